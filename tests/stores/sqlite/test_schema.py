"""What is in the embedded store's file: versions, boots, hosts, and tokens that never repeat."""

from __future__ import annotations

import os
import re
import shutil
import sqlite3
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from holdfast.claim import Busy
from holdfast.core.drive import run_now
from holdfast.errors import GuaranteeNotMet, Incompatible, Unsupported
from holdfast.io import clock
from holdfast.stores.sqlite import backend as sqlite
from holdfast.stores.sqlite import schema as sqlite_schema
from holdfast.stores.sqlite.host import Machine, this_machine
from stores.sqlite.helpers import backend_of, claim, take, try_to_take


def becomes(monkeypatch: pytest.MonkeyPatch, boot: str, host: str = "here") -> None:
    """Makes this process belong to another boot or host from now on."""
    monkeypatch.setattr(sqlite_schema, "this_machine", lambda: Machine(boot, host))


def set_wall(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    monkeypatch.setattr(sqlite, "wall_seconds", lambda: seconds)
    monkeypatch.setattr(clock, "wall", lambda: seconds)


def edit(path: Path, statement: str) -> None:
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute(statement)
    connection.close()


def refuses(path: Path, kind: type[Exception], message: str, options: str = "") -> None:
    """The store does not open the file, and leaves it as it is."""
    before = path.read_bytes()
    with backend_of(path, options=options) as backend, pytest.raises(kind, match=message):
        take(backend)
    assert path.read_bytes() == before


def test_a_newer_protocol_is_refused_untouched(tmp_path: Path) -> None:
    path = tmp_path / "locks.db"
    with backend_of(path) as backend:
        take(backend)
    edit(path, f"PRAGMA user_version={sqlite_schema.PROTOCOL + 1}")
    refuses(path, Incompatible, "protocol 2, this version has 1")


def test_a_file_of_other_software_is_refused_untouched(tmp_path: Path) -> None:
    path = tmp_path / "locks.db"
    path.touch(0o600)
    edit(path, "CREATE TABLE customers (name)")
    refuses(path, Incompatible, "of other software")


@pytest.mark.parametrize(
    "statement",
    [
        "CREATE TRIGGER more AFTER UPDATE ON name BEGIN DELETE FROM claim; END",
        "CREATE TRIGGER more AFTER UPDATE ON meta BEGIN DELETE FROM claim; END",
        "CREATE VIEW more AS SELECT * FROM name",
        "CREATE INDEX more ON name (abs(token))",
        "CREATE TABLE more (name)",
        "ALTER TABLE name ADD COLUMN more",
        "ALTER TABLE claim RENAME COLUMN behind TO more",
        "DROP INDEX record_until",
    ],
)
def test_a_changed_schema_is_refused_untouched(tmp_path: Path, statement: str) -> None:
    """An added trigger or view would run inside our own requests."""
    path = tmp_path / "locks.db"
    with backend_of(path) as backend:
        take(backend)
    edit(path, statement)
    refuses(path, Incompatible, "triggers or views that this version does not make")


def test_a_file_that_was_analyzed_or_vacuumed_is_the_same(tmp_path: Path) -> None:
    path = tmp_path / "locks.db"
    with backend_of(path) as backend:
        assert run_now(backend.release(take(backend)))
    edit(path, "ANALYZE")
    edit(path, "VACUUM")
    with backend_of(path) as backend:
        take(backend)


def test_a_view_that_is_added_later_is_not_trusted(tmp_path: Path) -> None:
    """While the file is open: it can't use functions beyond SQLite's harmless ones."""
    with backend_of(tmp_path / "locks.db") as backend:
        run_now(backend.look("name"))
        connection = backend._connection._database
        assert connection is not None
        assert connection.execute("PRAGMA trusted_schema").fetchone() == (0,)


def test_a_trigger_that_is_added_later_does_not_run(tmp_path: Path) -> None:
    """While the file is open. A trigger that never ends would hang the request."""
    path = tmp_path / "locks.db"
    with backend_of(path) as backend:
        held = take(backend)
        edit(path, "CREATE TRIGGER more BEFORE UPDATE ON name BEGIN DELETE FROM record; END")
        with pytest.raises(Incompatible, match="triggers"):
            run_now(backend.release(held))


@pytest.mark.parametrize("moment", [1, 2, 3])
def test_another_process_may_make_the_tables_at_any_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: int
) -> None:
    path = tmp_path / "locks.db"
    look = sqlite_schema._one
    looks: list[str] = []

    def another(connection: sqlite3.Connection, statement: str) -> int:
        found = look(connection, statement)
        looks.append(statement)
        if len(looks) == moment:
            with backend_of(path) as other:
                take(other, claim("another name"))
        return found

    monkeypatch.setattr(sqlite_schema, "_one", another)
    with backend_of(path) as backend:
        take(backend)


