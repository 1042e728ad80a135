"""``fence enter``: a broken lock's fence is carried to its resource."""

from __future__ import annotations

import json
import socket
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path

import psycopg
import pymysql
import pytest
import redis

from cli.processes import Cli
from fencing.accounts import mysql_settings
from holdfast import BackendUnavailable, Fence, Mode, StaleFence, connect, fencing
from holdfast.fencing.address import enter_at
from servers.mysql import MySQLServer
from servers.postgres import PostgresServer
from servers.redis import RedisServer
from servers.registry import Servers

Guard = Callable[[Fence], object]


def fence(token: int) -> Fence:
    return Fence("order:42", Mode.EXCLUSIVE, (), 0, token)


def at_postgres(servers: Servers, folder: Path) -> tuple[str, Guard]:
    url = servers.of(PostgresServer).url
    with psycopg.connect(url) as connection:
        connection.execute("DROP TABLE IF EXISTS holdfast_fence")

    def guard(asked: Fence) -> None:
        with psycopg.connect(url) as connection:
            fencing.sql.guard(connection, "orders", asked)

    return f"{url}#orders", guard


def at_mysql(servers: Servers, folder: Path) -> tuple[str, Guard]:
    url = servers.of(MySQLServer).url
    with pymysql.connect(**mysql_settings(url)) as connection:
        connection.cursor().execute("DROP TABLE IF EXISTS holdfast_fence")

    def guard(asked: Fence) -> None:
        with pymysql.connect(**mysql_settings(url)) as connection:
            fencing.sql.guard(connection, "orders", asked)
            connection.commit()

    return f"{url}#orders", guard


def at_sqlite(servers: Servers, folder: Path) -> tuple[str, Guard]:
    path = folder / "shop.db"
    sqlite3.connect(path).close()
    path.touch()

    def guard(asked: Fence) -> None:
        connection = sqlite3.connect(path)
        try:
            with connection:
                fencing.sql.guard(connection, "orders", asked)
        finally:
            connection.close()

    return f"sqlite:///{path}#orders", guard


def at_redis(servers: Servers, folder: Path) -> tuple[str, Guard]:
    url = servers.of(RedisServer).url

    def guard(asked: Fence) -> None:
        with redis.Redis.from_url(url) as client:
            fencing.redis.guard(client, "orders", asked).enter()

    with redis.Redis.from_url(url) as client:
        client.flushall()
    return f"{url}#orders", guard


def at_file(servers: Servers, folder: Path) -> tuple[str, Guard]:
    def guard(asked: Fence) -> None:
        with fencing.file.guard(folder / "ledger", asked):
            pass

    return str(folder / "ledger"), guard


def at_gate(servers: Servers, folder: Path) -> tuple[str, Guard]:
    def guard(asked: Fence) -> None:
        with (
            connect(f"sqlite:///{folder}/locks.db") as locks,
            fencing.http.Gate(locks).enter("printer", asked),
        ):
            pass

    return "gate:printer", guard


PLACES = {
    "postgresql": at_postgres,
    "mysql": at_mysql,
    "sqlite": at_sqlite,
    "redis": at_redis,
    "file": at_file,
    "gate": at_gate,
}


@pytest.mark.parametrize("place", PLACES)
def test_enter(cli: Cli, place: str, servers: Servers, tmp_path: Path) -> None:
    address, guard = PLACES[place](servers, tmp_path)
    result = cli("fence", "enter", address, str(fence(5)))
    assert result.returncode == 0, result.stderr
    guard(fence(5))
    with pytest.raises(StaleFence):
        guard(fence(4))
    result = cli("fence", "enter", address, str(fence(5)), "--broken")
    assert result.returncode == 0, result.stderr
    with pytest.raises(StaleFence):
        guard(fence(5))
    guard(fence(6))
    result = cli("fence", "enter", address, str(fence(3)))
    assert result.returncode == 1
    assert "token 6" in result.stderr


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("mode", [Mode.SHARED, Mode.SLOTS])
def test_broken_readers_and_permits(
    cli: Cli, place: str, mode: Mode, servers: Servers, tmp_path: Path
) -> None:
    """A reader is refused below a writer only: its fence is carried as one."""
    slots = (3,) if mode is Mode.SLOTS else ()
    address, guard = PLACES[place](servers, tmp_path)
    broken, later = Fence("order:42", mode, slots, 0, 5), Fence("order:42", mode, slots, 0, 6)
    for options in ((), ("--broken",)):
        result = cli("fence", "enter", address, str(broken), *options)
        assert result.returncode == 0, result.stderr
    with pytest.raises(StaleFence):
        guard(broken)
    guard(later)


