"""ZooKeeper's requests, packed by whoever asks and unpacked without detours.

An ``Ask`` is both the request and the place for its answer; whoever waits for a whole pipeline of
them is told once.
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
    """What ZooKeeper knows about a node."""

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
    """An access list as every create carries it."""
    parts = [_INT.pack(acl.perms) + _text(acl.id.scheme) + _text(acl.id.id) for acl in acls]
    return _INT.pack(len(acls)) + b"".join(parts)


def _read_text(buffer: bytes, offset: int) -> tuple[str, int]:
    (length,) = _INT.unpack_from(buffer, offset)
    offset += 4
    if not 0 <= length <= len(buffer) - offset:
        raise ValueError(f"a text of {length} bytes")
    return buffer[offset : offset + length].decode(), offset + length


def _error(code: int) -> Exception:
    """What a server's error code means; of one that is not known, its number."""
    if code not in EXCEPTIONS:
        unknown: Exception = ZookeeperError(f"error {code}")
        return unknown
    error: Exception = EXCEPTIONS[code]()
    return error


_parent_text = lru_cache(maxsize=1024)(_text)
"""Of nodes that are asked for again and again."""

# What goes out for a request that was withdrawn before it was sent: whether "/" exists.
_HARMLESS_KIND, _HARMLESS = 3, _text("/") + b"\0"


class Request:
    """One request and its answer: ``value`` or ``error``."""

    __slots__ = ("_sent", "_unsent", "body", "completion", "error", "value")

    kind: ClassVar[int]

    def __init__(self, body: bytes) -> None:
        self.body = body
        self.value: Any = None
        self.error: Exception | None = None
        self.completion: Completion | Callable[[Request], None] | None = None
        self._sent = False
        self._unsent = [None]  # whoever pops decides: it is sent, or it is withdrawn

    def pack(self, xid: int) -> bytes:
        """What is sent for it, once."""
        kind, body = self.kind, self.body
        try:
            self._unsent.pop()
            self._sent = True
        except IndexError:
            kind, body = _HARMLESS_KIND, _HARMLESS
        return _REQUEST.pack(len(body) + 8, xid, kind) + body

    def withdraw(self) -> bool:
        """Makes sure that it is never sent; false if it may have been."""
        try:
            self._unsent.pop()
        except IndexError:
            return False
        return True

    def read(self, body: bytes) -> Any:
        """Unpacks the answer."""
        return True

    def complete(self, code: int, body: bytes) -> None:
        """Its answer has come."""
        if code:
            if code != _NO_NODE or self.kind != Exists.kind:
                self.error = _error(code)
        elif self._sent:
            try:
                self.value = self.read(body)
            except (struct.error, ValueError, LookupError) as error:
                log.exception("an answer of ZooKeeper makes no sense")
                self.error = error
        self._finish()

    def set_exception(self, error: Exception) -> None:
        """There will be no answer."""
        self.error = error
        self._finish()

    def then(self, callback: Callable[[Request], None]) -> Self:
        """Calls back on the thread that reads, which must not be kept waiting."""
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
                    raise  # perhaps a signal's: whoever reads there ends the connection
                log.exception("what follows an answer of ZooKeeper failed")
        self.completion = None  # last: an interrupt before it has the call told again


class Create(Request):
    """A sequential, ephemeral node; answers its path and stat."""

    __slots__ = ()
    kind = 15
    flags: ClassVar[int] = _EPHEMERAL_SEQUENTIAL

    def __init__(self, path: str, data: bytes, acl: bytes) -> None:
        super().__init__(_text(path) + _data(data) + acl + _INT.pack(self.flags))

    def read(self, body: bytes) -> tuple[str, Stat]:
        path, offset = _read_text(body, 0)
        return path, Stat._make(_STAT.unpack_from(body, offset))


class Persistent(Create):
    """A node that stays until it is deleted."""

    __slots__ = ()
    flags = 0


class Container(Create):
    """A node that the server deletes some time after its last child."""

    __slots__ = ()
    kind = 19
    flags = _CONTAINER


class Delete(Request):
    """Deletes a node of any version."""

    __slots__ = ()
    kind = 2

    def __init__(self, path: str, version: int = ANY_VERSION) -> None:
        super().__init__(_text(path) + _INT.pack(version))


class Exists(Request):
    """A node's stat, or ``None``."""

    __slots__ = ()
    kind = 3

    def __init__(self, path: str) -> None:
        super().__init__(_text(path) + b"\0")

    def read(self, body: bytes) -> Stat:
        return Stat._make(_STAT.unpack_from(body))


class Read(Request):
    """A node's data and stat; with a watch, which is only set if the node exists."""

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
    """Replaces a node's data; answers its stat."""

    __slots__ = ()
    kind = 5

    def __init__(self, path: str, data: bytes, version: int = ANY_VERSION) -> None:
        super().__init__(_text(path) + _data(data) + _INT.pack(version))

    def read(self, body: bytes) -> Stat:
        return Stat._make(_STAT.unpack_from(body))


class Listing(Request):
    """The names of a node's children; with a watch for new and lost ones."""

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
            # Names have no zeroes; their lengths have three if they are short, as ours are.
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
    """Lets the server catch up with its leader before it answers what follows."""

    __slots__ = ()
    kind = 9

    def __init__(self, path: str) -> None:
        super().__init__(_parent_text(path))


class Check(Request):
    """Only inside a ``Multi``: the node exists."""

    __slots__ = ()
    kind = 13

    def __init__(self, path: str) -> None:
        super().__init__(_text(path) + _INT.pack(ANY_VERSION))


class Ephemeral(Create):
    """Only inside a ``Multi``, which has no other create: an ephemeral node of this name."""

    __slots__ = ()
    kind = 1
    flags = _EPHEMERAL


class Plain(Persistent):
    """Only inside a ``Multi``: a node that stays."""

    __slots__ = ()
    kind = 1


class Multi(Request):
    """All or nothing. Answers, one by one, ``True``, a stat, a path or an exception."""

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
        """Whether nothing was done."""
        return any(isinstance(result, Exception) for result in self.value)


class Checks(Multi):
    """All these nodes exist. As many as a client holds: packed and unpacked in one go."""

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
