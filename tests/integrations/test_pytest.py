"""The pytest plugin in real test runs, with xdist workers that are killed: duplicates without us,
none with us."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

import holdfast
from holdfast.testing.virtual import LockFaults, VirtualClock
from integrations.processes import Fleet, Journal, Line, eventually, fleet
from servers.redis import RedisServer

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "test-with-pytest.md"
PLAIN = ["-q", "-p", "no:cacheprovider", "--strict-markers"]
OURS = ["-p", "holdfast.integrations.pytest"]
XDIST = ["-p", "xdist", "-n"]

HEAD = """
import os, signal, time
from pathlib import Path
import pytest
from holdfast.integrations.pytest import shared_fixture

def write(*words):
    with Path(os.environ["JOURNAL"]).open("a") as file:
        file.write(" ".join(map(str, [time.time(), os.getpid(), *words])) + "\\n")

def seen(*words):
    lines = [line.split()[2:] for line in Path(os.environ["JOURNAL"]).read_text().splitlines()]
    return lines.count([str(word) for word in words])

def until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)

def die():
    write("killed")
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Fleet]:
    """Test runs, with a local store of their own; no variable of the run around them is left."""
    with fleet(tmp_path, XDG_STATE_HOME=str(tmp_path / "state")) as processes:
        for name in list(processes.environment):
            if name.startswith(("PYTEST_", "HOLDFAST_")):
                del processes.environment[name]
        for name in ("CI", "BUILD_NUMBER"):  # with either one pytest prints longer summaries
            processes.environment.pop(name, None)
        # Other plugins that happen to be installed take longer to import than the tests do.
        processes.environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
        yield processes


def start(runs: Fleet, name: str, suite: str, *options: str) -> subprocess.Popen[bytes]:
    folder = runs.folder / name
    folder.mkdir(exist_ok=True)
    (folder / "test_suite.py").write_text(HEAD + suite)
    (folder / "pytest.ini").write_text("[pytest]\nholdfast_ttl = 6\n")
    return runs.start(["-m", "pytest", *PLAIN, *OURS, *options, str(folder)])


def finished(runs: Fleet, run: subprocess.Popen[bytes]) -> str:
    """What the run has printed."""
    run.wait(150)
    return (runs.folder / f"log-{runs.processes.index(run)}").read_text()


def most_at_once(lines: Iterable[Line], name: str) -> int:
    """How many tests were between "begin NAME" and "end NAME", or their death, at a time."""
    inside: set[int] = set()
    most = 0
    for line in lines:
        if line.what == "begin" and line.words == (name,):
            inside.add(line.pid)
        elif line.what == "killed" or (line.what == "end" and line.words == (name,)):
            inside.discard(line.pid)
        most = max(most, len(inside))
    return most


def counted(journal: Journal) -> Counter[str]:
    return Counter(line.what for line in journal.lines())


SHARED = """
@pytest.fixture(scope="session")
def plain():
    write("plain-made")

@shared_fixture(teardown=lambda value: write("outer-ended", value["number"]))
def outer():
    write("outer-made")
    return {"number": 7}

@shared_fixture(teardown=lambda value: write("inner-ended", value))
def inner(outer):
    write("inner-made")
    return outer["number"] + 1

@pytest.mark.parametrize("number", range(6))
def test_uses_both(number, plain, inner, outer):
    write("used")
    assert (inner, outer) == (8, {"number": 7})

def test_uses_one(outer):
    write("used")
"""


def test_a_session_fixture_is_set_up_by_each_worker_and_a_shared_one_once(runs: Fleet) -> None:
    output = finished(runs, start(runs, "shared", SHARED, *XDIST, "2"))
    assert "7 passed" in output
    seen = counted(runs.journal)
    assert seen["plain-made"] == 2
    assert seen["outer-made"] == seen["inner-made"] == 1
    assert seen["outer-ended"] == seen["inner-ended"] == 1
    order = [line.what for line in runs.journal.lines("used", "inner-ended", "outer-ended")]
    assert order == ["used"] * 7 + ["inner-ended", "outer-ended"]


FAILING = """
def fail(value):
    write("failed")
    raise ValueError("can't drop it")

@shared_fixture(teardown=lambda value: write("ended"))
def first():
    write("made")

@shared_fixture(teardown=fail)
def second(first):
    write("made")

@pytest.mark.parametrize("number", range(4))
def test_uses(number, second):
    pass
"""


