"""Handing a lease over: the text, what is left in the old process, and stores that fail."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import subprocess
import sys
import threading
import time
from base64 import urlsafe_b64encode
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast import fencing, observe
from holdfast.core.drive import run_now
from holdfast.errors import BackendUnavailable, Incompatible, LockLost, StaleFence
from holdfast.handed_over import LONGEST_TEXT, PREFIX, read_text
from holdfast.io.clock import now
from holdfast.lease import Lease

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "hand-over.md"
SOON = 10.0


@pytest.fixture
def url() -> str:
    return f"memory://{time.monotonic_ns()}"


@pytest.fixture
def locks(url: str) -> Iterator[holdfast.Locks]:
    with holdfast.connect(url) as locks:
        yield locks


@pytest.fixture
def other(url: str) -> Iterator[holdfast.Locks]:
    """As a client in another process."""
    with holdfast.connect(url) as locks:
        yield locks


def _take(locks: holdfast.Locks, **options: Any) -> Lease:
    lease = locks.lock("name", **options).acquire()
    assert lease is not None
    return lease


def _until(condition: Callable[[], object]) -> None:
    ends = now() + SOON
    while not condition():
        assert now() < ends
        time.sleep(0.002)


def _with_fields(text: str, **changes: object) -> str:
    """The text of another hold, well spelled."""
    fields = read_text(text)._asdict() | changes
    words = json.dumps([*fields.values()], ensure_ascii=False, separators=(",", ":"))
    return PREFIX + urlsafe_b64encode(words.encode(errors="surrogatepass")).decode().rstrip("=")


def test_the_guide_runs_as_it_stands(tmp_path: Path) -> None:
    """Typed in as two programs, with a pipe between them."""
    api, worker = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    (tmp_path / "locks").mkdir(mode=0o700)
    environment = os.environ | {"HOLDFAST_URL": f"sqlite://{tmp_path}/locks/locks.db"}

    def run(program: str, words: str = "") -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-W", "error", "-c", program]
        return subprocess.run(
            command, input=words, env=environment, capture_output=True, text=True, timeout=60
        )

    given = run(api)
    assert (given.returncode, given.stderr) == (0, "")
    assert run(api).stderr == "order 42 is being worked on\n"
    taken = run(worker, given.stdout)
    assert (taken.returncode, taken.stderr) == (0, "")
    assert taken.stdout.startswith("working on order:42 with token ")
    assert "LockLost" in run(worker, given.stdout).stderr
    assert run(api).returncode == 0


def test_the_old_fence_is_refused(
    locks: holdfast.Locks, other: holdfast.Locks, tmp_path: Path
) -> None:
    """Once the new owner has entered, a late write of the old process changes nothing."""
    path = tmp_path / "ledger"
    lease = _take(locks)
    with fencing.file.guard(path, lease) as file:
        file.write_text("old")
    taken = other.take_over(lease.hand_over())
    with fencing.file.guard(path, taken) as file:
        file.write_text("new")
    with pytest.raises(StaleFence), fencing.file.guard(path, lease) as file:
        file.write_text("late")
    assert path.read_text() == "new"
    assert taken.release() is True


WRONG = [
    {"store": "redis"},
    {"store": "a b"},
    {"store": 1},
    {"namespace": "other"},
    {"epoch": 1},
    {"epoch": -1},
    {"epoch": True},
    {"name": ""},
    {"name": "a\nb"},
    {"name": "n" * 513},
    {"mode": "all"},
    {"mode": "slots"},
    {"mode": []},
    {"weight": 2},
    {"weight": 0},
    {"limit": 1},
    {"ttl": 0},
    {"ttl": 1e300},
    {"ttl": 10**400},
    {"ttl": float("nan")},
    {"ttl": "30"},
    {"kind": "\x1b[2J"},
    {"kind": "k" * 65},
    {"owner": ""},
    {"owner": "g" * 32},
    {"owner": "0" * 33},
    {"token": 0},
    {"token": 2**63},
    {"token": 1.0},
    {"ref": {}},
    {"ref": [[]]},
    {"ref": ["x" * 513]},
    {"ref": [1] * 9},
    {"more": 1},
]


@pytest.mark.parametrize("changes", WRONG, ids=str)
def test_a_text_is_read_strictly(
    locks: holdfast.Locks, other: holdfast.Locks, changes: dict[str, object]
) -> None:
    """Each is refused before the store is asked; the right text still works."""
    text = _take(locks).hand_over()
    with pytest.raises(ValueError, match=r"lease|taken over|honours") as raised:
        other.take_over(_with_fields(text, **changes))
    assert len(str(raised.value)) < 300
    assert read_text(text).owner not in str(raised.value)
    assert other.take_over(text).release() is True


@pytest.mark.parametrize(
    "wrong", ["", "[", "[" * 3000, "null", "{}", '"x"', "[1,2]", "\udcff", "1" * 5000], ids=repr
)
def test_a_damaged_text_is_refused(locks: holdfast.Locks, wrong: str) -> None:
    words = urlsafe_b64encode(wrong.encode(errors="surrogatepass")).decode().rstrip("=")
    for text in (wrong, PREFIX + words, PREFIX + wrong, PREFIX + words + "\n"):
        with pytest.raises(ValueError, match="not the text of a lease"):
            locks.take_over(text)
    with pytest.raises(TypeError):
        locks.take_over(wrong.encode(errors="surrogatepass"))  # type: ignore[arg-type]


def test_other_spellings_of_a_text_are_refused(locks: holdfast.Locks) -> None:
    """Else one text could be told as two, for those who remember which were used."""
    text = _take(locks).hand_over()
    fields = read_text(text)
    spaced = urlsafe_b64encode(json.dumps(fields).encode()).decode().rstrip("=")
    for other in (PREFIX + spaced, text + "=", text[:40] + "\n" + text[40:]):
        with pytest.raises(ValueError, match="not the text of a lease"):
            locks.take_over(other)
    assert locks.take_over(text).release() is True


def test_the_longest_text_fits(url: str) -> None:
    """Also with a name in which every character is escaped."""
    with holdfast.connect(url, namespace="n" * 64) as locks:
        lease = locks.semaphore('"' * 512, 65_536, permits=65_536, kind='"' * 64).acquire()
        assert lease is not None
        text = lease.hand_over()
        assert len(text) <= LONGEST_TEXT
        taken = locks.take_over(text)
        assert len(taken.slots) == 65_536
        assert taken.release() is True


def test_the_text_is_not_shown(
    url: str, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither in the log at DEBUG nor by any ``repr`` of what has it."""
    caplog.set_level(logging.DEBUG, "holdfast")
    with holdfast.connect(url, observers=[observe.Logging("DEBUG")]) as locks:
        lease = _take(locks)
        text = lease.hand_over()
        taken = locks.take_over(text)
        with pytest.raises(LockLost) as raised:
            locks.take_over(text)
        shown = [repr(lease), repr(taken), repr(read_text(text)), str(raised.value), caplog.text]
        taken.release()
    for secret in (text, text[len(PREFIX) :], read_text(text).owner):
        assert not [each for each in shown if secret in each]
    assert "".join(capsys.readouterr()) == ""


