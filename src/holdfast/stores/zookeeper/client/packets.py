"""ZooKeeper's packets: requests and replies as bytes, and the frames of a connection.

Everything here is pure. What a server sends is read strictly: a length that does not fit, a text
that is not UTF-8, or bytes that are left over raise ``ValueError`` or ``struct.error``.

A ``Request`` also stores its reply. The thread or task that waits for a pipeline is woken once, by
the last reply.
"""

from __future__ import annotations

import logging
import re
import struct
import threading
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple, Self

from holdfast.io.connection import PENDING, Broken
from holdfast.stores.zookeeper.client.completion import Completion

__all__ = [
    "ANYBODY",
    "ANY_VERSION",
    "EVENT_XID",
    "MOST_FRAME_BYTES",
    "Acl",
    "AuthFailed",
    "BadVersion",
    "Check",
    "Checks",
    "Close",
    "ConnectionLost",
    "Container",
    "Create",
    "Delete",
    "Ephemeral",
    "Exists",
    "Frames",
    "Header",
    "Listing",
    "Multi",
    "NoAuth",
    "NoNode",
    "NodeExists",
    "NotEmpty",
    "Persistent",
    "Plain",
    "Read",
    "Request",
    "Stat",
    "Sync",
    "Write",
    "ZooKeeperError",
    "pack_acl",
    "pack_text",
    "read_event",
    "read_header",
    "read_text",
]

log = logging.getLogger("holdfast")

MOST_FRAME_BYTES = 64 * 2**20
"""The largest reply that is accepted: a listing of very many names."""
EVENT_XID = -1
"""The xid of an event, which answers no request: a watch has fired."""
ANY_VERSION = -1

_INT = struct.Struct("!i")
_STAT = struct.Struct("!qqqqiiiqiiq")
_REQUEST = struct.Struct("!iii")
_REPLY = struct.Struct("!iqi")
_EVENT = struct.Struct("!ii")
_PART = struct.Struct("!iBi")
_END_OF_MULTI = _PART.pack(-1, 1, -1)
_FAILED = -1
"""The kind of all results of a transaction that was rejected."""
_EPHEMERAL, _EPHEMERAL_SEQUENTIAL, _CONTAINER = 1, 3, 4
_ANY = _INT.pack(ANY_VERSION)
_CHECK, _CHECKED = _PART.pack(13, 0, -1), _PART.pack(13, 0, 0)


# Errors


class ZooKeeperError(Exception):
    """An error code that a server answered, or the end of a connection."""

    code: ClassVar[int] = 0


class NoNode(ZooKeeperError):
    code = -101


class NoAuth(ZooKeeperError):
    code = -102


class BadVersion(ZooKeeperError):
    code = -103


class NodeExists(ZooKeeperError):
    code = -110


class NotEmpty(ZooKeeperError):
    code = -111


class AuthFailed(ZooKeeperError):
    code = -115


class ConnectionLost(ZooKeeperError):
    """The connection ended before the reply came: the outcome of the request is unknown."""


_ERRORS: dict[int, type[ZooKeeperError]] = {
    kind.code: kind for kind in (NoNode, NoAuth, BadVersion, NodeExists, NotEmpty, AuthFailed)
}


def _error(code: int) -> ZooKeeperError:
    """The exception for a server's error code; a general one for a code that we do not use."""
    kind = _ERRORS.get(code)
    return ZooKeeperError(f"error {code}") if kind is None else kind()


# Values


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


class Acl(NamedTuple):
    """One entry of an access list."""

    scheme: str
    id: str
    permissions: int = 31
    """31: all of them."""


ANYBODY = Acl("world", "anyone")


def pack_text(text: str) -> bytes:
    data = text.encode()
    return _INT.pack(len(data)) + data


def _data(data: bytes) -> bytes:
    return _INT.pack(len(data)) + data


def pack_acl(acls: Sequence[Acl]) -> bytes:
    """Packs an access list, as part of a create."""
    parts = [_INT.pack(acl.permissions) + pack_text(acl.scheme) + pack_text(acl.id) for acl in acls]
    return _INT.pack(len(acls)) + b"".join(parts)


def read_text(buffer: bytes, offset: int) -> tuple[str, int]:
    """A text and the offset behind it."""
    (length,) = _INT.unpack_from(buffer, offset)
    offset += 4
    if not 0 <= length <= len(buffer) - offset:
        raise ValueError(f"a text of {length} bytes")
    return buffer[offset : offset + length].decode(), offset + length


def _read_stat(body: bytes, offset: int) -> Stat:
    """The stat at the end of a reply."""
    if len(body) != offset + _STAT.size:
        raise ValueError(f"a stat of {len(body) - offset} bytes")
    return Stat._make(_STAT.unpack_from(body, offset))


