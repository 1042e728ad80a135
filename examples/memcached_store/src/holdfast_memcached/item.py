"""The item of a name as a value, and back. No I/O. Times are the server's, in µs."""

import hashlib
import json
from typing import Any

from holdfast.claim import Claim, Mode
from holdfast.core.queue import HeldClaim, NameState, QueuedClaim
from holdfast.errors import Incompatible

VERSION = 1
EXPIRY_SECONDS = 2 * 86_400
"""How long an unused item is kept: no hold is longer, and the clock keeps later tokens higher."""
_CLAIM = (str, int, int, str, str)


def key_of(namespace: str, name: str = "") -> bytes:
    """The key of a name; without one, what the keys of a namespace begin with. Any text becomes
    one word: a key has at most 250 bytes."""
    words = [hashlib.sha256(word.encode()).hexdigest() for word in (namespace, name) if word]
    return ".".join(["holdfast", *words]).encode()


def write_request(key: bytes, version: bytes, state: NameState[None]) -> bytes:
    """The request that writes a state, if the item still has this version; empty: if there is none.
    Of a claim it has mode, weight, limit, owner and label."""
    holds = [_words(h.claim, h.token, h.slots, h.since, h.ends) for h in state.holds.values()]
    waits = [_words(q.claim, q.since, q.ends, q.reserved, q.behind) for q in state.queue.values()]
    data = json.dumps((VERSION, state.name, state.token, holds, waits)).encode()
    words = (b"cas" if version else b"add", key, EXPIRY_SECONDS, len(data), version, data)
    return b"%b %b 0 %d %d %b\r\n%b\r\n" % words


def _words(claim: Claim, *more: Any) -> tuple[Any, ...]:
    return (*claim[1:4], *claim[5:], *more)


def read_item(data: bytes, store: str) -> NameState[None]:
    """Decodes an item. Raises ``Incompatible`` for one that this version can't have written."""
    try:
        version, name, token, holds, queue = _checked(json.loads(data), int, str, int, list, list)
        state: NameState[None] = NameState(name, store, token)
        for entry in holds:
            *words, given, slots, since, ends = _checked(entry, *_CLAIM, int, list, int, int)
            claim, numbers = _claim(name, *words), _checked(slots, *[int] * len(slots))
            state.holds[claim.owner] = HeldClaim(claim, given, tuple(numbers), since, ends)
        for entry in queue:
            *words, since, ends, reserved, behind = _checked(entry, *_CLAIM, int, int, int, int)
            queued: QueuedClaim[None] = QueuedClaim(_claim(name, *words), since, ends)
            queued.reserved, queued.behind = reserved, behind
            state.queue[queued.claim.owner] = queued
        if version != VERSION or len({*state.holds, *state.queue}) != len(holds) + len(queue):
            raise ValueError("another version, or an owner with two entries")
    except (ValueError, RecursionError):  # its text would show what is stored
        raise Incompatible(f"an item on {store} is damaged, or of another version") from None
    return state


def _claim(name: str, mode: str, weight: int, limit: int, owner: str, label: str) -> Claim:
    return Claim(name, Mode(mode), weight, limit, 0.0, owner, label)


def _checked(entry: Any, *kinds: type) -> list[Any]:
    """The words of an entry. Raises ``ValueError`` unless they are of these kinds."""
    words = entry if type(entry) is list else []
    numbers = [word for word in words if type(word) is int]
    if tuple(map(type, words)) != kinds or any(not 0 <= n < 2**63 - 1 for n in numbers):
        raise ValueError("not the words that an entry has")
    return words
