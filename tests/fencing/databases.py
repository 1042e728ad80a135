"""What the tests of guards in SQL share."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from holdfast import Fence, Mode, StaleFence
from holdfast.fencing import sql
from holdfast.fencing.sql.drivers import driver_of

Connect = Callable[..., Any]


def fence(token: int, mode: Mode = Mode.EXCLUSIVE, *slots: int, name: str = "lock") -> Fence:
    return Fence(name, mode, slots, 0, token)


def ready(connect: Connect) -> Any:
    connection = connect()
    sql.create(connection)
    connection.commit()
    return connection


def refused(connection: Any, asked: Fence, why: str | None = None, **options: Any) -> None:
    """A refusal leaves the row locked until the transaction ends, as an entry does."""
    with pytest.raises(StaleFence, match=why):
        sql.guard(connection, "r", asked, **options)
    connection.rollback()


WAITING = {
    "postgresql": "SELECT COUNT(*) FROM pg_locks WHERE NOT granted",
    "mysql": "SELECT COUNT(*) FROM information_schema.innodb_trx WHERE trx_state = 'LOCK WAIT'",
}


class Beside:
    """Work on another connection, in another thread; known to wait before this goes on."""

    def __init__(self, connection: Any, watcher: Any, work: Callable[[], object]) -> None:
        self._kind = dialect(connection)
        self._watcher = watcher
        self._asked = threading.Event()
        self.outcome: list[object] = []
        if self._kind == "sqlite":  # nobody can tell who waits there, but that it has asked
            connection.set_trace_callback(lambda _: self._asked.set())

        def run() -> None:
            try:
                self.outcome.append(work())
            except BaseException as error:
                self.outcome.append(error)

        self._thread = threading.Thread(target=run)
        self._thread.start()
        self._until_it_waits()

    def _until_it_waits(self) -> None:
        ends = time.monotonic() + 20
        while not self._waits():
            assert self._thread.is_alive(), f"it did not wait: {self.outcome}"
            assert time.monotonic() < ends
            time.sleep(0.15)  # asked more often, InnoDB answers from its memory
        assert not self.outcome

    def _waits(self) -> bool:
        if self._kind == "sqlite":
            return self._asked.is_set()
        cursor = self._watcher.cursor()
        cursor.execute(WAITING[self._kind])
        waiting = cursor.fetchone()[0]
        self._watcher.rollback()
        return bool(waiting)

    def join(self) -> object:
        self._thread.join(30)
        return self.outcome[0]


def dialect(connection: Any) -> str:
    return driver_of(connection).dialect
