"""Libraries whose private parts we use: each is named, is there, and has a version cap.

Where one of these fails after an upgrade, read what the library does now in its place, and mend the
module that is named before the cap in pyproject.toml is raised.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pymysql.connections
import pytest

import holdfast

STORES = Path(holdfast.__file__).parent / "stores"
PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
EXTRAS: dict[str, list[str]] = PROJECT["project"]["optional-dependencies"]

PYMYSQL = {"_sock"}


def missing(thing: object, names: set[str]) -> list[str]:
    return sorted(name for name in names if not hasattr(thing, name))


def used(*files: str) -> set[str]:
    """What modules use of objects that are a library's, by the names we give those."""
    texts = [path.read_text() for pattern in files for path in sorted(STORES.glob(pattern))]
    assert texts
    found = [
        re.findall(r"(?:\bclient|\bconnection|super\(\))\.(_[a-z]\w*)", text) for text in texts
    ]
    return {name for names in found for name in names}


def test_pymysql() -> None:
    """Its handshake is used, then its socket is ours."""
    client = pymysql.connections.Connection(defer_connect=True)
    assert not missing(client, PYMYSQL), "PyMySQL has changed: see stores/mysql/connection.py"
    assert used("mysql/connection.py") <= PYMYSQL


@pytest.mark.parametrize("store", ["redis", "redlock"])
def test_redis_py(store: str) -> None:
    """Nothing of it: a user's client object is read by its public attributes."""
    texts = [path.read_text() for path in sorted((STORES / store).glob("*.py"))]
    assert texts
    assert not any(re.search(r"^\s*(import|from) redis\b", text, re.MULTILINE) for text in texts)


@pytest.mark.parametrize(("extra", "package"), [("mysql", "PyMySQL"), ("redis", "redis")])
def test_versions_are_capped(extra: str, package: str) -> None:
    """A new major version may change what is private without a word."""
    [wanted] = [line for line in EXTRAS[extra] if re.match(rf"{package}\b", line)]
    assert re.search(r"<\d+$", wanted), wanted
