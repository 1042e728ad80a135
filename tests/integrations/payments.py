"""What the payment service of the tests does, for ASGI and WSGI alike: each payment is a row."""

from __future__ import annotations

import os
import sqlite3
import time
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from holdfast import Fence, fencing
from integrations.journal import Journal

__all__ = ["Answer", "journal", "pay"]

journal = Journal(os.environ["JOURNAL"])
LEDGER = Path(os.environ["JOURNAL"]).parent / "ledger.db"


class Answer(NamedTuple):
    """The response to a request."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes


def pay(what: str, body: bytes, fence: Fence | None) -> Answer:
    """Does what the path asks for; writes to the journal that the handler ran."""
    journal.write(what, token=None if fence is None else fence.token)
    match what:
        case "pay":
            number = charge(body, fence)
            headers = [("set-cookie", "a=1"), ("set-cookie", "b=2"), ("x-payment", str(number))]
            return Answer(201, headers, f"payment {number}".encode())
        case "slow":
            while not journal.read("finish"):
                time.sleep(0.05)
            return Answer(201, [], f"payment {charge(body, fence)}".encode())
        case "broken":
            return Answer(500, [], b"broken")
        case "limited":
            return Answer(429, [], b"later")
        case "busy":
            return Answer(423, [("retry-after", "1")], b"busy")
        case "declined":
            return Answer(402, [], b"declined")
        case "large":
            return Answer(200, [], b"x" * 1_000_000)
    return Answer(404, [], b"")


def charge(body: bytes, fence: Fence | None) -> int:
    """One transaction, behind the fence if there is one."""
    with closing(sqlite3.connect(LEDGER, timeout=30)) as connection, connection:
        connection.execute("CREATE TABLE IF NOT EXISTS payment (body BLOB)")
        if fence is not None:
            fencing.sql.guard(connection, fence.name, fence)
        connection.execute("INSERT INTO payment VALUES (?)", [body])
        number: int = connection.execute("SELECT count(*) FROM payment").fetchone()[0]
    return number
