"""Which test process runs what: see `servers.spread`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from servers.spread import Place, Share, place_of


@pytest.fixture(autouse=True)
def every_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in a run for some stores alone."""
    monkeypatch.delenv("HOLDFAST_STORES", raising=False)


@pytest.mark.parametrize(
    ("test", "place"),
    [
        ("tests/contract/test_contract.py::test_contract[redis-asyncio-a.b]", ("redis", "redis")),
        ("tests/primitives/test_once.py::test_it[blocking-sqlite]", ("sqlite", "sqlite")),
        (
            "tests/conformance/test_conformance.py::test_conformance[mysql-advisory-asyncio-a.b]",
            ("mysql", "mysql-advisory"),
        ),
        (
            "tests/primitives/test_once.py::test_it[blocking-etcd-three]",
            ("etcd", "etcd-three"),
        ),
        (
            "tests/stores/redis/test_wire.py::test_it[blocking]",
            ("redis", "tests/stores/redis/test_wire.py redis"),
        ),
        (
            "tests/stores/test_consensus.py::test_it[etcd-blocking]",
            ("etcd", "tests/stores/test_consensus.py etcd"),
        ),
        ("tests/core/test_list.py::test_it", ("", "tests/core/test_list.py ")),
    ],
)
def test_tests_with_the_same_servers_are_one_place(test: str, place: tuple[str, str]) -> None:
    assert place_of(test) == Place(*place)


def _suite(store: str, count: int) -> list[str]:
    return [f"tests/contract/test_contract.py::test_contract[{store}-{n}]" for n in range(count)]


def _file(name: str, count: int) -> list[str]:
    return [f"tests/stores/{name}/test_it.py::test_{n}" for n in range(count)]


def test_a_process_stays_where_it_is_and_with_its_store() -> None:
    suite, file, other = _suite("redis", 3), _file("redis_wire", 2), _file("etcd", 9)
    share = Share([*other, *file, *_suite("mysql", 20), *suite])
    assert [share.next("mysql") for _ in range(20)] == _suite("mysql", 20)
    share = Share([*suite, *file, *other])
    assert [share.next("a") for _ in range(9)] == other
    share = Share([*suite, *file])
    assert [share.next("a") for _ in range(5)] == [*suite, *file]


def test_processes_begin_in_different_places() -> None:
    """Some at the large end, and some at the small one."""
    share = Share([*_suite("redis", 4), *_suite("etcd", 3), *_file("consul", 1), *_file("core", 2)])
    first = [share.next(who) for who in "abc"]
    assert [place_of(test).store for test in first] == ["redis", "consul", "etcd"]


def test_who_has_nothing_left_helps_where_most_is_left() -> None:
    """Every test is handed out once, whoever asks for it."""
    suite = _suite("redis", 6)
    share = Share([*suite, *_file("core", 1)])
    asked = [share.next(who) for who in "abbab"]
    assert asked == [suite[0], "tests/stores/core/test_it.py::test_0", suite[1], suite[2], suite[3]]
    assert {share.next(who) for who in "ab"} == set(suite[4:])


BODY = """
import os, pathlib, pytest

@pytest.mark.parametrize("number", range(6))
def test_it(number):
    pathlib.Path(f"{__name__}-{number}").write_text(str(os.getpid()))
"""


def test_processes_follow_it(tmp_path: Path) -> None:
    """As pytest's own processes show: each begins with a file of its own, and goes on with it."""
    (tmp_path / "pytest.ini").touch()
    for name in ("redis", "etcd"):
        (tmp_path / f"test_{name}.py").write_text(BODY)
    done = _run_two(tmp_path)
    assert done.returncode == 0, done.stdout

    def process(test: str) -> str:
        return (tmp_path / test).read_text()

    assert process("test_redis-0") == process("test_redis-1")
    assert process("test_etcd-0") == process("test_etcd-1")
    assert process("test_redis-0") != process("test_etcd-0")


DYING = """
import os, pathlib, pytest

@pytest.mark.parametrize("number", range(4))
def test_it(number):
    with pathlib.Path("began").open("a") as file:
        file.write(f"{number}\\n")
    if number == 1:
        os._exit(1)
"""


def test_a_test_that_ends_its_process_is_told_once_and_the_others_run(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").touch()
    (tmp_path / "test_dying.py").write_text(DYING)
    done = _run_two(tmp_path)
    assert "1 failed, 3 passed" in done.stdout, done.stdout
    assert sorted((tmp_path / "began").read_text().split()) == ["0", "1", "2", "3"]


def _run_two(folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs the tests of a folder in two processes, spread as ours are."""
    plugins = ("-p", "xdist.plugin", "-p", "servers.spread")
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", *plugins]
    return subprocess.run(
        command, cwd=folder, env=environment, timeout=200, stdout=subprocess.PIPE, text=True
    )
