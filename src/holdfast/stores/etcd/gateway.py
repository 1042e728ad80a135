"""etcd's JSON gateway: sends requests, signs in, and maps refusals to exceptions."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from holdfast.errors import BackendUnavailable
from holdfast.io.http import Http, Reply
from holdfast.stores._consensus.strict import (
    DamagedAnswer,
    JsonReader,
    is_base64,
    is_digits,
    is_list_of,
)

__all__ = ["Credentials", "FinalRefusal", "Gateway", "NoSpace", "SessionGone"]

_SIGN_IN = b"POST /v3/auth/authenticate"
_SERVER_TROUBLE = (408, 429, 500, 502, 503, 504)
_OLD_TOKEN = (
    b"invalid auth token",
    b"user name is empty",
    b"revision in header is old",  # of a signed token, after any change of users or roles
    b"revision of auth store is old",
    b"permission denied",  # the token may be older than the permission
)
"""Refusals of requests whose token may be too old: it is fetched again once."""


def _is(kind: type) -> Callable[[Any], bool]:
    return lambda value: type(value) is kind


def _is_ttl(value: object) -> bool:
    """etcd reports -1 for a lease that has ended."""
    return value == "-1" or is_digits(value)


def _is_object(value: object) -> bool:
    return isinstance(value, dict)


_KINDS: dict[str, Callable[[Any], bool]] = {
    "ID": is_digits,
    "TTL": _is_ttl,
    "count": is_digits,
    "create_revision": is_digits,
    "deleted": is_digits,
    "errors": is_list_of(str),
    "header": _is_object,
    "key": is_base64,
    "keys": is_list_of(str),
    "kvs": is_list_of(dict),
    "leader": is_digits,
    "lease": is_digits,
    "mod_revision": is_digits,
    "more": _is(bool),
    "prev_kv": _is_object,
    "raft_term": is_digits,
    "response_delete_range": _is_object,
    "response_put": _is_object,
    "response_range": _is_object,
    "response_txn": _is_object,
    "responses": is_list_of(dict),
    "result": _is_object,
    "revision": is_digits,
    "succeeded": _is(bool),
    "token": _is(str),
    "value": is_base64,
    "version": _is(str),
}
"""Type checks by field name, the same for all of etcd's replies."""


class SessionGone(Exception):
    """The lease of a request has ended; the request changed nothing."""


class NoSpace(BackendUnavailable):
    """The database is full and accepts only deletes; the request changed nothing."""


class FinalRefusal(BackendUnavailable):
    """A refusal that is final: a retry would not help. The request changed nothing."""

    def __init__(self, message: str) -> None:
        super().__init__(message, final=True)


class Credentials:
    """User and password of one store, and the token they were last exchanged for."""

    def __init__(self, user: str | None, password: str | None) -> None:
        self.user, self.password = user, password
        self.sign_ins = 0
        """Number of sign-ins so far. A refused request that was sent before the latest sign-in is
        repeated without another one."""

    def __repr__(self) -> str:
        return f"Credentials({self.user!r})"


