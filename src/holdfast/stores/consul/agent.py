"""Consul's HTTP API: sends transactions and session requests, and raises what a refusal means."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any, TypeVar

from holdfast.errors import BackendUnavailable, Unsupported
from holdfast.io.connection import PENDING
from holdfast.io.http import HttpStream, Reply, request_bytes
from holdfast.stores._consensus.hosts import HostConnection, HostEndpoint, Hosts, Wire
from holdfast.stores._consensus.strict import (
    LARGEST_TOKEN,
    DamagedAnswer,
    Items,
    JsonReader,
    is_list_of,
)

__all__ = [
    "Agent",
    "AgentConnection",
    "AgentEndpoint",
    "NodeMissing",
    "SessionGone",
    "TransactionRefused",
]

TXN = b"PUT /v1/txn"
READ = b"PUT /v1/txn?consistent"
UNREGISTERED, WRONG_TTL = b"Missing node registration", b"Invalid Session TTL"
"""Consul refuses a session by these texts, with the status of a server that can't serve."""
KEYS = b"GET /v1/kv/"
"""Consul's answers to these have an index, also if there are no keys."""
T = TypeVar("T")


def _is_text(value: object) -> bool:
    return type(value) is str


def _is_index(value: object) -> bool:
    return type(value) is int and 0 <= value <= LARGEST_TOKEN


def _is_id(value: object) -> bool:
    """Whether it may be the id of a session: it is sent back in JSON and in paths."""
    return type(value) is str and value.isascii() and value.replace("-", "0").isalnum()


