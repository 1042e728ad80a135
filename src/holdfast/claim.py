"""The values that travel between doors, core and backends. All are immutable.

A ``Claim`` is what is asked; a ``Grant`` or a ``Busy`` is the answer. A ``Fence`` is what a
resource checks. A ``Standing`` is what a store can tell about a name: its holders and waiters.
"""

# Without "from __future__ import annotations": named tuples compile the text of every annotation,
# which every program would pay for at its start.
import enum
from typing import Any, NamedTuple

from holdfast.errors import InvalidName

__all__ = [
    "Busy",
    "Claim",
    "Fence",
    "Grant",
    "Holder",
    "Mode",
    "Record",
    "Standing",
    "Waiter",
    "check_name",
]

LONGEST_NAME_BYTES = 512
LONGEST_ORIGIN = 256
"""Characters that are kept of a host's or a thread's name."""
LONGEST_NOTE_BYTES = 1024
"""What a client writes; of what others wrote, as many characters are read."""
LARGEST_PID = 2**63 - 1
LARGEST_TOKEN = 2**63 - 1
LARGEST_EPOCH = 2**31 - 1
LARGEST_LIMIT = 65_536
"""Slots that a semaphore can have: they are numbered from 0."""
MOST_SLOTS = 1024
"""Slots in one fence."""
LONGEST_FENCE = 9216
"""Characters of a fence's text: so many slots, the longest name with each byte escaped, all."""


class Mode(enum.StrEnum):
    """How a name is claimed: alone, together with other readers, or some of its slots."""

    EXCLUSIVE = "exclusive"
    SHARED = "shared"
    SLOTS = "slots"


class Claim(NamedTuple):
    """What is asked of a store. The owner is secret: knowing it is the right to release."""

    name: str
    mode: Mode
    weight: int
    """How many slots are asked for; 1 in the other modes."""
    limit: int
    """The semaphore's capacity; 0 in the other modes."""
    ttl: float
    owner: str
    label: str
    """Who asks, as the JSON text that stores keep beside the claim and give back unread."""


class Grant(NamedTuple):
    """A claim that was admitted, with the token that fences it."""

    claim: Claim
    token: int
    slots: tuple[int, ...] = ()
    """The slots that are held, numbered from 0; empty in the other modes."""
    since: float | None = None
    """When the certain time began, where it is not the moment the request was sent
    (stores with sessions: when the session's last answered keep-alive was sent)."""
    ref: Any = None
    """The backend's own reference to the hold (a key, a path, a session). Plain data."""
    seconds: float | None = None
    """How long it lasts unless it is renewed, where that is less than the ttl: a store that grants
    as it wakes does not know whether the waiter is still well."""


class Busy(NamedTuple):
    """A claim that was not admitted; it stands in line unless it asked not to join."""

    place: int
    """How many are in front of it in the line; 0 for the first."""
    retry_seconds: float | None = None
    """When another attempt is worth it even without a wake-up (a hold's or reservation's end)."""
    ref: Any = None
    """What the backend's ``wait`` waits for. Plain data."""
    reason: str = ""
    """Why nothing can be granted although nobody may hold it (a quarantine, a lock-delay)."""


class Holder(NamedTuple):
    """One who holds a name, as the store tells it. Text in here is as hostile as its writer."""

    host: str
    pid: int
    thread: str
    note: str
    mode: Mode
    token: int
    slots: tuple[int, ...]
    since: float
    """Seconds since the epoch, by the store's clock."""
    remaining: float
    """Seconds that the store would still wait for a renewal."""

    def __str__(self) -> str:
        note = f", note {self.note!r}" if self.note else ""
        return f"{escaped(self.host)} pid {self.pid} ({escaped(self.thread)}){note}"


class Waiter(NamedTuple):
    """One who stands in line: the first of its process, and how many wait behind it there."""

    host: str
    pid: int
    thread: str
    note: str
    mode: Mode
    since: float
    behind: int


class Standing(NamedTuple):
    """What a store knows about one name."""

    name: str
    limit: int
    holders: tuple[Holder, ...]
    waiters: tuple[Waiter, ...]
    notice: str = ""
    """Where a wait may take longer than usual, and why: a store that frees what the dead held late,
    waiters that can't be woken. For people, who are told with the timeout, too."""


class Record(NamedTuple):
    """A durable value that was written under a grant."""

    value: str
    token: int
    age_seconds: float


