"""Wake-ups between the processes of one machine, through UNIX datagram sockets.

Every client that waits binds one socket in a folder that only those who share the locks can
enter. Whoever frees a name sends the waiter's key to the waiter's address, and nobody else
stirs. A refused datagram is news too: that client is dead.

Those who share the locks need not trust each other with their files. An address comes from the
database, so only names of the form that ``bind`` makes are used. Whatever is changed, removed or
sent to in a shared folder is named relative to the open folder, and must be a socket: a link could
lead to a socket that only we may write to.
"""

from __future__ import annotations

import atexit
import enum
import errno
import os
import re
import socket
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from weakref import WeakSet

from holdfast.io.wakeups import EVERYBODY

__all__ = ["DatagramSubscription", "Delivery", "Folder", "supported"]

LONGEST_ADDRESS_BYTES = 107 if sys.platform == "linux" else 103
SENDER_QUEUE = 8
"""A reader that finds so many at once may have missed some: Linux keeps 10 unread by default."""
MOST_DATAGRAMS = 4096
LONGEST_KEY_BYTES = 128
DRAFT_SECONDS = 60.0
MOST_LEFTOVERS = 2000
_ADDRESS = re.compile(r"[0-9]{1,10}-[0-9a-f]{16}\.sock", re.ASCII)
_DRAFT = ".new"
_HANDLES = "/proc/self/fd"


class Delivery(enum.Enum):
    """What became of a datagram."""

    SENT = "sent"
    DEAD = "dead"
    """Nobody will ever read at that address again."""
    FULL = "full"
    """Its reader is alive and has not come to read yet."""
    UNKNOWN = "unknown"


def supported() -> bool:
    """Whether this system has UNIX datagram sockets."""
    return hasattr(socket, "AF_UNIX") and os.name == "posix"


