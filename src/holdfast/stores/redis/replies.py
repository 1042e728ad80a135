"""The keys of a lock name, and what the replies of the scripts mean: values or errors."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote, unquote

from holdfast.claim import Busy, Claim
from holdfast.core import admit, log
from holdfast.core.contract import QUEUE_CAP
from holdfast.durations import shown
from holdfast.errors import BackendUnavailable, HoldfastError, Incompatible, Unsupported
from holdfast.io.clock import now
from holdfast.io.connection import AllBusy, Broken
from holdfast.io.resp import NotResp, RedisRefused, bulk
from holdfast.stores.redis.scripts import Script
from holdfast.stores.redis.url import NodeAddress

__all__ = [
    "Keys",
    "ReasonLog",
    "RedisConnectionBroken",
    "busy_answer",
    "clock_time",
    "damage",
    "denied_in_script",
    "escape",
    "is_final",
    "lock_name",
    "login_refused",
    "milliseconds",
    "read_wakeup",
    "refusal",
    "unescape",
    "unreachable",
]

KEPT_NAMES = 4096
LONGEST_TOKEN = 16
"""Digits of 2^53, the largest token of a script."""
KEPT_CAUSES = 64
NEW_CAUSE_SECONDS = 60.0
_DIGITS = re.compile(r"\d+")
_FULL, _JOINED = 2, 1
_NO_RIGHTS = ("NOPERM", "NOAUTH", "WRONGPASS")
_NO_LOGIN = re.compile("invalid password|no password is set|without any password|AUTH failed")
_FINAL_TEXTS = re.compile(
    "DB index|Invalid Database|SELECT is not allowed|cluster support disabled"
)
_DENIED_IN_SCRIPT = re.compile("executing the script can't|ACL failure in script")
_DAMAGED = re.compile(r"DAMAGED ([^;]*);")
"""How ``reading.lua`` reports damaged data."""


def read_wakeup(message: Any) -> tuple[tuple[str, int | None], ...]:
    """The key of the waiter that a message wakes, and the token if the release granted the lock to
    it directly; nothing for any other message."""
    if type(message) is not list or len(message) != 3 or type(message[2]) is not bytes:
        return ()
    key, _, token = message[2].decode(errors="replace").partition(" ")
    is_token = token.isascii() and token.isdigit() and len(token) <= LONGEST_TOKEN
    return ((key, int(token) if is_token else None),)


def milliseconds(seconds: float) -> int:
    return max(1, round(seconds * 1000))


def escape(text: str) -> str:
    """Escapes the characters that a hash tag must not have; the text stays readable."""
    if "%" in text or "{" in text or "}" in text:
        return text.replace("%", "%25").replace("{", "%7B").replace("}", "%7D")
    return text


def unescape(text: str) -> str:
    return unquote(text) if "%" in text else text


def lock_name(state: str) -> str:
    """The lock name of a state key of any namespace."""
    return unescape(state.partition(":{")[2][:-1])


class Keys:
    """The key of a lock name, ``namespace:{name}``, packed once per name.

    This spelling is stored: it must not change. The hash tag is the name itself, so that a redis-py
    Lock of the same name is in the same slot.
    """

    def __init__(self, namespace: str, *, cluster: bool) -> None:
        self._cluster = cluster
        self._prefix = escape(namespace)
        self._wake = f"{quote(namespace, safe='')}:wake:"

    def channel(self, client: str) -> str:
        """The channel of a client. It has no blanks: they separate the fields of a stored entry."""
        return self._wake + client

    def name(self, state: str) -> str:
        """The lock name of a state key of this namespace."""
        return unescape(state[len(self._prefix) + 2 : -1])

    def pattern(self, prefix: str) -> str:
        """The SCAN pattern for the state keys of all names with this prefix."""
        literal = f"{self._prefix}:{{{escape(prefix)}"
        for special in "\\*?[]":
            literal = literal.replace(special, "\\" + special)
        return literal + "*}"

    def start(self, script: Script, name: str) -> tuple[str, str]:
        """The command up to its arguments, and the key that routes it. Cached per name."""
        found = script.starts.get(name)
        if found is None:
            if len(script.starts) >= KEPT_NAMES:
                script.starts.clear()
            keys = [self._key(kind, name) for kind in script.keys]
            found = script.starts[name] = script.head + "".join(map(bulk, keys)), keys[0]
        return found

    def _key(self, kind: str, name: str) -> str:
        if kind == "foreign":
            if self._cluster and escape(name) != name:
                raise Unsupported(f"{name!r} has {{, }} or %: on a cluster redis-py can't share it")
            return name  # the key that a redis-py Lock of this name uses
        if kind == "loss":
            return f"{self._prefix}:loss"
        return f"{self._prefix}:{{{escape(name)}}}"


def clock_time(moment: int) -> str:
    """Formats a server's time in milliseconds as a time of day."""
    try:
        return datetime.fromtimestamp(moment / 1000, UTC).strftime("%H:%M:%S UTC")
    except (ValueError, OverflowError, OSError):
        return "a time out of range"


def _is_digits(word: Any) -> bool:
    return type(word) is bytes and len(word) <= 16 and word.isdigit()


