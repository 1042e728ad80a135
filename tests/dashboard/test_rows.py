"""What is shown of names: order, filter, and the tree of who blocks whom."""

from __future__ import annotations

import math

import pytest

import holdfast
from holdfast import Holder, LockInfo, Mode, Waiter
from holdfast.dashboard.rows import (
    DEEPEST,
    MOST_BRANCHES,
    SORTS,
    matching,
    row_of,
    store_of,
    tree,
)

NOW = 1_000_000.0


def holder(
    *, since: float = NOW - 60, left: float = 20, note: str = "", host: str = "web-1"
) -> Holder:
    return Holder(host, 7, "main", note, "", "", Mode.EXCLUSIVE, 12, (), since, left)


def waiter(thread: str = "main", *, since: float = NOW - 5, behind: int = 0) -> Waiter:
    return Waiter("web-2", 8, thread, "", "", "", Mode.EXCLUSIVE, since, behind)


def info(name: str, holders: tuple[Holder, ...] = (), waiters: tuple[Waiter, ...] = ()) -> LockInfo:
    return LockInfo(name, 0, holders, waiters)


def names(rows: list[LockInfo], sort: str) -> list[str]:
    return [row.name for row in sorted((row_of(r, NOW) for r in rows), key=SORTS[sort])]


def test_a_row_counts_those_behind_the_first_of_their_process() -> None:
    row = row_of(info("a", (holder(),), (waiter(behind=3), waiter(since=NOW - 40))), NOW)
    assert (row.waiting, row.wait_seconds, row.hold_seconds, row.left_seconds) == (5, 40, 60, 20)


@pytest.mark.parametrize("since", [math.nan, math.inf, -math.inf, NOW + 1e9])
def test_times_that_are_none_are_no_durations(since: float) -> None:
    """A store's clock is not ours, and others write what they like."""
    row = row_of(info("a", (holder(since=since),), (waiter(since=since),)), NOW)
    assert (row.wait_seconds, row.hold_seconds) == (0, 0)
    assert row_of(info("a", (holder(left=math.nan),)), NOW).left_seconds == math.inf


def test_orders() -> None:
    rows = [
        info("calm", (holder(since=NOW - 900, left=3),)),
        info("short", (holder(),), (waiter(since=NOW - 2), waiter(), waiter())),
        info("long", (holder(),), (waiter(since=NOW - 100),)),
    ]
    assert names(rows, "wait") == ["long", "short", "calm"]
    assert names(rows, "queue") == ["short", "long", "calm"]
    assert names(rows, "held")[0] == "calm"
    assert names(rows, "left")[0] == "calm"
    assert names(rows, "name") == ["calm", "long", "short"]


def test_standbys_of_a_leader_do_not_count_as_waiting_long() -> None:
    """They wait for as long as all is well: they would always come first."""
    standby = waiter(since=NOW - 90_000)
    led, leaderless = info("leader:a", (holder(),), (standby,)), info("leader:b", (), (standby,))
    busy = info("order:1", (holder(),), (waiter(),))
    assert names([led, busy], "wait") == ["order:1", "leader:a"]
    assert names([leaderless, busy], "wait") == ["leader:b", "order:1"]
    assert row_of(led, NOW).waiting == 1
    assert {branch.name for branch in tree([row_of(led, NOW), row_of(leaderless, NOW)])} == {
        "leader:b"
    }


def test_the_filter_looks_at_names_hosts_processes_and_notes() -> None:
    rows = [
        row_of(info("order:42", (holder(note="charging CARD"),)), NOW),
        row_of(info("stock", (holder(host="db-9"),), (waiter(),)), NOW),
    ]
    for text, found in [
        ("ORDER", ["order:42"]),
        ("card", ["order:42"]),
        ("db-9", ["stock"]),
        ("web-2", ["stock"]),
        ("8", ["stock"]),
        ("  ", ["order:42", "stock"]),
        ("absent", []),
    ]:
        assert [row.name for row in matching(rows, text)] == found, text


