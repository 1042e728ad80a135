"""The values that clients, core and backends exchange. All are immutable.

A ``Claim`` is the request; a ``Grant`` or a ``Busy`` is the answer. A ``Fence`` is what a resource
checks. A ``LockInfo`` is what a store knows about a name: its holders and waiters.
"""

# Without "from __future__ import annotations": see holdfast.lazy.
import enum
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from holdfast.errors import InvalidName, UntrustedFence

__all__ = [
    "Busy",
    "Claim",
    "Fence",
    "FenceKeys",
    "Grant",
    "Holder",
    "LockInfo",
    "Mode",
    "Record",
    "Waiter",
    "check_name",
]

LONGEST_NAME_BYTES = 512
LONGEST_ORIGIN = 256
"""Characters of a host's or a thread's name; the rest is cut."""
LONGEST_NOTE_BYTES = 1024
"""Limit of a note. Of a note that another program wrote, this many characters are read."""
LONGEST_KIND = 64
"""Characters of a kind; the rest of a derived or a stored one is cut."""
MOST_HOLDS = 8
LONGEST_HOLDS_BYTES = 640
"""How many holds of its thread or task a label names, and the bytes of their names in total: room
for the longest name. The others are left out."""
LARGEST_PID = 2**63 - 1
LARGEST_TOKEN = 2**63 - 1
LARGEST_EPOCH = 2**31 - 1
LARGEST_LIMIT = 65_536
"""Slots that a semaphore can have: they are numbered from 0."""
MOST_SLOTS = 1024
"""Slots in one fence."""
LONGEST_FENCE = 9216
"""Characters of a fence's text: room for all slots and the longest name, each byte escaped."""
SHORTEST_KEY_BYTES = 16
SIGNATURE_DIGITS = 64


class Mode(enum.StrEnum):
    """How a name is claimed: alone, together with other readers, or some of its slots."""

    EXCLUSIVE = "exclusive"
    SHARED = "shared"
    SLOTS = "slots"


class Claim(NamedTuple):
    """A request to a store. The owner is secret: a caller that knows it can release the hold."""

    name: str
    mode: Mode
    weight: int
    """The number of requested slots; 1 in the other modes."""
    limit: int
    """The semaphore's capacity; 0 in the other modes."""
    ttl: float
    owner: str
    label: str
    """Host, process, thread, note, kind, traceparent, and what its thread holds while it waits, as
    JSON text. Stores keep it beside the claim, unread."""


class Grant(NamedTuple):
    """A claim that was admitted, with its fencing token."""

    claim: Claim
    token: int
    slots: tuple[int, ...] = ()
    """The slots that are held, numbered from 0; empty in the other modes."""
    since: float | None = None
    """When the certain time began; ``None``: when the request was sent. Stores with sessions give
    the time when the session's last answered keep-alive was sent."""
    ref: Any = None
    """The backend's own reference to the hold (a key, a path, a session). Plain data."""
    seconds: float | None = None
    """How long it lasts unless it is renewed; ``None``: the ttl. A direct grant is shorter: the
    store does not know whether the waiter is still alive."""


class Busy(NamedTuple):
    """A claim that was not admitted. It is in the queue, unless the attempt was not to join."""

    place: int
    """How many entries of the queue are in front of it; 0 for the first."""
    retry_seconds: float | None = None
    """When to attempt again even without a wake-up: the end of a hold or of a reservation."""
    ref: Any = None
    """The backend's own reference for its ``wait``. Plain data."""
    reason: str = ""
    """Why nothing is granted although perhaps no holder exists: a quarantine, a lock-delay."""


class Label(NamedTuple):
    """What is stored of the origin of a claim: the first fields of ``Holder`` and ``Waiter``."""

    host: str
    pid: int
    thread: str
    note: str
    kind: str
    traceparent: str


class Holder(NamedTuple):
    """A holder of a name, as the store reports it. Its texts are untrusted: other programs wrote
    them."""

    host: str
    pid: int
    thread: str
    note: str
    kind: str
    """The kind that its program gave; empty if it gave none: see ``LockInfo.kind``."""
    traceparent: str
    """The trace in which it was acquired, as W3C ``traceparent``; empty if it has none."""
    mode: Mode
    token: int
    slots: tuple[int, ...]
    since: float
    """Seconds since the epoch, by the store's clock."""
    remaining: float
    """Seconds until the hold ends in the store, at the most, without a renewal. It is the whole ttl
    on stores that do not tell the last renewal: ZooKeeper, Consul, advisory locks of MySQL."""

    def __str__(self) -> str:
        note = f", note {self.note!r}" if self.note else ""
        return f"{escaped(self.host)} pid {self.pid} ({escaped(self.thread)}){note}"


