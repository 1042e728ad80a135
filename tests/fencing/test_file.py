"""What is peculiar to guards of files: one lock for the block, and crashes at any point."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast import Fence, Incompatible, LockTimeout, Mode, NotHeld, StaleFence, Unsupported
from holdfast.fencing.file import guard


def fence(token: int, mode: Mode = Mode.EXCLUSIVE) -> Fence:
    return Fence("lock", mode, (), 0, token)


def until_somebody_waits(path: Path) -> None:
    """For the lock on the file, as the kernel tells it."""
    inode, ends = f":{path.stat().st_ino} ", time.monotonic() + 20
    while not any("->" in line and inode in line for line in open_locks()):
        assert time.monotonic() < ends, "nobody waits"
        time.sleep(0.01)


def open_locks() -> list[str]:
    return Path("/proc/locks").read_text().splitlines()


def test_its_words(tmp_path: Path) -> None:
    path = tmp_path / "ledger.json"
    with guard(path, fence(5)) as ledger:
        assert not ledger.exists()
        with pytest.raises(FileNotFoundError):
            ledger.read()
        ledger.write_text("häuser")
        assert ledger.exists()
        assert ledger.read() == "häuser".encode()
        assert not path.exists()  # not before the block has ended
    assert path.read_text() == "häuser"
    with pytest.raises(NotHeld, match="inside its block"):
        ledger.read()
    assert sorted(found.name for found in tmp_path.iterdir()) == [
        "ledger.json",
        "ledger.json.fence",
        "ledger.json.fence.lock",
    ]


def test_a_block_that_raises_writes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    path.write_text("old")

    def fail() -> None:
        with guard(path, fence(5)) as ledger:
            ledger.write_text("new")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert path.read_text() == "old"
    with pytest.raises(StaleFence):  # it had entered all the same
        guard(path, fence(4)).__enter__()


def test_one_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    with guard(path, fence(5)):
        with pytest.raises(LockTimeout, match=r"locked by another process for 0\.05 s"):
            guard(path, fence(6), timeout=0.05).__enter__()
        with pytest.raises(LockTimeout):
            guard(path, fence(6, Mode.SHARED), timeout=0).__enter__()
    with guard(path, fence(6), timeout=0):
        pass


def test_a_stale_holder_that_waited_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    outcome: list[object] = []

    def late() -> None:
        try:
            with guard(path, fence(4)) as ledger:
                ledger.write_text("stale")
        except StaleFence as error:
            outcome.append(error)

    with guard(path, fence(5)) as ledger:
        thread = threading.Thread(target=late)
        thread.start()
        until_somebody_waits(tmp_path / "ledger.fence.lock")
        assert not outcome
        ledger.write_text("fresh")
    thread.join(10)
    assert len(outcome) == 1
    assert path.read_text() == "fresh"


def test_readers_read_together(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    path.write_text("content")
    with guard(path, fence(7, Mode.SHARED), timeout=5) as first:
        with guard(path, fence(7, Mode.SHARED), timeout=5) as again:
            assert first.read_text() == again.read_text() == "content"
        with pytest.raises(Unsupported, match="as a reader"):
            first.write_text("other")
        with pytest.raises(LockTimeout):
            guard(path, fence(8), timeout=0.05).__enter__()


def test_two_names_of_one_file(tmp_path: Path) -> None:
    path, link = tmp_path / "ledger", tmp_path / "link"
    path.write_text("old")
    path.chmod(0o640)
    link.symlink_to(path)
    with guard(link, fence(5)) as ledger:
        ledger.write_text("new")
    assert link.is_symlink()
    assert path.read_text() == "new"
    assert path.stat().st_mode & 0o777 == 0o640
    with pytest.raises(StaleFence):
        guard(path, fence(4)).__enter__()


def test_a_lock_file_that_was_removed(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    lock = tmp_path / "ledger.fence.lock"
    entered: list[str] = []

    def wait() -> None:
        with guard(path, fence(6)):
            entered.append("second")

    with guard(path, fence(5)):
        thread = threading.Thread(target=wait)
        thread.start()
        until_somebody_waits(lock)
        lock.unlink()
    thread.join(10)
    assert entered == ["second"]
    assert lock.exists()


def test_a_memory_that_can_not_be_read_lets_nobody_in(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    for text in ("", "no JSON", '{"format": 2}', "[]"):
        (tmp_path / "ledger.fence").write_text(text)
        with pytest.raises(Incompatible, match="nobody is let in"):
            guard(path, fence(5)).__enter__()


def test_entered_twice(tmp_path: Path) -> None:
    guarded = guard(tmp_path / "ledger", fence(5))
    with guarded, pytest.raises(RuntimeError, match="entered already"):
        guarded.__enter__()
    with guarded:
        pass


def test_a_killed_process_leaves_the_file_free(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    program = (
        "import sys, time\nfrom holdfast.fencing.file import guard\n"
        f"with guard({str(path)!r}, {str(fence(5))!r}) as file:\n"
        "    file.write_text('half'); print('in', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"in\n"
        process.kill()
    with guard(path, fence(6), timeout=5) as ledger:
        assert not ledger.exists()


CALLS = ("open", "write", "fsync", "close", "replace", "fchmod", "fchown")


def crash_at(number: int, path: Path, monkeypatch: Any) -> bool:
    """Runs a whole block in a child that dies before its n-th call; whether it came to its end."""
    child = os.fork()
    if child == 0:
        left = [number]

        def dying(real: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **options: Any) -> Any:
                left[0] -= 1
                if left[0] == 0:
                    if real is write and len(args[1]) > 1:  # in the middle of a write
                        write(args[0], bytes(args[1])[: len(args[1]) // 2])
                    os._exit(9)
                return real(*args, **options)

            return call

        write = os.write
        for name in CALLS:
            setattr(os, name, dying(getattr(os, name)))
        code = 1
        try:
            with guard(path, fence(7)) as ledger:
                ledger.write_text("new" * 1000)
            code = 0
        finally:
            os._exit(code)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, 9)
    return status == 0


def test_a_crash_at_any_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The n-th call never comes back, n = 1, 2, 3 … until the block is whole: what is found then
    is the old content or the new, the memory is intact, and whoever entered stays entered."""
    number, done, seen = 0, False, set()
    while not done:
        number += 1
        folder = tmp_path / str(number)
        folder.mkdir()
        path = folder / "ledger"
        with guard(path, fence(6)) as ledger:
            ledger.write_text("old")
        done = crash_at(number, path, monkeypatch)
        with guard(path, fence(7), timeout=5) as ledger:
            content = ledger.read_text()
            assert content in ("old", "new" * 1000)
            seen.add(content)
            ledger.write_text(content + "!")
        assert path.read_text() == content + "!"
        with pytest.raises(StaleFence):
            guard(path, fence(6)).__enter__()
    assert seen == {"old", "new" * 1000}
    assert number > 10
