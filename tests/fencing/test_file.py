"""What is peculiar to guards of files: one lock for the block, and crashes at any point."""

from __future__ import annotations

import os
import stat
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
from holdfast.fencing.file_lock import FileLock


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
    memory = '{"format": 1, "name": "lock", "writer": %s, "highest": [0, 1], "slots": {}}'
    broken = [memory % stamp for stamp in ('["a", "b"]', "[0, 1.5]", "[0, 1, 2]", "null", "[0]")]
    for text in ("", "no JSON", '{"format": 2}', "[]", "[" * 100_000, "\xff", *broken):
        (tmp_path / "ledger.fence").write_text(text, encoding="latin-1")
        with pytest.raises(Incompatible, match="so it refuses all"):
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


@pytest.mark.parametrize(
    ("umask", "mode", "lock", "kept"),
    [
        (0o022, 0o600, 0o600, 0o600),
        (0o022, 0o644, 0o600, 0o644),
        (0o077, 0o660, 0o660, 0o660),
        (0o000, 0o640, 0o600, 0o640),
        (0o022, None, 0o600, 0o644),
        (0o002, None, 0o660, 0o664),
    ],
)
def test_who_may_write_the_file_may_lock_it_and_nobody_else(
    tmp_path: Path, umask: int, mode: int | None, lock: int, kept: int
) -> None:
    path = tmp_path / "ledger"
    before = os.umask(umask)
    try:
        if mode is not None:
            path.touch()
            path.chmod(mode)
        with guard(path, fence(5)):
            pass
    finally:
        os.umask(before)
    assert (tmp_path / "ledger.fence.lock").stat().st_mode & 0o7777 == lock
    assert (tmp_path / "ledger.fence").stat().st_mode & 0o7777 == kept


def test_a_lock_file_that_others_could_open_is_closed_to_them(tmp_path: Path) -> None:
    path, lock = tmp_path / "ledger", tmp_path / "ledger.fence.lock"
    path.touch(0o600)
    lock.touch()
    lock.chmod(0o644)
    with guard(path, fence(5)):
        assert lock.stat().st_mode & 0o7777 == 0o600


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_the_lock_file_belongs_to_the_group_that_may_write(tmp_path: Path) -> None:
    path, lock = tmp_path / "ledger", tmp_path / "ledger.fence.lock"
    path.touch()
    path.chmod(0o660)
    os.chown(path, 64123, 64124)
    with guard(path, fence(5)):
        found = lock.stat()
        assert (found.st_uid, found.st_gid, found.st_mode & 0o777) == (64123, 64124, 0o660)


class Child:
    """A forked child: runs some lines of ours, then lives until it is told to end."""

    def __init__(self, work: Callable[[], object]) -> None:
        done, answer = os.pipe()
        ends, self._end = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self._end)
            code = 1
            try:
                code = 0 if work() is not False else 2
                os.write(answer, b"x")
                os.read(ends, 1)
            finally:
                os._exit(code)
        os.close(answer)
        os.close(ends)
        os.read(done, 1)  # or its end
        os.close(done)

    def end(self) -> int:
        os.close(self._end)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


FORKS_IN_THE_BLOCK = """
import ctypes, os, sys
from pathlib import Path
from holdfast.fencing.file import guard

path, old, new, by = sys.argv[1:]
fork = os.fork if by == "Python" else ctypes.PyDLL(None).fork
done, answer = os.pipe()
ends, end = os.pipe()
with guard(path, old) as ledger:
    child = fork()
    if child == 0:
        os.close(end)
        os.write(answer, b"x")
        os.read(ends, 1)  # lives until it is told to end
        os._exit(0)
    os.read(done, 1)
    ledger.write_text("written")
with guard(path, new, timeout=0) as ledger:
    print(ledger.read_text())
os.close(end)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.parametrize("by", ["Python", "C"])
def test_a_child_that_was_forked_in_the_block_keeps_nobody_out(tmp_path: Path, by: str) -> None:
    """Also one that a library forked: Python's own handlers do not run then. A program of its own,
    because such a child may hang where other threads of its parent run Python."""
    words = [str(tmp_path / "ledger"), str(fence(5)), str(fence(6)), by]
    program = [sys.executable, "-c", FORKS_IN_THE_BLOCK, *words]
    done = subprocess.run(program, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, "written\n"), done.stderr


def test_a_child_outlives_its_killed_parent_without_the_lock(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    program = (
        "import os, sys, time\nfrom holdfast.fencing.file import guard\n"
        f"with guard({str(path)!r}, {str(fence(5))!r}):\n"
        "    if os.fork() == 0: print('forked', flush=True)\n"
        "    sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"forked\n"
        process.kill()
        process.wait()
        with guard(path, fence(6), timeout=0):
            pass
        assert process.stdin is not None
        process.stdin.close()


def test_a_child_neither_writes_nor_unlocks_what_its_parent_entered(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    path.write_text("old")
    guarded = guard(path, fence(5))

    def leave() -> bool:
        for use in (ledger.read, ledger.exists, lambda: ledger.write(b"child")):
            try:
                use()
            except NotHeld:
                continue
            return False
        guarded.__exit__(None, None, None)
        return path.read_text() == "old"

    with guarded as ledger:
        ledger.write_text("new")
        child = Child(leave)
        with pytest.raises(LockTimeout):
            guard(path, fence(6), timeout=0).__enter__()
        assert path.read_text() == "old"
        assert child.end() == 0
    assert path.read_text() == "new"


def test_a_reader_looks_again_after_it_was_written_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A writer may come in between, when the lock is given up to take it together with others."""
    path = tmp_path / "ledger"
    take = FileLock.take
    taken: list[bool] = []

    def interrupted(lock: FileLock, *, shared: bool) -> None:
        taken.append(shared)
        if taken == [True, False, True]:
            with guard(path, fence(9)) as ledger:
                ledger.write_text("newer")
        take(lock, shared=shared)

    with guard(path, fence(6)) as ledger:
        ledger.write_text("older")
    monkeypatch.setattr(FileLock, "take", interrupted)
    with pytest.raises(StaleFence):
        guard(path, fence(7, Mode.SHARED)).__enter__()
    assert taken[:3] == [True, False, True]


def test_the_folder_is_synced_after_each_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a power cut could take back a name that others have seen."""
    calls: list[str] = []
    sync, rename = os.fsync, os.replace

    def synced(file: int) -> None:
        folder = stat.S_ISDIR(os.fstat(file).st_mode)
        calls.append("folder" if folder else "file")
        sync(file)

    def renamed(*args: Any, **options: Any) -> None:
        calls.append("rename")
        rename(*args, **options)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", renamed)
    with guard(tmp_path / "ledger", fence(5)) as ledger:
        assert calls == ["file", "rename", "folder"]
        ledger.write_text("content")
    assert calls == ["file", "rename", "folder"] * 2


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