def test_a_lower_epoch_is_refused_and_a_higher_one_is_not(url: str) -> None:
    with holdfast.connect(url, epoch=1) as locks, holdfast.connect(url, epoch=2) as higher:
        lease = _take(higher)
        text = lease.hand_over()
        with pytest.raises(ValueError, match="epoch"):
            locks.take_over(text)
        assert higher.take_over(text).release() is True
        text = _take(locks).hand_over()
        taken = higher.take_over(text)
        assert taken.fence.epoch == 2
        assert taken.release() is True


def test_options_are_checked(locks: holdfast.Locks, other: holdfast.Locks) -> None:
    text = _take(locks).hand_over()
    wrong: list[dict[str, Any]] = [{"ttl": 5}, {"expire": 5}, {"renew": 1}, {"note": "n" * 2000}]
    for options in wrong:
        with pytest.raises((TypeError, ValueError)):
            other.take_over(text, **options)
    lease = other.take_over(text, renew=False, max_hold=5, note="late", timeout=1)
    assert lease.remaining <= 5
    assert lease.note == "late"
    assert lease.release() is True


def test_a_kind_is_handed_over_too(locks: holdfast.Locks, other: holdfast.Locks) -> None:
    taken = other.take_over(_take(locks, kind="order").hand_over())
    assert locks.inspect("name").kind == "order"
    assert taken.release() is True


def test_the_thread_that_took_it_over_holds_it(locks: holdfast.Locks) -> None:
    """It may take the name again after it has handed it over, and not while it holds it."""
    taken = locks.take_over(_take(locks).hand_over())
    with pytest.raises(holdfast.AlreadyHeld):
        _take(locks)
    text = taken.hand_over()
    assert locks.lock("name").acquire(blocking=False) is None
    assert locks.take_over(text).release() is True