class Waiter(NamedTuple):
    """A waiter in the store's queue: the first of its client, and how many wait behind it there."""

    host: str
    pid: int
    thread: str
    note: str
    kind: str
    traceparent: str
    mode: Mode
    since: float
    behind: int
    holds: tuple[tuple[str, int], ...] = ()
    """The names that its thread or task holds in blocks while it waits, each with the token of the
    hold, the newest first: at most eight. Leases of ``acquire()`` are not among them."""


class LockInfo(NamedTuple):
    """What a store knows about one name."""

    name: str
    limit: int
    holders: tuple[Holder, ...]
    waiters: tuple[Waiter, ...]
    notice: str = ""
    """Why a wait may take longer than usual, for people; also part of the timeout error. Examples:
    the store frees the holds of dead clients late; waiters can't be woken."""

    @property
    def kind(self) -> str:
        """What sort of name it is: as a holder or waiter says, else the text before the first
        colon. Hostile characters are escaped: a store may have any name."""
        kinds = [holder.kind for holder in self.holders] + [waiter.kind for waiter in self.waiters]
        return next(filter(None, kinds), "") or escaped(kind_of(self.name))[:LONGEST_KIND]

    def explain(self, now: float) -> list[str]:
        """Who holds the name and for how long, who waits, and how long the holds last: a clause
        each, for people. Empty for a name that nobody holds or waits for. ``now`` is the time by
        the wall clock. Hostile characters are escaped."""
        from holdfast.explain import clauses

        return clauses(self, now)


class Record(NamedTuple):
    """A durable value that was written under a grant."""

    value: str
    token: int
    age_seconds: float


