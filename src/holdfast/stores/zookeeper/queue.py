"""The line of one name, as the names of its nodes tell it: pure values, no network.

Every claim is one node, and a listing of the names alone decides who is admitted::

    <namespace>/locks/<name>/1.x.1.0.<owner's digest>.0000000012    a claim: x, s or n (slots)
    <namespace>/locks/<name>/1.k.3                                  slot 3 is taken

The first number is the protocol's version, the last one ZooKeeper's sequence. The sequence
orders the line and nothing else: it starts over with a new parent, and tokens don't.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from functools import lru_cache
from operator import itemgetter
from typing import NamedTuple
from urllib.parse import quote, unquote

from holdfast.claim import Claim, Mode
from holdfast.core import admit
from holdfast.errors import Incompatible
from holdfast.stores._consensus.strict import MOST_SLOTS, digits, moment

__all__ = [
    "NodeData",
    "NodeQueue",
    "QueuedNode",
    "RecordData",
    "decode_name",
    "digest",
    "encode_name",
    "entry_prefix",
    "nodes_ahead",
    "read_data",
    "read_record",
    "slot_name",
    "slots_to_end",
    "unreadable",
    "write_data",
    "write_record",
]

VERSION = "1"
SEQUENCE_LIMIT = 2**31 - 2**20
"""From here on newcomers let the line drain, so that its node and its sequence start over."""
_LETTERS = {Mode.EXCLUSIVE: "x", Mode.SHARED: "s", Mode.SLOTS: "n"}
_MODES = {letter: mode for mode, letter in _LETTERS.items()}
_CLAIM = re.compile(
    rf"{VERSION}\.[xsn]\.\d{{1,18}}\.\d{{1,18}}\.[0-9a-f]{{1,64}}\.(?:\d{{10}}|-\d{{9,10}})",
    re.ASCII,
)
"""The whole name of a claim's node. What else begins with our version was never written by us."""
_EXCLUSIVE = f"{VERSION}.x."
_OWNER = slice(8, 40)
"""Where an exclusive claim's node has the owner's digest."""
_SLOT = "k"
_TAKEN = re.compile(rf"{VERSION}\.{_SLOT}\.(\d{{1,18}})", re.ASCII)
_SEQUENCE = itemgetter(slice(-11, None))
"""The end of a node's name, which sorts like the number unless one of them is negative: then one
of those comes first."""


@lru_cache(maxsize=64)
def digest(owner: str) -> str:
    """What is shown of an owner: enough to find its node, nothing to release it with."""
    return hashlib.blake2b(owner.encode(), digest_size=16).hexdigest()


@lru_cache(maxsize=1024)
def encode_name(name: str) -> str:
    """Any text as one node's name."""
    text = quote(name, safe=":@,;=+!$&'()*~ ")
    return "%2E" + text[1:] if text.startswith(".") else text


def decode_name(node: str) -> str:
    return unquote(node)


def entry_prefix(claim: Claim) -> str:
    """The claim's node, but for the sequence that ZooKeeper adds."""
    letter = _LETTERS[claim.mode]
    return f"{VERSION}.{letter}.{claim.weight}.{claim.limit}.{digest(claim.owner)}."


def slot_name(slot: int) -> str:
    return f"{VERSION}.{_SLOT}.{slot}"


class NodeData(NamedTuple):
    """What a claim's node carries beside its name."""

    ttl: int
    behind: int
    slots: tuple[int, ...]
    token: int
    """Where it is not the zxid of the node: after a move to another session."""
    label: str


def nodes_ahead(node: str, nodes: Sequence[str]) -> list[str] | None:
    """Those in front of an exclusive claim, the last of them at the end, where the line is of
    nothing else; ``None`` where it is not so simple: a ``Line`` tells."""
    if node not in nodes or {len(node)} != set(map(len, nodes)):
        return None
    own, owner = node[-11:], node[_OWNER]
    front = []
    for other in nodes:
        if other[:4] != _EXCLUSIVE or not other[-10:].isdigit():
            return None
        if owner in other and other != node:
            return None
        if other[-11:] < own:
            front.append(other)
    front.sort(key=_SEQUENCE)
    return front


def write_data(data: NodeData) -> bytes:
    slots = ",".join(map(str, data.slots))
    return f"{data.ttl} {data.behind} {slots} {data.token}\n{data.label}".encode()


def read_data(data: bytes, where: str) -> NodeData:
    """Reads a node's data: the one place where that is done. Raises ``Incompatible``."""
    try:
        head, _, label = data.decode().partition("\n")
        ttl, behind, slots, token = head.split(" ")
        numbers = tuple(digits(slot) for slot in slots.split(",") if slot)
        if len(numbers) > MOST_SLOTS:
            raise ValueError("its slots are too many")
        return NodeData(digits(ttl), digits(behind), numbers, digits(token), label)
    except ValueError:
        raise unreadable(where) from None


def slots_to_end(data: bytes) -> NodeData:
    """The same for who ends a claim, which must be possible in any case: what can't be read says
    nothing of slots, which end with their session."""
    try:
        return read_data(data, "")
    except Incompatible:
        return NodeData(0, 0, (), 0, "")


