"""Processes that stop, die, fork or lose their disk while they use the embedded store."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import pytest

import holdfast
from holdfast.claim import Busy, Grant, Mode
from holdfast.core.drive import run_now
from holdfast.core.renewer import Renewer
from holdfast.errors import BackendUnavailable
from holdfast.io.clock import now
from holdfast.stores.sqlite.backend import SHORT_MICROSECONDS, SqliteBackend
from holdfast.stores.sqlite.file import StoreFile
from holdfast.testing.stalls import Stalls
from stores.sqlite.helpers import Program, backend_of, claim, expire, grant, take, try_to_take

IN_A_TRANSACTION = """
with backend_of(path) as backend:
    take(backend, claim("name"))
    backend._connection._database.execute("BEGIN IMMEDIATE")
    backend._connection._database.execute("UPDATE name SET token = 9000000000000000000")
    print("inside", flush=True)
    input()
"""
HOLDER = """
with backend_of(path) as backend:
    print(take(backend, claim(ttl=0.5)).token, flush=True)
    input()
"""


def test_a_process_stopped_in_a_transaction_is_named(tmp_path: Path) -> None:
    path = tmp_path / "locks.db"
    with backend_of(path, request_seconds=0.2) as backend, Program(path, IN_A_TRANSACTION) as other:
        assert other.says() == "inside"
        other.process.send_signal(signal.SIGSTOP)
        with pytest.raises(BackendUnavailable) as caught:
            take(backend, claim("another name"))
        assert str(path) in str(caught.value)
        assert str(other.process.pid) in str(caught.value)
        assert isinstance(run_now(backend.look("name")).holders, tuple)  # reading goes on
        other.kill()
        take(backend, claim("another name"))


def test_a_process_killed_in_a_transaction_leaves_no_trace(tmp_path: Path) -> None:
    path = tmp_path / "locks.db"
    with backend_of(path) as backend:
        with Program(path, IN_A_TRANSACTION) as other:
            assert other.says() == "inside"
        assert isinstance(try_to_take(backend, claim(), join=False), Busy)
        tokens = run_now(backend.revoke("name"))
        assert tokens[0] < take(backend).token < 9e18


def test_a_killed_holder_blocks_until_its_ttl_is_over(tmp_path: Path) -> None:
    path = tmp_path / "locks.db"
    with backend_of(path) as backend:
        with Program(path, HOLDER) as holder:
            token = int(holder.says())
        asked = claim()
        answer = try_to_take(backend, asked)
        while isinstance(answer, Busy):
            assert answer.retry_seconds is not None
            assert answer.retry_seconds <= 0.5
            run_now(backend.wait(asked, answer, now() + answer.retry_seconds + 0.01))
            answer = try_to_take(backend, asked)
        assert answer.token > token


def test_a_renewal_gives_up_in_time(tmp_path: Path) -> None:
    path = tmp_path / "locks.db"
    with backend_of(path) as backend:
        held = take(backend)
        with Program(path, IN_A_TRANSACTION.replace('claim("name")', 'claim("other")')) as other:
            assert other.says() == "inside"
            started = now()
            with Stalls() as stalls, pytest.raises(BackendUnavailable):
                run_now(backend.renew([held], [], until=started + 0.2))
            assert now() - started - stalls.seconds < 4  # request_seconds are five
        assert not run_now(backend.renew([held], [], until=now() + 5)).lost


def locked_by(path: Path, pid: int) -> bool:
    """Whether the process has a lock on the file, by /proc/locks."""
    inode = str(path.stat().st_ino)
    for line in Path("/proc/locks").read_text().splitlines():
        fields = line.split()
        if fields[5].endswith(f":{inode}") and fields[4] == str(pid):
            return True
    return False


FORK = """
with backend_of(path) as backend, backend_of(path) as renewer:
    asked, held = claim(), take(backend)
    try_to_take(backend, asked)
    run_now(renewer.look("name"))
    go_on, tell = os.pipe()                      # of two readers of one input either may be first
    child = os.fork()
    if child == 0:
        backend.forget(); renewer.forget()
        mine = take(backend, claim("the child's"))
        print(os.getpid(), flush=True)
        os.read(go_on, 1)                        # the parent closes the file in between
        run_now(backend.release(mine))
        print(take(backend, claim("the child's")).token > mine.token, flush=True)
        print(isinstance(try_to_take(backend, claim("the other's"), join=False), Grant), flush=True)
        os.read(go_on, 1)
        os._exit(0)
    sys.stdin.readline()
    print(run_now(backend.release(held)), flush=True)
    take(backend, asked)