_parent_text = lru_cache(maxsize=1024)(pack_text)
"""Cached: the paths of parents are packed often."""


# Frames


class Header(NamedTuple):
    """What every reply and event begins with."""

    xid: int
    zxid: int
    code: int


def read_header(frame: bytes) -> tuple[Header, bytes]:
    """The header of a reply, and its body."""
    return Header._make(_REPLY.unpack_from(frame)), frame[_REPLY.size :]


def read_event(body: bytes) -> str:
    """The path of the node whose watch has fired."""
    path, end = read_text(body, _EVENT.size)
    if end != len(body):
        raise ValueError(f"{len(body) - end} bytes behind an event")
    return path


class Frames:
    """Cuts received bytes into frames: each has its length in front."""

    __slots__ = ("_at", "_data", "_rest", "most_bytes")

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        """A longer frame is refused, as soon as its length is known."""
        self._data, self._at = b"", 0
        self._rest = bytearray()
        """A frame that is not complete yet. Appended to, since it may come in many pieces."""

    def feed(self, data: bytes) -> None:
        if self._rest:
            self._rest += data
        elif self._at < len(self._data):
            self._rest += self._data[self._at :] + data
        else:
            self._data, self._at = data, 0
            return
        self._data, self._at = b"", 0
        if self._is_complete():
            self._data, self._rest = bytes(self._rest), bytearray()

    def _is_complete(self) -> bool:
        return len(self._rest) >= 4 and len(self._rest) >= 4 + self._length(self._rest, 0)

    def _length(self, data: bytes | bytearray, at: int) -> int:
        (length,) = _INT.unpack_from(data, at)
        if not 0 <= length <= self.most_bytes:
            raise Broken(f"not ZooKeeper's: a reply of {length} bytes")
        return int(length)

    def next(self) -> Any:
        """The next complete frame, or ``PENDING``."""
        data, start = self._data, self._at + 4
        if len(data) < start:
            return PENDING
        end = start + self._length(data, self._at)
        if len(data) < end:
            return PENDING
        self._at = end
        return data[start:end]


# Requests


class Request:
    """One request and its reply: ``value`` or ``error``."""

    __slots__ = ("body", "completion", "error", "value", "xid")

    kind: ClassVar[int]

    def __init__(self, body: bytes) -> None:
        self.body = body
        self.xid = 0
        self.value: Any = None
        self.error: Exception | None = None
        self.completion: Completion | Callable[[Request], None] | None = None

    def pack(self, xid: int) -> bytes:
        """The frame to send."""
        self.xid = xid
        return _REQUEST.pack(len(self.body) + 8, xid, self.kind) + self.body

    def read(self, body: bytes) -> Any:
        """Unpacks the reply, which has no content."""
        if body:
            raise ValueError(f"{len(body)} bytes in a reply without content")
        return True

    def answer(self, code: int, body: bytes) -> None:
        """Stores the reply."""
        if code:
            if code != NoNode.code or self.kind != Exists.kind:
                self.error = _error(code)
            return
        try:
            self.value = self.read(body)
        except (struct.error, ValueError, LookupError) as error:
            log.exception("a reply of ZooKeeper can't be read")
            self.error = error

    def fail(self, error: Exception) -> None:
        """Notes that there will be no reply, unless there is one, and wakes what waits."""
        if self.value is None and self.error is None:
            self.error = error
        self.finish()

    def then(self, callback: Callable[[Request], None]) -> Self:
        """Calls back on the thread that reads the reply; the callback must not block."""
        self.completion = callback
        return self

    def finish(self) -> None:
        """Wakes the waiting thread or task, or calls back; a second call does nothing."""
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
                    raise  # perhaps from a signal handler: the connection ends
                log.exception("a callback for a reply of ZooKeeper failed")
        self.completion = None  # last: after an interrupt before this line it is called again


class Create(Request):
    """Creates a sequential, ephemeral node; replies its path and stat."""

    __slots__ = ("path",)
    kind = 15
    flags: ClassVar[int] = _EPHEMERAL_SEQUENTIAL
    suffix: ClassVar[re.Pattern[str]] = re.compile(r"\d{10}|-\d{9,10}", re.ASCII)
    """What the server appends to the path."""

    def __init__(self, path: str, data: bytes, acl: bytes) -> None:
        super().__init__(pack_text(path) + _data(data) + acl + _INT.pack(self.flags))
        self.path = path

    def read(self, body: bytes) -> tuple[str, Stat]:
        path, offset = read_text(body, 0)
        if not path.startswith(self.path) or not self.suffix.fullmatch(path, len(self.path)):
            raise ValueError(f"the path {path!r} for a node {self.path!r}")
        return path, _read_stat(body, offset)


