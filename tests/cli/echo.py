"""A program for a terminal: says when it is up, when it goes on after a stop, and what it reads."""

import os
import signal
import sys


def main() -> None:
    # Not through a buffer: the handler may run in the middle of another write.
    signal.signal(signal.SIGCONT, lambda *_: os.write(1, b"back\n") and None)
    os.write(1, b"up\n")
    for line in sys.stdin:
        os.write(1, f"got {line}".encode())


main()