class Gateway:
    """The connection of one backend to the store."""

    def __init__(self, http: Http, credentials: Credentials) -> None:
        self.http, self.credentials = http, credentials
        self.display = http.servers.display
        self._reader = JsonReader(self.display, _KINDS)
        http.servers.bare = _SIGN_IN  # an expired token would be refused even here

    async def post(self, line: bytes, body: bytes, until: float | None = None) -> dict[str, Any]:
        """Returns the reply's JSON. Raises ``SessionGone``, ``NoSpace`` or ``FinalRefusal`` if
        nothing was changed, and ``BackendUnavailable`` if the outcome is unknown."""
        known = self.credentials.sign_ins
        if self.credentials.user and not known:
            await self._sign_in(until)
            known = self.credentials.sign_ins
        reply = await self.http.ask(line, body, until)
        if reply.status != 200:
            if self._wants_sign_in(reply):
                if known == self.credentials.sign_ins:
                    await self._sign_in(until)
                reply = await self.http.ask(line, body, until)
            if reply.status != 200:
                raise self._refusal(line, reply)
        return self._read(line, reply)

    def number(self, fields: dict[str, Any], name: str) -> int:
        """Reads a number from a field that holds a text in other replies."""
        if not is_digits(fields[name]):
            raise self._reader.damaged(f"the field {name!r} is not a number")
        return int(fields[name])

    def _read(self, line: bytes, reply: Reply) -> dict[str, Any]:
        try:
            answer = self._reader.read_as(dict, reply.body)
            if "error" in answer:  # a streaming reply has status 200 even if it fails
                raise self._refusal(line, reply)
            if "header" not in answer and "result" not in answer:
                raise self._reader.damaged("it has no header")
        except DamagedAnswer as error:
            if self.http.servers.known:  # it may have executed the request
                raise
            raise FinalRefusal(f"{error}: it is not etcd") from None
        self.http.servers.known = True
        return answer

    def _wants_sign_in(self, reply: Reply) -> bool:
        refused = any(text in reply.body for text in _OLD_TOKEN)
        return refused and bool(self.credentials.user)

    async def _sign_in(self, until: float | None) -> None:
        credentials = self.credentials
        fields = {"name": credentials.user, "password": credentials.password or ""}
        reply = await self.http.ask(_SIGN_IN, json.dumps(fields).encode(), until)
        if reply.status != 200:
            if b"authentication is not enabled" in reply.body:
                self.http.servers.headers = b""
                credentials.sign_ins += 1
                return
            raise self._refusal(_SIGN_IN, reply)
        token: str = self._read(_SIGN_IN, reply)["token"]
        if not token.isascii() or not token.isprintable():
            raise self._reader.damaged("its token is not a valid header value")
        self.http.servers.headers = b"Authorization: %b\r\n" % token.encode()
        credentials.sign_ins += 1

    def _refusal(self, line: bytes, reply: Reply) -> Exception:
        text = _message(reply)
        if "requested lease not found" in text:
            return SessionGone()
        if reply.status in (404, 405, 501) and not self.http.servers.known:
            return FinalRefusal(
                f"{self.display} answers HTTP but has no JSON gateway of etcd: the gateway is off "
                "(start etcd with --enable-grpc-gateway), etcd is older than 3.4, or it is not etcd"
            )
        denial = self._denial(line, text)
        if denial:
            return FinalRefusal(f"{self.display} {denial}")
        if reply.status in _SERVER_TROUBLE or text:
            kind = NoSpace if "database space exceeded" in text else BackendUnavailable
            return kind(f"{self.display}: {_path(line)}: {text or reply.status}")
        return self._unexpected(line, reply)

    def _denial(self, line: bytes, text: str) -> str:
        user = self.credentials.user
        if "invalid user ID or password" in text:
            return f"refused the password of {user!r}" if user else "needs a user and a password"
        if "user name is empty" in text and not user:  # with a user, a node lags behind another
            return "needs a user and a password"
        if "permission denied" in text:
            return f"refuses {_path(line)} to the user {user!r}: its role lacks the permission"
        return ""

    def _unexpected(self, line: bytes, reply: Reply) -> Exception:
        kind = BackendUnavailable if self.http.servers.known else FinalRefusal
        return kind(
            f"{self.display}: {_path(line)}: status {reply.status}, with a body that is not etcd's"
        )


def _path(line: bytes) -> str:
    return line.decode().partition(" ")[2]


def _message(reply: Reply) -> str:
    try:
        answer = json.loads(reply.body)
    except (ValueError, RecursionError):
        return ""
    error = answer.get("error", "") if isinstance(answer, dict) else ""
    text = error.get("message", "") if isinstance(error, dict) else error
    return str(text)