def escaped(text: str) -> str:
    """The text with every character escaped that a log or a terminal would interpret or hide.

    Control characters could rewrite the screen or forge a log line. Invisible characters and those
    that change the writing direction could make one name look like another.

    >>> escaped("plain: ü, 日本")
    'plain: ü, 日本'
    >>> escaped("\\x1b[2J\\u202e")
    '\\\\x1b[2J\\\\u202e'
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else _escape(c) for c in text)


def _escape(character: str) -> str:
    return character.encode("unicode_escape", "surrogatepass").decode("ascii")


def _origin(text: object) -> str:
    """A host's or a thread's name, cut and safe to print; "?" for a value that is not text."""
    if not isinstance(text, str):
        return "?"
    return escaped(text[:LONGEST_ORIGIN])[:LONGEST_ORIGIN]


def kind_of(name: str) -> str:
    """The kind of a name whose program gives none: the text before the first colon.

    >>> kind_of("order:42")
    'order'
    """
    return name.partition(":")[0][:LONGEST_KIND] or name[:LONGEST_KIND]


def is_election(kind: str) -> bool:
    """Whether names of this kind are taken for elections: a store does not tell one from a lock.

    >>> is_election("leader"), is_election("election:mailer"), is_election("leaderboard")
    (True, True, False)
    """
    return kind.partition(":")[0] in ("leader", "election")


def write_label(
    host: str,
    pid: int,
    thread: str,
    note: str,
    kind: str = "",
    traceparent: str = "",
    holds: Sequence[tuple[str, int]] = (),
) -> str:
    """The text that stores keep beside a claim. A kind, a traceparent and the holds of a waiter are
    added at the end: versions without them ignore these."""
    host, thread, held = _origin(host), _origin(thread), _fitting(holds)
    texts = host + thread + note + kind + traceparent + "".join(name for name, _ in held)
    if texts.isprintable() and '"' not in texts and "\\" not in texts:
        # The usual case, which does not import json.
        more = f',"{kind}","{traceparent}"' if kind or traceparent or held else ""
        if held:
            pairs = [f'"{name}",{token}' for name, token in held]
            more += f",[{','.join(pairs)}]"
        return f'["{host}",{pid},"{thread}","{note}"{more}]'
    import json

    fields: list[object] = [host, pid, thread, note]
    if kind or traceparent or held:
        fields += [kind, traceparent]
    if held:
        fields.append([value for hold in held for value in hold])
    return json.dumps(fields, ensure_ascii=False, separators=(",", ":"))


def _fitting(holds: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
    """The first of the holds, as many as a label may name."""
    fitting: list[tuple[str, int]] = []
    left = LONGEST_HOLDS_BYTES
    for name, token in holds[:MOST_HOLDS]:
        left -= len(name.encode())
        if left >= 0:
            fitting.append((name, token))
    return fitting


def read_label(label: str) -> "Label":
    """Reads a stored label back.

    Its writer may be hostile, or newer than this version. A damaged label gives question marks,
    never an exception. Fields that a newer version adds at the end are ignored. Host and thread are
    cut and escaped. A note is only cut, so that it is returned as it was written: escape it where
    it is shown. A kind is cut and escaped, and what is no traceparent is left out.
    """
    import json

    try:
        fields = json.loads(label)
    except (ValueError, TypeError, RecursionError):
        fields = None
    if not isinstance(fields, list) or len(fields) < 4:
        return Label("?", 0, "?", "", "", "")
    host, pid, thread, note, kind, traceparent = [*fields[:6], "", ""][:6]
    known = type(pid) is int and abs(pid) <= LARGEST_PID
    kind = escaped(kind[:LONGEST_KIND])[:LONGEST_KIND] if isinstance(kind, str) else ""
    return Label(
        _origin(host),
        pid if known else 0,
        _origin(thread),
        _note(note),
        kind,
        traceparent if is_traceparent(traceparent) else "",
    )


def read_holds(label: str) -> tuple[tuple[str, int], ...]:
    """What the writer of a label said that its thread holds: names and tokens. Empty if it holds
    nothing, and for a list that no client writes. As untrusted as all of a label."""
    import json

    try:
        fields = json.loads(label)
        pairs = fields[6]
    except (ValueError, TypeError, RecursionError, IndexError, KeyError):
        return ()
    if not isinstance(fields, list) or not isinstance(pairs, list):
        return ()
    if len(pairs) % 2 or len(pairs) > 2 * MOST_HOLDS:
        return ()
    holds = tuple(zip(pairs[::2], pairs[1::2], strict=True))
    return holds if all(_is_hold(name, token) for name, token in holds) else ()


def _is_hold(name: object, token: object) -> bool:
    try:
        check_name(name)  # type: ignore[arg-type]
    except (TypeError, InvalidName):
        return False
    return type(token) is int and 0 <= token <= LARGEST_TOKEN


def is_traceparent(text: object) -> bool:
    """Whether it has the form of a W3C ``traceparent`` of version 00."""
    if not isinstance(text, str) or len(text) != 55 or not text.startswith("00-"):
        return False
    parts = text.split("-")
    sizes = [len(part) for part in parts]
    return sizes == [2, 32, 16, 2] and not "".join(parts).strip("0123456789abcdef")


def _note(text: object) -> str:
    if not isinstance(text, str):
        return ""
    # Lone surrogates can't be encoded, so no client accepts them in a note.
    kept = text[:LONGEST_NOTE_BYTES].encode(errors="backslashreplace").decode()
    return kept[:LONGEST_NOTE_BYTES]


def _quoted(name: str) -> str:
    if name.isascii() and "".join(name.split("-")).isalnum():
        return name  # the usual case, which does not import urllib: holdfast run writes a fence
    from urllib.parse import quote

    return quote(name, safe="")


def check_name(name: str) -> str:
    """Returns the name; raises ``InvalidName`` or ``TypeError`` that says what is wrong with it."""
    if not isinstance(name, str):
        raise TypeError(f"a lock's name is text, not {type(name).__name__}")
    if not name:
        raise InvalidName("a lock's name can't be empty")
    try:
        size = len(name) if name.isascii() else len(name.encode())
    except UnicodeEncodeError:
        raise InvalidName("a lock's name can't contain lone surrogates") from None
    if size > LONGEST_NAME_BYTES:
        raise InvalidName(
            f"a lock's name has at most {LONGEST_NAME_BYTES} bytes, not {size}: {name[:40]!r}…"
        )
    if not name.isprintable() and any(ord(c) < 32 or 127 <= ord(c) < 160 for c in name):
        raise InvalidName(f"a lock's name can't contain control characters: {name!r}")
    return name


class Fence:
    """What a resource checks: it refuses a lower fence and accepts an equal one.

    Fences of one name are ordered by (epoch, token). ``str(fence)`` is for headers and
    environment variables; ``Fence.parse`` reads it back. If a client has ``fence_keys``, the fences
    of its leases have a ``signature``. The signature is part of the text only: comparisons and
    hashes ignore it.

    >>> fence = Fence("order:42", Mode.EXCLUSIVE, (), 0, 1700000000000001)
    >>> Fence.parse(str(fence)) == fence
    True
    """

    __slots__ = ("epoch", "mode", "name", "signature", "slots", "token")

    name: str
    mode: Mode
    slots: tuple[int, ...]
    epoch: int
    token: int
    signature: str
    """Hexadecimal digits; empty if not signed. A secret: it proves the fence to a resource."""

    def __init__(
        self,
        name: str,
        mode: Mode,
        slots: tuple[int, ...],
        epoch: int,
        token: int,
        signature: str = "",
    ) -> None:
        write = object.__setattr__
        write(self, "name", name)
        write(self, "mode", mode)
        write(self, "slots", slots)
        write(self, "epoch", epoch)
        write(self, "token", token)
        write(self, "signature", signature)

    def __setattr__(self, attribute: str, value: object) -> None:
        raise AttributeError("a fence can't be changed")

    def __reduce__(self) -> tuple[Any, ...]:
        return Fence, (*self._key(), self.signature)

    def _key(self) -> tuple[object, ...]:
        return self.name, self.mode, self.slots, self.epoch, self.token

    def __eq__(self, other: object) -> bool:
        return self._key() == other._key() if isinstance(other, Fence) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._key())

    def _order(self, other: "Fence") -> int:
        if self.name != other.name:
            raise ValueError(
                f"fences of different locks have no order: {self.name!r} and {other.name!r}"
            )
        mine, theirs = (self.epoch, self.token), (other.epoch, other.token)
        return (mine > theirs) - (mine < theirs)

    def __lt__(self, other: object) -> bool:
        return self._order(other) < 0 if isinstance(other, Fence) else NotImplemented

    def __le__(self, other: object) -> bool:
        return self._order(other) <= 0 if isinstance(other, Fence) else NotImplemented

    def __gt__(self, other: object) -> bool:
        return self._order(other) > 0 if isinstance(other, Fence) else NotImplemented

    def __ge__(self, other: object) -> bool:
        return self._order(other) >= 0 if isinstance(other, Fence) else NotImplemented

    def __repr__(self) -> str:
        """Without the signature: a reader of a log must not be able to use the fence."""
        return f"Fence.parse({self._unsigned()!r})"

    def __str__(self) -> str:
        text = self._unsigned()
        return f"{text};{self.signature}" if self.signature else text

    def _unsigned(self) -> str:
        """The text that is signed: every field, in its only spelling."""
        slots = ",".join(map(str, self.slots))
        return f"1;{self.mode};{slots};{self.epoch};{self.token};{_quoted(self.name)}"

    def signed(self, fence_keys: "Keys") -> "Fence":
        """The same fence with a signature by the first of the keys."""
        return FenceKeys(fence_keys).sign(self)

    @classmethod
    def parse(cls, text: str, fence_keys: "Keys" = ()) -> "Fence":
        """Reads ``str(fence)`` back; raises ``ValueError`` for anything else.

        With keys it raises ``UntrustedFence`` unless one of the keys has signed it.
        """
        if not isinstance(text, str):
            raise TypeError(f"a fence's text is text, not {type(text).__name__}")
        try:
            fence = check_fence(cls(*_read_fields(text)))
        except ValueError as error:
            raise ValueError(f"not a fence: {_without_signature(text)!r} ({error})") from None
        return FenceKeys(fence_keys).verify(fence)


def _without_signature(text: str) -> str:
    """A damaged text for an error: a reader of a log must not be able to repair and use it."""
    import re

    return re.sub("[0-9a-fA-F]{40,}", "…", text[:120])


def _read_fields(text: str) -> tuple[str, Mode, tuple[int, ...], int, int, str]:
    if len(text) > LONGEST_FENCE:
        raise ValueError(f"longer than {LONGEST_FENCE} characters")
    try:
        version, mode, slots, epoch, token, quoted, *signed = text.split(";")
        numbers = tuple(map(_number, slots.split(","))) if slots else ()
        rest = Mode(mode), numbers, _number(epoch), _number(token)
        signature = _read_signature(signed)
    except ValueError:
        form = "1;mode;slots;epoch;token;name, then ;signature if it is signed"
        raise ValueError(f"its form is {form}") from None
    if version != "1":
        raise ValueError(f"version {version}")
    from urllib.parse import unquote

    return unquote(quoted, errors="strict"), *rest, signature


def _read_signature(found: list[str]) -> str:
    if not found:
        return ""
    [text] = found
    if len(text) != SIGNATURE_DIGITS or text.strip("0123456789abcdef"):
        raise ValueError("no signature")
    return text


def _number(text: str) -> int:
    """A number as ``str`` writes it: no sign, no leading zero, no digits of other scripts."""
    if not (text.isascii() and text.isdecimal()) or len(text) > 19 or (text[0] == "0" != text):
        raise ValueError(text)
    return int(text)


def check_fence(fence: Fence) -> Fence:
    """Returns the fence; raises ``ValueError`` if no lease can have such a fence."""
    if fence.signature:
        _read_signature([fence.signature])
    check_name(fence.name)
    check_epoch(fence.epoch)
    slots = fence.slots
    if not 0 <= fence.token <= LARGEST_TOKEN:
        raise ValueError(f"a token is from 0 to {LARGEST_TOKEN}")
    if len(slots) > MOST_SLOTS or len(set(slots)) < len(slots):
        raise ValueError(f"at most {MOST_SLOTS} slots, none of them twice")
    if any(not 0 <= slot < LARGEST_LIMIT for slot in slots):
        raise ValueError(f"a slot is from 0 to {LARGEST_LIMIT - 1}")
    return fence


def check_epoch(epoch: int) -> int:
    """Returns the epoch; raises ``ValueError`` for anything but an integer in range."""
    if isinstance(epoch, bool) or not isinstance(epoch, int) or not 0 <= epoch <= LARGEST_EPOCH:
        raise ValueError(f"epoch is a whole number from 0 to {LARGEST_EPOCH}; not {epoch!r:.40}")
    return epoch


class FenceKeys:
    """Keys that sign fences (HMAC-SHA-256): the first signs, all verify. No key is ever shown.

    >>> FenceKeys(["a key of sixteen bytes or more"])
    <FenceKeys: 1>
    """

    __slots__ = ("_keys",)

    def __init__(self, keys: "Keys" = ()) -> None:
        """A key is bytes or text of at least 16 bytes; raises ``ValueError`` for a shorter one."""
        self._keys: tuple[bytes, ...]
        if isinstance(keys, FenceKeys):
            self._keys = keys._keys
            return
        if not isinstance(keys, Iterable):
            raise TypeError(f"fence_keys are bytes or text, not {type(keys).__name__}")
        given = (keys,) if isinstance(keys, str | bytes) else tuple(keys)
        self._keys = tuple(map(_key_bytes, given))
        if self._keys:
            import hmac  # noqa: F401 - now, not later: see holdfast.lazy

    def __bool__(self) -> bool:
        return bool(self._keys)

    def __repr__(self) -> str:
        return f"<FenceKeys: {len(self._keys)}>"

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("keys of fences can't be pickled: give them to each process")

    def sign(self, fence: Fence) -> Fence:
        """The fence with a signature by the first key; unchanged if there are no keys."""
        if not self._keys:
            return fence
        signature = _signature(self._keys[0], fence)
        return Fence(fence.name, fence.mode, fence.slots, fence.epoch, fence.token, signature)

    def verify(self, fence: Fence) -> Fence:
        """Returns the fence if a key has signed it, or if there are no keys; else raises
        ``UntrustedFence``."""
        if not self._keys:
            return fence
        import hmac

        if any(hmac.compare_digest(_signature(k, fence), fence.signature) for k in self._keys):
            return fence
        wrong = "none of the known keys has signed it"
        raise UntrustedFence(
            f"token {fence.token} of {fence.name!r} is not accepted: "
            f"{wrong if fence.signature else 'it is not signed'} (fence_keys)"
        )


Keys = FenceKeys | Iterable[str | bytes] | str | bytes
"""Accepted as ``fence_keys``: several keys, of which the first signs; or a single key."""


def _key_bytes(key: object) -> bytes:
    if not isinstance(key, str | bytes):
        raise TypeError(f"a key of fence_keys is bytes or text, not {type(key).__name__}")
    found = key.encode() if isinstance(key, str) else key
    if len(found) < SHORTEST_KEY_BYTES:
        raise ValueError(f"a key of fence_keys has at least {SHORTEST_KEY_BYTES} bytes")
    return found


def _signature(key: bytes, fence: Fence) -> str:
    import hmac

    return hmac.digest(key, b"holdfast fence\n" + fence._unsigned().encode(), "sha256").hex()