def test_a_file_that_is_no_database_is_refused_untouched(tmp_path: Path) -> None:
    path = tmp_path / "locks.db"
    path.write_text("a letter to a friend, longer than a hundred bytes " * 10)
    path.chmod(0o600)
    refuses(path, Incompatible, "damaged or no store of locks")


def test_damage_that_sqlite_cannot_quote_is_reported_too(tmp_path: Path) -> None:
    """SQLite's message contains bytes of the file that Python can't decode."""
    path = tmp_path / "locks.db"
    with backend_of(path) as backend:
        take(backend)
    damaged = path.read_bytes().replace(b"CREATE TABLE meta", b"CREATE \xd8ABLE meta")
    path.write_bytes(damaged)
    refuses(path, Incompatible, "is damaged")


def test_a_damaged_file_says_so(tmp_path: Path) -> None:
    path = tmp_path / "locks.db"
    with backend_of(path) as backend:
        for number in range(200):
            take(backend, claim(f"name-{number}"))
    content = bytearray(path.read_bytes())
    content[2048:] = b"\x55" * (len(content) - 2048)
    path.write_bytes(content)
    asked = [claim(f"name-{number}") for number in range(200)]
    with backend_of(path) as backend, pytest.raises(Incompatible, match="damaged"):
        list(map(partial(take, backend), asked))


def test_too_old_a_library_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite3, "sqlite_version_info", (3, 34, 1))
    with (
        backend_of(tmp_path / "locks.db") as backend,
        pytest.raises(Unsupported, match=r"3\.35\.0 or newer"),
    ):
        take(backend)


def test_the_file_is_recognised_by_its_header(tmp_path: Path) -> None:
    path = tmp_path / "locks.db"
    with backend_of(path) as backend:
        take(backend)
    assert path.read_bytes()[68:72] == b"HOLD"


def test_after_a_reboot_every_hold_is_dead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "locks.db"
    becomes(monkeypatch, "first")
    with backend_of(path) as backend:
        before = take(backend, claim(ttl=3600))
        assert isinstance(try_to_take(backend, claim()), Busy)
    becomes(monkeypatch, "second")
    with backend_of(path) as backend:
        assert not run_now(backend.look("name")).waiters
        assert take(backend).token > before.token
        assert not run_now(backend.release(before))


def test_a_file_of_another_machine_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "locks.db"
    becomes(monkeypatch, "first", "there")
    with backend_of(path) as backend:
        before = take(backend, claim(ttl=3600))
    becomes(monkeypatch, "second", "here")
    refuses(path, GuaranteeNotMet, "another machine")
    with backend_of(path, options="?adopt=on") as backend:
        assert take(backend).token > before.token
    with backend_of(path) as backend:  # it belongs to this machine now
        take(backend, claim("other"))


def test_containers_of_one_kernel_share_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    becomes(monkeypatch, "boot", "container-a")
    with backend_of(tmp_path / "locks.db") as one:
        take(one)
        becomes(monkeypatch, "boot", "container-b")
        with backend_of(tmp_path / "locks.db") as other:
            assert isinstance(try_to_take(other, claim()), Busy)


def test_without_boot_ids_the_clock_shows_a_reboot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    becomes(monkeypatch, "", "")
    real = clock.now
    with backend_of(tmp_path / "locks.db") as backend:
        take(backend, claim(ttl=3600))
    with backend_of(tmp_path / "locks.db") as backend:
        assert isinstance(try_to_take(backend, claim()), Busy)
    monkeypatch.setattr(clock, "now", lambda: real() - 1e6)  # it started over
    with backend_of(tmp_path / "locks.db") as backend:
        assert not run_now(backend.look("name")).holders


def test_a_process_that_cannot_read_the_boot_id_deletes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A missing id is not another id: the holds in the file may be of this boot."""
    path = tmp_path / "locks.db"
    becomes(monkeypatch, "boot")
    with backend_of(path) as backend:
        held = take(backend, claim(ttl=3600))
    for options in ("", "?adopt=on"):
        becomes(monkeypatch, "", "")
        refuses(path, GuaranteeNotMet, "boot id, and this one can't", options)
    becomes(monkeypatch, "boot")
    with backend_of(path) as backend:
        assert not run_now(backend.renew([held], [], until=clock.now() + 5)).lost


def test_a_file_without_a_boot_id_is_taken_over_on_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "locks.db"
    becomes(monkeypatch, "", "")
    with backend_of(path) as backend:
        held = take(backend, claim(ttl=3600))
    becomes(monkeypatch, "boot")
    refuses(path, GuaranteeNotMet, "boot id, and this one can,")
    with backend_of(path, options="?adopt=on") as backend:
        assert take(backend).token > held.token
    becomes(monkeypatch, "", "")
    refuses(path, GuaranteeNotMet, "boot id, and this one can't")


HIDDEN = """
import subprocess, sys
from pathlib import Path
from stores.sqlite.helpers import *
path = Path(sys.argv[1])
subprocess.run(["mount", "-t", "proc", "-o", "subset=pid", "proc", "/proc"], check=True)
try:
    with backend_of(path) as backend: take(backend)