def test_a_broken_hold_is_kept_out(cli: Cli, tmp_path: Path) -> None:
    """The whole way: a hold is broken, its fence is carried to the file, the old holder comes."""
    holder = cli.hold("order:42")
    broken = json.loads(cli("break", "order:42", "--reason", "stuck", "--json").stdout)
    [text] = broken["fences"]
    assert Fence.parse(text).token == broken["token"]
    path = tmp_path / "ledger"
    with fencing.file.guard(path, text) as ledger:  # nobody has told the file
        ledger.write_text("late")
    assert cli("fence", "enter", str(path), text, "--broken").returncode == 0
    with pytest.raises(StaleFence):
        fencing.file.guard(path, text).__enter__()
    with (
        connect(f"sqlite:///{tmp_path}/locks.db") as locks,
        locks.lock("order:42", timeout=20) as lease,
        fencing.file.guard(path, lease) as ledger,
    ):
        ledger.write_text("fresh")
    holder.communicate("\n", timeout=20)


@pytest.mark.parametrize("job", [["run"], ["run", "--every", "1h"], ["once"], ["elect"]])
def test_commands_of_a_later_epoch(cli: Cli, job: list[str], tmp_path: Path) -> None:
    """After a restored backup all programs say the next epoch, and those of the shell too."""
    path = tmp_path / "ledger"
    with fencing.file.guard(path, Fence("x", Mode.EXCLUSIVE, (), 1, 5)):
        pass
    for epoch, let_in in (("0", False), ("1", True), ("2", True)):
        result = cli(*job, f"x{epoch}", "--epoch", epoch, "--", "printenv", "HOLDFAST_FENCE")
        answer = Fence.parse(result.stdout.strip())
        assert answer.epoch == int(epoch)
        entered = cli(
            "fence", "enter", str(path), str(Fence("x", Mode.EXCLUSIVE, (), *key(answer)))
        )
        assert (entered.returncode == 0) is let_in
    assert cli(*job, "x", "--epoch", "-1", "--", "true").returncode == 64


def key(fence: Fence) -> tuple[int, int]:
    return fence.epoch, fence.token


def test_the_epoch_of_a_broken_hold(cli: Cli) -> None:
    holder = cli.hold("x")
    answer = json.loads(cli("break", "x", "--reason", "r", "--epoch", "3", "--json").stdout)
    assert [Fence.parse(text).epoch for text in answer["fences"]] == [3]
    holder.communicate("\n", timeout=20)


def test_break_says_how(cli: Cli) -> None:
    holder = cli.hold("x")
    result = cli("break", "x", "--reason", "r")
    assert "holdfast fence enter --broken RESOURCE`: '1;exclusive;;0;" in result.stdout
    holder.communicate("\n", timeout=20)


@pytest.mark.parametrize(
    ("address", "text", "code", "says"),
    [
        ("ledger", "nonsense", 64, "not a fence: 'nonsense' (its form is 1;mode;"),
        ("ledger", "1;exclusive;;0;x;a", 64, "(its form is 1;mode;slots;epoch;token;name"),
        ("/proc/ledger", str(fence(5)), 69, "'/proc/ledger' can't be guarded: No such file"),
        ("oracle://host#orders", str(fence(5)), 64, "no resource is known at oracle:"),
        ("redis://localhost:1", str(fence(5)), 64, "end the address with #name"),
        ("redis://:secret@localhost:1#orders", str(fence(5)), 69, "ConnectionError"),
        ("redis://:\u2100secret@localhost:1/0#orders", str(fence(5)), 69, "ConnectionError"),
        ("postgresql://u:a@secret@localhost:1/d#orders", str(fence(5)), 69, "OperationalError"),
        ("postgresql://u:12#secret@localhost:1/d#orders", str(fence(5)), 64, "as %23"),
        ("redis://:secret@localhost:1#a@b", str(fence(5)), 69, "ConnectionError"),
        ("sqlite:///nowhere/shop.db#orders", str(fence(5)), 64, "there is no database"),
        ("/nowhere/ledger", str(fence(5)), 64, "there is no folder"),
    ],
)
def test_bad_input(cli: Cli, address: str, text: str, code: int, says: str) -> None:
    result = cli("fence", "enter", address, text)
    assert result.returncode == code
    assert says in result.stderr
    assert "secret" not in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("scheme", ["postgresql", "mysql"])
