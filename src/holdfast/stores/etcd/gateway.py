"""etcd's JSON gateway: posts requests, signs in, and says what a refusal means."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from holdfast.errors import BackendUnavailable, Unsupported
from holdfast.io.http import Http, Reply
from holdfast.stores._consensus.strict import JsonReader, is_base64, is_digits, is_list_of

__all__ = ["Credentials", "Gateway", "NoSpace", "SessionGone"]

_SIGN_IN = b"POST /v3/auth/authenticate"
_SERVER_TROUBLE = (408, 429, 500, 502, 503, 504)


def _is(kind: type) -> Callable[[Any], bool]:
    return lambda value: type(value) is kind


def _is_ttl(value: object) -> bool:
    """Of a lease that is over, etcd says -1."""
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
"""What etcd's answers have in the fields that are read here, whatever they answer."""


class SessionGone(Exception):
    """The lease that a request was for has ended; nothing was changed."""


class NoSpace(BackendUnavailable):
    """The database is full, and takes no writes but deletions; nothing was changed."""


class Credentials:
    """User and password of one store, and the token they were last exchanged for."""

    def __init__(self, user: str | None, password: str | None) -> None:
        self.user, self.password = user, password
        self.tries = 0
        """How often somebody signed in: who meets a refusal after that just asks again."""

    def __repr__(self) -> str:
        return f"Credentials({self.user!r})"


class Gateway:
    """One backend's way to the store."""

    def __init__(self, http: Http, credentials: Credentials) -> None:
        self.http, self.credentials = http, credentials
        self.display = http.servers.display
        self._reader = JsonReader(self.display, _KINDS)

    async def post(self, line: bytes, body: bytes, until: float | None = None) -> dict[str, Any]:
        """The answer's JSON. Raises ``SessionGone``, ``NoSpace`` or ``Unsupported``, where nothing
        was changed, and ``BackendUnavailable`` where that is not known."""
        known = self.credentials.tries
        if self.credentials.user and not known:
            await self._sign_in(until)
            known = self.credentials.tries
        reply = await self.http.ask(line, body, until)
        if reply.status != 200:
            if self._wants_sign_in(reply):
                if known == self.credentials.tries:
                    await self._sign_in(until)
                reply = await self.http.ask(line, body, until)
            if reply.status != 200:
                raise self._refusal(line, reply)
        return self._read(line, reply)

    def number(self, fields: dict[str, Any], name: str) -> int:
        """A number in a field that is a text elsewhere."""
        if not is_digits(fields[name]):
            raise self._reader.damaged(f"the field {name!r} is no number")
        return int(fields[name])

    def _read(self, line: bytes, reply: Reply) -> dict[str, Any]:
        answer = self._reader.read_as(dict, reply.body)
        if "error" in answer:  # a stream answers 200 before it knows
            raise self._refusal(line, reply)
        return answer

    def _wants_sign_in(self, reply: Reply) -> bool:
        text = reply.body
        refused = b"invalid auth token" in text or b"user name is empty" in text
        return refused and bool(self.credentials.user)

    async def _sign_in(self, until: float | None) -> None:
        credentials = self.credentials
        words = {"name": credentials.user, "password": credentials.password or ""}
        self.http.servers.headers = b""  # with an old token even this would be refused
        reply = await self.http.ask(_SIGN_IN, json.dumps(words).encode(), until)
        if reply.status != 200:
            if b"authentication is not enabled" in reply.body:
                credentials.tries += 1
                return
            raise self._refusal(_SIGN_IN, reply)
        token: str = self._read(_SIGN_IN, reply)["token"]
        if not token.isascii() or not token.isprintable():
            raise self._reader.damaged("its token can't be sent back")
        self.http.servers.headers = b"Authorization: %b\r\n" % token.encode()
        credentials.tries += 1

    def _refusal(self, line: bytes, reply: Reply) -> Exception:
        text = _message(reply)
        if "requested lease not found" in text:
            return SessionGone()
        if reply.status in (404, 405, 501):
            return Unsupported(
                f"{self.display} answers HTTP but not etcd's JSON gateway: it is switched off "
                "(start etcd with --enable-grpc-gateway), older than 3.4, or not etcd"
            )
        denial = self._denial(line, text)
        if denial:  # not worth another try, unlike a store that can't be reached
            return Unsupported(f"{self.display} {denial}")
        if reply.status in _SERVER_TROUBLE or text:
            kind = NoSpace if "database space exceeded" in text else BackendUnavailable
            return kind(f"{self.display}: {_said(line)}: {text or reply.status}")
        return self._strange(line, reply)

    def _denial(self, line: bytes, text: str) -> str:
        user = self.credentials.user
        if "user name is empty" in text or "invalid user ID or password" in text:
            return f"refused the password of {user!r}" if user else "needs a user and a password"
        if "permission denied" in text:
            return f"does not let {user!r} do this ({_said(line)}): its role is too small"
        return ""

    def _strange(self, line: bytes, reply: Reply) -> Exception:
        return BackendUnavailable(
            f"{self.display}: {_said(line)}: status {reply.status}, with a text that is not etcd's"
        )


def _said(line: bytes) -> str:
    return line.decode().partition(" ")[2]


def _message(reply: Reply) -> str:
    try:
        answer = json.loads(reply.body)
    except (ValueError, RecursionError):
        return ""
    error = answer.get("error", "") if isinstance(answer, dict) else ""
    text = error.get("message", "") if isinstance(error, dict) else error
    return str(text)