class Folder:
    """Where the sockets are. Also sends to them."""

    def __init__(self, path: str, make: Callable[[str], None], mode: int) -> None:
        self.path, self._make, self._mode = path, make, mode
        longest = len(os.fsencode(path)) + len("/1234567890-.sock.new") + 16
        self._too_long = longest > LONGEST_ADDRESS_BYTES
        shared = bool(mode & 0o070)
        self._by_handle = (shared or self._too_long) and hasattr(os, "O_PATH") and _has_handles()
        self._socket: socket.socket | None = None
        # Re-entrant: a signal handler may release a lock in the middle of another release.
        self._mutex = threading.RLock()

    @contextmanager
    def reach(self, address: str) -> Iterator[str]:
        """A path to the socket, short enough to be an address; ``OSError`` if there is none."""
        if not self._by_handle:
            yield self._path_of(address)
            return
        with self._opened() as folder:
            flags = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
            file = os.open(address, flags, dir_fd=folder)
            try:
                if not stat.S_ISSOCK(os.fstat(file).st_mode):
                    raise OSError(errno.ECONNREFUSED, "not a socket", address)
                yield f"{_HANDLES}/{file}"
            finally:
                os.close(file)

    def _path_of(self, name: str) -> str:
        path = f"{self.path}/{name}"
        if self._too_long:
            raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG), path)
        return path

    def send(self, address: str, key: str) -> Delivery:
        """Sends a key, without ever blocking."""
        if not _ADDRESS.fullmatch(address):
            return Delivery.DEAD
        try:
            with self.reach(address) as path:
                self._sender().sendto(key.encode(), path)
        except OSError as error:
            return self._failed(address, error)
        return Delivery.SENT

    def alive(self, address: str) -> bool:
        """Whether somebody may still read there. Sends nothing."""
        if not _ADDRESS.fullmatch(address):
            return False
        try:
            with self.reach(address) as path, _datagram_socket() as probe:
                probe.connect(path)
        except OSError as error:
            return self._failed(address, error) is not Delivery.DEAD
        return True

    def _sender(self) -> socket.socket:
        with self._mutex:
            if self._socket is None:
                self._socket = _datagram_socket()
            return self._socket

    def _failed(self, address: str, error: OSError) -> Delivery:
        if error.errno == errno.ECONNREFUSED:
            self.remove(address)  # addresses are random and never used again
            return Delivery.DEAD
        if error.errno == errno.ENOENT:
            return Delivery.DEAD
        if error.errno in (errno.EAGAIN, errno.ENOBUFS):
            return Delivery.FULL
        return Delivery.UNKNOWN

    @contextmanager
    def _opened(self) -> Iterator[int]:
        """The folder itself: what is named relative to it can't lead elsewhere."""
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        folder = os.open(self.path, flags)
        try:
            yield folder
        finally:
            os.close(folder)

    def remove(self, name: str) -> None:
        """Removes a socket from the folder; anything else stays."""
        with suppress(OSError), self._opened() as folder:
            if stat.S_ISSOCK(os.lstat(name, dir_fd=folder).st_mode):
                os.unlink(name, dir_fd=folder)

    def bind(self) -> DatagramSubscription:
        """A new address of our own; leftovers of the dead are cleared away."""
        self._make(self.path)
        address = f"{os.getpid()}-{os.urandom(8).hex()}.sock"
        draft = address + _DRAFT  # a socket refuses for an instant before it listens
        bound = _datagram_socket()
        try:
            with suppress(OSError):  # Linux makes the socket file with this mode, less the umask
                os.fchmod(bound.fileno(), self._mode)
            with self._opened() as folder:
                inside = f"{_HANDLES}/{folder}/{draft}"
                bound.bind(inside if self._by_handle else self._path_of(draft))
                _set_mode(draft, folder, self._mode)
                os.rename(draft, address, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            bound.close()
            self.remove(draft)
            raise
        self._sweep(address)
        return DatagramSubscription(bound, address, self)

    def _sweep(self, mine: str) -> None:
        with os.scandir(self.path) as entries:
            for _, entry in zip(range(MOST_LEFTOVERS), entries, strict=False):
                name = entry.name
                if _ADDRESS.fullmatch(name) and name != mine:
                    self.alive(name)
                elif name.endswith(_DRAFT) and _ADDRESS.fullmatch(name.removesuffix(_DRAFT)):
                    self._sweep_draft(entry)

    def _sweep_draft(self, entry: os.DirEntry[str]) -> None:
        try:
            if time.time() - entry.stat(follow_symlinks=False).st_mtime > DRAFT_SECONDS:
                self.remove(entry.name)
        except OSError:
            pass

    def close(self) -> None:
        """Closes what sends; also right in a forked child."""
        self._mutex = threading.RLock()  # a thread of the parent's may have had it
        sender, self._socket = self._socket, None
        if sender is not None:
            sender.close()


class DatagramSubscription:
    """The socket of one client: what its wake-up hub listens to."""

    def __init__(self, bound: socket.socket, address: str, folder: Folder) -> None:
        self.address, self.path = address, f"{folder.path}/{address}"
        self._bound, self._folder = bound, folder
        self._owner = os.getpid()
        _bound_subscriptions.add(self)

    def fileno(self) -> int:
        return self._bound.fileno()

    def read(self) -> list[str]:
        """The keys that came in; also everybody's, if some may have been turned away."""
        keys: list[str] = []
        try:
            for _ in range(MOST_DATAGRAMS):
                key = self._bound.recv(LONGEST_KEY_BYTES + 1)
                if len(key) <= LONGEST_KEY_BYTES:  # no key of ours is longer
                    keys.append(key.decode(errors="replace"))
        except BlockingIOError:
            pass
        if len(keys) >= SENDER_QUEUE:
            keys.append(EVERYBODY)
        return keys

    def reachable(self) -> bool:
        """Whether the socket is still where its address says: somebody may clean up folders."""
        return os.access(self.path, os.F_OK)

    def close(self) -> None:
        """Closes the socket and, unless it was inherited by a fork, removes it."""
        _bound_subscriptions.discard(self)
        self._bound.close()
        if os.getpid() == self._owner:
            self._folder.remove(self.address)


def _has_handles() -> bool:
    """Whether open files can be named; not in a chroot without /proc."""
    return Path(_HANDLES).is_dir()


def _set_mode(name: str, folder: int, mode: int) -> None:
    """Sets the mode of a socket that we made; raises ``OSError`` if something else is there now."""
    if not hasattr(os, "O_PATH"):  # not Linux
        os.chmod(name, mode, dir_fd=folder, follow_symlinks=False)
        return
    file = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    try:
        found = os.fstat(file)
        if not stat.S_ISSOCK(found.st_mode) or found.st_uid != os.geteuid():
            raise OSError(errno.EEXIST, "somebody has replaced our socket", name)
        if stat.S_IMODE(found.st_mode) != mode:
            Path(f"/proc/self/fd/{file}").chmod(mode)
    finally:
        os.close(file)


def _datagram_socket() -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    made.setblocking(False)
    return made


_bound_subscriptions: WeakSet[DatagramSubscription] = WeakSet()


@atexit.register
def _remove_all() -> None:
    for subscription in list(_bound_subscriptions):
        subscription.close()
