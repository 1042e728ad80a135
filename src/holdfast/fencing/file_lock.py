"""One ``flock`` on a file that is never replaced.

Every process that can open the file, also for reading, can lock it and keep the others out. So
only users who may write the guarded file may open it.

A lock belongs to the open file, which a forked child shares. The child closes it at once, and the
parent unlocks it before it closes it: a child forked in the block blocks no other process.
"""

from __future__ import annotations

import fcntl
import os
import stat
import time
from contextlib import suppress
from pathlib import Path
from weakref import WeakSet

from holdfast.errors import LockTimeout

__all__ = ["FileLock"]

POLL_SECONDS = 0.005, 0.05
"""With a timeout the kernel can't be asked to wait: asked at once, then more and more rarely."""


class FileLock:
    """Taken and released by one block at a time. It ends with its process, however that ends."""

    def __init__(self, path: Path, guarded: Path, timeout: float | None) -> None:
        self._path, self._guarded, self._timeout = path, guarded, timeout
        self._file: int | None = None
        _locks.add(self)

    @property
    def taken(self) -> bool:
        """Whether this process has it; not in a child that was forked since."""
        return self._file is not None

    def take(self, *, shared: bool) -> None:
        """Waits for the lock; raises ``LockTimeout``."""
        how = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        ends = None if self._timeout is None else time.monotonic() + self._timeout
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        while True:
            file = self._file = os.open(self._path, flags, 0o622)
            try:
                self._set_rights(file)
                self._wait(file, how, ends)
                if self._still_there(file):
                    return
            except BaseException:
                self.release()
                raise
            self.release()  # it was removed since: others lock another file

    def _set_rights(self, file: int) -> None:
        found = os.fstat(file)
        if os.geteuid() not in (0, found.st_uid):
            return  # its owner does so
        try:
            like = self._guarded.stat()
        except FileNotFoundError:
            like = found  # as the umask left it
        if found.st_gid != like.st_gid:
            with suppress(PermissionError):
                os.fchown(file, -1, like.st_gid)
        if found.st_uid != like.st_uid:
            with suppress(PermissionError):
                os.fchown(file, like.st_uid, -1)
        writers = like.st_mode & (0o222 if os.fstat(file).st_gid == like.st_gid else 0o202)
        mode = 0o600 | writers | writers << 1
        if stat.S_IMODE(found.st_mode) != mode:
            os.fchmod(file, mode)

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
            try:
                fcntl.flock(file, fcntl.LOCK_UN)
            finally:
                os.close(file)

    def forget(self) -> None:
        """In a forked child: the lock is the parent's."""
        file, self._file = self._file, None
        if file is not None:
            os.close(file)


_locks: WeakSet[FileLock] = WeakSet()


def _after_in_child() -> None:
    for lock in list(_locks):
        lock.forget()


os.register_at_fork(after_in_child=_after_in_child)
