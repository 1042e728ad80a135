"""The text of a lease that is handed over: both ends of the way, for both clients."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from holdfast.claim import (
    LARGEST_LIMIT,
    LARGEST_TOKEN,
    LONGEST_KIND,
    Claim,
    Grant,
    Mode,
    check_epoch,
    check_name,
    kind_of,
    read_label,
)
from holdfast.core import hand_over as core
from holdfast.core.hold import AcquireOptions
from holdfast.durations import LONGEST_SECONDS
from holdfast.lease import LeaseBase, not_acquired, tell_acquired
from holdfast.primitives.options import check_ttl

if TYPE_CHECKING:
    from holdfast.core.engine import Engine
    from holdfast.core.hold import Hold
    from holdfast.primitives.options import LockOptions

__all__ = ["HandedOver", "hand_over", "read_text", "take_over", "write_text"]

L = TypeVar("L", bound=LeaseBase)

PREFIX = "holdfast-lease-1."
"""The first part of every text, with its version: a search for leaked secrets can find it."""
LONGEST_TEXT = 4096
LONGEST_WORD = 512
MOST_WORDS = 8
"""The limits of what a store adds to a text."""
OWNER_DIGITS = 32


class HandedOver(NamedTuple):
    """What the text of a hold says. The owner is secret, and so is the text."""

    store: str
    """The kind of the store, as ``kind_of_store`` names it."""
    namespace: str
    epoch: int
    name: str
    mode: Mode
    weight: int
    limit: int
    ttl: float
    kind: str
    owner: str
    token: int
    ref: tuple[str | int, ...]
    """The store's own: see ``HandingOver.hand_over``."""

    def __repr__(self) -> str:
        return f"HandedOver({self.name!r}, token={self.token})"


def kind_of_store(store: object) -> str:
    """The kind of a store: the name of its package. Two URLs of one server have the same kind."""
    parts = type(store).__module__.split(".")
    return parts[2] if parts[:2] == ["holdfast", "stores"] else parts[0]


def write_text(handed: HandedOver) -> str:
    """The text of a hold."""
    import json
    from base64 import urlsafe_b64encode

    words = json.dumps(handed, ensure_ascii=False, separators=(",", ":")).encode()
    return PREFIX + urlsafe_b64encode(words).decode().rstrip("=")


def read_text(text: str) -> HandedOver:
    """Reads what ``write_text`` has written; raises ``ValueError`` for anything else, without
    repeating it: it may be the secret of a hold, with a typing error."""
    if not isinstance(text, str):
        raise TypeError(f"take_over() takes the text of hand_over(), not {type(text).__name__}")
    try:
        handed = _checked(_fields(text))
        if write_text(handed) == text:
            return handed
        why = "it is spelled in another way"
    except (ValueError, TypeError, RecursionError) as error:
        why = str(error) if type(error) is _NotAText else "it is damaged"
    raise ValueError(f"not the text of a lease that was handed over: {why}") from None


class _NotAText(ValueError):
    """Its message has nothing of the text."""


def _fields(text: str) -> list[Any]:
    import json
    from base64 import urlsafe_b64decode

    if len(text) > LONGEST_TEXT:
        raise _NotAText(f"it is longer than {LONGEST_TEXT} characters")
    if not text.startswith(PREFIX):
        raise _NotAText(f"it does not begin with {PREFIX!r}")
    words = text.removeprefix(PREFIX)
    fields = json.loads(urlsafe_b64decode(words + "=" * (-len(words) % 4)).decode())
    if not isinstance(fields, list) or len(fields) != len(HandedOver._fields):
        raise _NotAText(f"it has not {len(HandedOver._fields)} fields")
    return fields


