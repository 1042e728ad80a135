"""The queue of a ZooKeeper name, read from the names of its nodes alone."""

from __future__ import annotations

import struct
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.claim import Claim, Mode
from holdfast.core import admit
from holdfast.core.admit import Share
from holdfast.errors import Incompatible, LimitMismatch
from holdfast.stores.zookeeper.client.packets import Listing
from holdfast.stores.zookeeper.queue import (
    NodeData,
    NodeQueue,
    decode_name,
    digest,
    encode_name,
    entry_prefix,
    nodes_ahead,
    read_data,
    slot_name,
    slots_to_end,
    write_data,
)


def _claim(owner: str, mode: Mode = Mode.EXCLUSIVE, weight: int = 1, limit: int = 0) -> Claim:
    return Claim("name", mode, weight, limit, 30.0, owner, "[]")


def _node(sequence: int, mode: Mode = Mode.EXCLUSIVE, weight: int = 1, limit: int = 0) -> str:
    claim = _claim(str(sequence), mode, weight, limit)
    return f"{entry_prefix(claim)}{sequence:010d}"


def test_node_names_hide_the_owner() -> None:
    """They contain a digest: enough to find the owner's node, useless to release it."""
    assert "secret" not in entry_prefix(_claim("secret"))
    assert digest("secret") in entry_prefix(_claim("secret"))


@given(st.text(min_size=1, max_size=60))
def test_any_name_is_one_node(name: str) -> None:
    """Encoding is reversible, and ZooKeeper accepts the result."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return
    node = encode_name(name)
    assert decode_name(node) == name
    assert "/" not in node
    assert node not in (".", "..")
    assert node.isascii()
    assert node.isprintable()


@given(st.integers(0, 999), st.lists(st.integers(0, 99)), st.text(max_size=50))
def test_data_is_read_as_written(behind: int, slots: list[int], label: str) -> None:
    """For all numbers and texts."""
    data = NodeData(30, behind, tuple(slots), 7, label.encode(errors="replace").decode())
    assert read_data(write_data(data), "here") == data


@pytest.mark.parametrize(
    "damaged",
    [
        b"",
        b"\xff\xfe",
        b"1 2\nlabel",
        b"x y z w\n",
        b"1_0 0  0\n",
        b"+1 0  0\n",
        "١ 0  0\n".encode(),
        b"1 0 -1 0\n",
        b"1 0  9223372036854775808\n",
        b"1 0 %b 0\n" % b",".join([b"1"] * 65_537),
        b"9" * 5000 + b" 0  0\n",
    ],
)
def test_damaged_data_is_refused(damaged: bytes) -> None:
    """The error names the lock; the claim can still be deleted."""
    with pytest.raises(Incompatible, match="order:42"):
        read_data(damaged, "'order:42'")
    assert slots_to_end(damaged).slots == ()


@pytest.mark.parametrize("first", [2**31 - 2, -(2**31), -12, -2, -1, 0, 8, 10**9 - 2])
def test_the_counter_may_wrap_around(first: int) -> None:
    """ZooKeeper's sequence is a signed 32-bit number."""
    sequences = [(first + step + 2**31) % 2**32 - 2**31 for step in range(4)]
    queue = NodeQueue([_node(sequence) for sequence in reversed(sequences)], "here")
    assert [claim.sequence for claim in queue.claims] == sequences


_shares = st.one_of(
    st.lists(st.sampled_from([Mode.EXCLUSIVE, Mode.SHARED]).map(lambda mode: (mode, 1, 0))),
    st.lists(st.integers(1, 3).map(lambda weight: (Mode.SLOTS, weight, 4))),
)


@given(_shares)
def test_admission_is_the_rule_of_all_stores(wanted: list[tuple[Mode, int, int]]) -> None:
    """A claim is admitted by position if and only if it fits beside all claims ahead."""
    queue = NodeQueue([_node(number, *share) for number, share in enumerate(wanted)], "here")
    taken: list[Share] = []
    fit = 0
    for mode, weight, limit in wanted:
        if not admit.fits(mode, weight, limit, taken):
            break
        taken.append(Share(mode, weight))
        fit += 1
    assert queue.admitted == fit


