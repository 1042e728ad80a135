"""Names as keys, and answers as errors: the words between the Redis backend and its scripts."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote, unquote

from holdfast.claim import Busy, Claim
from holdfast.core import admit
from holdfast.core.contract import QUEUE_CAP
from holdfast.errors import BackendUnavailable, HoldfastError, Incompatible, Unsupported
from holdfast.wires.redis import Refused, bulk

__all__ = ["Keys", "busy_answer", "escape", "milliseconds", "refusal", "unescape"]

KEPT_NAMES = 4096
_FULL, _JOINED = 2, 1


def milliseconds(seconds: float) -> int:
    return max(1, round(seconds * 1000))


def escape(text: str) -> str:
    """Text that can stand between the braces of a hash tag, and stays readable."""
    if "%" in text or "{" in text or "}" in text:
        return text.replace("%", "%25").replace("{", "%7B").replace("}", "%7D")
    return text


def unescape(text: str) -> str:
    return unquote(text) if "%" in text else text


class Keys:
    """The keys of a name: ``namespace:{name}`` and what hangs on it, packed once per name.

    The tag is the name itself, so all keys of a name share a Cluster slot, and so does a
    redis-py Lock of that name.
    """

    def __init__(self, namespace: str, *, loss_protection: bool, interop: bool) -> None:
        self._prefix = escape(namespace)
        self._interop = interop
        self.loss = f"{self._prefix}:loss"
        self._loss = bulk(self.loss) if loss_protection else ""
        self._wake = f"{quote(namespace, safe='')}:wake:"
        self._names: dict[str, tuple[str, str]] = {}
        self._claims: dict[str, tuple[str, str]] = {}

    def channel(self, door: str) -> str:
        """Where a door listens; without blanks, which separate words in a stored entry."""
        return self._wake + door

    def state(self, name: str) -> str:
        return f"{self._prefix}:{{{escape(name)}}}"

    def record(self, name: str) -> str:
        return f"{self.state(name)}:record"

    def name(self, state: str) -> str:
        """The name whose state key this is."""
        return unescape(state[len(self._prefix) + 2 : -1])

    def pattern(self, prefix: str) -> str:
        """What SCAN matches: state keys of names that start so."""
        literal = f"{self._prefix}:{{{escape(prefix)}"
        for special in "\\*?[]":
            literal = literal.replace(special, "\\" + special)
        return literal + "*}"

    def of_name(self, name: str) -> tuple[str, str]:
        """The packed keys of a name, and the one that routes it."""
        found = self._names.get(name)
        if found is None:
            state = self.state(name)
            packed = bulk(state) + "".join(
                bulk(f"{state}:{what}") for what in ("line", "held", "gone")
            )
            if self._interop:
                packed += bulk(name)
            if len(self._names) >= KEPT_NAMES:
                self._names.clear()
            found = self._names[name] = packed, state
        return found

    def of_claim(self, name: str) -> tuple[str, str]:
        """The same for a claim, which also looks at the mark of loss protection."""
        if not self._loss:
            return self.of_name(name)
        packed, state = self.of_name(name)
        return packed + self._loss, state

    def of_record(self, name: str) -> tuple[str, str]:
        state = self.state(name)
        parts = [state, *(f"{state}:{what}" for what in ("line", "held", "gone", "record"))]
        return "".join(map(bulk, parts)), state


def busy_answer(claim: Claim, reply: Any, store: str, heard: int) -> Busy:
    """Reads an answer that is no grant; raises where nothing was changed."""
    kind = reply[0]
    if kind == b"limit":
        limit = int(reply[1])
        admit.check_limit(claim, limit, slots=limit > 0, store=store)
    if kind == b"gone":
        raise BackendUnavailable(
            f"a request for {claim.name!r} reached {store} after it had been given up"
        )
    if kind != b"busy":
        raise refusal(reply, store)
    _, place, retry, joined, barred = reply
    reason = ""
    if joined == _FULL:
        reason = f"{QUEUE_CAP} already wait for {claim.name!r}"
        retry = 1000
    if barred:
        until = datetime.fromtimestamp(barred / 1000, UTC).strftime("%H:%M:%S UTC")
        reason = (
            f"{store} grants nothing before {until}: it was restarted, emptied or replaced and "
            "may have lost holds (loss_protection; `holdfast init` marks a new one as new)"
        )
    return Busy(place, retry / 1000 if retry >= 0 else None, heard, reason)


def refusal(reply: Any, store: str) -> HoldfastError:
    """The error for a reply that is none of the expected ones."""
    if isinstance(reply, HoldfastError):
        return reply
    if isinstance(reply, list) and reply and reply[0] == b"incompatible":
        return Incompatible(
            f"{store} holds locks of protocol version {reply[1].decode()}, which this version of "
            "Holdfast can't share: use one version, or another namespace"
        )
    if not isinstance(reply, Refused):
        return BackendUnavailable(f"{store} gave an answer that is not understood")
    text = str(reply)
    if reply.code == "READONLY":
        return BackendUnavailable(f"{store} is a read-only replica: locks need the master")
    if "unknown command" in text.lower():
        return Unsupported(f"{store} does not run scripts: {text}")
    return BackendUnavailable(f"{store} refuses: {text}")
