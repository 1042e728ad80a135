"""A fence before a file: check, read, write aside, rename, under one ``flock`` for the block.

    with fencing.file.guard("ledger.json", lease) as file:   # StaleFence if a newer holder was here
        ledger = json.loads(file.read_text())
        file.write_text(json.dumps(ledger | {"paid": True})) # published when the block ends well

The fence is on disk before the block begins, and what was written appears as a whole or not at
all: a crash at any point leaves the old content or the new one. Beside ``ledger.json`` lie
``ledger.json.fence``, which remembers, and ``ledger.json.fence.lock``, which is locked.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from holdfast.claim import Fence, Keys, Mode
from holdfast.durations import Duration, timeout_seconds
from holdfast.errors import NotHeld, Unsupported
from holdfast.fencing.file_lock import FileLock
from holdfast.fencing.rule import Memory, as_fence, enter, pack, refusal, stale, unpack

__all__ = ["File", "FileGuard", "guard"]


def guard(
    path: str | os.PathLike[str],
    lease: Any,
    *,
    timeout: Duration | None = None,
    fence_keys: Keys = (),
) -> FileGuard:
    """A block in which this process alone has the file, if the lease's fence may enter.

    Entering raises ``StaleFence`` if a newer holder was here, and ``LockTimeout`` if another
    process kept the file locked for longer than ``timeout``. ``lease`` is a lease, a fence, or a
    fence's text; a shared one lets several readers in at once. With ``fence_keys`` what is not a
    lease must be signed by one of them.
    """
    fence = as_fence(lease, fence_keys)
    return FileGuard(Path(os.path.realpath(path)), fence, timeout_seconds(timeout))


class FileGuard:
    """One block. It can be entered once at a time."""

    def __init__(self, path: Path, fence: Fence, timeout: float | None) -> None:
        self.path, self.fence = path, fence
        self._kept = path.with_name(f"{path.name}.fence")
        self._lock = FileLock(path.with_name(f"{path.name}.fence.lock"), path, timeout)
        self._file: File | None = None

    def __repr__(self) -> str:
        return f"<Guard of {str(self.path)!r}, {self.fence!r}>"

    def __enter__(self) -> File:
        if self._file is not None:
            raise RuntimeError(f"{self!r} is entered already")
        try:
            if self.fence.mode is Mode.SHARED:
                self._share()
            else:
                self._lock.take(shared=False)
                self._enter()
        except BaseException:
            self._lock.release()
            raise
        self._file = File(self.path, self.fence, self._lock)
        return self._file

    def _share(self) -> None:
        """A reader's first entry is written down, alone; it then reads beside other readers."""
        self._lock.take(shared=True)
        while self._enter(write=False):
            self._lock.release()
            self._lock.take(shared=False)
            self._enter()
            self._lock.release()
            self._lock.take(shared=True)  # another may have come in between: looked at again

    def _enter(self, *, write: bool = True) -> bool:
        """Raises ``StaleFence``, or enters; whether there was something to write down."""
        memory = _read(self._kept)
        against = refusal(memory, self.fence)
        if against is not None:
            raise stale(str(self.path), self.fence, against)
        entered = enter(memory, self.fence)
        if entered is memory:
            return False
        if write:
            replace(self._kept, pack(entered).encode(), like=self.path)
        return True

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        file, self._file = self._file, None
        try:
            if file is not None and error is None and self._lock.taken:
                file._publish()  # by the process that entered, not by a child of it
        finally:
            if file is not None:
                file._open = False
            self._lock.release()


class File:
    """The guarded file inside its block."""

    def __init__(self, path: Path, fence: Fence, lock: FileLock) -> None:
        self.path, self.fence = path, fence
        self._lock, self._open = lock, True
        self._pending: bytes | None = None

    def read(self) -> bytes:
        """The content; raises ``FileNotFoundError`` if there is none yet."""
        self._check()
        return self.path.read_bytes() if self._pending is None else self._pending

    def read_text(self, encoding: str = "utf-8") -> str:
        """The content as text."""
        return self.read().decode(encoding)

    def write(self, content: bytes) -> None:
        """The content from the end of the block on, if it ends well."""
        self._check()
        if self.fence.mode is Mode.SHARED:
            raise Unsupported(f"{self.fence.name!r} is held as a reader: it can't write {self}")
        self._pending = bytes(content)

    def write_text(self, content: str, encoding: str = "utf-8") -> None:
        """The content as text."""
        self.write(content.encode(encoding))

    def exists(self) -> bool:
        """Whether there is a content."""
        self._check()
        return self._pending is not None or self.path.exists()

    def __str__(self) -> str:
        return repr(str(self.path))

    def _check(self) -> None:
        if not self._open or not self._lock.taken:
            raise NotHeld(
                f"{self} can only be used inside its block, in the process that entered it"
            )

    def _publish(self) -> None:
        if self._pending is not None:
            replace(self.path, self._pending, aside=f"{self.path.name}.fence.write")


def replace(path: Path, content: bytes, *, aside: str = "", like: Path | None = None) -> None:
    """Writes aside, syncs, renames, syncs the folder: whole or not at all, also in a power cut.

    Others are locked out, so what a crash left aside is simply written over. A new file gets the
    rights of the file ``like``.
    """
    other = path.with_name(aside or f"{path.name}.write")
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
    file = os.open(other, flags, 0o666)
    try:
        if not _keep_rights(path, file) and like is not None:
            _keep_rights(like, file)
        view = memoryview(content)
        while view:
            view = view[os.write(file, view) :]
        os.fsync(file)
    finally:
        os.close(file)
    other.replace(path)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _keep_rights(path: Path, file: int) -> bool:
    try:
        status = path.stat()
    except FileNotFoundError:
        return False
    with suppress(PermissionError):  # only its owner may give it away
        os.fchown(file, status.st_uid, status.st_gid)
    os.fchmod(file, status.st_mode & 0o7777)
    return True


def _read(path: Path) -> Memory | None:
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return None
    return unpack(text, repr(str(path)))