@pytest.mark.parametrize("options", [(), (*XDIST, "2")], ids=["alone", "xdist"])
def test_a_run_that_fails_to_tear_down_fails(runs: Fleet, options: tuple[str, ...]) -> None:
    """Once, and the others are torn down all the same, in the reverse order."""
    run = start(runs, "failing", FAILING, *options)
    output = finished(runs, run)
    assert run.returncode == pytest.ExitCode.TESTS_FAILED
    assert output.count("the teardown of a shared fixture failed") == 1
    assert "ValueError: can't drop it" in output
    assert [line.what for line in runs.journal.lines()] == ["made", "made", "failed", "ended"]


LATE = """
@shared_fixture(teardown=lambda value: write("ended"))
def resource():
    write("made")

def test_early(resource):
    write("used")

def test_late(request):
    until(lambda: seen("used"))
    deadline = time.monotonic() + 3
    while not seen("ended") and time.monotonic() < deadline:
        time.sleep(0.02)
    request.getfixturevalue("resource")
    write("used")
"""


def test_a_worker_that_is_done_early_is_not_the_last(runs: Fleet) -> None:
    output = finished(runs, start(runs, "late", LATE, *XDIST, "2"))
    assert "2 passed" in output
    assert [line.what for line in runs.journal.lines()] == ["made", "used", "used", "ended"]


KILLED = """
@shared_fixture(teardown=lambda value: write("whole-ended", value))
def whole():
    write("whole-made")
    return os.getpid()

@shared_fixture(teardown=lambda value: write("half-ended", value))
def half(whole):
    write("half-begun")
    if seen("half-begun") == 1:
        die()
    write("half-made")
    return os.getpid()

@pytest.mark.parametrize("number", range(4))
def test_half(number, half):
    pass

@pytest.mark.parametrize("number", range(8))
def test_whole(number, whole):
    until(lambda: seen("killed"))
    if whole == os.getpid() and seen("killed") < 2:
        die()
"""


def test_workers_that_are_killed_while_they_set_up_and_use(runs: Fleet) -> None:
    """The set-up is taken over, and what was made is ended once, by a worker that lives. A worker
    in the place of a killed one may come when the others have left: then it begins again."""
    output = finished(runs, start(runs, "killed", KILLED, *XDIST, "3", "--max-worker-restart=9"))
    assert "crashed" in output
    seen, killed = counted(runs.journal), {line.pid for line in runs.journal.lines("killed")}
    assert seen["half-begun"] == seen["half-made"] + 1
    assert seen["half-made"] == seen["half-ended"] > 0
    wholes = runs.journal.lines("whole-made", "whole-ended")
    rounds = len(wholes) // 2
    assert [line.what for line in wholes] == ["whole-made", "whole-ended"] * rounds
    assert 1 <= rounds <= 2
    assert not killed & {line.pid for line in runs.journal.lines("half-ended", "whole-ended")}
    halves = runs.journal.lines("half-made", "half-ended", "whole-ended")
    orders = [line.what for line in halves]
    assert orders[orders.index("half-made") :][:3] == ["half-made", "half-ended", "whole-ended"]


MARKED = """
@pytest.mark.parametrize("number", range(2))
def test_naive(number):
    write("begin", "naive")
    until(lambda: seen("begin", "naive") > 1)  # another one begins before this one ends
    write("end", "naive")

@pytest.mark.lock("gpu")
@pytest.mark.parametrize("number", range(3))
def test_one(number):
    write("begin", "one")
    if "KILL" in os.environ and number == 0:
        die()
    time.sleep(0.2)
    write("end", "one")

@pytest.mark.lock("licence", limit=2)
@pytest.mark.parametrize("number", range(4))
def test_two(number):
    write("begin", "two")
    time.sleep(0.2)
    write("end", "two")
"""


def test_a_mark_holds_between_workers_and_between_runs(runs: Fleet) -> None:
    first = start(runs, "first", MARKED, *XDIST, "2")
    runs.environment["KILL"] = "yes"
    second = start(runs, "second", MARKED, *XDIST, "2")
    assert "9 passed" in finished(runs, first)
    output = finished(runs, second)
    assert "1 failed, 8 passed" in output
    assert "crashed" in output
    lines = runs.journal.lines()
    assert most_at_once(lines, "naive") > 1
    assert most_at_once(lines, "one") == 1
    assert most_at_once(lines, "two") <= 2