def _checked(fields: list[Any]) -> HandedOver:
    """The fields as values; raises ``ValueError`` or ``TypeError`` for what no lease has."""
    store, namespace, epoch, name, mode, weight, limit, ttl, kind, owner, token, ref = fields
    slots = Mode(mode) is Mode.SLOTS
    _need(slots <= _whole(limit, LARGEST_LIMIT) <= slots * LARGEST_LIMIT)
    _need(1 <= _whole(weight, LARGEST_LIMIT) <= max(limit, 1))
    _need(_text(store, 64).isidentifier())
    _need(type(ttl) in (int, float) and 0 < ttl <= LONGEST_SECONDS)
    _need(len(_text(owner, OWNER_DIGITS)) == OWNER_DIGITS and not owner.strip("0123456789abcdef"))
    _need(_whole(token, LARGEST_TOKEN) > 0)
    _need(type(ref) is list and len(ref) <= MOST_WORDS)
    for word in ref:
        _need(type(word) is int or bool(_text(word, LONGEST_WORD)))
    _need(_text(kind, LONGEST_KIND).isprintable())
    place = store, _text(namespace, 64), check_epoch(epoch), check_name(name)
    return HandedOver(*place, Mode(mode), weight, limit, ttl, kind, owner, token, tuple(ref))


def _need(right: bool) -> None:
    if not right:
        raise _NotAText("a field of it is out of range")


def _whole(value: object, largest: int) -> int:
    if type(value) is not int or not 0 <= value <= largest:
        raise _NotAText("a field of it is no number, or out of range")
    return value


def _text(value: object, longest: int) -> str:
    if not isinstance(value, str) or len(value) > longest:
        raise _NotAText("a field of it is no text, or too long")
    return value


async def hand_over(engine: Engine, hold: Hold) -> str:
    """The text of a hold that is not this client's any more: see ``core.hand_over``."""
    grant = await core.hand_over(engine, hold)
    name, mode, weight, limit, ttl, owner, label = grant.claim
    store, kind = kind_of_store(engine.store), read_label(label).kind
    place, ref = (store, engine.namespace, engine.epoch, name), tuple(grant.ref)
    return write_text(HandedOver(*place, mode, weight, limit, ttl, kind, owner, grant.token, ref))


async def take_over(engine: Engine, lease: type[L], text: str, options: LockOptions) -> L:
    """The lease of a hold that was handed over with this text."""
    engine.enter()
    handed = _for_this_client(engine, read_text(text))
    me, events = engine.runtime.me(), engine.observing()
    kind = handed.kind or kind_of(handed.name)
    use = None
    if events is not None:
        use = events.begin(handed.name, kind, handed.mode, options.note, leads=False)
    label = engine.label(me, options.note, handed.kind, use)
    _, _, _, name, mode, weight, limit, ttl, _, owner, token, ref = handed
    old = Grant(Claim(name, mode, weight, limit, ttl, owner, ""), token, ref=ref)
    claim = old.claim._replace(owner=os.urandom(16).hex(), label=label)
    how = AcquireOptions(options.timeout, options.renew, options.max_hold, use=use)
    taken = claim
    try:
        hold = await core.take_over(engine, old, claim, how)
        taken = hold.grant.claim
        engine.own(hold, me, block=False)
        made = lease(engine, hold, options.note)
        if use is not None:  # after its lease: observers may take long, or take locks
            tell_acquired(made, use, block=False)
        return made
    except BaseException as error:
        await not_acquired(engine, taken, use, error)
        raise


def _for_this_client(engine: Engine, handed: HandedOver) -> HandedOver:
    """Raises ``ValueError`` for a hold that this client can't find, or whose fences would be above
    its own."""
    store, mine = engine.store.display, kind_of_store(engine.store)
    problem = ""
    if handed.store != mine:
        problem = f"it was handed over on another kind of store ({handed.store}, not {mine})"
    elif handed.namespace != engine.namespace:
        problem = f"its namespace is {handed.namespace!r}, not {engine.namespace!r}"
    elif handed.epoch > engine.epoch:
        problem = (
            f"its epoch is {handed.epoch}, and the epoch {engine.epoch} of this client is less"
        )
    if problem:
        raise ValueError(f"{handed.name!r} can't be taken over through {store}: {problem}")
    check_ttl(handed.ttl, engine.store)
    return handed