def busy_answer(claim: Claim, reply: Any, store: str, generation: int) -> Busy:
    """Reads a reply that is not a grant. Raises if the script changed nothing: another limit, an
    abandoned request, an unexpected reply.

    ``generation`` is the subscription that was live when the request was sent.
    """
    kind = reply[0]
    if kind == b"limit":
        limit = int(reply[1]) if len(reply) == 2 and _is_digits(reply[1]) else 0
        admit.check_limit(claim, limit, slots=limit > 0, store=store)
    if kind == b"gone":
        raise BackendUnavailable(
            f"a request for {claim.name!r} reached {store} after it was abandoned"
        )
    if kind != b"busy" or [type(word) for word in reply[1:]] != [int] * 5:
        raise refusal(reply, store, claim.name)
    _, position, retry, joined, barred, token = reply
    reason = ""
    if joined == _FULL:
        reason = f"{QUEUE_CAP} waiters are already queued for {claim.name!r}"
        retry = 1000
    if barred:
        reason = (
            f"{store} grants nothing before {clock_time(barred)}: it was restarted, emptied, "
            "demoted or replaced and may have lost holds (loss_protection; "
            "`holdfast init` marks a new server as new)"
        )
    return Busy(position, retry / 1000 if retry >= 0 else None, (generation, token), reason)


class ReasonLog:
    """Logs why a store grants nothing: one warning per cause, not one per waiting name, nor one per
    number in the reason: other nodes may have answered, with another time. A cause that was not
    seen for ``NEW_CAUSE_SECONDS`` is logged again."""

    def __init__(self) -> None:
        self._seen: dict[str, float] = {}

    def tell(self, claim: Claim, busy: Busy) -> None:
        if not busy.reason:
            return
        cause, moment = _DIGITS.sub("", busy.reason), now()
        last, self._seen[cause] = self._seen.get(cause), moment
        if len(self._seen) > KEPT_CAUSES:
            self._seen.pop(next(iter(self._seen)), None)
        if last is None or moment - last > NEW_CAUSE_SECONDS:
            log.warning("waiting for %r: %s", claim.name, busy.reason)


def damage(reply: Any) -> str:
    """What is wrong with the stored data, if an error reply reports that; otherwise ``""``."""
    if not isinstance(reply, RedisRefused):
        return ""
    if "WRONGTYPE" in str(reply):
        return "it is a value of another type"
    found = _DAMAGED.search(str(reply))
    return found[1] if found else ""


def is_final(reply: Any) -> bool:
    """Whether an error reply refuses for good, before it changed anything: no rights, no login, no
    such database, no cluster."""
    if not isinstance(reply, RedisRefused) or denied_in_script(reply):
        return False
    return reply.code in _NO_RIGHTS or _FINAL_TEXTS.search(str(reply)) is not None


def denied_in_script(reply: Any) -> bool:
    """Whether a script was denied one of its commands: what it wrote before that is not undone."""
    return isinstance(reply, RedisRefused) and _DENIED_IN_SCRIPT.search(str(reply)) is not None


def refusal(reply: Any, store: str, name: str) -> HoldfastError:
    """The error for an unexpected reply to a request about the lock ``name``."""
    if isinstance(reply, HoldfastError):
        return reply
    if isinstance(reply, list) and reply[:1] == [b"incompatible"]:
        version = reply[1][:20].decode(errors="replace") if type(reply[-1]) is bytes else "?"
        return Incompatible(
            f"{store} holds locks of protocol version {repr(version)[1:-1]} ({name!r} is one), "
            "which this version of Holdfast can't share: use one version, or another namespace"
        )
    what = damage(reply)
    if what:
        return Incompatible(
            f"the data that {store} has stored for the lock {name!r} can't be used: {what}. While "
            "the lock is not held, delete its key there and raise connect(epoch=…), so that fences "
            "still grow"
        )
    if not isinstance(reply, RedisRefused):
        return BackendUnavailable(f"{store} sent a reply that can't be read")
    text = str(reply)
    if reply.code == "READONLY":
        return BackendUnavailable(f"{store} is a read-only replica: locks need the master")
    if "unknown command" in text.lower():
        return Unsupported(f"{store} does not run scripts: {text}")
    return BackendUnavailable(f"{store} refuses: {text}", final=is_final(reply))


class RedisConnectionBroken(BackendUnavailable):
    """A connection broke or timed out. The server may or may not have run the request."""

    def __init__(self, message: str, *, closed: bool, final: bool = False) -> None:
        super().__init__(message, final=final)
        self.closed = closed
        """True if the server closed or refused the connection: a retry is cheap then."""


def login_refused(
    address: NodeAddress,
    reply: RedisRefused,
    kind: type[RedisConnectionBroken] = RedisConnectionBroken,
) -> RedisConnectionBroken:
    """The error for a login that the server refuses; final unless its reason may pass."""
    final = is_final(reply) or _NO_LOGIN.search(str(reply)) is not None
    return kind(f"redis at {address} can't be used: {reply}", closed=False, final=final)


def unreachable(address: NodeAddress, error: OSError, seconds: float) -> RedisConnectionBroken:
    """The error for a failed connection or request."""
    if isinstance(error, TimeoutError):
        return RedisConnectionBroken(
            f"redis at {address} did not answer within {shown(seconds)}", closed=False
        )
    what = str(error.strerror or error) or type(error).__name__
    if isinstance(error, AllBusy):
        return RedisConnectionBroken(f"redis at {address}: {what}", closed=False)
    if isinstance(error, NotResp):
        return RedisConnectionBroken(
            f"redis at {address} can't be used: {what}", closed=False, final=True
        )
    if isinstance(error, Broken):
        return RedisConnectionBroken(
            f"the connection to redis at {address} broke: {what}", closed=error.closed
        )
    # It could not be opened: no command was sent yet.
    return RedisConnectionBroken(f"redis at {address} can't be reached: {what}", closed=True)