def unreadable(where: str) -> Incompatible:
    return Incompatible(
        f"what is kept for {where} was written by a version of Holdfast that this one does not "
        "understand, or by something else"
    )


class RecordData(NamedTuple):
    token: int
    keep_seconds: float
    value: str


def write_record(token: int, keep_seconds: float, value: str) -> bytes:
    return f"{token} {keep_seconds!r}\n{value}".encode()


def read_record(data: bytes) -> RecordData | None:
    """``None`` for what can't be read."""
    try:
        head, _, value = data.decode().partition("\n")
        token, keep = head.split(" ")
        return RecordData(digits(token), moment(float(keep)), value)
    except ValueError:
        return None


class QueuedNode(NamedTuple):
    """One claim's node."""

    node: str
    mode: Mode
    weight: int
    limit: int
    digest: str
    sequence: int


def _parse(node: str) -> QueuedNode:
    _, letter, weight, limit, owner, sequence = node.split(".")
    return QueuedNode(node, _MODES[letter], int(weight), int(limit), owner, int(sequence))


class NodeQueue:
    """Everybody who holds or waits, in order of arrival, and the slots that are taken.

    Places are read when they are looked at: who asks looks at itself, and at the first.
    """

    __slots__ = ("_nodes", "admitted", "slots")

    def __init__(self, nodes: Sequence[str], where: str) -> None:
        self.slots: set[int] = set()
        self._nodes = [node for node in nodes if _CLAIM.fullmatch(node)]
        self._nodes.sort(key=_SEQUENCE)
        if len(self._nodes) < len(nodes):
            self._read_others(nodes, where)
        if self._nodes and "-" in _SEQUENCE(self._nodes[0]):
            self._sort_wrapped()
        self.admitted = self._count_admitted()

    def _read_others(self, nodes: Sequence[str], where: str) -> None:
        claims = set(self._nodes)
        for node in nodes:
            version, _, _ = node.partition(".")
            if version == VERSION:
                taken = _TAKEN.fullmatch(node)
                if taken:
                    self.slots.add(int(taken[1]))
                elif node not in claims:
                    raise unreadable(where)
            elif version.isdigit():
                raise Incompatible(
                    f"{where} is in use by version {version} of the protocol; this is {VERSION}"
                )

    def _sort_wrapped(self) -> None:
        """ZooKeeper's counter ran over: what is alive is close together, so order is the
        distance from any of them."""
        origin = self.claim(0).sequence
        self._nodes.sort(key=lambda node: (_parse(node).sequence - origin + 2**31) % 2**32)

    def _count_admitted(self) -> int:
        """How many from the front on fit together: they hold."""
        taken = 0
        for count, node in enumerate(self._nodes):
            if node.startswith(_EXCLUSIVE):
                return count or 1
            claim = _parse(node)
            taken += claim.weight if claim.mode is Mode.SLOTS else 0
            if taken > claim.limit:
                return count
        return len(self._nodes)

    @property
    def claims(self) -> list[QueuedNode]:
        return [_parse(node) for node in self._nodes]

    def claim(self, index: int) -> QueuedNode:
        return _parse(self._nodes[index])

    def sequence(self, index: int) -> int:
        return int(self._nodes[index].rpartition(".")[2])

    def index(self, node: str) -> int | None:
        """Where a claim stands, counted from the front."""
        try:
            return self._nodes.index(node)
        except ValueError:
            return None

    def others_of(self, owner_digest: str, node: str) -> list[str]:
        """Nodes of the same owner beside this one."""
        return [other for other in self._nodes if owner_digest in other and other != node]

    def of_owner(self, owner_digest: str) -> list[QueuedNode]:
        """The nodes of one owner: more than one only after a lost reply."""
        return [_parse(node) for node in self._nodes if owner_digest in node]

    def check(self, claim: Claim, index: int, display: str) -> None:
        """Raises ``LimitMismatch`` if somebody in front uses the name as something else."""
        if index and not (claim.mode is Mode.EXCLUSIVE and self._nodes[0].startswith(_EXCLUSIVE)):
            first = self.claim(0)
            slots = first.mode is Mode.SLOTS
            admit.check_limit(claim, first.limit, slots=slots, store=display)

    def node_to_watch(self, index: int) -> str | None:
        """The node whose end or change is worth a new attempt; ``None`` for any of them."""
        node = self._nodes[index]
        mode = Mode.EXCLUSIVE if node.startswith(_EXCLUSIVE) else _parse(node).mode
        if mode is Mode.SLOTS and index == self.admitted:
            return None
        if mode is Mode.SHARED:
            writers = [p.node for p in self.claims[:index] if p.mode is not Mode.SHARED]
            return writers[-1]
        return self._nodes[index - 1]

    def free_slots(self, weight: int, limit: int) -> tuple[int, ...]:
        """The lowest slots that nobody has taken."""
        free = [slot for slot in range(limit) if slot not in self.slots]
        return tuple(free[:weight])
