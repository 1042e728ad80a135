"""Damaged rows: operations on that name raise ``Incompatible``, other names are not affected."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

import holdfast
from holdfast.claim import Mode
from holdfast.core.contract import Waiting
from holdfast.core.drive import run_now
from holdfast.errors import Incompatible
from holdfast.io.clock import now
from holdfast.testing import Flavour
from servers.mysql import MySQLServer
from stores.claims import claim_of
from stores.mysql import helpers
from stores.mysql.helpers import Peer, open_admin, rows

server, admin = helpers.server, helpers.admin

FAR = "4000000000000000"
ENTRY = f"owner shared 5 {FAR} - - 1 1 0 0 - "
LABEL = json.dumps('["host",1,"thread",""]')
DAMAGES: dict[str, dict[str, Any]] = {
    "no line at all": {"crowd": b"nonsense"},
    "bytes": {"crowd": b"\xff\xfe\n"},
    "a line without an end": {"crowd": (ENTRY + LABEL).encode()},
    "too few words": {"crowd": b"owner shared 5 4000000000000000\n"},
    "no mode": {"crowd": (ENTRY.replace("shared", "x") + LABEL + "\n").encode()},
    "no owner": {"crowd": (ENTRY.replace("owner", "") + LABEL + "\n").encode()},
    "a token of letters": {"crowd": (ENTRY.replace(" 5 ", " x ") + LABEL + "\n").encode()},
    "a token of another script": {"crowd": (ENTRY.replace(" 5 ", " ٥ ") + LABEL + "\n").encode()},
    "a token with a line": {"crowd": (ENTRY.replace(" 5 ", " 1_5 ") + LABEL + "\n").encode()},
    "a huge end": {"crowd": (ENTRY.replace(FAR, "9" * 400) + LABEL + "\n").encode()},
    "a huge since": {
        "crowd": (ENTRY.replace(" 1 1 0", f" {'9' * 30} 1 0") + LABEL + "\n").encode()
    },
    "a huge limit": {
        "crowd": (ENTRY.replace(" 1 1 0", " 1 1 99999999999") + LABEL + "\n").encode()
    },
    "slots of letters": {"crowd": (ENTRY[:-2] + "a,b " + LABEL + "\n").encode()},
    "a label of no text": {"crowd": (ENTRY + "5\n").encode()},
    "a deep label": {"crowd": (ENTRY + "[" * 100_000 + "\n").encode()},
    "an endless label": {"crowd": (ENTRY + '"\\ud800\n').encode()},
    "an owner twice": {"crowd": 2 * (ENTRY + LABEL + "\n").encode()},
    "a token that is full": {"token": 2**63 - 1, "owner": b""},
    "a token below nothing": {"token": -5, "owner": b"x", "ends": 2**62},
    "a version below nothing": {"version": -1, "owner": b"x", "ends": 2**62},
    "an owner of bytes": {"owner": b"\xff\xfe", "ends": 2**62},
}


def damage(admin: Any, namespace: str, how: str, name: str = "name") -> None:
    given: dict[str, Any] = {"version": 7, "token": 7, "owner": b"", "label": b"", "since": 1}
    given |= {"crowd": b"", "ends": 0} | DAMAGES[how]
    columns = ", ".join(given)
    values = ", ".join(f"X'{v.hex()}'" if isinstance(v, bytes) else str(v) for v in given.values())
    key = f"'{namespace}', '{name}'"
    rows(admin, f"REPLACE INTO holdfast_lock (namespace, name, {columns}) VALUES ({key}, {values})")


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_name_is_incompatible_and_others_go_on(
    server: MySQLServer, admin: Any, namespace: str, how: str
) -> None:
    """Acquiring, waiting, inspecting and breaking raise the same error; a list has the name."""
    url = server.url
    with holdfast.connect(url, namespace=namespace) as locks, locks.lock("a"), locks.lock("z"):
        calls: dict[str, Callable[[], object]] = {
            "take": lambda: locks.lock("name").acquire(timeout=0),
            "wait": lambda: locks.lock("name").acquire(timeout=5),
            "read": lambda: locks.rwlock("name").read().acquire(timeout=0),
            "permit": lambda: locks.semaphore("name", 3).acquire(timeout=0),
            "inspect": lambda: locks.inspect("name"),
            "break": lambda: locks.break_lock("name", reason="test"),
        }
        for word, call in calls.items():
            damage(admin, namespace, how)
            with pytest.raises(Incompatible, match=r"'name' on mysql://.*can't be read") as caught:
                call()
            assert len(str(caught.value)) < 500, word
            assert str(caught.value).isprintable()
        damage(admin, namespace, how)
        listed = {info.name: info for info in locks.list()}
        assert set(listed) == {"a", "name", "z"}
        assert listed["name"].notice.startswith("what is stored under this name can't be read: ")
        assert not listed["a"].notice
        assert listed["z"].holders


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_name_is_incompatible_on_asyncio(
    server: MySQLServer, admin: Any, namespace: str, how: str
) -> None:
    async def body() -> None:
        async with holdfast.connect_async(server.url, namespace=namespace) as locks:
            await locks.list()
            damage(admin, namespace, how)
            for timeout in (0, 5):
                with pytest.raises(Incompatible, match=r"'name' on mysql://.*can't be read"):
                    await locks.lock("name").acquire(timeout=timeout)
            assert [info.name for info in await locks.list()] == ["name"]

    asyncio.run(body())


@pytest.mark.parametrize("mode", ["lease", "advisory"])
def test_a_name_that_is_not_utf_8_is_listed(
    server: MySQLServer, admin: Any, namespace: str, mode: str
) -> None:
    """And the pages after it are listed. A row alone does not make a named lock held."""
    with (
        holdfast.connect(f"{server.url}?mode={mode}", namespace=namespace) as locks,
        locks.lock("a"),
        locks.lock("z"),
    ):
        table = "lock" if mode == "lease" else "counter"
        move = f"UPDATE holdfast_{table} SET name = X'62FF' WHERE name = 'a' AND namespace = "
        rows(admin, f"{move}'{namespace}'")
        backend = locks._engine.backend
        names, cursor = [], None
        for _ in range(5):
            page = run_now(backend.survey("", cursor, 1))
            names += [info.name for info in page.infos]
            cursor = page.cursor
            if cursor is None:
                break
        assert names == (["b\\xff", "z"] if mode == "lease" else ["z"])
        rows(admin, f"UPDATE holdfast_{table} SET name = 'a' WHERE name = X'62FF'")


@pytest.mark.parametrize("flavour", list(Flavour))
def test_a_renewal_goes_on_beside_a_damaged_name(
    server: MySQLServer, namespace: str, flavour: Flavour
) -> None:
    """The damaged name is unknown; the others are renewed."""
    peer = Peer(server.url, namespace, flavour)
    claims = [claim_of(name, mode=Mode.SHARED) for name in ("a", "name", "z")]
    grants = [peer.do(peer.backend.attempt(claim, join=True)) for claim in claims]
    with open_admin(server) as admin:
        damage(admin, namespace, "no line at all")
        waits = [Waiting(claim_of("name"), 0)]
        renewal = peer.do(peer.backend.renew(grants, waits, until=now() + 20))  # type: ignore[arg-type]
    assert set(renewal.unknown) == {claims[1].owner, waits[0].claim.owner}
    assert not renewal.lost
    assert not renewal.forgotten
    peer.close()


def test_a_damaged_record_is_incompatible(server: MySQLServer, admin: Any, namespace: str) -> None:
    with holdfast.connect(server.url, namespace=namespace) as locks:
        locks.once("key").run(lambda: 1)
        rows(admin, f"UPDATE holdfast_record SET value = X'FF' WHERE namespace = '{namespace}'")
        with pytest.raises(Incompatible, match=r"the record of .* can't be read: .*UTF-8"):
            locks.once("key").run(lambda: 2)