PAUSED = """
@shared_fixture(teardown=lambda value: write("ended", value))
def resource():
    write("made")
    return 7

@pytest.mark.lock("gpu")
def test_it(resource):
    write("begin", "it")
    until(lambda: seen("finish"))
    write("end", "it")
"""


def test_a_run_that_is_paused_past_its_ttl_is_told(runs: Fleet) -> None:
    """Another run has the lock meanwhile; the test that was not alone fails."""
    first = start(runs, "first", PAUSED)
    eventually("the test", lambda: len(runs.journal.lines("begin")) == 1)
    first.send_signal(signal.SIGSTOP)
    try:
        second = start(runs, "second", PAUSED)
        eventually("the other test", lambda: len(runs.journal.lines("begin")) == 2)
    finally:
        first.send_signal(signal.SIGCONT)
    with runs.journal.path.open("a") as file:
        file.write("0 0 finish\n")
    assert "1 passed" in finished(runs, second)
    output = finished(runs, first)
    assert "1 passed, 1 error" in output
    assert "LockLost: 'gpu'" in output


def test_a_store_that_is_restarted_costs_nothing(runs: Fleet) -> None:
    """The locks and values of test runs on several machines are on a server."""
    with RedisServer(persist=True) as store:
        options = ("--holdfast-url", store.url)
        first = start(runs, "first", PAUSED, *options)
        eventually("the test", lambda: len(runs.journal.lines("begin")) == 1)
        second = start(runs, "second", PAUSED, *options)
        with holdfast.connect(store.url, namespace="pytest") as other:
            eventually("the other one waits", lambda: other.inspect("gpu").waiters)
        store.restart()
        with runs.journal.path.open("a") as file:
            file.write("0 0 finish\n")
        for run in (first, second):
            assert "1 passed" in finished(runs, run)
            assert run.returncode == 0
    order = [line.what for line in runs.journal.lines("begin", "end")]
    assert order == ["begin", "end"] * 2, "not exclusive"
    assert counted(runs.journal)["made"] == counted(runs.journal)["ended"] == 2


WRONG = """
@pytest.fixture
def kept():
    return []

def test_leak(locks, kept, request):
    request.config.kept = locks.lock("order:42").acquire()  # the leak

def test_leak_in_virtual_time(locks, lock_time, request):
    request.config.kept = locks.lock("order:43").acquire()

@pytest.mark.lock("gpu", size=2)
def test_misspelt():
    pass

@pytest.mark.lock
def test_nameless():
    pass

@pytest.mark.lock("gpu", limit=2)
@pytest.mark.lock("gpu", limit=3)
def test_two_limits():
    pass

@pytest.mark.lock("gpu")
@pytest.mark.skip
def test_skipped():
    pass

@pytest.fixture
def held():
    import holdfast
    with holdfast.connect("local", namespace="pytest") as other, other.lock("gpu", note="us"):
        yield

@pytest.fixture(scope="module")
def held_before():
    import holdfast
    with holdfast.connect("local", namespace="pytest") as other, other.lock("busy", note="us"):
        yield

def test_takes_it(held_before):
    pass

@pytest.mark.lock("busy", timeout=0)
def test_busy():
    pass

@pytest.mark.lock("broken")
def test_loses_it():
    import holdfast
    with holdfast.connect("local", namespace="pytest") as other:
        other.break_lock("broken", reason="a test")
"""


def test_what_is_wrong_is_told(runs: Fleet) -> None:
    output = finished(runs, start(runs, "wrong", WRONG, "-W", "error"))
    leak = (HEAD + WRONG).split("\n").index(next(x for x in WRONG.split("\n") if "the leak" in x))
    assert re.search(rf"still held .*'order:42' \(acquired at .*test_suite.py:{leak + 1}\)", output)
    assert "'order:43' (acquired at" in output
    takes = r"mark.lock takes lock\(name, limit=None, timeout=None\)\. A mark of your own"
    assert len(re.findall(takes, output)) == 2
    assert "_Wanted" not in output
    assert "two marks for 'gpu' differ in their limit" in output
    assert re.search("'busy' on sqlite.* was not acquired at once: held by .*note 'us'", output)
    assert "LockLost: 'broken'" in output
    assert "4 passed, 1 skipped, 7 errors" in output


