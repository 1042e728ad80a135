"""Names as keys, and answers as errors: the words between the Redis backend and its scripts."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote, unquote

from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError

from holdfast.claim import Busy, Claim
from holdfast.core import admit, log
from holdfast.core.contract import QUEUE_CAP
from holdfast.errors import BackendUnavailable, HoldfastError, Incompatible, Unsupported
from holdfast.io.resp import Refused, bulk
from holdfast.stores.redis.scripts import Script
from holdfast.stores.redis.url import Address

__all__ = [
    "Excuses",
    "Keys",
    "LinkBroken",
    "busy_answer",
    "clock_time",
    "damage",
    "escape",
    "lock_name",
    "milliseconds",
    "refusal",
    "unescape",
    "unreachable",
]

KEPT_NAMES = 4096
_FULL, _JOINED = 2, 1
_DAMAGED = re.compile(r"DAMAGED ([^;]*);")
"""How ``reading.lua`` says what is wrong with what is stored."""


def milliseconds(seconds: float) -> int:
    return max(1, round(seconds * 1000))


def escape(text: str) -> str:
    """Text that can stand between the braces of a hash tag, and stays readable."""
    if "%" in text or "{" in text or "}" in text:
        return text.replace("%", "%25").replace("{", "%7B").replace("}", "%7D")
    return text


def unescape(text: str) -> str:
    return unquote(text) if "%" in text else text


def lock_name(state: str) -> str:
    """The name whose state key this is, in whichever namespace."""
    return unescape(state.partition(":{")[2][:-1])


class Keys:
    """The key of a name, ``namespace:{name}``, packed once per name.

    The hash tag is the name itself, so a redis-py Lock of that name lives in the same slot.
    """

    def __init__(self, namespace: str, *, cluster: bool) -> None:
        self._cluster = cluster
        self._prefix = escape(namespace)
        self._wake = f"{quote(namespace, safe='')}:wake:"

    def channel(self, client: str) -> str:
        """Where a client listens; without blanks, which separate words in a stored entry."""
        return self._wake + client

    def name(self, state: str) -> str:
        """The name whose state key this is."""
        return unescape(state[len(self._prefix) + 2 : -1])

    def pattern(self, prefix: str) -> str:
        """What SCAN matches: state keys of names that start so."""
        literal = f"{self._prefix}:{{{escape(prefix)}"
        for special in "\\*?[]":
            literal = literal.replace(special, "\\" + special)
        return literal + "*}"

    def start(self, script: Script, name: str) -> tuple[str, str]:
        """A command up to its arguments, and the key that routes it; kept for the next time."""
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
                raise Unsupported(f"{name!r} can't be shared with redis-py's Lock on a cluster")
            return name  # the very key of a redis-py Lock
        if kind == "loss":
            return f"{self._prefix}:loss"
        return f"{self._prefix}:{{{escape(name)}}}"


def clock_time(moment: int) -> str:
    """A time of day for people, from milliseconds that a server told."""
    try:
        return datetime.fromtimestamp(moment / 1000, UTC).strftime("%H:%M:%S UTC")
    except (ValueError, OverflowError, OSError):
        return "a year that no calendar has"


def _is_digits(word: Any) -> bool:
    return type(word) is bytes and len(word) <= 16 and word.isdigit()


def busy_answer(claim: Claim, reply: Any, store: str, heard: int) -> Busy:
    """Reads an answer that is no grant; raises where nothing was changed."""
    kind = reply[0]
    if kind == b"limit":
        limit = int(reply[1]) if len(reply) == 2 and _is_digits(reply[1]) else 0
        admit.check_limit(claim, limit, slots=limit > 0, store=store)
    if kind == b"gone":
        raise BackendUnavailable(
            f"a request for {claim.name!r} reached {store} after it had been given up"
        )
    if kind != b"busy" or [type(word) for word in reply[1:]] != [int] * 5:
        raise refusal(reply, store, claim.name)
    _, place, retry, joined, barred, token = reply
    reason = ""
    if joined == _FULL:
        reason = f"{QUEUE_CAP} already wait for {claim.name!r}"
        retry = 1000
    if barred:
        reason = (
            f"{store} grants nothing before {clock_time(barred)}: it was restarted, emptied, "
            "demoted or replaced and may have lost holds (loss_protection; "
            "`holdfast init` marks a new one as new)"
        )
    return Busy(place, retry / 1000 if retry >= 0 else None, (heard, token), reason)


class Excuses:
    """Tells the log why a store grants nothing: once for all names that wait because of it."""

    def __init__(self) -> None:
        self._told = ""

    def tell(self, claim: Claim, busy: Busy) -> None:
        if busy.reason and busy.reason != self._told:
            self._told = busy.reason
            log.warning("waiting for %r: %s", claim.name, busy.reason)


def damage(reply: Any) -> str:
    """What is wrong with what is stored, where that is what an error reply is about."""
    if not isinstance(reply, Refused):
        return ""
    if "WRONGTYPE" in str(reply):
        return "it is a value of another type"
    found = _DAMAGED.search(str(reply))
    return found[1] if found else ""


def refusal(reply: Any, store: str, name: str) -> HoldfastError:
    """The error for a reply about a lock that is none of the expected ones."""
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
            f"what {store} has stored for the lock {name!r} can't be used: {what}. When nobody "
            "holds it, delete its key there and raise connect(epoch=…), so that fences still grow"
        )
    if not isinstance(reply, Refused):
        return BackendUnavailable(f"{store} gave an answer that is not understood")
    text = str(reply)
    if reply.code == "READONLY":
        return BackendUnavailable(f"{store} is a read-only replica: locks need the master")
    if "unknown command" in text.lower():
        return Unsupported(f"{store} does not run scripts: {text}")
    return BackendUnavailable(f"{store} refuses: {text}")


class LinkBroken(BackendUnavailable):
    """A connection broke or was too slow: whether the server acted is unknown."""

    def __init__(self, message: str, *, closed: bool) -> None:
        super().__init__(message)
        self.closed = closed
        """Whether the other side closed or refused it: another try costs little then."""


def unreachable(address: Address, error: BaseException, seconds: float) -> LinkBroken:
    """The error for a failed connection or request; foreign texts hold no secrets here."""
    closed = isinstance(error, EOFError | ConnectionResetError | BrokenPipeError)
    if isinstance(error, TimeoutError | BlockingIOError):
        return LinkBroken(f"redis at {address} did not answer within {seconds:g} s", closed=False)
    if isinstance(error, RedisError):
        # Exactly this class: its subclasses are about logging in, which another try won't mend.
        closed = type(error) is RedisConnectionError
        return LinkBroken(f"redis at {address} can't be used: {error}", closed=closed)
    what = str(error) or type(error).__name__
    return LinkBroken(f"the connection to redis at {address} broke: {what}", closed=closed)
