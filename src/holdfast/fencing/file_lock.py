"""One ``flock`` on a file that is never replaced."""

from __future__ import annotations

import fcntl
import os
import time
from contextlib import suppress
from pathlib import Path

from holdfast.errors import LockTimeout

__all__ = ["FileLock"]

POLL_SECONDS = 0.005, 0.05
"""With a timeout the kernel can't be asked to wait: asked at once, then more and more rarely."""


class FileLock:
    """Taken and released by one block at a time. It ends with its process, however that ends."""

    def __init__(self, path: Path, timeout: float | None) -> None:
        self._path, self._timeout = path, timeout
        self._file: int | None = None

    def take(self, *, shared: bool) -> None:
        """Waits for the lock; raises ``LockTimeout``."""
        how = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        ends = None if self._timeout is None else time.monotonic() + self._timeout
        while True:
            file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
            try:
                self._wait(file, how, ends)
                if self._still_there(file):
                    self._file = file
                    return
            except BaseException:
                os.close(file)
                raise
            os.close(file)  # somebody has removed it meanwhile: others lock another one

    def _wait(self, file: int, how: int, ends: float | None) -> None:
        if ends is None:
            fcntl.flock(file, how)
            return
        pause, longest = POLL_SECONDS
        while True:
            with suppress(BlockingIOError):
                fcntl.flock(file, how | fcntl.LOCK_NB)
                return
            left = ends - time.monotonic()
            if left <= 0:
                raise LockTimeout(
                    f"{str(self._path)!r} was locked by another process for {self._timeout:g} s",
                    name=str(self._path),
                )
            time.sleep(min(pause, left))
            pause = min(longest, pause * 2)

    def _still_there(self, file: int) -> bool:
        try:
            named = self._path.lstat()
        except FileNotFoundError:
            return False
        mine = os.fstat(file)
        return (named.st_dev, named.st_ino) == (mine.st_dev, mine.st_ino)

    def release(self) -> None:
        """Gives it up; nothing happens if it is not taken."""
        file, self._file = self._file, None
        if file is not None:
            os.close(file)