def escaped(text: str) -> str:
    """The text with every character escaped that a log or a terminal would act on or hide.

    Control characters could rewrite the screen or forge a line of a log; invisible and
    direction-changing ones could make one name look like another.

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
    """A host's or a thread's name, short and harmless to print; "?" for what is no text."""
    if not isinstance(text, str):
        return "?"
    return escaped(text[:LONGEST_ORIGIN])[:LONGEST_ORIGIN]


def write_label(host: str, pid: int, thread: str, note: str) -> str:
    """The text that stores keep beside a claim."""
    host, thread = _origin(host), _origin(thread)
    texts = host + thread + note
    if texts.isprintable() and '"' not in texts and "\\" not in texts:
        return f'["{host}",{pid},"{thread}","{note}"]'  # most are, and a module less is loaded
    import json

    return json.dumps([host, pid, thread, note], ensure_ascii=False, separators=(",", ":"))


def read_label(label: str) -> tuple[str, int, str, str]:
    """Reads a stored label back: host, process id, thread or task, note.

    Its writer may be hostile, or newer than this version. A damaged label gives question marks,
    never an exception; further fields are left out. Host and thread are cut and escaped. A note
    is cut only, so that it comes back as it was written: escape it where it is shown.
    """
    import json

    try:
        fields = json.loads(label)
    except (ValueError, TypeError, RecursionError):
        fields = None
    if not isinstance(fields, list) or len(fields) < 4:
        return "?", 0, "?", ""
    host, pid, thread, note = fields[:4]
    known = type(pid) is int and abs(pid) <= LARGEST_PID
    return _origin(host), pid if known else 0, _origin(thread), _note(note)


def _note(text: object) -> str:
    if not isinstance(text, str):
        return ""
    # Lone surrogates can't be written anywhere: no client accepts them in a note.
    kept = text[:LONGEST_NOTE_BYTES].encode(errors="backslashreplace").decode()
    return kept[:LONGEST_NOTE_BYTES]


def _quoted(name: str) -> str:
    if name.isascii() and "".join(name.split("-")).isalnum():
        return name  # most are, and every command that is run under a lock is told its fence
    from urllib.parse import quote

    return quote(name, safe="")


def check_name(name: str) -> str:
    """Returns the name, or raises ``InvalidName`` or ``TypeError`` saying what is wrong with it."""
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
    """What a resource checks: refuses a lower one, accepts an equal one.

    Fences of one name are ordered by (epoch, token). ``str(fence)`` is for headers and
    environments; ``Fence.parse`` reads it back.

    >>> fence = Fence("order:42", Mode.EXCLUSIVE, (), 0, 1700000000000001)
    >>> Fence.parse(str(fence)) == fence
    True
    """

    __slots__ = ("epoch", "mode", "name", "slots", "token")

    name: str
    mode: Mode
    slots: tuple[int, ...]
    epoch: int
    token: int

    def __init__(
        self, name: str, mode: Mode, slots: tuple[int, ...], epoch: int, token: int
    ) -> None:
        write = object.__setattr__
        write(self, "name", name)
        write(self, "mode", mode)
        write(self, "slots", slots)
        write(self, "epoch", epoch)
        write(self, "token", token)

    def __setattr__(self, attribute: str, value: object) -> None:
        raise AttributeError("a fence can't be changed")

    def __reduce__(self) -> tuple[Any, ...]:
        return Fence, (self.name, self.mode, self.slots, self.epoch, self.token)

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
        return f"Fence.parse({str(self)!r})"

    def __str__(self) -> str:
        slots = ",".join(map(str, self.slots))
        return f"1;{self.mode};{slots};{self.epoch};{self.token};{_quoted(self.name)}"

    @classmethod
    def parse(cls, text: str) -> "Fence":
        """Reads ``str(fence)`` back; raises ``ValueError`` for anything else."""
        if not isinstance(text, str):
            raise TypeError(f"a fence's text is text, not {type(text).__name__}")
        try:
            return check_fence(cls(*_read_fields(text)))
        except ValueError as error:
            raise ValueError(f"not a fence: {text[:120]!r} ({error})") from None


def _read_fields(text: str) -> tuple[str, Mode, tuple[int, ...], int, int]:
    if len(text) > LONGEST_FENCE:
        raise ValueError(f"longer than {LONGEST_FENCE} characters")
    try:
        version, mode, slots, epoch, token, quoted = text.split(";")
        numbers = tuple(map(_number, slots.split(","))) if slots else ()
        rest = Mode(mode), numbers, _number(epoch), _number(token)
    except ValueError:
        raise ValueError("its form is 1;mode;slots;epoch;token;name") from None
    if version != "1":
        raise ValueError(f"version {version}")
    from urllib.parse import unquote

    return unquote(quoted, errors="strict"), *rest


def _number(text: str) -> int:
    """A number as ``str`` writes it: no sign, no leading zero, no digits of other scripts."""
    if not (text.isascii() and text.isdecimal()) or len(text) > 19 or (text[0] == "0" != text):
        raise ValueError(text)
    return int(text)


def check_fence(fence: Fence) -> Fence:
    """Returns the fence, or raises ``ValueError`` if no lease can have had it."""
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
    """Returns the epoch, or raises ``ValueError``."""
    if isinstance(epoch, bool) or not isinstance(epoch, int) or not 0 <= epoch <= LARGEST_EPOCH:
        raise ValueError(f"epoch is a whole number from 0 to {LARGEST_EPOCH}; not {epoch!r:.40}")
    return epoch
