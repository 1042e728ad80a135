"""Libraries whose private parts we use: each is named, is there, and has a version cap.

Where one of these fails after an upgrade, read what the library does now in its place, and mend the
module that is named before the cap in pyproject.toml is raised.
"""

from __future__ import annotations

import inspect
import re
import tomllib
from pathlib import Path

import pymysql.connections
import pytest
from django.db import transaction
from django.db.backends.sqlite3.base import DatabaseWrapper

import holdfast
from holdfast.stores.mysql.connect import _LoginClient

STORES = Path(holdfast.__file__).parent / "stores"
PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
EXTRAS: dict[str, list[str]] = PROJECT["project"]["optional-dependencies"]

PYMYSQL = {"_sock", "_rfile", "_secure", "_read_timeout", "_write_timeout", "_read_bytes"}
PYMYSQL |= {"_force_close"}
AT_LOGIN = {"_current_timeout"}
"""What PyMySQL sets when it connects."""


def missing(thing: object, names: set[str]) -> list[str]:
    return sorted(name for name in names if not hasattr(thing, name))


def test_pymysql() -> None:
    """Its handshake is used, then its socket is ours. One module knows that."""
    client = pymysql.connections.Connection(defer_connect=True)
    assert not missing(client, PYMYSQL), "PyMySQL has changed: see stores/mysql/connect.py"
    login = inspect.getsource(_LoginClient)
    ours = set(re.findall(r"def (_\w+)", login)) | set(vars(_LoginClient)) | {"_local"}
    assert set(re.findall(r"\bself\.(_[a-z]\w*)", login)) <= PYMYSQL | AT_LOGIN | ours
    assert set(re.findall(r"self\.(_\w+)", inspect.getsource(pymysql.connections))) >= AT_LOGIN
    others = [path for path in STORES.glob("mysql*/*.py") if path.name != "connect.py"]
    assert not [path for path in others if "import pymysql" in path.read_text()]


def test_django() -> None:
    """Its ``TestCase`` marks the transactions that it opens, which are not the program's."""
    block = transaction.Atomic("default", savepoint=True, durable=False)
    assert not missing(block, {"_from_testcase"}), "see integrations/django/transactions.py"
    undocumented = {"run_on_commit", "commit_on_exit", "atomic_blocks", "savepoint_ids"}
    connection = DatabaseWrapper({"AUTOCOMMIT": True}, "default")
    assert not missing(connection, undocumented), "see integrations/django/transactions.py"


@pytest.mark.parametrize("store", ["redis", "redlock"])
def test_redis_py(store: str) -> None:
    """Nothing of it: a user's client object is read by its public attributes."""
    texts = [path.read_text() for path in sorted((STORES / store).glob("*.py"))]
    assert texts
    assert not any(re.search(r"^\s*(import|from) redis\b", text, re.MULTILINE) for text in texts)


@pytest.mark.parametrize(
    ("extra", "package"), [("mysql", "PyMySQL"), ("redis", "redis"), ("django", "Django")]
)
def test_versions_are_capped(extra: str, package: str) -> None:
    """A new major version may change what is private without a word."""
    [wanted] = [line for line in EXTRAS[extra] if re.match(rf"{package}\b", line)]
    assert re.search(r"<\d+$", wanted), wanted