def _or_null(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or fits(value)


_KINDS: dict[str, Callable[[Any], bool]] = {
    "CreateIndex": _is_index,
    "Errors": _or_null(is_list_of(dict)),
    "ID": _is_id,
    "KV": lambda value: isinstance(value, dict),
    "Key": _is_text,
    "LockDelay": _is_index,
    "ModifyIndex": _is_index,
    "OpIndex": _is_index,
    "Results": _or_null(is_list_of(dict)),
    "Session": lambda value: value == "" or _is_id(value),
    "TTL": _is_text,
    "Value": _or_null(_is_text),
    "What": _is_text,
}
"""The type of each field that is read here, in any of Consul's answers."""


class SessionGone(Exception):
    """The session of a request has ended; nothing was changed."""


class NodeMissing(Exception):
    """The node of a new session is not registered; no session was created."""


class TransactionRefused(Exception):
    """A transaction was not applied; ``failed`` has the numbers of the operations that failed."""

    def __init__(self, failed: frozenset[int], *, delayed: bool = False) -> None:
        super().__init__(f"operations {sorted(failed)}")
        self.failed = failed
        self.delayed = delayed
        """Whether a lock-delay is the reason."""


class AgentEndpoint(HostEndpoint["AgentConnection"]):
    """The hosts of one store, and the token that every request to them carries."""

    def __init__(self, hosts: Hosts, token: bytes = b"") -> None:
        super().__init__(hosts)
        self.token = token
        self._headers = b"X-Consul-Token: %b\r\n" % token if token else b""

    def connection(self, sock: socket.socket, host: int) -> AgentConnection:
        return AgentConnection(sock, host, self)

    def request(self, host: int, line: bytes, body: bytes) -> bytes:
        return request_bytes(line, self.hosts.authorities[host], self._headers, body)


class AgentConnection(HostConnection, HttpStream):
    """One connection to Consul: a request is a line, such as ``PUT /v1/txn``, and a body."""

    index_header = b"x-consul-index"
    endpoint: AgentEndpoint

    def send(self, request: tuple[bytes, bytes]) -> None:  # type: ignore[override]
        self.begin()
        super().send(self.endpoint.request(self.host, *request))

    def send_query(self, line: bytes) -> None:
        """Sends a blocking query. That it has no reply for long does not mean that the host is
        silent."""
        super().send(self.endpoint.request(self.host, line, b""))

    def next(self) -> Any:
        reply = super().next()
        if reply is not PENDING:
            self.answered(unavailable=reply.status >= 500 and not _is_refusal(reply))
        return reply


class _AnswerReader(JsonReader):
    """Reads Consul's answers. A server that never answered as Consul is one of another kind:
    trying again can't help. After that it is an answer of a proxy."""

    def __init__(self, hosts: Hosts) -> None:
        super().__init__(hosts.display, _KINDS)
        self._hosts = hosts

    def damaged(self, why: str) -> DamagedAnswer:
        text = f"{self.where} answers HTTP, but not as Consul does: {why}"
        return DamagedAnswer(text, final=not self._hosts.known)


class Agent:
    """Sends one backend's requests to Consul."""

    def __init__(self, wire: Wire[Reply], endpoint: AgentEndpoint) -> None:
        self.wire, self.endpoint, self.hosts = wire, endpoint, endpoint.hosts
        self.display = self.hosts.display
        self._reader = _AnswerReader(self.hosts)

    async def txn(
        self, body: bytes, *, line: bytes = TXN, until: float | None = None
    ) -> list[dict[str, Any]]:
        """The results of the operations. Raises ``TransactionRefused``, ``SessionGone``,
        ``Unsupported`` or ``BackendUnavailable``."""
        reply = await self.wire.ask(line, body, until)
        if reply.status == 200:
            results = self._reader.read_as(dict, reply.body)["Results"]
            self.hosts.known = True
            return Items(self._reader, "Results", [result["KV"] for result in results or ()])
        if reply.status == 409:
            errors = self._reader.read_as(dict, reply.body)["Errors"] or ()
            if any("invalid session" in error["What"] for error in errors):
                raise SessionGone
            if any("ermission denied" in error["What"] for error in errors):
                raise self._denied(line)
            delayed = any("lock delay" in error["What"] for error in errors)
            raise TransactionRefused(
                frozenset(int(error["OpIndex"]) for error in errors), delayed=delayed
            )
        raise self._refusal(line, reply)

    async def ask(
        self, kind: type[T], line: bytes, body: bytes = b"", until: float | None = None
    ) -> T | None:
        """The JSON of the answer, which must be of this type; ``None`` if the object does not
        exist."""
        reply = await self.wire.ask(line, body, until)
        if reply.status == 404 and _says_absent(reply):
            return None
        if reply.status != 200:
            raise self._refusal(line, reply)
        if line.startswith(KEYS) and not reply.seen:
            raise self.damaged(_path(line))
        return self._reader.read_as(kind, reply.body)

    async def ask_many(self, kind: type[T], line: bytes, until: float | None = None) -> list[T]:
        """The items of a list, which must be of this type; an empty list if the object does not
        exist."""
        found = await self.ask(list, line, until=until) or []
        if not is_list_of(kind)(found):
            raise self.damaged("the items of its list have another type")
        return found

    def damaged(self, why: str) -> DamagedAnswer:
        return self._reader.damaged(why)

    def _refusal(self, line: bytes, reply: Reply) -> Exception:
        token = self.endpoint.token
        body = reply.body.replace(token, b"***") if token else reply.body
        text = body[:200].decode(errors="replace").strip()
        if WRONG_TTL in body:
            return Unsupported(f"{self.display} does not allow this ttl: {text}")
        if UNREGISTERED in body:
            return NodeMissing()
        if reply.status == 403:
            return self._denied(line)
        if reply.status in (404, 405, 501):
            return self.damaged(_path(line))
        told = f"status {reply.status}" + (f": {text}" if text else "")
        return BackendUnavailable(f"{self.display}: {_path(line)}: {told}")

    def _denied(self, line: bytes) -> BackendUnavailable:
        reason = "the token is missing or may not do this"
        text = f"{self.display}: {_path(line)}: permission denied: {reason}"
        return BackendUnavailable(text, final=True)


def _is_refusal(reply: Reply) -> bool:
    """Whether Consul refuses the request itself: any other server would, too."""
    return UNREGISTERED in reply.body or WRONG_TTL in reply.body


def _says_absent(reply: Reply) -> bool:
    """Whether a 404 is Consul's own: for a key it has an index, for a session a known text."""
    return reply.seen > 0 or reply.body.startswith(b"Session id ")


def _path(line: bytes) -> str:
    return line.decode().partition("?")[0]
