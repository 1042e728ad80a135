"""Imports point one way, and the core touches nothing of the world."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import holdfast

ROOT = Path(holdfast.__file__).parent

STORES = "holdfast.stores"

WORLD = {"asyncio", "threading", "time", "socket", "ssl", "select", "selectors", "os", "sqlite3"}

# What a room of the tree may import of the package, besides its own.
ALLOWED: dict[str, set[str]] = {
    "core": {"claim", "durations", "errors"},
    "io": {"core", "claim", "durations", "errors"},
    "stores": {"core", "claim", "durations", "errors", "io", "url", "sql"},
    "primitives": {
        "core",
        "claim",
        "errors",
        "durations",
        "lease",
        "multilease",
        "one_process",
    },
    "fencing": {"core", "claim", "errors", "durations", "lease", "url", "sql"},
    "dashboard": {"claim"},  # of which it escapes texts; all else is the public API
    "cli": {
        "bench",
        "claim",
        "core",
        "dashboard",
        "durations",
        "errors",
        "explain",
        "fencing",
        "lab",
        "lease",
        "locks",
        "observe",
        "primitives",
        "io",
        "url",
    },
    "observe": {"core", "claim", "errors", "io", "locks"},
}

# A guard in the lock's own store speaks to it in that store's words, and in no other's.
OWN_STORES = {"fencing.etcd", "fencing.consul", "fencing.zookeeper"}
# A resource's address is connected to as a store's is: the same options, the same safety.
LOGINS = {
    "fencing.address": {"holdfast.stores.mysql.connect", "holdfast.io.clock"},
}

CONSENSUS, SQL = "_consensus", "_sql"
KNOWN: dict[str, set[str]] = {
    "redlock": {"redis"},
    "etcd": {CONSENSUS},
    "consul": {CONSENSUS},
    "zookeeper": {CONSENSUS},
    "postgres": {SQL},
    "postgres_advisory": {SQL, "postgres"},
    "mysql": {SQL},
    "mysql_advisory": {SQL, "mysql"},
}
"""Which folders of ``stores`` a store may import, besides its own."""
DISPATCH: dict[str, set[str]] = {
    "stores.postgres.__init__": {"postgres_advisory"},
    "stores.mysql.__init__": {"mysql_advisory"},
}
"""Modules that open another store, where the URL asks for it by ``mode``."""


def modules() -> Iterator[tuple[str, Path]]:
    for path in sorted(ROOT.rglob("*.py")):
        yield ".".join(path.relative_to(ROOT).with_suffix("").parts), path


def imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module == STORES:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


@pytest.mark.parametrize(("name", "path"), list(modules()))
def test_imports_point_one_way(name: str, path: Path) -> None:
    """Core knows claims; io knows core; stores know core and io; the clients know all of these."""
    room = name.split(".", maxsplit=1)[0]
    if room not in ALLOWED:
        return
    for target in imported(path):
        parts = target.split(".")
        if target in LOGINS.get(name, ()):
            continue
        if name in OWN_STORES and parts[1:2] == ["stores"]:
            assert name == f"fencing.{parts[2]}", f"{name} imports {target}"
        elif parts[0] == "holdfast" and len(parts) > 1:
            assert parts[1] in ALLOWED[room] | {room}, f"{name} imports {target}"


@pytest.mark.parametrize(("name", "path"), [m for m in modules() if m[0].startswith("core")])
def test_core_is_pure(name: str, path: Path) -> None:
    """No clocks, threads, loops or sockets in the rules."""
    assert not WORLD & {target.split(".")[0] for target in imported(path)}, name


@pytest.mark.parametrize(("name", "path"), [m for m in modules() if m[0].startswith("stores.")])
def test_stores_do_not_know_each_other(name: str, path: Path) -> None:
    """A store is read, changed and removed without a look at another one."""
    own = name.split(".")[1]
    for target in imported(path):
        if target.startswith(f"{STORES}."):
            other = target.split(".")[2]
            known = KNOWN.get(own, set()) | DISPATCH.get(name, set())
            assert other in {own} | known, f"{name} imports {target}"


def test_a_blocking_client_loads_no_event_loop_and_no_client() -> None:
    """Start-up is light: asyncio and foreign clients come when they are used."""
    program = (
        "import sys, holdfast\n"
        "with holdfast.connect('memory://light') as locks, locks.lock('a'): pass\n"
        "heavy = {'asyncio', 'redis', 'psycopg', 'puresasl', 'pymysql', 'rich', 'sqlite3', 'ssl'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