def test_a_server_that_does_not_answer(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is given up by a deadline, and its store with it."""
    monkeypatch.setattr("holdfast.fencing.address.LOGIN_SECONDS", 2.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"{scheme}://u:p@127.0.0.1:{silent.getsockname()[1]}/d#order:42"
        began = time.monotonic()
        with pytest.raises(BackendUnavailable):
            enter_at(address, fence(5), table="holdfast_fence", open_client=lambda: None)
    assert time.monotonic() - began < 20


KEYS = "first-key-that-is-long-enough\nsecond-key-that-is-long-enough"
SIGNING = KEYS.split()


@pytest.mark.parametrize("variable", ["HOLDFAST_FENCE_KEYS", "HOLDFAST_FENCE_KEYS_FILE"])
def test_fences_signed_by_the_command_line(cli: Cli, tmp_path: Path, variable: str) -> None:
    """Keys are in the environment or in a file: a command line can be seen by others."""
    kept = tmp_path / "keys"
    kept.write_text(KEYS + "\n")
    cli.environment[variable] = str(kept) if variable.endswith("FILE") else KEYS
    result = cli("run", "order:42", "--", "printenv", "HOLDFAST_FENCE")
    text = result.stdout.strip()
    assert Fence.parse(text, SIGNING[:1]).name == "order:42"
    path = str(tmp_path / "ledger")
    entered = result
    for forged in (str(fence(2**63 - 1)), str(fence(5).signed("another key, long enough"))):
        refused = cli("fence", "enter", path, forged)
        assert refused.returncode == 1
        assert "is not accepted" in refused.stderr
        assert not any(key in refused.stderr for key in SIGNING)
    assert cli("fence", "enter", path, text).returncode == 0
    for place in (path, "gate:ledger"):
        entered = cli("fence", "enter", place, text, "--broken")
        assert entered.returncode == 0, entered.stderr
    assert cli("fence", "enter", path, text).returncode == 1
    assert not any(key in result.stderr + entered.stderr for key in SIGNING)


def test_the_fence_of_a_broken_hold_is_signed(cli: Cli) -> None:
    cli.environment["HOLDFAST_FENCE_KEYS"] = KEYS
    holder = cli.hold("x")
    answer = json.loads(cli("break", "x", "--reason", "r", "--json").stdout)
    assert [Fence.parse(text, SIGNING).name for text in answer["fences"]] == ["x"]
    holder.communicate("\n", timeout=20)


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        (
            {"HOLDFAST_FENCE_KEYS": "tooshort-secret"},
            "keys of fences: a key of fence_keys has",
        ),
        ({"HOLDFAST_FENCE_KEYS_FILE": "/nowhere/keys"}, "'/nowhere/keys' can't be read"),
        ({"HOLDFAST_FENCE_KEYS": KEYS, "HOLDFAST_FENCE_KEYS_FILE": "x"}, "are both set"),
        ({"HOLDFAST_FENCE_KEYS_FILE": "/dev/null"}, "'/dev/null' is empty"),
        ({"HOLDFAST_FENCE_KEYS": " \n"}, "is set, and has no keys"),
    ],
)
def test_keys_that_can_not_be_used(cli: Cli, variables: dict[str, str], says: str) -> None:
    for words in (["run", "x", "--", "true"], ["fence", "enter", "ledger", str(fence(5))]):
        result = cli(*words, env=variables)
        assert result.returncode == 78
        assert says in result.stderr
        assert "tooshort-secret" not in result.stderr