def test_observers_are_told(url: str) -> None:
    """A hand-over is a release there, and an acquire here."""
    told: list[str] = []

    class Words(observe.Observer):
        def acquired(self, event: observe.Acquired) -> None:
            told.append(f"acquired {event.name}")

        def released(self, event: observe.Released) -> None:
            told.append(f"released {event.ours}")

        def lost(self, event: observe.Lost) -> None:
            told.append("lost")

        def cancelled(self, event: observe.Cancelled) -> None:
            told.append(f"cancelled {event.outcome}")

    with holdfast.connect(url, observers=[Words()]) as locks:
        lease = _take(locks)
        text = lease.hand_over()
        assert told == ["acquired name", "released True"]
        taken = locks.take_over(text)
        taken.release()
        with pytest.raises(LockLost):
            locks.take_over(text)
    assert told[2:] == ["acquired name", "released True", "cancelled failed"]


def _unanswered(backend: Any, word: str, *, lands: bool) -> Any:
    method = getattr(backend, word)

    async def call(*args: Any, **kwargs: Any) -> Any:
        if lands:
            await method(*args, **kwargs)
        raise BackendUnavailable("no answer came")

    return call


@pytest.mark.parametrize("lands", [True, False], ids=["landed", "lost"])
def test_a_hand_over_whose_renewal_fails_changes_nothing(
    locks: holdfast.Locks, other: holdfast.Locks, monkeypatch: pytest.MonkeyPatch, lands: bool
) -> None:
    """The lease is held and renewed as before, and can be handed over later."""
    lease, backend = _take(locks, ttl=2), locks._engine.backend
    with monkeypatch.context() as patch:
        patch.setattr(backend, "renew", _unanswered(backend, "renew", lands=lands))
        with pytest.raises(BackendUnavailable):
            lease.hand_over()
    assert lease.held
    time.sleep(2.5)
    assert lease.held
    assert other.take_over(lease.hand_over()).release() is True


@pytest.mark.parametrize("lands", [True, False], ids=["landed", "lost"])
def test_a_hand_over_of_unknown_outcome_is_undone(
    locks: holdfast.Locks, other: holdfast.Locks, monkeypatch: pytest.MonkeyPatch, lands: bool
) -> None:
    """No text was given, so the hold is of no use to any process."""
    lease, backend = _take(locks), locks._engine.backend
    reasons: list[str] = []
    lease.on_lost(reasons.append)
    monkeypatch.setattr(backend, "hand_over", _unanswered(backend, "hand_over", lands=lands))
    with pytest.raises(BackendUnavailable, match="ends with its ttl at the latest"):
        lease.hand_over()
    assert (lease.held, lease.lost) == (False, True)
    _until(lambda: reasons)
    _until(lambda: not other.inspect("name").holders)
    assert lease.release() is False