def test_kinds() -> None:
    """What the program gave, else the text before the first colon."""
    given = holder()._replace(kind="payment")
    rows = [row_of(info("order:42", (each,)), NOW) for each in (given, holder())]
    assert [row.kind for row in rows] == ["payment", "order"]


def drawn(rows: list[LockInfo]) -> list[str]:
    """The tree as text."""
    lines = []
    for branch in tree(row_of(row, NOW) for row in rows):
        who = f" {branch.who.host}/{branch.who.thread}" if branch.who else ""
        mark = " (circle)" if branch.circular else ""
        lines.append(f"{'  ' * branch.depth}{branch.what} {branch.name}{who}{mark}")
    return lines


def process(thread: str) -> tuple[Holder, Waiter]:
    """The same thread as a holder and as a waiter."""
    return (
        Holder("h", 1, thread, "", "", "", Mode.EXCLUSIVE, 1, (), NOW, 1),
        Waiter("h", 1, thread, "", "", "", Mode.EXCLUSIVE, NOW, 0),
    )


def test_a_waiter_that_holds_another_name_has_those_that_it_blocks_below_it() -> None:
    (holds_a, waits_a), (holds_b, waits_b), (_, waits_c) = map(process, "abc")
    rows = [info("low", (holds_b,), (waits_c,)), info("high", (holds_a,), (waits_b,))]
    assert drawn([*rows, info("idle", (holds_a,))]) == [
        "name high",
        "  holder high h/a",
        "  waiter high h/b",
        "    name low",
        "      holder low h/b",
        "      waiter low h/c",
    ]
    assert waits_a


def test_a_circle_of_waiters_is_shown_once_and_named() -> None:
    (holds_a, waits_a), (holds_b, waits_b) = map(process, "ab")
    assert drawn([info("x", (holds_a,), (waits_b,)), info("y", (holds_b,), (waits_a,))]) == [
        "name x",
        "  holder x h/a",
        "  waiter x h/b",
        "    name y",
        "      holder y h/b",
        "      waiter y h/a",
        "        name x (circle)",
    ]


def test_threads_of_one_name_are_told_apart_by_what_they_hold() -> None:
    """In blocks. One that tells nothing is known by its name."""
    holds, waits = process("same")
    rows = [
        info("x", (holds,), (waits._replace(holds=(("y", 1),)),)),
        info("y", (holds,), (waits._replace(holds=(("z", 1), ("x", 2), ("y", 3))),)),
    ]
    assert drawn(rows) == [
        "name x",
        "  holder x h/same",
        "  waiter x h/same",
        "    name y",
        "      holder y h/same",
        "      waiter y h/same",
    ]


def test_a_tree_is_bounded() -> None:
    chain = []
    for number in range(100):
        (holds, _), (_, waits) = process(f"t{number}"), process(f"t{number + 1}")
        chain.append(info(f"n{number:03}", (holds,), (waits,)))
    assert max(branch.depth for branch in tree(row_of(row, NOW) for row in chain)) <= 2 * DEEPEST
    waits = process("w")[1]
    many = [row_of(info(f"m{n}", (process(f"h{n}")[0],), (waits,) * 3), NOW) for n in range(2000)]
    assert len(tree(many)) == MOST_BRANCHES


def test_many_waiters_of_one_thread_that_hold_many_names_end_in_time() -> None:
    """Threads of one name are not told apart: every waiter seems to hold everything."""
    holds, waits = process("Task")
    rows = [row_of(info(f"n{n}", (holds,), (waits,) * 5), NOW) for n in range(300)]
    assert len(tree(rows)) == MOST_BRANCHES


def test_a_store_is_named_without_its_password() -> None:
    with holdfast.connect("redis://user:s3cret@127.0.0.1:1/0") as locks:
        assert store_of(locks) == "redis://user@127.0.0.1:1/0"
    with holdfast.connect("memory://") as locks:
        assert store_of(locks) == "memory://"