def test_a_waiter_watches_one_node_ahead() -> None:
    """A writer the last node, a reader the last writer, the first one for slots any change."""
    x, s = Mode.EXCLUSIVE, Mode.SHARED
    nodes = [_node(0, x), _node(1, s), _node(2, x), _node(3, s), _node(4, s), _node(5, x)]
    queue = NodeQueue(nodes, "here")
    assert [queue.node_to_watch(index) for index in range(1, 6)] == [
        nodes[i] for i in (0, 1, 2, 2, 4)
    ]
    slots = [_node(number, Mode.SLOTS, 1, 2) for number in range(4)]
    queue = NodeQueue([*slots, slot_name(0), slot_name(1)], "here")
    assert queue.node_to_watch(2) is None
    assert queue.node_to_watch(3) == slots[2]
    assert queue.free_slots(1, 2) == ()
    assert queue.free_slots(2, 5) == (2, 3)


def test_another_use_of_the_name_is_refused() -> None:
    """The first claim decides."""
    queue = NodeQueue([_node(0, Mode.SLOTS, 1, 3), _node(1)], "here")
    with pytest.raises(LimitMismatch):
        queue.check(_claim("1"), 1, "zookeeper://here")
    queue.check(_claim("0", Mode.SLOTS, 1, 3), 0, "zookeeper://here")


@given(st.lists(st.text(st.characters(exclude_characters="\0/"), min_size=1, max_size=300)))
def test_any_names_of_children_are_read(names: list[str]) -> None:
    """Long names and names that are not ASCII too: others may have created such nodes."""
    names = [name.encode(errors="replace").decode() for name in names]
    packed = [struct.pack("!i", len(name.encode())) + name.encode() for name in names]
    assert Listing("/").read(struct.pack("!i", len(names)) + b"".join(packed)) == names


def test_another_version_is_refused() -> None:
    """Versions that can't exclude each other don't run together."""
    with pytest.raises(Incompatible, match="version 2"):
        NodeQueue([_node(0), "2.whatever"], "here")
    assert len(NodeQueue([_node(0), "put here by hand"], "here").claims) == 1


@pytest.mark.parametrize(
    "node",
    [
        "1.x.by hand",
        "1.y.1.0.0.0000000001",
        "1.x.1.0.0.000000000١",
        "1.n.1_0.2.0.0000000001",
        "1.n.-1.2.0.0000000001",
        "1.n.1.99999999999999999999.0.0000000001",
        "1.k.",
        "1.k.1_0",
        "1." + "x." * 500,
    ],
)
def test_a_damaged_node_is_refused(node: str) -> None:
    """It is unknown which claims are admitted; the error names the lock."""
    with pytest.raises(Incompatible, match="here"):
        NodeQueue([_node(0), node], "here")
    own = _node(7)
    assert nodes_ahead(own, [own, own[:-10] + "000000000x"]) is None  # left to NodeQueue


SEQUENCES = st.one_of(
    st.integers(0, 40), st.integers(2**31 - 9, 2**31 - 1), st.integers(-(2**31), -1)
)
OTHERS = st.sampled_from([slot_name(3), "a note", _node(7, Mode.SHARED)])


@given(
    st.lists(SEQUENCES, min_size=1, max_size=12, unique=True),
    st.lists(OTHERS, max_size=2),
    st.randoms(use_true_random=False),
)
def test_the_fast_path_agrees_with_the_queue(
    sequences: list[int], others: list[str], draw: Random
) -> None:
    """Where it decides: other queues are left to ``NodeQueue``."""
    own = _node(sequences[0])
    nodes = [_node(sequence) for sequence in sequences] + others
    draw.shuffle(nodes)
    ahead = nodes_ahead(own, nodes)
    assert ahead is None or not others
    if ahead is None:
        assert others or min(sequences) < 0
        return
    queue = NodeQueue(nodes, "here")
    index = queue.index(own)
    assert index == len(ahead)
    assert (ahead == []) == (index < queue.admitted)
    assert not ahead or queue.node_to_watch(index) == ahead[-1]


def test_the_fast_path_leaves_other_queues_open() -> None:
    """Without the claim's node, with another node of its owner, or of another version."""
    own, other = _node(3), _node(1)
    assert nodes_ahead(own, [own, other]) == [other]
    assert nodes_ahead(own, [other]) is None
    assert nodes_ahead(own, []) is None
    assert nodes_ahead(own, [own, f"{own[:-1]}1"]) is None
    assert nodes_ahead(own, [own, f"2{other[1:]}"]) is None