OWN_MARK = """
@pytest.mark.lock
def test_bare():
    pass

@pytest.mark.lock(7, door="front")
def test_other_arguments():
    pass

@pytest.mark.lock(7)
def test_another_name():
    pass

@pytest.mark.lock("gpu", timeout=0)
def test_of_the_plugin():
    import holdfast
    with holdfast.connect("local", namespace="pytest") as other:
        assert other.inspect("gpu").holders
"""


@pytest.mark.parametrize("line", ["lock", "lock: closes the door", "lock(key): closes it"])
def test_a_mark_of_the_project_with_other_arguments_is_left_alone(runs: Fleet, line: str) -> None:
    run = start(runs, "own", OWN_MARK, "-o", f"markers={line}")
    assert "4 passed" in finished(runs, run)


def test_a_suite_that_does_not_use_it_loads_nothing(tmp_path: Path) -> None:
    suite = (
        "import sys\n"
        "def test_nothing_is_loaded():\n"
        "    loaded = {m for m in sys.modules if m.split('.')[0] == 'holdfast'}\n"
        "    assert loaded == {'holdfast', 'holdfast.errors', 'holdfast.integrations',"
        " 'holdfast.integrations.pytest'}\n"
    )
    (tmp_path / "test_light.py").write_text(suite)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    slow = ("hypothesispytest", "anyio", "faker", "celery", "xdist", "timeout")
    without = [word for name in slow for word in ("-p", f"no:{name}")]
    command = [sys.executable, "-m", "pytest", *PLAIN, *without, str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert "1 passed" in run.stdout, run.stdout


def charge(locks: holdfast.Locks, ledger: list[str], timeout: float = 1) -> None:
    """What a user tests: it must not book after its lock was lost."""
    with locks.lock("order:42", timeout=timeout) as lease:
        ledger.append("asked the bank")
        lease.check()
        ledger.append("booked")


def test_fixtures_of_the_plugin_in_this_run(
    locks: holdfast.Locks, lock_time: VirtualClock, lock_faults: LockFaults
) -> None:
    ledger: list[str] = []
    charge(locks, ledger)
    assert ledger == ["asked the bank", "booked"]
    with lock_faults.busy("order:42"), pytest.raises(holdfast.LockTimeout):
        charge(locks, ledger, timeout=5)
    assert 5 <= lock_time.now() < 6


@pytest.mark.anyio
async def test_asyncio_fixtures_of_the_plugin_in_this_run(
    async_locks: holdfast.AsyncLocks, lock_faults: LockFaults, anyio_backend: str
) -> None:
    import asyncio

    with pytest.raises(holdfast.LockLost):  # noqa: PT012
        async with async_locks.lock("order:42"):
            lock_faults.expire("order:42")
            await asyncio.sleep(60)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def printed(heading: str) -> str:
    """The Python program of the guide behind a line such as `test_shop.py`:"""
    found = re.search(
        rf"^{heading}\n\n```python\n(.*?)^```", GUIDE.read_text(), re.MULTILINE | re.DOTALL
    )
    assert found is not None
    return found[1]


SHARED_IN_THE_GUIDE = """
@pytest.mark.parametrize("number", range(4))
@pytest.mark.lock("licence-server", timeout=600)
def test_database(number, database):
    assert database["name"].startswith("test_")
"""


def test_the_programs_of_the_guide(runs: Fleet) -> None:
    """As they are printed; two commands stand for those of PostgreSQL."""
    folder = runs.folder / "guide"
    folder.mkdir()
    for name in ("createdb", "dropdb"):
        (runs.folder / name).write_text(f'#!/bin/sh\necho "0 0 {name} $1" >> "$JOURNAL"\n')
        (runs.folder / name).chmod(0o755)
    runs.environment["PATH"] = f"{runs.folder}:{os.environ['PATH']}"
    (folder / "shop.py").write_text(printed("`shop.py`:"))
    (folder / "test_shop.py").write_text(printed("`test_shop.py`:"))
    shared = printed("## One set-up for all xdist workers")
    run = start(runs, "guide", shared + SHARED_IN_THE_GUIDE, *XDIST, "2")
    assert "9 passed" in finished(runs, run)
    assert [line.what for line in runs.journal.lines()] == ["createdb", "dropdb"]