print("closed", flush=True)
for _ in range(2):
    sys.stdin.readline()
    os.write(tell, b"x")
os.waitpid(child, 0)
"""


def test_a_forked_child_has_locks_of_its_own(tmp_path: Path) -> None:
    """A connection that shares SQLite's record of the parent's locks would lose its writes."""
    path = tmp_path / "locks.db"
    with Program(path, "from holdfast.claim import Grant\n" + FORK) as program:
        child = int(program.says())
        assert locked_by(path, child)
        assert locked_by(path, program.process.pid)
        program.go_on()
        assert [program.says(), program.says()] == ["True", "closed"]
        assert not locked_by(path, program.process.pid)
        with backend_of(path) as other:
            take(other, claim("the other's"))
            program.go_on()
            assert [program.says(), program.says()] == ["True", "False"]
            # The writes of the child, after its parent had closed the file, are there.
            assert isinstance(try_to_take(other, claim("the child's")), Busy)
        program.go_on()
        assert program.process.wait(30) == 0


def test_forks_amid_requests_of_other_threads(tmp_path: Path) -> None:
    """Whatever the threads do, the file works in the child and still works in the parent."""
    path = tmp_path / "locks.db"
    stop = threading.Event()

    def work(backend: SqliteBackend) -> None:
        while not stop.is_set():
            assert run_now(backend.release(take(backend, claim(str(threading.get_ident())))))

    with backend_of(path) as backend:
        threads = [threading.Thread(target=work, args=(backend,)) for _ in range(2)]
        for thread in threads:
            thread.start()
        codes = []
        for number in range(20):
            child = os.fork()
            if child == 0:
                try:
                    backend.forget()
                    take(backend, claim(f"child {number}"))
                    os._exit(0)
                finally:
                    os._exit(1)
            codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        stop.set()
        for thread in threads:
            thread.join()
        assert codes == [0] * 20
        assert len(run_now(backend.survey("child", None, 100)).infos) == 20


@pytest.mark.filterwarnings(
    "ignore:.*was never awaited", "ignore::pytest.PytestUnraisableExceptionWarning"
)
def test_an_interrupt_in_a_request_leaves_no_lock_behind(tmp_path: Path) -> None:
    """Many signals whose handler raises: the write lock of the file is always released."""
    path = tmp_path / "locks.db"

    class Interrupt(Exception):
        pass

    def strike(*_: object) -> None:
        raise Interrupt

    before = signal.signal(signal.SIGALRM, strike)
    struck = 0
    with backend_of(path) as backend, backend_of(path) as other:
        take(other, claim("other"))
        assert run_now(backend.release(take(backend)))
        try:
            for _ in range(1500):
                try:
                    signal.setitimer(signal.ITIMER_REAL, random.uniform(0.00001, 0.0004))
                    answer = try_to_take(backend, claim(ttl=0.05), join=False)
                    if isinstance(answer, Grant):
                        run_now(backend.release(answer))
                    signal.setitimer(signal.ITIMER_REAL, 0)
                except Interrupt:
                    struck += 1
        finally:
            signal.signal(signal.SIGALRM, before)
        assert struck > 100
        assert run_now(other.revoke("other"))  # no transaction is left open
        take(other, claim("other"))
        assert run_now(backend.look("other")).holders
        assert run_now(backend.release(take(backend, claim("after"))))


def test_a_signal_handler_may_use_the_store(tmp_path: Path) -> None:
    """It runs in the middle of a request of the same thread, and must not deadlock."""
    path = tmp_path / "locks.db"
    said: list[bool | None] = []
    with backend_of(path) as backend:

        def strike(*_: object) -> None:
            signal.setitimer(signal.ITIMER_REAL, 0)
            said.append(run_now(backend.release(take(backend, claim("handler")))))
            signal.setitimer(signal.ITIMER_REAL, 0.0005)

        assert run_now(backend.release(take(backend)))
        before = signal.signal(signal.SIGALRM, strike)
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.0005)
            until = time.monotonic() + 30
            while len(said) <= 50 and time.monotonic() < until:
                held = take(backend)
                assert run_now(backend.record(held, "value", 60))
                assert run_now(backend.release(held))
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        assert len(said) > 50
        assert run_now(backend.release(take(backend, claim("after"))))


def remove(path: Path) -> None:
    """Removes the file and its log, as a clean-up would."""
    for file in path.parent.glob(f"{path.name}*"):
        if file.is_file():
            file.unlink()


def test_a_file_that_was_removed_is_noticed_by_every_request(tmp_path: Path) -> None:
    """A client that goes on with a removed file would hold locks that no other client sees."""
    path = tmp_path / "locks.db"
    with backend_of(path) as backend:
        held = take(backend)
        shared = take(backend, claim("shared", Mode.SHARED))
        remove(path)
        with backend_of(path) as other:
            assert take(other).token > held.token
            assert isinstance(try_to_take(backend, claim()), Busy)
            lost = run_now(backend.renew([held, shared], [], until=now() + 5)).lost
            assert set(lost) == {held.claim.owner, shared.claim.owner}
            assert "removed or replaced" in lost[held.claim.owner]


@pytest.mark.parametrize("mode", [Mode.EXCLUSIVE, Mode.SHARED])
def test_nothing_is_granted_in_a_file_that_is_being_replaced(tmp_path: Path, mode: Mode) -> None:
    """During the request: its answer counts only in the file at the path."""
    path = tmp_path / "locks.db"
    with backend_of(path) as backend, backend_of(path) as other:
        run_now(backend.look("name"))
        connection = backend._connection._database
        assert connection is not None

        def strike(statement: str) -> None:
            if statement.startswith("INSERT") and not taken:
                remove(path)
                taken.append(take(other))

        taken: list[Grant] = []
        connection.set_trace_callback(strike)
        assert isinstance(try_to_take(backend, claim(mode=mode)), Busy)
        assert len(taken) == 1


def test_a_release_in_a_removed_file_returns_false(tmp_path: Path) -> None:
    path = tmp_path / "locks.db"
    with backend_of(path) as backend:
        held = take(backend)
        long = held._replace(token=held.token - SHORT_MICROSECONDS)  # tokens follow the clock
        remove(path)
        assert not run_now(backend.release(long))


def test_a_hold_is_not_valid_in_a_copy_of_its_file(tmp_path: Path) -> None:
    """A restored backup may have a hold of a name that others have held since."""
    path = tmp_path / "locks.db"
    with backend_of(path) as backend:
        held = take(backend)
        assert backend.glance([held]) == {}
    subprocess.run(["cp", "-p", path, f"{path}.copy"], check=True)
    Path(f"{path}.copy").replace(path)
    with backend_of(path) as backend:
        assert isinstance(try_to_take(backend, claim()), Busy)  # the copy has it
        assert list(backend.glance([held])) == [held.claim.owner]
        assert held.claim.owner in run_now(backend.renew([held], [], until=now() + 5)).lost


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere no file can be pinned")
def test_the_inode_number_of_a_removed_file_is_not_reused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new file would pass for the old one, and the loss of its holds would not be noticed."""
    path = tmp_path / "locks.db"
    in_use: list[bool] = []
    make = StoreFile._make_file

    def watched(file: StoreFile) -> None:
        in_use.append(number in numbers_in_use())
        make(file)

    with backend_of(path) as backend:
        held = take(backend)
        number = path.stat().st_ino
        remove(path)
        monkeypatch.setattr(StoreFile, "_make_file", watched)
        take(backend, claim("another name"))
        assert in_use == [True]
        assert list(backend.glance([held])) == [held.claim.owner]
        assert number not in numbers_in_use()


