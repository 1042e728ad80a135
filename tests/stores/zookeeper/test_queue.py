"""The line of a ZooKeeper name, read from the names of its nodes alone."""

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


def test_names_tell_no_owner() -> None:
    """A node shows a digest: it finds the owner's node and does not release it."""
    assert "secret" not in entry_prefix(_claim("secret"))
    assert digest("secret") in entry_prefix(_claim("secret"))


@given(st.text(min_size=1, max_size=60))
def test_any_name_is_one_node(name: str) -> None:
    """Encoding is one to one, and never gives what ZooKeeper refuses."""
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
def test_data_comes_back(behind: int, slots: list[int], label: str) -> None:
    """What a node carries is read as it was written."""
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
    """It names the lock; and whoever ends that claim can do so all the same."""
    with pytest.raises(Incompatible, match="order:42"):
        read_data(damaged, "'order:42'")
    assert slots_to_end(damaged).slots == ()


@pytest.mark.parametrize("first", [2**31 - 2, -(2**31), -12, -2, -1, 0, 8, 10**9 - 2])
def test_the_counter_may_run_over(first: int) -> None:
    """ZooKeeper's sequence is a signed 32-bit number: behind its end comes its beginning."""
    sequences = [(first + step + 2**31) % 2**32 - 2**31 for step in range(4)]
    line = NodeQueue([_node(sequence) for sequence in reversed(sequences)], "here")
    assert [place.sequence for place in line.claims] == sequences


_shares = st.one_of(
    st.lists(st.sampled_from([Mode.EXCLUSIVE, Mode.SHARED]).map(lambda mode: (mode, 1, 0))),
    st.lists(st.integers(1, 3).map(lambda weight: (Mode.SLOTS, weight, 4))),
)


@given(_shares)
def test_admission_is_the_rule_of_all_stores(asked: list[tuple[Mode, int, int]]) -> None:
    """Who is admitted by position is who fits beside all in front."""
    line = NodeQueue([_node(number, *share) for number, share in enumerate(asked)], "here")
    taken: list[Share] = []
    fit = 0
    for mode, weight, limit in asked:
        if not admit.fits(mode, weight, limit, taken):
            break
        taken.append(Share(mode, weight))
        fit += 1
    assert line.admitted == fit


def test_everybody_watches_one_in_front() -> None:
    """A writer the one in front, a reader the last writer, the first for slots any change."""
    x, s = Mode.EXCLUSIVE, Mode.SHARED
    nodes = [_node(0, x), _node(1, s), _node(2, x), _node(3, s), _node(4, s), _node(5, x)]
    line = NodeQueue(nodes, "here")
    assert [line.node_to_watch(index) for index in range(1, 6)] == [
        nodes[i] for i in (0, 1, 2, 2, 4)
    ]
    slots = [_node(number, Mode.SLOTS, 1, 2) for number in range(4)]
    line = NodeQueue([*slots, slot_name(0), slot_name(1)], "here")
    assert line.node_to_watch(2) is None
    assert line.node_to_watch(3) == slots[2]
    assert line.free_slots(1, 2) == ()
    assert line.free_slots(2, 5) == (2, 3)


def test_another_use_of_the_name_is_refused() -> None:
    """By those who come later, whatever they are."""
    line = NodeQueue([_node(0, Mode.SLOTS, 1, 3), _node(1)], "here")
    with pytest.raises(LimitMismatch):
        line.check(_claim("1"), 1, "zookeeper://here")
    line.check(_claim("0", Mode.SLOTS, 1, 3), 0, "zookeeper://here")


@given(st.lists(st.text(st.characters(exclude_characters="\0/"), min_size=1, max_size=300)))
def test_children_of_any_name_are_read(names: list[str]) -> None:
    """Also long ones, and those that are not ASCII, which somebody may have put there."""
    names = [name.encode(errors="replace").decode() for name in names]
    packed = [struct.pack("!i", len(name.encode())) + name.encode() for name in names]
    assert Listing("/").read(struct.pack("!i", len(names)) + b"".join(packed)) == names


def test_another_version_is_refused() -> None:
    """Two versions that can't exclude each other don't run together."""
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
    """Whatever it was, nobody can tell who was admitted; a look says of which lock."""
    with pytest.raises(Incompatible, match="here"):
        NodeQueue([_node(0), node], "here")
    own = _node(7)
    assert nodes_ahead(own, [own, own[:-10] + "000000000x"]) is None  # left to the whole line


SEQUENCES = st.one_of(
    st.integers(0, 40), st.integers(2**31 - 9, 2**31 - 1), st.integers(-(2**31), -1)
)
STRANGERS = st.sampled_from([slot_name(3), "a note", _node(7, Mode.SHARED)])


@given(
    st.lists(SEQUENCES, min_size=1, max_size=12, unique=True),
    st.lists(STRANGERS, max_size=2),
    st.randoms(use_true_random=False),
)
def test_the_front_of_a_simple_line_is_what_the_line_says(
    sequences: list[int], strangers: list[str], draw: Random
) -> None:
    """Where it says anything: what is not simple is left to the line."""
    own = _node(sequences[0])
    nodes = [_node(sequence) for sequence in sequences] + strangers
    draw.shuffle(nodes)
    front = nodes_ahead(own, nodes)
    assert front is None or not strangers
    if front is None:
        assert strangers or min(sequences) < 0
        return
    line = NodeQueue(nodes, "here")
    index = line.index(own)
    assert index == len(front)
    assert (front == []) == (index < line.admitted)
    assert not front or line.node_to_watch(index) == front[-1]


def test_the_front_of_a_line_is_left_open() -> None:
    """Without its own node, with another of the same owner, or of another version."""
    own, other = _node(3), _node(1)
    assert nodes_ahead(own, [own, other]) == [other]
    assert nodes_ahead(own, [other]) is None
    assert nodes_ahead(own, []) is None
    assert nodes_ahead(own, [own, f"{own[:-1]}1"]) is None
    assert nodes_ahead(own, [own, f"2{other[1:]}"]) is None
