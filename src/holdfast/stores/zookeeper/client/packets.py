"""ZooKeeper's requests and replies, packed and unpacked without kazoo's serialization.

A ``Request`` also stores its reply. The thread or task that waits for a pipeline is woken once, by
the last reply.
"""

from __future__ import annotations

import logging
import struct
import threading
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple, Self

from kazoo.exceptions import EXCEPTIONS, ZookeeperError
from kazoo.security import ACL

from holdfast.stores.zookeeper.client.completion import Completion

__all__ = [
    "ANY_VERSION",
    "Check",
    "Checks",
    "Container",
    "Create",
    "Delete",
    "Ephemeral",
    "Exists",
    "Listing",
    "Multi",
    "Persistent",
    "Plain",
    "Read",
    "Request",
    "Stat",
    "Sync",
    "Write",
    "pack_acl",
]

log = logging.getLogger("holdfast")

_INT = struct.Struct("!i")
_STAT = struct.Struct("!qqqqiiiqiiq")
_REQUEST = struct.Struct("!iii")
_HEADER = struct.Struct("!iBi")
_END_OF_MULTI = _HEADER.pack(-1, 1, -1)
_EPHEMERAL, _EPHEMERAL_SEQUENTIAL, _CONTAINER = 1, 3, 4
_NO_NODE = -101
ANY_VERSION = -1
_ANY = _INT.pack(ANY_VERSION)
_CHECK, _CHECKED = _HEADER.pack(13, 0, -1), _HEADER.pack(13, 0, 0)


class Stat(NamedTuple):
    """ZooKeeper's metadata of a node."""

    czxid: int
    mzxid: int
    ctime: int
    mtime: int
    version: int
    cversion: int
    aversion: int
    ephemeral_owner: int
    data_length: int
    children: int
    pzxid: int


def _text(text: str) -> bytes:
    data = text.encode()
    return _INT.pack(len(data)) + data


def _data(data: bytes) -> bytes:
    return _INT.pack(len(data)) + data


def pack_acl(acls: Sequence[ACL]) -> bytes:
    """Packs an access list, as part of a create."""
    parts = [_INT.pack(acl.perms) + _text(acl.id.scheme) + _text(acl.id.id) for acl in acls]
    return _INT.pack(len(acls)) + b"".join(parts)


def _read_text(buffer: bytes, offset: int) -> tuple[str, int]:
    (length,) = _INT.unpack_from(buffer, offset)
    offset += 4
    if not 0 <= length <= len(buffer) - offset:
        raise ValueError(f"a text of {length} bytes")
    return buffer[offset : offset + length].decode(), offset + length


def _error(code: int) -> Exception:
    """The exception for a server's error code; a general one for an unknown code."""
    if code not in EXCEPTIONS:
        unknown: Exception = ZookeeperError(f"error {code}")
        return unknown
    error: Exception = EXCEPTIONS[code]()
    return error


_parent_text = lru_cache(maxsize=1024)(_text)
"""Cached: the paths of parents are packed often."""

# Sent in place of a request that was withdrawn before: whether "/" exists.
_HARMLESS_KIND, _HARMLESS = 3, _text("/") + b"\0"


class Request:
    """One request and its reply: ``value`` or ``error``."""

    __slots__ = ("_sent", "_unsent", "body", "completion", "error", "value")

    kind: ClassVar[int]

    def __init__(self, body: bytes) -> None:
        self.body = body
        self.value: Any = None
        self.error: Exception | None = None
        self.completion: Completion | Callable[[Request], None] | None = None
        self._sent = False
        self._unsent = [None]  # the first pop decides whether it is sent or withdrawn

    def pack(self, xid: int) -> bytes:
        """The bytes to send; those of a harmless request if this one was withdrawn."""
        kind, body = self.kind, self.body
        try:
            self._unsent.pop()
            self._sent = True
        except IndexError:
            kind, body = _HARMLESS_KIND, _HARMLESS
        return _REQUEST.pack(len(body) + 8, xid, kind) + body

    def withdraw(self) -> bool:
        """Makes sure that it is never sent; false if it may have been sent."""
        try:
            self._unsent.pop()
        except IndexError:
            return False
        return True

    def read(self, body: bytes) -> Any:
        """Unpacks the reply."""
        return True

    def complete(self, code: int, body: bytes) -> None:
        """Stores the reply and wakes the waiting thread or task."""
        if code:
            if code != _NO_NODE or self.kind != Exists.kind:
                self.error = _error(code)
        elif self._sent:
            try:
                self.value = self.read(body)
            except (struct.error, ValueError, LookupError) as error:
                log.exception("a reply of ZooKeeper can't be read")
                self.error = error
        self._finish()

    def set_exception(self, error: Exception) -> None:
        """Fails the request: there will be no reply."""
        self.error = error
        self._finish()

    def then(self, callback: Callable[[Request], None]) -> Self:
        """Calls back on the thread that reads the reply; the callback must not block."""
        self.completion = callback
        return self

    def _finish(self) -> None:
        completion = self.completion
        if completion is None:
            return
        if not callable(completion):
            completion.done()
        else:
            try:
                completion(self)
            except Exception:
                if threading.current_thread() is threading.main_thread():
                    raise  # perhaps from a signal handler: the reader ends the connection
                log.exception("a callback for a reply of ZooKeeper failed")
        self.completion = None  # last: after an interrupt before this line it is called again