class Persistent(Create):
    """Creates a persistent node."""

    __slots__ = ()
    flags = 0
    suffix = re.compile("")


class Container(Persistent):
    """Creates a node that the server deletes some time after its last child."""

    __slots__ = ()
    kind = 19
    flags = _CONTAINER


class Delete(Request):
    """Deletes a node, of any version unless one is given."""

    __slots__ = ()
    kind = 2

    def __init__(self, path: str, version: int = ANY_VERSION) -> None:
        super().__init__(pack_text(path) + _INT.pack(version))


class Exists(Request):
    """Reads a node's stat; ``None`` if there is no such node."""

    __slots__ = ()
    kind = 3

    def __init__(self, path: str) -> None:
        super().__init__(pack_text(path) + b"\0")

    def read(self, body: bytes) -> Stat:
        return _read_stat(body, 0)


class Read(Request):
    """Reads a node's data and stat. A watch is only set if the node exists."""

    __slots__ = ("path",)
    kind = 4

    def __init__(self, path: str, *, watch: bool = False) -> None:
        super().__init__(pack_text(path) + (b"\1" if watch else b"\0"))
        self.path = path

    def read(self, body: bytes) -> tuple[bytes, Stat]:
        (length,) = _INT.unpack_from(body)
        end = 4 + max(0, length)  # -1: the node was created without data
        return body[4:end], _read_stat(body, end)


class Write(Request):
    """Replaces a node's data; replies its stat."""

    __slots__ = ()
    kind = 5

    def __init__(self, path: str, data: bytes, version: int = ANY_VERSION) -> None:
        super().__init__(pack_text(path) + _data(data) + _INT.pack(version))

    def read(self, body: bytes) -> Stat:
        return _read_stat(body, 0)


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
            _, *parts = packed.decode().split("\0\0\0")
            names = [part[1:] for part in parts if part and ord(part[0]) == len(part) - 1]
            if len(names) == len(parts) == count:
                return names
        return self._read_any(packed, count)

    def _read_any(self, packed: bytes, count: int) -> list[str]:
        names, offset = [], 0
        for _ in range(count):
            name, offset = read_text(packed, offset)
            names.append(name)
        if offset != len(packed):
            raise ValueError(f"{len(packed) - offset} bytes behind a list")
        return names


class Sync(Request):
    """Lets the server catch up with the leader before it executes the next requests."""

    __slots__ = ()
    kind = 9

    def __init__(self, path: str) -> None:
        super().__init__(_parent_text(path))

    def read(self, body: bytes) -> str:
        path, end = read_text(body, 0)
        if end != len(body):
            raise ValueError(f"{len(body) - end} bytes behind a path")
        return path


class Check(Request):
    """Only inside a ``Multi``: fails unless the node exists."""

    __slots__ = ()
    kind = 13

    def __init__(self, path: str) -> None:
        super().__init__(pack_text(path) + _ANY)


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

    __slots__ = ("_kinds",)
    kind = 14

    def __init__(self, parts: Sequence[Request]) -> None:
        self._kinds = [part.kind for part in parts]
        packed = [_PART.pack(part.kind, 0, -1) + part.body for part in parts]
        super().__init__(b"".join(packed) + _END_OF_MULTI)

    def read(self, body: bytes) -> list[Any]:
        results: list[Any] = []
        kinds: list[int] = []
        offset = 0
        while True:
            kind, done, _ = _PART.unpack_from(body, offset)
            offset += _PART.size
            if done:
                if offset != len(body):
                    raise ValueError(f"{len(body) - offset} bytes behind a transaction")
                if kinds not in (self._kinds, [_FAILED] * len(self._kinds)):
                    raise ValueError(f"results of the kinds {kinds}")
                return results
            kinds.append(kind)
            result: Any = True
            if kind == Plain.kind:
                result, offset = read_text(body, offset)
            elif kind == Write.kind:
                result = Stat._make(_STAT.unpack_from(body, offset))
                offset += _STAT.size
            elif kind == _FAILED:
                (code,) = _INT.unpack_from(body, offset)
                result, offset = _error(code), offset + 4
            elif kind not in (Delete.kind, Check.kind):
                raise ValueError(f"a result of kind {kind}")
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
        self._kinds = [Check.kind] * len(paths)
        Request.__init__(
            self, b"".join([_CHECK + pack_text(path) + _ANY for path in paths]) + _END_OF_MULTI
        )
        self._expected = _CHECKED * len(paths) + _END_OF_MULTI

    def read(self, body: bytes) -> list[Any]:
        if body == self._expected:
            return []
        return super().read(body)


class Close(Request):
    """Ends the session, with all its ephemeral nodes and watches."""

    __slots__ = ()
    kind = -11

    def __init__(self) -> None:
        super().__init__(b"")
