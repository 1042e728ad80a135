"""The wake-ups of the embedded store: one UNIX datagram socket per backend that waits.

A backend that waits binds one socket in a folder that only users of the locks can enter. A backend
that frees a name sends the waiter's key to the waiter's address; no other waiter is woken. A
refused datagram also has a meaning: that client is dead. Where there are no datagram sockets, or
none can be bound, waits are short and jittered instead.

Users who share the locks need not trust each other with their files. An address comes from the
database, so only names of the form that ``bind`` makes are used. In a shared folder, sockets are
changed, removed and sent to only relative to the open folder, and must be sockets: a symbolic link
could lead to a socket that only we may write to.
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
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import WeakSet

from holdfast.core import log
from holdfast.core.backoff import FILE_POLL_SECONDS
from holdfast.core.contract import Runtime
from holdfast.errors import GuaranteeNotMet
from holdfast.io.wakeups import EVERYBODY, AsyncWakeupHub, BlockingWakeupHub
from holdfast.stores.sqlite.file import StoreFile
from holdfast.stores.sqlite.queue import Wakeup

if TYPE_CHECKING:
    import asyncio

__all__ = ["DatagramSubscription", "Delivery", "SocketFolder", "SqliteWakeups", "supported"]

FULL_TRIES = 20
FULL_PAUSE_SECONDS = 0.001
REBIND_SECONDS = 60.0
LONGEST_ADDRESS_BYTES = 107 if sys.platform == "linux" else 103
SENDER_QUEUE = 8
"""A reader that finds so many at once may have missed some: Linux queues 10 by default."""
MOST_DATAGRAMS = 4096
LONGEST_KEY_BYTES = 128
DRAFT_SECONDS = 60.0
MOST_LEFTOVERS = 2000
_ADDRESS = re.compile(r"[0-9]{1,10}-[0-9a-f]{16}\.sock", re.ASCII)
_DRAFT = ".new"
_DESCRIPTORS = "/proc/self/fd"


class SqliteWakeups:
    """Receives the wake-ups of one backend, and sends those for other backends."""

    def __init__(self, file: StoreFile, runtime: Runtime) -> None:
        self._file, self._runtime = file, runtime
        self._folder = SocketFolder(f"{file.path}-wake", self._make_folder, file.file_mode)
        self._subscription: DatagramSubscription | None = None
        self._hub: BlockingWakeupHub | AsyncWakeupHub | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._retry_at = 0.0 if supported() else float("inf")
        # Re-entrant: a signal handler may wait while its thread is in the middle of a call.
        self._mutex = threading.RLock()

    def _make_folder(self, path: str) -> None:
        try:
            Path(path).mkdir(0o700)
            self._file.share_folder(path, self._file.socket_folder_mode)
        except FileExistsError:
            pass
        found = Path(path).lstat()
        private = stat.S_ISDIR(found.st_mode) and not found.st_mode & stat.S_IWOTH
        if not private or not self._file.trusts(found.st_uid):
            raise GuaranteeNotMet(f"{path} is not a folder for Holdfast's wake-ups: remove it")

    def address(self) -> str:
        """The address of this backend, bound if need be. Empty if it has to poll."""
        subscription = self._subscription
        if subscription is not None and (self._runtime.blocking or self._same_loop()):
            return subscription.address
        with self._mutex:
            return self._bind(instead_of=subscription)

    def _same_loop(self) -> bool:
        import asyncio

        return self._loop is asyncio.get_running_loop()

    def _bind(self, instead_of: DatagramSubscription | None) -> str:
        if self._subscription is not instead_of and self._subscription is not None:
            return self._subscription.address  # another thread has bound one
        if self._runtime.now() < self._retry_at:
            return ""
        self._unbind()
        try:
            subscription = self._folder.bind()
        except OSError as error:
            self._retry_at = self._runtime.now() + REBIND_SECONDS
            log.warning("no wake-ups in %s, waiting by polling: %s", self._folder.path, error)
            return ""
        if self._subscription is not None:  # a signal handler has bound one
            subscription.close()
            return self._subscription.address
        if self._runtime.blocking:
            if not isinstance(self._hub, BlockingWakeupHub):
                self._hub = BlockingWakeupHub()
            self._hub.attach(subscription)
        else:
            self._listen(subscription)
        self._subscription = subscription
        return subscription.address

    def _listen(self, subscription: DatagramSubscription) -> None:
        import asyncio

        if not isinstance(self._hub, AsyncWakeupHub):
            self._hub = AsyncWakeupHub()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(subscription.fileno(), self._read_wakeups, subscription, self._hub)

    @staticmethod
    def _read_wakeups(subscription: DatagramSubscription, hub: AsyncWakeupHub) -> None:
        for key in subscription.read():
            if key == EVERYBODY:
                hub.wake_all()
            else:
                hub.wake(key)

    def _unbind(self) -> None:
        subscription, self._subscription = self._subscription, None
        loop, self._loop = self._loop, None
        if subscription is None:
            return
        if loop is not None and not loop.is_closed():
            loop.remove_reader(subscription.fileno())
        subscription.close()

    async def wait(self, owner: str, until: float) -> None:
        """Returns when the owner was woken, at ``until`` at the latest, or early."""
        subscription, hub, runtime = self._subscription, self._hub, self._runtime
        if subscription is None or hub is None:
            pause = min(until - runtime.now(), runtime.between(*FILE_POLL_SECONDS))
            await runtime.sleep(max(0.0, pause))
        elif not subscription.reachable():
            with self._mutex:
                self._retry_at = 0.0
                self._bind(instead_of=subscription)  # the next attempt stores the new address
        elif isinstance(hub, BlockingWakeupHub):
            self._wait_blocking(hub, owner, until)
        else:
            await hub.wait(owner, until)

    def _wait_blocking(self, hub: BlockingWakeupHub, owner: str, until: float) -> None:
        try:
            hub.wait(owner, until)
        except OSError as error:
            log.debug("wake-ups at %s broke: %s", self._folder.path, error)
            self._subscription = None

    def wake(self, owner: str) -> None:
        """Ends the owner's wait on this backend."""
        if self._hub is not None:
            self._hub.wake(owner)

    def drop(self, owner: str) -> None:
        """Drops a wake-up of an owner that does not wait any more."""
        if self._hub is not None:
            self._hub.forget(owner)

    async def deliver(self, wakeups: Iterable[Wakeup]) -> set[str]:
        """Wakes the waiters. Returns the addresses of dead clients."""
        dead = set()
        for owner, address in wakeups:
            if self._subscription is not None and address == self._subscription.address:
                self.wake(owner)
            elif address and await self._send(owner, address) is Delivery.DEAD:
                dead.add(address)
        return dead

    async def _send(self, owner: str, address: str) -> Delivery:
        delivery = self._folder.send(address, owner)
        for _ in range(FULL_TRIES):
            if delivery is not Delivery.FULL:
                break
            await self._runtime.sleep(FULL_PAUSE_SECONDS)
            delivery = self._folder.send(address, owner)
        return delivery

    def dead_among(self, addresses: Iterable[str]) -> set[str]:
        """The addresses of dead clients."""
        return {address for address in addresses if not self._folder.alive(address)}

    def forget(self) -> None:
        """In a forked child: closes the sockets of the parent, and drops its loop."""
        self._mutex = threading.RLock()
        subscription, self._subscription = self._subscription, None
        hub, self._hub = self._hub, None
        self._loop = None
        if isinstance(hub, BlockingWakeupHub):
            hub.discard()
        if subscription is not None:
            subscription.close()
        self._folder.close()

    def close(self) -> None:
        """Ends all waits and removes our socket."""
        hub = self._hub
        if isinstance(hub, BlockingWakeupHub):
            hub.close()
        elif hub is not None:
            hub.wake_all()
        self._unbind()
        self._folder.close()