def numbers_in_use() -> set[int]:
    """The inode numbers of the files that this process has open."""
    numbers = set()
    for handle in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            numbers.add(os.fstat(int(handle.name)).st_ino)
    return numbers


NOTICED_SECONDS = 3.0  # the page promises about one second


def until_lost(lease: holdfast.Lease | holdfast.AsyncLease) -> float:
    """How long it took, without the time that this machine stalled."""
    started = now()
    with Stalls() as stalls:
        while lease.held and now() < started + 20:
            time.sleep(0.01)
    assert "removed or replaced" in lease.reason
    return now() - started - stalls.seconds


def until_it_sleeps(renewer: Renewer) -> None:
    """Waits until the renewer has nothing due for long, which may also look so during a round."""
    started, seen = now(), 0
    while seen < 50:
        assert now() < started + 20
        seen = seen + 1 if renewer.planned > now() + NOTICED_SECONDS + 1 else 0
        time.sleep(0.01)


def test_a_holder_that_asks_for_nothing_notices_too(tmp_path: Path) -> None:
    """Long before its renewal is due, also if the renewer planned to sleep longer."""
    path = tmp_path / "folder" / "locks.db"
    with holdfast.connect(f"sqlite://{path}", ttl=60) as locks:
        with locks.lock("first"):
            pass
        until_it_sleeps(locks._engine.renewer)
        lease = locks.lock("name").acquire()
        assert lease
        remove(path)
        assert until_lost(lease) < NOTICED_SECONDS
    with holdfast.connect(f"sqlite://{path}", ttl=60) as locks, locks.lock("name"):
        pass


