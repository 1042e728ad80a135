"""The queue of one name, read from the names of its nodes: pure values, no network access.

Every claim is one node. A listing of the node names alone decides which claims are admitted::

    <namespace>/locks/<name>/1.x.1.0.<owner's digest>.0000000012    a claim: x, s or n (slots)
    <namespace>/locks/<name>/1.k.3                                  slot 3 is taken

The first number is the protocol's version, the last one ZooKeeper's sequence number. The sequence
only orders the queue: it restarts with a new parent node, and tokens don't. These names and the
data of the nodes are the stored format: other versions and processes read them.
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
    "handed_node",
    "nodes_ahead",
    "read_data",
    "read_record",
    "renamed",
    "slot_name",
    "slots_to_end",
    "unreadable",
    "write_data",
    "write_record",
]

VERSION = "1"
SEQUENCE_LIMIT = 2**31 - 2**20
"""From this sequence number on new claims don't join: the queue becomes empty, its node is deleted,
and the sequence restarts."""
_LETTERS = {Mode.EXCLUSIVE: "x", Mode.SHARED: "s", Mode.SLOTS: "n"}
_MODES = {letter: mode for mode, letter in _LETTERS.items()}
_CLAIM = re.compile(
    rf"{VERSION}\.[xsn]\.\d{{1,18}}\.\d{{1,18}}\.[0-9a-f]{{1,64}}\.(?:\d{{10}}|-\d{{9,10}})",
    re.ASCII,
)
"""The name of a claim's node. Any other name with our version was not written by Holdfast."""
_EXCLUSIVE = f"{VERSION}.x."
_OWNER = slice(8, 40)
"""Where the name of an exclusive claim's node has the owner's digest."""
_SLOT = "k"
_TAKEN = re.compile(rf"{VERSION}\.{_SLOT}\.(\d{{1,18}})", re.ASCII)
_SEQUENCE = itemgetter(slice(-11, None))
"""The end of a node's name. It sorts like the sequence number unless a number is negative: a
negative number then sorts first."""


@lru_cache(maxsize=64)
def digest(owner: str) -> str:
    """The digest of an owner id: enough to find the owner's node, useless to release it."""
    return hashlib.blake2b(owner.encode(), digest_size=16).hexdigest()


@lru_cache(maxsize=1024)
def encode_name(name: str) -> str:
    """A lock name as the name of a ZooKeeper node."""
    text = quote(name, safe=":@,;=+!$&'()*~ ")
    return "%2E" + text[1:] if text.startswith(".") else text


def decode_name(node: str) -> str:
    return unquote(node)


def entry_prefix(claim: Claim) -> str:
    """The name of a claim's node, without the sequence number that ZooKeeper appends."""
    letter = _LETTERS[claim.mode]
    return f"{VERSION}.{letter}.{claim.weight}.{claim.limit}.{digest(claim.owner)}."


def renamed(node: str, claim: Claim) -> str:
    """The name of a claim's node, with the sequence number of another node."""
    return entry_prefix(claim) + node.rpartition(".")[2]


def handed_node(ref: Sequence[str | int], claim: Claim) -> str:
    """The name of a node that was handed over, of a text. Raises ``ValueError`` unless it is the
    node of such a claim."""
    node = ref[0] if len(ref) == 1 else ""
    if isinstance(node, str) and _CLAIM.fullmatch(node):
        kind = entry_prefix(claim).removesuffix(f"{digest(claim.owner)}.")
        if node.startswith(kind):
            return node
    raise ValueError("not the text of a hold in ZooKeeper")


def slot_name(slot: int) -> str:
    return f"{VERSION}.{_SLOT}.{slot}"


class NodeData(NamedTuple):
    """The data of a claim's node."""

    ttl: int
    behind: int
    slots: tuple[int, ...]
    token: int
    """The token, if it is not the zxid of the node: after a move to another session. Else 0."""
    label: str