class Delivery(enum.Enum):
    """The outcome of a send."""

    SENT = "sent"
    DEAD = "dead"
    """The address will never be read again."""
    FULL = "full"
    """The receiver is alive, and its queue is full."""
    UNKNOWN = "unknown"


def supported() -> bool:
    """Whether this system has UNIX datagram sockets."""
    return hasattr(socket, "AF_UNIX") and os.name == "posix"


class SocketFolder:
    """The folder of the sockets. Sends to them."""

    def __init__(self, path: str, make: Callable[[str], None], mode: int) -> None:
        self.path, self._make, self._mode = path, make, mode
        longest = len(os.fsencode(path)) + len("/1234567890-.sock.new") + 16
        self._too_long = longest > LONGEST_ADDRESS_BYTES
        shared = bool(mode & 0o070)
        self._by_descriptor = (
            (shared or self._too_long) and hasattr(os, "O_PATH") and _has_descriptor_paths()
        )
        self._socket: socket.socket | None = None
        # Re-entrant: a signal handler may release a lock in the middle of another release.
        self._mutex = threading.RLock()

    @contextmanager
    def reach(self, address: str) -> Iterator[str]:
        """A path to the socket, short enough for an address. Raises ``OSError`` for no socket."""
        if not self._by_descriptor:
            yield self._path_of(address)
            return
        with self._opened() as folder:
            flags = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
            file = os.open(address, flags, dir_fd=folder)
            try:
                if not stat.S_ISSOCK(os.fstat(file).st_mode):
                    raise OSError(errno.ECONNREFUSED, "not a socket", address)
                yield f"{_DESCRIPTORS}/{file}"
            finally:
                os.close(file)

    def _path_of(self, name: str) -> str:
        path = f"{self.path}/{name}"
        if self._too_long:
            raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG), path)
        return path

    def send(self, address: str, key: str) -> Delivery:
        """Sends a key. Never blocks."""
        if not _ADDRESS.fullmatch(address):
            return Delivery.DEAD
        try:
            with self.reach(address) as path:
                self._sender().sendto(key.encode(), path)
        except OSError as error:
            return self._failed(address, error)
        return Delivery.SENT

    def alive(self, address: str) -> bool:
        """False if the client of this address is dead. Sends nothing."""
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
        """The open folder: names relative to it can't lead elsewhere."""
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        folder = os.open(self.path, flags)
        try:
            yield folder
        finally:
            os.close(folder)

    def remove(self, name: str) -> None:
        """Removes a socket from the folder. Other files stay."""
        with suppress(OSError), self._opened() as folder:
            if stat.S_ISSOCK(os.lstat(name, dir_fd=folder).st_mode):
                os.unlink(name, dir_fd=folder)

    def bind(self) -> DatagramSubscription:
        """Binds a new address of our own, and removes sockets of dead clients."""
        self._make(self.path)
        address = f"{os.getpid()}-{os.urandom(8).hex()}.sock"
        draft = address + _DRAFT  # right after bind a socket may still refuse
        bound = _datagram_socket()
        try:
            with suppress(OSError):  # Linux makes the socket file with this mode, less the umask
                os.fchmod(bound.fileno(), self._mode)
            with self._opened() as folder:
                inside = f"{_DESCRIPTORS}/{folder}/{draft}"
                bound.bind(inside if self._by_descriptor else self._path_of(draft))
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
        """Closes the sending socket; also in a forked child."""
        self._mutex = threading.RLock()  # a thread of the parent may have held it
        sender, self._socket = self._socket, None
        if sender is not None:
            sender.close()


