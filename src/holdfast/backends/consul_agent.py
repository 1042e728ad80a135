"""Consul's HTTP API: transactions and sessions, and what a refusal means."""

from __future__ import annotations

import json
from typing import Any

from holdfast.errors import BackendUnavailable, Unsupported
from holdfast.wires.http import Http, Reply

__all__ = ["Agent", "NodeMissing", "Refused", "SessionGone"]

TXN = b"PUT /v1/txn"
READ = b"PUT /v1/txn?consistent"


class SessionGone(Exception):
    """The session that a request was for has ended; nothing was changed."""


class NodeMissing(Exception):
    """The node that a session was to be bound to is not registered."""


class Refused(Exception):
    """A transaction was not carried out; ``failed`` are the operations that did not fit."""

    def __init__(self, failed: frozenset[int], *, delayed: bool = False) -> None:
        super().__init__(f"operations {sorted(failed)}")
        self.failed = failed
        self.delayed = delayed
        """Whether a lock-delay was in the way."""


class Agent:
    """One backend's way to the store."""

    def __init__(self, http: Http) -> None:
        self.http = http
        self.display = http.servers.display

    async def txn(
        self, body: bytes, *, line: bytes = TXN, until: float | None = None
    ) -> list[dict[str, Any]]:
        """What the operations answered. Raises ``Refused``, ``SessionGone``, ``Unsupported`` or
        ``BackendUnavailable``."""
        reply = await self.http.ask(line, body, until)
        if reply.status == 200:
            results = self._read(line, reply)["Results"]
            return [result["KV"] for result in results or ()]
        if reply.status == 409:
            errors = self._read(line, reply)["Errors"] or ()
            if any("invalid session" in error["What"] for error in errors):
                raise SessionGone
            if any("ermission denied" in error["What"] for error in errors):
                raise self._denied(line)
            delayed = any("lock delay" in error["What"] for error in errors)
            raise Refused(frozenset(int(error["OpIndex"]) for error in errors), delayed=delayed)
        raise self._refusal(line, reply)

    async def ask(self, line: bytes, body: bytes = b"", until: float | None = None) -> Any:
        """The answer's JSON; ``None`` for what does not exist."""
        reply = await self.http.ask(line, body, until)
        if reply.status == 404:
            return None
        if reply.status != 200:
            raise self._refusal(line, reply)
        return self._read(line, reply)

    def _read(self, line: bytes, reply: Reply) -> Any:
        try:
            return json.loads(reply.body.decode() or "null")
        except ValueError:
            raise BackendUnavailable(
                f"{self.display}: {_said(line)}: status {reply.status}, with a text that is not "
                "Consul's"
            ) from None

    def _refusal(self, line: bytes, reply: Reply) -> Exception:
        token = self.http.servers.headers.partition(b": ")[2].strip()
        body = reply.body.replace(token, b"***") if token else reply.body
        text = body[:200].decode(errors="replace").strip()
        if "Invalid Session TTL" in text:
            return Unsupported(f"{self.display} does not allow this ttl: {text}")
        if "Missing node registration" in text:
            return NodeMissing()
        if reply.status == 403:
            return self._denied(line)
        return BackendUnavailable(f"{self.display}: {_said(line)}: {text or reply.status}")

    def _denied(self, line: bytes) -> Unsupported:
        # Not worth another try, unlike a store that can't be reached.
        words = "the token is missing or may not do this"
        return Unsupported(f"{self.display}: {_said(line)}: permission denied: {words}")


def _said(line: bytes) -> str:
    return line.decode().partition("?")[0]