class Create(Request):
    """Creates a sequential, ephemeral node; replies its path and stat."""

    __slots__ = ()
    kind = 15
    flags: ClassVar[int] = _EPHEMERAL_SEQUENTIAL

    def __init__(self, path: str, data: bytes, acl: bytes) -> None:
        super().__init__(_text(path) + _data(data) + acl + _INT.pack(self.flags))

    def read(self, body: bytes) -> tuple[str, Stat]:
        path, offset = _read_text(body, 0)
        return path, Stat._make(_STAT.unpack_from(body, offset))


class Persistent(Create):
    """Creates a persistent node."""

    __slots__ = ()
    flags = 0


class Container(Create):
    """Creates a node that the server deletes some time after its last child."""

    __slots__ = ()
    kind = 19
    flags = _CONTAINER


class Delete(Request):
    """Deletes a node, of any version unless one is given."""

    __slots__ = ()
    kind = 2

    def __init__(self, path: str, version: int = ANY_VERSION) -> None:
        super().__init__(_text(path) + _INT.pack(version))


class Exists(Request):
    """Reads a node's stat; ``None`` if there is no node."""

    __slots__ = ()
    kind = 3

    def __init__(self, path: str) -> None:
        super().__init__(_text(path) + b"\0")

    def read(self, body: bytes) -> Stat:
        return Stat._make(_STAT.unpack_from(body))


class Read(Request):
    """Reads a node's data and stat. A watch is only set if the node exists."""

    __slots__ = ("path",)
    kind = 4

    def __init__(self, path: str, *, watch: bool = False) -> None:
        super().__init__(_text(path) + (b"\1" if watch else b"\0"))
        self.path = path

    def read(self, body: bytes) -> tuple[bytes, Stat]:
        (length,) = _INT.unpack_from(body)
        end = 4 + max(0, length)
        return body[4:end], Stat._make(_STAT.unpack_from(body, end))


class Write(Request):
    """Replaces a node's data; replies its stat."""

    __slots__ = ()
    kind = 5

    def __init__(self, path: str, data: bytes, version: int = ANY_VERSION) -> None:
        super().__init__(_text(path) + _data(data) + _INT.pack(version))

    def read(self, body: bytes) -> Stat:
        return Stat._make(_STAT.unpack_from(body))


class Listing(Request):
    """Lists the names of a node's children; a watch fires when the list changes."""

    __slots__ = ()
    kind = 8

    def __init__(self, path: str, *, watch: bool = False) -> None:
        super().__init__(_parent_text(path) + (b"\1" if watch else b"\0"))

    def read(self, body: bytes) -> list[str]:
        (count,) = _INT.unpack_from(body)
        packed = body[4:]
        if not 0 <= count <= len(packed):
            raise ValueError(f"a list of {count} names")
        if packed.isascii():
            # Names have no zero bytes, and the length of a short name has three: ours are short.
            names = packed.decode().split("\0\0\0")
            if len(names) == count + 1:
                return [name[1:] for name in names[1:]]
        return self._read_any(packed, count)

    def _read_any(self, packed: bytes, count: int) -> list[str]:
        names, offset = [], 0
        for _ in range(count):
            name, offset = _read_text(packed, offset)
            names.append(name)
        return names


class Sync(Request):
    """Lets the server catch up with the leader before it executes the next requests."""

    __slots__ = ()
    kind = 9

    def __init__(self, path: str) -> None:
        super().__init__(_parent_text(path))


class Check(Request):
    """Only inside a ``Multi``: fails unless the node exists."""

    __slots__ = ()
    kind = 13

    def __init__(self, path: str) -> None:
        super().__init__(_text(path) + _INT.pack(ANY_VERSION))


class Ephemeral(Create):
    """Only inside a ``Multi``: creates an ephemeral node of exactly this name."""

    __slots__ = ()
    kind = 1
    flags = _EPHEMERAL


class Plain(Persistent):
    """Only inside a ``Multi``: creates a persistent node."""

    __slots__ = ()
    kind = 1


class Multi(Request):
    """A transaction. Replies for each part ``True``, a stat, a path or an exception."""

    __slots__ = ()
    kind = 14

    def __init__(self, parts: Sequence[Request]) -> None:
        packed = [_HEADER.pack(part.kind, 0, -1) + part.body for part in parts]
        super().__init__(b"".join(packed) + _END_OF_MULTI)

    def read(self, body: bytes) -> list[Any]:
        results: list[Any] = []
        offset = 0
        while True:
            kind, done, _ = _HEADER.unpack_from(body, offset)
            offset += _HEADER.size
            if done:
                return results
            result: Any = True
            if kind == Plain.kind:
                result, offset = _read_text(body, offset)
            elif kind == Write.kind:
                result = Stat._make(_STAT.unpack_from(body, offset))
                offset += _STAT.size
            elif kind == -1:
                (code,) = _INT.unpack_from(body, offset)
                result, offset = _error(code), offset + 4
            results.append(result)

    @property
    def failed(self) -> bool:
        """Whether the transaction was rejected: none of its parts was executed."""
        return any(isinstance(result, Exception) for result in self.value)


class Checks(Multi):
    """A transaction that fails unless all these nodes exist. Packed and unpacked as a whole, since
    a client may hold many."""

    __slots__ = ("_expected",)

    def __init__(self, paths: Sequence[str]) -> None:
        Request.__init__(
            self, b"".join([_CHECK + _text(path) + _ANY for path in paths]) + _END_OF_MULTI
        )
        self._expected = _CHECKED * len(paths) + _END_OF_MULTI

    def read(self, body: bytes) -> list[Any]:
        if body == self._expected:
            return []
        return super().read(body)
