"""Results on disk: a JSON file for each step, so that a long run can be made in parts."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import subprocess
import time
from pathlib import Path
from typing import Any

from benchmarks.plan import CASES

__all__ = ["Results", "load", "save", "versions"]

Row = dict[str, Any]
Results = dict[str, dict[str, Any]]
"""By step: when it was run, of what size, and its rows."""

_PROGRAMS = {
    "Redis": ["redis-server", "--version"],
    "etcd": ["etcd", "--version"],
    "MariaDB": ["mariadbd", "--version"],
    "PostgreSQL": ["/usr/lib/postgresql", "--version"],
    "Consul": ["consul", "version"],
    "Java": ["java", "-version"],
}


def save(folder: Path, name: str, rows: list[Row], *, quick: bool) -> None:
    """Writes one step, and all of them together."""
    steps = folder / "steps"
    steps.mkdir(parents=True, exist_ok=True)
    made = {"at": time.strftime("%Y-%m-%d %H:%M"), "quick": quick, "rows": rows}
    (steps / f"{name}.json").write_text(json.dumps(made, indent=1) + "\n")


def load(folder: Path) -> Results:
    """Everything that is there, in the order of the cases."""
    found = {path.stem: json.loads(path.read_text()) for path in (folder / "steps").glob("*.json")}
    rank = list(CASES)

    def order(name: str) -> tuple[int, str]:
        case = max((case for case in rank if name.startswith(f"{case}-")), key=len)
        return rank.index(case), name

    return {name: found[name] for name in sorted(found, key=order)}


def write_all(folder: Path, results: Results) -> None:
    """``results.json``: for programs."""
    whole = {"versions": versions(), "machine": machine(), "steps": results}
    (folder / "results.json").write_text(json.dumps(whole, indent=1) + "\n")


def machine() -> str:
    return f"{os.cpu_count()} cores, Python {platform.python_version()}, {platform.system()}"


def versions() -> dict[str, str]:
    """What was measured: packages as installed here, servers as they tell themselves."""
    text = (Path(__file__).parent / "requirements.txt").read_text()
    names = re.findall(r"^([\w.-]+)==", text, re.MULTILINE)
    names += ["holdfast", "redis", "hiredis", "psycopg", "pymysql", "asyncmy", "kazoo"]
    found = {}
    for name in sorted(set(names) - {"matplotlib", "psutil"}):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found | {name: told for name, words in _PROGRAMS.items() if (told := _told(words))}


def _told(words: list[str]) -> str:
    program = words[0]
    if program.endswith("postgresql"):
        binaries = sorted(Path(program).glob("*/bin/postgres"))
        program = str(binaries[-1]) if binaries else program
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:{Path.home()}/.cache/holdfast/servers"
    try:
        said = subprocess.run(
            [program, *words[1:]],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "PATH": path},
        )
    except OSError:
        return ""
    found = re.search(r"\d+\.\d+[\w.-]*", said.stdout + said.stderr)
    return found[0] if found else ""