except Exception as error: print(type(error).__name__, error)
"""


def test_a_hidden_boot_id_is_refused_beside_a_known_one(tmp_path: Path) -> None:
    """As under systemd's ProcSubset=pid."""
    enter = ["unshare", "-mpf"] if os.geteuid() == 0 else ["unshare", "-rmpf"]
    with backend_of(tmp_path / "locks.db") as backend:
        take(backend)
        done = subprocess.run(
            [*enter, sys.executable, "-c", HIDDEN, str(tmp_path / "locks.db")],
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.stdout.startswith("GuaranteeNotMet"), done.stdout + done.stderr


def test_this_machine_has_ids() -> None:
    assert len(this_machine().boot) == 36


def test_tokens_survive_a_power_cut_and_a_clock_that_goes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unsynced commits are lost, and the clock of the new boot is years behind."""
    path, saved = tmp_path / "locks.db", tmp_path / "saved"
    saved.mkdir()
    becomes(monkeypatch, "first")
    tokens: list[int] = []
    with backend_of(path) as backend:
        held = take(backend)
        # The disk as the first grant left it. By another process: to close the file here would
        # drop SQLite's locks.
        subprocess.run(["cp", path, f"{path}-wal", saved], check=True)
        for _ in range(1000):
            assert run_now(backend.release(held))
            held = take(backend)
            tokens.append(held.token)
    for file in saved.iterdir():
        shutil.copy(file, tmp_path)
    becomes(monkeypatch, "second")
    set_wall(monkeypatch, 1e9)
    with backend_of(path) as backend:
        assert take(backend).token > max(tokens)


def test_tokens_grow_while_the_clock_goes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens: list[int] = []
    with backend_of(tmp_path / "locks.db") as backend:
        for seconds in (2e9, 2e9 + 7200, 1e9, 1e9 + 1):
            set_wall(monkeypatch, seconds)
            held = take(backend)
            tokens.append(held.token)
            assert run_now(backend.release(held))
    assert tokens == sorted(set(tokens))
    assert tokens[0] == 2_000_000_000_000_000


def test_tokens_grow_although_another_process_has_a_clock_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokens that one process remembers say nothing about those of other processes."""
    path = tmp_path / "locks.db"
    with backend_of(path) as ahead, backend_of(path) as behind:
        for backend in (ahead, behind):
            run_now(backend.look("name"))
        tokens: list[int] = []
        for backend, seconds in ((ahead, 2e9), (behind, 1e9), (ahead, 2e9), (behind, 1e9)):
            set_wall(monkeypatch, seconds)
            held = take(backend)
            tokens.append(held.token)
            assert run_now(backend.release(held))
    assert tokens == sorted(set(tokens))


def test_every_token_is_below_a_synced_mark(tmp_path: Path) -> None:
    """One synced commit is enough for an hour of tokens: only the first of these two needs one."""
    path = tmp_path / "locks.db"
    synced: list[str] = []
    with backend_of(path) as backend:
        take(backend)
        connection = backend._connection._database
        assert connection is not None
        connection.set_trace_callback(synced.append)
        take(backend, claim("other"))
        assert not [statement for statement in synced if "synchronous" in statement]
        backend._high = 0
        take(backend, claim("third"))
        assert [statement for statement in synced if "synchronous=FULL" in statement]


SHIFTED = """
import sys
from functools import partial
from pathlib import Path
from stores.sqlite.helpers import *
try:
    with backend_of(Path(sys.argv[1])) as backend: take(backend)
except Exception as error: print(type(error).__name__, error)
"""


def test_a_shifted_boot_clock_is_refused(tmp_path: Path) -> None:
    enter = ["unshare", "-T", "--boottime", "1000", "--fork"]
    if subprocess.run([*enter, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no time namespaces for this user")
    done = subprocess.run(
        [*enter, sys.executable, "-c", SHIFTED, str(tmp_path / "locks.db")],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith("GuaranteeNotMet"), done.stdout + done.stderr
    assert "time namespace" in done.stdout


def test_no_statement_numbers_its_parameters() -> None:
    """Python 3.12.0 to 3.12.3 warns of each numbered parameter that is given in a sequence."""
    folder = Path(sqlite.__file__).parent
    numbered = [path.name for path in folder.glob("*.py") if re.search(r"\?\d", path.read_text())]
    assert numbered == []