def nodes_ahead(node: str, nodes: Sequence[str]) -> list[str] | None:
    """The nodes ahead of an exclusive claim, in order; a fast path for queues of exclusive claims.

    ``None`` if the queue has anything else: then a ``NodeQueue`` must decide."""
    if node not in nodes or {len(node)} != set(map(len, nodes)):
        return None
    own, owner = node[-11:], node[_OWNER]
    ahead = []
    for other in nodes:
        if other[:4] != _EXCLUSIVE or not other[-10:].isdigit():
            return None
        if owner in other and other != node:
            return None
        if other[-11:] < own:
            ahead.append(other)
    ahead.sort(key=_SEQUENCE)
    return ahead


def write_data(data: NodeData) -> bytes:
    slots = ",".join(map(str, data.slots))
    return f"{data.ttl} {data.behind} {slots} {data.token}\n{data.label}".encode()


def read_data(data: bytes, where: str) -> NodeData:
    """Decodes a node's data. Raises ``Incompatible``."""
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
    """Decodes a node's data in order to delete the claim, which must always be possible: data that
    can't be read counts as data without slots. Those slots end with their session."""
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
    """The data of a record's node."""

    token: int
    keep_seconds: float
    value: str


def write_record(token: int, keep_seconds: float, value: str) -> bytes:
    return f"{token} {keep_seconds!r}\n{value}".encode()


def read_record(data: bytes) -> RecordData | None:
    """Decodes the data of a record's node; ``None`` if it can't be read."""
    try:
        head, _, value = data.decode().partition("\n")
        token, keep = head.split(" ")
        return RecordData(digits(token), moment(float(keep)), value)
    except ValueError:
        return None


class QueuedNode(NamedTuple):
    """The name of a claim's node, parsed."""

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
    """The claims of one name, holding or waiting, in order of arrival; and the taken slots.

    Node names are parsed on demand: an attempt needs its own and the first one only.
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
        """Sorts after ZooKeeper's 32-bit counter has wrapped around. Existing nodes have numbers
        close to each other, so they are ordered by their distance to any of them."""
        origin = self.claim(0).sequence
        self._nodes.sort(key=lambda node: (_parse(node).sequence - origin + 2**31) % 2**32)

    def _count_admitted(self) -> int:
        """How many claims, from the first one on, fit together: these hold."""
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
        """The position of a claim's node, from 0; ``None`` if it is not in the queue."""
        try:
            return self._nodes.index(node)
        except ValueError:
            return None

    def others_of(self, owner_digest: str, node: str) -> list[str]:
        """The other nodes of the same owner."""
        return [other for other in self._nodes if owner_digest in other and other != node]

    def of_owner(self, owner_digest: str) -> list[QueuedNode]:
        """The nodes of one owner: more than one only after a lost reply."""
        return [_parse(node) for node in self._nodes if owner_digest in node]

    def check(self, claim: Claim, index: int, display: str) -> None:
        """Raises ``LimitMismatch`` if the first claim uses the name in another way."""
        if index and not (claim.mode is Mode.EXCLUSIVE and self._nodes[0].startswith(_EXCLUSIVE)):
            first = self.claim(0)
            slots = first.mode is Mode.SLOTS
            admit.check_limit(claim, first.limit, slots=slots, store=display)

    def node_to_watch(self, index: int) -> str | None:
        """The node to watch: its deletion or change is worth a new attempt. ``None`` if any change
        of the queue is."""
        node = self._nodes[index]
        mode = Mode.EXCLUSIVE if node.startswith(_EXCLUSIVE) else _parse(node).mode
        if mode is Mode.SLOTS and index == self.admitted:
            return None
        if mode is Mode.SHARED:
            writers = [p.node for p in self.claims[:index] if p.mode is not Mode.SHARED]
            return writers[-1]
        return self._nodes[index - 1]

    def free_slots(self, weight: int, limit: int) -> tuple[int, ...]:
        """The lowest free slots."""
        free = [slot for slot in range(limit) if slot not in self.slots]
        return tuple(free[:weight])
