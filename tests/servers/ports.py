"""Loopback ports that no other test process on this machine picks at the same time."""

import random
import socket

LOOPBACK = "127.0.0.1"

# Below the range from which the kernel serves outgoing connections, so that none of those takes
# the port between our look and the server's bind, or while a killed server is away.
_FIRST, _LAST = 12_000, 30_000
_TRIES = 1_000

# A name in the abstract socket namespace is ours until this process ends, however it ends.
_reserved: dict[int, socket.socket] = {}


def free_port() -> int:
    """A loopback port that stays reserved for this process."""
    for _ in range(_TRIES):
        port = random.randrange(_FIRST, _LAST)
        if port not in _reserved and _reserve(port):
            return port
    raise RuntimeError("no free loopback port")


def give_back(port: int) -> None:
    """Lets others have the port again."""
    if held := _reserved.pop(port, None):
        held.close()


def _reserve(port: int) -> bool:
    mark = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        mark.bind(f"\0holdfast-test-port-{port}")
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((LOOPBACK, port))
    except OSError:
        mark.close()
        return False
    _reserved[port] = mark
    return True
