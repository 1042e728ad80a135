"""The oracle finds what is broken, and nothing in what is not."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.claim import Mode
from holdfast.io.clock import now
from holdfast.testing.history import (
    Event,
    RecordedHold,
    Recorder,
    fairness,
    faults,
    overtaken,
    read_holds,
    to_holds,
)

EXCLUSIVE, SHARED, SLOTS = Mode.EXCLUSIVE, Mode.SHARED, Mode.SLOTS


def hold(
    asked: float,
    held: float,
    ends: float,
    token: int,
    mode: Mode = EXCLUSIVE,
    slots: tuple[int, ...] = (),
    process: str = "p",
    name: str = "n",
) -> RecordedHold:
    return RecordedHold(process, name, mode, asked, held, ends, token, slots)


def lawful(seed: int, count: int = 300) -> list[RecordedHold]:
    """A history of a right lock: readers and writers by turns, waits before grants."""
    rng, at, token = random.Random(seed), 0.0, 100
    holds: list[RecordedHold] = []
    while len(holds) < count:
        readers = rng.choice((0, 0, 1, 3))
        at += rng.random()
        ends = at
        for _ in range(max(1, readers)):
            token += 1
            length = rng.random()
            mode = SHARED if readers else EXCLUSIVE
            holds.append(hold(at - rng.random() * 5, at, at + length, token, mode))
            ends = max(ends, at + length)
            at += rng.random() * 0.01
        at = ends
    return holds


@pytest.mark.parametrize("seed", range(20))
def test_a_right_lock_has_no_faults(seed: int) -> None:
    holds = lawful(seed)
    random.Random(seed).shuffle(holds)
    assert faults(holds) == []


@pytest.mark.parametrize("seed", range(20))
def test_one_hold_that_lasts_too_long_is_found(seed: int) -> None:
    holds, rng = lawful(seed), random.Random(seed)
    writers = [n for n, one in enumerate(holds[:-1]) if one.mode is EXCLUSIVE]
    chosen = rng.choice(writers)
    late = holds[chosen + 1].held + 0.001
    broken = hold(holds[chosen].asked, holds[chosen].held, late, holds[chosen].token)
    holds[chosen] = broken
    assert any("while" in fault for fault in faults(holds))


@pytest.mark.parametrize("seed", range(20))
def test_one_repeated_token_is_found(seed: int) -> None:
    holds, rng = lawful(seed), random.Random(seed)
    writer = rng.choice([one for one in holds if one.mode is EXCLUSIVE])
    end = holds[-1].ends
    holds.append(hold(0.0, end, end + 1, writer.token))
    assert any("2 times" in fault for fault in faults(holds))


@pytest.mark.parametrize("seed", range(20))
def test_one_token_that_sank_is_found(seed: int) -> None:
    holds = lawful(seed)
    end = holds[-1].ends
    holds.append(hold(end, end + 1, end + 2, holds[-1].token - 1000))
    assert any("asked after" in fault for fault in faults(holds))


@pytest.mark.parametrize(
    ("first", "second", "clash"),
    [
        ((EXCLUSIVE, ()), (EXCLUSIVE, ()), True),
        ((EXCLUSIVE, ()), (SHARED, ()), True),
        ((SHARED, ()), (EXCLUSIVE, ()), True),
        ((SHARED, ()), (SHARED, ()), False),
        ((SLOTS, (0,)), (SLOTS, (0, 1)), True),
        ((SLOTS, (0,)), (SLOTS, (1,)), False),
        ((SLOTS, (0,)), (EXCLUSIVE, ()), True),
    ],
)
def test_who_excludes_whom(
    first: tuple[Mode, tuple[int, ...]], second: tuple[Mode, tuple[int, ...]], clash: bool
) -> None:
    pair = [hold(0, 1, 3, 10, *first), hold(0, 2, 4, 11, *second)]
    assert bool(faults(pair)) is clash
    apart = [hold(0, 1, 2, 10, *first), hold(0, 2, 4, 11, *second)]
    assert faults(apart) == []


def test_other_names_do_not_matter() -> None:
    assert faults([hold(0, 1, 9, 10, name="a"), hold(0, 2, 9, 10, name="b")]) == []


def test_a_late_answer_to_an_early_question_may_have_a_lower_token() -> None:
    # Granted in the other order than heard of: only who asks afterwards must be above.
    assert faults([hold(0, 5, 6, 10), hold(0, 4, 4.5, 11)]) == []
    assert faults([hold(4.6, 5, 6, 10), hold(0, 4, 4.5, 11)]) != []


def test_readers_may_share_a_token_but_not_with_a_writer() -> None:
    assert faults([hold(0, 1, 2, 7, SHARED), hold(1.5, 1.6, 2, 7, SHARED)]) == []
    assert faults([hold(0, 1, 2, 7, SHARED), hold(0, 3, 4, 7)]) != []
    assert faults([hold(0, 1, 2, 7), hold(3, 3.5, 4, 7, SHARED)]) != []


def test_slots_are_fenced_slot_by_slot() -> None:
    other = [hold(0, 1, 2, 9, SLOTS, (0,)), hold(3, 4, 5, 8, SLOTS, (1,))]
    assert faults(other) == []
    same = [hold(0, 1, 2, 9, SLOTS, (0,)), hold(3, 4, 5, 8, SLOTS, (0,))]
    assert faults(same) != []


def test_holds_end_with_what_ends_belief() -> None:
    def events(*more: Event) -> list[Event]:
        asked = Event(0.0, "p", "1", "asked", "n")
        held = Event(1.0, "p", "1", "held", token=5, certain_until=10.0)
        return [asked, held, *more]

    def end(*more: Event) -> float:
        (one,) = to_holds(events(*more))
        return one.ends

    assert end() == 10.0
    assert end(Event(4.0, "p", "1", "ended")) == 4.0
    assert end(Event(4.0, "p", "", "died", certain_until=4.0)) == 4.0
    assert end(Event(4.0, "q", "", "died", certain_until=3.5)) == 10.0
    assert end(Event(4.0, "p", "1", "kept", certain_until=14.0)) == 14.0
    # A holder that wakes up late believed no longer than its certain time.
    assert end(Event(30.0, "p", "1", "ended")) == 10.0
    assert to_holds([Event(0.0, "p", "1", "asked", "n"), Event(1.0, "p", "1", "refused")]) == []


def test_a_recorded_file_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "history"
    recorders = [Recorder(path, "a"), Recorder(path, "b")]
    for token, recorder in enumerate(recorders, start=1):
        recorder.asked("x", "name", SHARED)
        recorder.held("x", token, now() + 100.0)
        recorder.kept("x", now() + 200.0)
    recorders[0].ended("x")
    recorders[0].died("b", now())
    recorders[1].asked("y", "name")
    recorders[1].refused("y")
    for recorder in recorders:
        recorder.close()
    with path.open("ab") as file:
        file.write(b"[1.0, cut off by a ki")
    first, second = read_holds(path)
    assert (first.process, first.token, first.mode, first.name) == ("a", 1, SHARED, "name")
    assert (second.process, second.token) == ("b", 2)
    assert first.held <= first.ends <= second.ends < first.held + 100
    assert faults([first, second]) == []


def test_a_certain_end_is_recorded_as_it_was_told(tmp_path: Path) -> None:
    """However long the process stands still before it records."""
    path, certain_until = tmp_path / "history", now() - 1
    recorder = Recorder(path, "a")
    recorder.asked("x", "name")
    recorder.held("x", 1, certain_until)
    recorder.close()
    assert [one.ends for one in read_holds(path)] == [certain_until]


def test_a_holder_that_stood_still_until_its_certain_end_overlaps_nobody() -> None:
    # Its answer came in time; the process then stood still, and another was granted.
    late, next_one = hold(0, 5, 3, 10), hold(1, 4, 6, 11)
    assert faults([late, next_one]) == []
    assert faults([hold(0, 5, 5, 10), next_one]) != []
    assert faults([hold(0, 5, 3, 11), next_one]) == ["'n': token 11 was given 2 times"]


def test_fairness_counts_those_who_got_nothing() -> None:
    holds = [hold(0, n, n, n, process="ab"[n % 2]) for n in range(10)]
    assert fairness(holds, ["a", "b"]) == 1.0
    assert fairness(holds, ["a", "b", "c"]) == 0.0
    assert fairness([], ["a"]) == 0.0


def _turns(pick: Callable[[list[str], dict[str, float]], str]) -> list[RecordedHold]:
    """Four processes, one of which comes seldom; ``pick`` says whose turn it is."""
    draw = random.Random(1)
    asked = dict.fromkeys("abcd", 0.0)
    holds, at = [], 0.0
    for token in range(400):
        waiting = [p for p in asked if asked[p] <= at] or [min(asked, key=lambda p: asked[p])]
        turn = pick(waiting, asked)
        began = max(at, asked[turn])
        holds.append(hold(asked[turn], began, began + 1, token, process=turn))
        at = began + 1
        asked[turn] = at + draw.uniform(-0.1, 0.1) + (5 if turn == "d" else 0)
    return holds


def test_who_came_later_and_again_has_overtaken() -> None:
    draw = random.Random(2)
    in_order = _turns(lambda waiting, asked: min(waiting, key=lambda p: asked[p]))
    assert overtaken([]) == overtaken(in_order) == 0.0
    assert fairness(in_order, "abcd") < 0.8  # although nobody was wronged
    assert overtaken(_turns(lambda waiting, asked: draw.choice(waiting))) > 0.1