def test_a_holder_in_asyncio_that_asks_for_nothing_notices_too(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "locks.db"

    async def hold() -> float:
        async with holdfast.connect_async(f"sqlite://{path}", ttl=60) as locks:
            lease = await locks.lock("name").acquire()
            assert lease
            remove(path)
            return await asyncio.to_thread(until_lost, lease)

    assert asyncio.run(hold()) < NOTICED_SECONDS


DISK_FULL = """
import subprocess, sys
from pathlib import Path
from stores.sqlite.helpers import *
from holdfast.core.drive import run_now
from holdfast.io.clock import now
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", sys.argv[1]], check=True)
path, ballast = Path(sys.argv[1]) / "folder" / "locks.db", Path(sys.argv[1]) / "ballast"

def fill():
    with ballast.open("ab", buffering=0) as file:
        for size in (65536, 4096, 1):
            try:
                while file.write(b"x" * size): pass
            except OSError: pass

if sys.argv[2] == "new":
    fill()
    try:
        with backend_of(path) as backend: take(backend)
    except Exception as error: print(type(error).__name__, error)
    ballast.unlink()
    with backend_of(path) as backend: print("then", take(backend).token > 0)
else:
    with backend_of(path) as backend:
        held = take(backend)
        fill()
        for _ in range(300):
            assert not run_now(backend.renew([held], [], until=now() + 5)).lost
        print("renewed", run_now(backend.release(held)))
        taken = 0
        try:
            for number in range(10000): taken = take(backend, claim(f"name-{number}")).token
        except Exception as error: print(type(error).__name__, error)
        ballast.unlink()
        print("then", take(backend, claim("name-9999")).token > taken)
"""


def on_a_small_disk(folder: Path, case: str) -> list[str]:
    enter = ["unshare", "-m"] if os.geteuid() == 0 else ["unshare", "-rm"]
    done = subprocess.run(
        [*enter, sys.executable, "-c", DISK_FULL, str(folder), case],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_full_disk_says_so_and_recovers(tmp_path: Path) -> None:
    refused, then = on_a_small_disk(tmp_path, "new")
    assert refused.split()[0] in ("BackendUnavailable", "Unsupported")
    assert "disk is full" in refused
    assert then == "then True"


def test_on_a_full_disk_holds_are_renewed_and_released(tmp_path: Path) -> None:
    renewed, refused, then = on_a_small_disk(tmp_path, "used")
    assert renewed == "renewed True"
    assert refused.startswith("BackendUnavailable")
    assert "disk is full" in refused
    assert then == "then True"


def test_grants_are_idempotent_by_owner(tmp_path: Path) -> None:
    with backend_of(tmp_path / "locks.db") as backend:
        asked = claim()
        first = grant(try_to_take(backend, asked))
        assert grant(try_to_take(backend, asked)) == first
        expire(backend)
        assert grant(try_to_take(backend, asked)).token > first.token


def test_a_release_that_fails_while_it_is_written_is_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The row may have been changed: the second try finds nothing, which says nothing."""
    with backend_of(tmp_path / "locks.db") as backend:
        grant = take(backend)
        connection = backend._connection
        change = connection.change

        def fail(*given: Any, **options: Any) -> NoReturn:
            change(*given, **options)
            error = sqlite3.OperationalError("disk I/O error")
            error.sqlite_errorcode = sqlite3.SQLITE_IOERR
            raise error

        monkeypatch.setattr(connection, "change", fail)
        assert run_now(backend.release(grant)) is None
        monkeypatch.undo()
        assert take(backend).token > grant.token


@pytest.mark.parametrize("late", ["abandon", "attempt", "release"])
def test_a_request_after_close_leaves_no_file_open(tmp_path: Path, late: str) -> None:
    """As by a thread that undoes its acquire while another one closes the client."""
    path = tmp_path / "locks.db"
    with backend_of(path) as backend:
        held = take(backend)
    requests: dict[str, Callable[[], Coroutine[Any, Any, object]]] = {
        "abandon": lambda: backend.abandon(held.claim),
        "attempt": lambda: backend.attempt(held.claim, join=False),
        "release": lambda: backend.release(held),
    }
    assert run_now(requests[late]()) is not False
    assert [name for name in _open_files() if name.startswith(str(path))] == []
    assert backend._connection._database is None


def _open_files() -> list[str]:
    names = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            names.append(str(descriptor.readlink()))
    return names