def test_a_hand_over_that_is_refused_changes_nothing(
    locks: holdfast.Locks, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(*args: object, **kwargs: object) -> None:
        raise Incompatible("another version")

    lease = _take(locks)
    monkeypatch.setattr(locks._engine.backend, "hand_over", refuse)
    with pytest.raises(Incompatible):
        lease.hand_over()
    assert lease.held
    assert lease.release() is True


def test_a_lost_lease_is_not_handed_over(locks: holdfast.Locks, other: holdfast.Locks) -> None:
    """Its reason is told, whether it is known here already or not."""
    lease = _take(locks)
    other.break_lock("name", reason="enough")
    with pytest.raises(LockLost, match="enough"):
        lease.hand_over()
    assert lease.lost
    with pytest.raises(LockLost, match="enough"):
        lease.hand_over()


def test_a_hold_that_is_lost_meanwhile_is_not_handed_over(
    locks: holdfast.Locks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its certain time ends during the request: no text is given, and the hold is undone."""
    lease, backend = _take(locks, ttl=0.2, renew=False), locks._engine.backend

    async def slow(*args: object, **kwargs: object) -> tuple[()]:
        time.sleep(0.5)
        return ()

    monkeypatch.setattr(backend, "hand_over", slow)
    with pytest.raises(LockLost):
        lease.hand_over()
    assert lease.lost


def test_the_renewer_renews_nothing_after_a_hand_over(
    locks: holdfast.Locks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also a renewal that was under way has ended before: a hand-over waits for its turn."""
    lease, backend = _take(locks, ttl=0.3), locks._renewer_thread.renewer.backend
    renewed: list[int] = []
    renew = backend.renew

    async def counted(grants: Any, *rest: Any, **how: Any) -> Any:
        renewed.append(len(grants))
        return await renew(grants, *rest, **how)

    monkeypatch.setattr(backend, "renew", counted)
    _until(lambda: renewed)
    lease.hand_over()
    count = sum(renewed)
    time.sleep(0.5)
    assert sum(renewed) == count
    assert not locks.inspect("name").holders


def test_a_hand_over_waits_for_a_renewal(
    locks: holdfast.Locks, other: holdfast.Locks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is under way could arrive after the hand-over: it must be over before."""
    lease, renewer = _take(locks, ttl=1), locks._renewer_thread.renewer
    renew, begun, go_on = renewer.backend.renew, threading.Event(), threading.Event()
    order: list[str] = []

    async def slow(*args: Any, **kwargs: Any) -> Any:
        begun.set()
        go_on.wait(SOON)
        order.append("renewed")
        return await renew(*args, **kwargs)

    monkeypatch.setattr(renewer.backend, "renew", slow)
    assert begun.wait(SOON)
    timer = threading.Timer(0.2, go_on.set)
    timer.start()
    text = lease.hand_over()
    order.append("handed over")
    assert order == ["renewed", "handed over"]
    timer.join()
    assert other.take_over(text).release() is True


@pytest.mark.parametrize("lands", [True, False], ids=["landed", "lost"])
def test_a_take_over_that_is_not_answered_is_tried_again(
    locks: holdfast.Locks, other: holdfast.Locks, monkeypatch: pytest.MonkeyPatch, lands: bool
) -> None:
    """By the same owner: one that has it already gets it."""
    text, backend = _take(locks).hand_over(), other._engine.backend
    method: Any = backend.take_over  # type: ignore[attr-defined]
    answers = [_unanswered(backend, "take_over", lands=lands), method]

    async def call(*args: Any, **kwargs: Any) -> Any:
        return await answers.pop(0)(*args, **kwargs)

    monkeypatch.setattr(backend, "take_over", call)
    taken = other.take_over(text)
    assert [each.token for each in locks.inspect("name").holders] == [taken.token]
    assert taken.release() is True


def test_a_take_over_that_is_never_answered_is_undone(
    locks: holdfast.Locks, other: holdfast.Locks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within its timeout, and what it has taken is not left behind."""
    text, backend = _take(locks).hand_over(), other._engine.backend
    with monkeypatch.context() as patch:
        patch.setattr(backend, "take_over", _unanswered(backend, "take_over", lands=True))
        began = now()
        with pytest.raises(BackendUnavailable):
            other.take_over(text, timeout=0.3)
        assert now() - began < SOON
    _until(lambda: not locks.inspect("name").holders)


def test_a_final_refusal_leaves_the_text_valid(
    locks: holdfast.Locks, other: holdfast.Locks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong password is told at once, and nothing is undone: the hold waits for its taker."""

    async def refuse(*args: object, **kwargs: object) -> None:
        raise BackendUnavailable("wrong password", final=True)

    text = _take(locks).hand_over()
    with monkeypatch.context() as patch:
        patch.setattr(other._engine.backend, "take_over", refuse)
        with pytest.raises(BackendUnavailable):
            other.take_over(text)
    time.sleep(0.2)
    assert other.take_over(text).release() is True


def test_a_cancelled_take_over_is_undone(url: str, locks: holdfast.Locks) -> None:
    async def use(text: str) -> None:
        async with holdfast.connect_async(url) as client:
            backend: Any = client._engine.backend
            method, landed = backend.take_over, asyncio.Event()

            async def slow(*args: Any, **kwargs: Any) -> None:
                await method(*args, **kwargs)
                landed.set()
                await asyncio.sleep(60)

            backend.take_over = slow
            taking = asyncio.create_task(client.take_over(text))
            await landed.wait()
            taking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await taking
            assert not run_now(locks._engine.backend.look("name")).holders

    asyncio.run(use(_take(locks).hand_over()))


def test_an_asyncio_block_goes_on_after_a_hand_over(url: str) -> None:
    """The task is not cancelled when the hold ends that it has handed over."""

    async def use() -> None:
        async with holdfast.connect_async(url) as client:
            async with client.lock("name", ttl=0.3) as lease:
                await lease.hand_over()
                await asyncio.sleep(0.6)
            assert not lease.lost

    asyncio.run(use())


def test_a_lease_of_a_lock_s_acquire_is_forgotten(locks: holdfast.Locks) -> None:
    """``Lock.release()`` finds nothing to release then."""
    lock = locks.lock("name")
    lease = lock.acquire()
    assert lease is not None
    text = lease.hand_over()
    with pytest.raises(holdfast.NotHeld):
        lock.release()
    assert locks.take_over(text).release() is True


def test_a_dropped_lease_that_was_handed_over_ends_nothing(
    locks: holdfast.Locks, other: holdfast.Locks, recwarn: pytest.WarningsRecorder
) -> None:
    text = _take(locks).hand_over()
    time.sleep(0.2)
    assert other.take_over(text).release() is True
    assert not recwarn.list