class DatagramSubscription:
    """The socket of one client, which its wake-up hub reads."""

    def __init__(self, bound: socket.socket, address: str, folder: SocketFolder) -> None:
        self.address, self.path = address, f"{folder.path}/{address}"
        self._bound, self._folder = bound, folder
        self._owner = os.getpid()
        _bound_subscriptions.add(self)

    def fileno(self) -> int:
        return self._bound.fileno()

    def read(self) -> list[str]:
        """The keys received; also ``EVERYBODY``, if some datagrams may have been refused."""
        keys: list[str] = []
        try:
            for _ in range(MOST_DATAGRAMS):
                key = self._bound.recv(LONGEST_KEY_BYTES + 1)
                if len(key) <= LONGEST_KEY_BYTES:  # no key of Holdfast is longer
                    keys.append(key.decode(errors="replace"))
        except BlockingIOError:
            pass
        if len(keys) >= SENDER_QUEUE:
            keys.append(EVERYBODY)
        return keys

    def reachable(self) -> bool:
        """Whether the socket is still in the folder: a clean-up may have removed it."""
        return os.access(self.path, os.F_OK)

    def close(self) -> None:
        """Closes the socket, and removes it unless it was inherited by a fork."""
        _bound_subscriptions.discard(self)
        self._bound.close()
        if os.getpid() == self._owner:
            self._folder.remove(self.address)


def _has_descriptor_paths() -> bool:
    """Whether an open file has a path; not in a chroot without /proc."""
    return Path(_DESCRIPTORS).is_dir()


def _set_mode(name: str, folder: int, mode: int) -> None:
    """Sets the mode of our new socket. Raises ``OSError`` if it was replaced."""
    if not hasattr(os, "O_PATH"):  # not Linux
        os.chmod(name, mode, dir_fd=folder, follow_symlinks=False)
        return
    file = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    try:
        found = os.fstat(file)
        if not stat.S_ISSOCK(found.st_mode) or found.st_uid != os.geteuid():
            raise OSError(errno.EEXIST, "another user has replaced our socket", name)
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
