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

PACKAGES = ("holdfast.backends", "holdfast.wires", "holdfast.io")
"""Of these it is a module that is imported, not a name."""

WORLD = {"asyncio", "threading", "time", "socket", "ssl", "select", "selectors", "os", "sqlite3"}

# What a room of the tree may import of the package, besides its own.
ALLOWED: dict[str, set[str]] = {
    "core": {"claim", "errors"},
    "io": {"core", "claim", "errors"},
    "wires": {"core", "claim", "errors", "io", "url"},
    "backends": {"core", "claim", "errors", "io", "wires", "url", "sql"},
    "primitives": {"core", "claim", "errors", "durations", "lease", "multilease"},
    "fencing": {"core", "claim", "errors", "durations", "lease", "url", "sql"},
    "cli": {
        "bench",
        "claim",
        "core",
        "durations",
        "errors",
        "fencing",
        "lease",
        "locks",
        "primitives",
        "io",
        "url",
    },
}

# A guard in the lock's own store speaks to it in that store's words, and in no other's.
OWN_STORES = ("fencing.etcd", "fencing.consul", "fencing.zookeeper")
# A resource's address is connected to as a store's is: the same options, the same safety.
LOGINS = {
    "fencing.address": {"holdfast.stores.mysql.login", "holdfast.io.clock"},
}

# A backend stays among its own files; these serve several.
SHARED_BACKENDS = {"lines", "sessions", "memory", "sql", "strict"}
FAMILIES = {"redlock": "redis"}


def modules() -> Iterator[tuple[str, Path]]:
    for path in sorted(ROOT.rglob("*.py")):
        yield ".".join(path.relative_to(ROOT).with_suffix("").parts), path


def imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module in PACKAGES:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


@pytest.mark.parametrize(("name", "path"), list(modules()))
def test_imports_point_one_way(name: str, path: Path) -> None:
    """Core knows claims; backends and wires know core; primitives know core; doors know all."""
    room = name.split(".", maxsplit=1)[0]
    if room not in ALLOWED:
        return
    for target in imported(path):
        parts = target.split(".")
        if target in LOGINS.get(name, ()):
            continue
        if name in OWN_STORES and parts[1:2] in (["backends"], ["wires"]):
            assert family(parts[2]) in name.split("."), f"{name} imports {target}"
        elif parts[0] == "holdfast" and len(parts) > 1:
            assert parts[1] in ALLOWED[room] | {room}, f"{name} imports {target}"


@pytest.mark.parametrize(("name", "path"), [m for m in modules() if m[0].startswith("core")])
def test_core_is_pure(name: str, path: Path) -> None:
    """No clocks, threads, loops or sockets in the rules."""
    assert not WORLD & {target.split(".")[0] for target in imported(path)}, name


def family(module: str) -> str:
    """The store that a module of ``backends`` belongs to."""
    return module.split("_", maxsplit=1)[0]


@pytest.mark.parametrize(("name", "path"), [m for m in modules() if m[0].startswith("backends.")])
def test_backends_do_not_know_each_other(name: str, path: Path) -> None:
    """A store is read, changed and removed without a look at another one."""
    own = family(name.split(".")[1])
    for target in imported(path):
        parts = target.split(".")
        if parts[:2] == ["holdfast", "backends"] and len(parts) > 2:
            other = family(parts[2])
            known = SHARED_BACKENDS | {own, FAMILIES.get(own, own)}
            assert other in known, f"{name} imports {target}"


def test_a_blocking_door_loads_no_event_loop_and_no_client() -> None:
    """Start-up is light: asyncio and foreign clients come when they are used."""
    program = (
        "import sys, holdfast\n"
        "with holdfast.connect('memory://light') as locks, locks.lock('a'): pass\n"
        "heavy = {'asyncio', 'redis', 'psycopg', 'kazoo', 'pymysql', 'rich', 'sqlite3', 'ssl'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
