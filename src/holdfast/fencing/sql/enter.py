"""How a fence enters a resource in SQL: the path of ``fencing.sql.guard``, once for all drivers."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from holdfast.claim import Fence, Mode
from holdfast.errors import StaleFence, Unsupported
from holdfast.fencing.rule import NOBODY, Memory, Stamp, refusal, stale, tell_refused
from holdfast.fencing.sql.drivers import Answer, Driver
from holdfast.fencing.sql.table import (
    ensure_table,
    forget_table,
    is_deadlock,
    is_missing,
    make_table,
    refused,
)
from holdfast.fencing.sql.text import LOCK_ROW, Statements

__all__ = ["enter"]

MOST_TRIES = 10
REMEMBERED_READERS = 4096
ENTERED, REFUSED = 1, 2

_readers: OrderedDict[tuple[str, str, str], None] = OrderedDict()
"""Readers that entered from this process: when they come again, they take their row shared."""


async def enter(
    driver: Driver, asked: Statements, resource: str, fence: Fence, savepoint: bool
) -> None:
    """Enters, or raises ``StaleFence``; nothing that it leaves behind outlives a rollback."""
    if await driver.autocommit():
        raise Unsupported(
            f"{resource!r} can't be guarded outside a transaction: with autocommit every statement "
            "is a transaction of its own, and a stale holder could come between them"
        )
    if driver.in_savepoint() and not savepoint:
        raise _in_savepoint(resource)
    await driver.begin(fence.mode is not Mode.SHARED)
    await ensure_table(driver, asked)
    begun = asked.dialect == "mysql" and await driver.begun()
    tries = 1 if begun else MOST_TRIES
    while tries:
        try:
            await _enter_rows(driver, asked, resource, fence, savepoint, begun)
            return
        except Exception as error:
            # The server has rolled the transaction back: try again if nothing was in it before.
            tries -= 1
            if not tries or not is_deadlock(asked, error):
                raise


async def _enter_rows(
    driver: Driver, asked: Statements, resource: str, fence: Fence, savepoint: bool, begun: bool
) -> None:
    for slot in sorted(fence.slots) or [LOCK_ROW]:
        row = Row(driver, asked, resource, fence, slot)
        if asked.dialect == "mysql":
            row = MySQLRow(driver, asked, resource, fence, slot, begun=begun)
            begun = True
        if not await row.enter() and not savepoint:
            raise _in_savepoint(resource)


def _in_savepoint(resource: str) -> Unsupported:
    return Unsupported(
        f"{resource!r} can't be guarded inside a savepoint (a nested transaction): a rollback to "
        "it takes back the lock of the row, or what is remembered, while the transaction goes on. "
        "Call guard before the savepoint. In psycopg `with conn.transaction()` is a savepoint if "
        "an earlier statement has begun a transaction: commit that first. savepoint=True allows "
        "it, for code that writes no more under this fence after such a rollback, and for tests "
        "that run in a transaction of their own"
    )


class Row:
    """One row of a resource: the lock's, or that of a semaphore's slot."""

    def __init__(
        self, driver: Driver, asked: Statements, resource: str, fence: Fence, slot: int
    ) -> None:
        self._driver, self._asked, self._resource, self._fence = driver, asked, resource, fence
        self._values: dict[str, Any] = {
            "resource": _stored(asked, resource),
            "name": _stored(asked, fence.name),
            "slot": slot,
            "epoch": fence.epoch,
            "token": fence.token,
        }

    async def enter(self) -> bool:
        """Lets the fence enter. False if PostgreSQL wrote the row inside a savepoint."""
        shared = self._fence.mode is Mode.SHARED
        if shared and await self._again():
            return True
        answer = await self._let_in(self._asked.read if shared else self._asked.write)
        if answer is None:
            raise await self._refusal()
        if shared:
            _note(self._key())
        return self._asked.dialect != "postgresql" or bool(answer.rows[0][0])

    async def _let_in(self, sql: str) -> Answer | None:
        """The answer of a statement that let the fence enter; else nothing."""
        answer = await self._ask(sql)
        return answer if answer.changed == 1 else None

    async def _again(self) -> bool:
        """Whether a reader that has entered before is let in again, beside other readers."""
        if self._key() not in _readers or not self._driver.shares:
            return False
        rows = (await self._ask(self._asked.share)).rows
        if not rows:  # its first transaction was rolled back
            return False
        name, epoch, token = rows[0][:3]
        memory = Memory(_text(name), Stamp(epoch, token), Stamp(epoch, token))
        against = refusal(memory, self._fence)
        if against is not None:
            raise stale(self._resource, self._fence, against)
        await self._check_age(rows[0])
        return True

    async def _check_age(self, row: tuple[Any, ...]) -> None:
        """Raises ``Unsupported`` if the transaction may see less than an earlier holder wrote."""

    def _key(self) -> tuple[str, str, str]:
        return self._asked.create, self._resource, str(self._fence)

    async def _ask(self, sql: str) -> Answer:
        wanted = {word: value for word, value in self._values.items() if f":{word}" in sql}
        try:
            return await self._driver.execute(sql, wanted)
        except Exception as error:
            forget_table(self._driver, self._asked)
            known = refused(self._asked, error)
            if known is not None:
                raise known from error
            if not is_missing(self._asked, error):
                raise
        await make_table(self._driver, self._asked)
        return await self._driver.execute(sql, wanted)

    async def _refusal(self) -> StaleFence:
        for sql in (self._asked.own, self._asked.other):
            for row in (await self._ask(sql)).rows:
                against = refusal(_memory(row), self._fence)
                if against is not None:
                    return stale(self._resource, self._fence, against)
        tell_refused(self._resource, self._fence)
        return StaleFence(
            f"{self._resource!r} refused token {self._fence.token} of {self._fence.name!r}",
            fence=self._fence,
        )


class MySQLRow(Row):
    """A row of MySQL's, where a transaction may see what was there before it had the row.

    Under REPEATABLE READ its first read decides what it sees, so a transaction that read before
    its guard could miss what the earlier holder wrote, and undo it. It is refused if another
    holder has entered since that read. A transaction that begins with its guard has not read yet.
    """

    def __init__(self, *given: Any, begun: bool) -> None:
        super().__init__(*given)
        self._begun = begun
        """Whether the transaction may have read before."""

    async def _let_in(self, sql: str) -> Answer | None:
        new = False
        if self._begun:
            entries = (await self._ask(self._asked.lock)).inserted
            new = not entries
            if entries:
                await self._check_entries(entries)
        answer = await self._ask(sql)
        if answer.inserted == ENTERED and not new:
            return answer
        # A new row: is it ours to make?
        if answer.inserted == REFUSED:
            return None
        if (await self._ask(self._asked.other)).rows:
            await self._unmake()
            return None
        return answer

    async def _unmake(self) -> None:
        """Takes the new row away: a caller may commit after all, and it would let this lock in."""
        try:
            await self._ask(self._asked.unmake)
        except Unsupported:  # no right to delete: then a rollback alone does it
            return

    async def _check_age(self, row: tuple[Any, ...]) -> None:
        if self._begun:
            await self._check_entries(row[3])

    async def _check_entries(self, entries: int) -> None:
        """Compares with how many had entered by what the transaction sees."""
        if (await self._ask(self._asked.seen)).rows != [(entries,)]:
            raise Unsupported(
                f"{self._resource!r} can't be guarded in this transaction: it has read before "
                "(REPEATABLE READ), and another holder has entered since. Roll back, and guard "
                "before the first read"
            )


def _memory(row: tuple[Any, ...]) -> Memory:
    slot, name, epoch, token, highest_epoch, highest_token = row
    if slot == LOCK_ROW:
        return Memory(_text(name), Stamp(epoch, token), Stamp(highest_epoch, highest_token))
    return Memory(_text(name), NOBODY, NOBODY, {slot: Stamp(epoch, token)})


def _stored(asked: Statements, text: str) -> str:
    """A text as the statements take it: MySQL's as hexadecimal digits."""
    return text.encode().hex() if asked.dialect == "mysql" else text


def _text(stored: str | bytes) -> str:
    return stored if isinstance(stored, str) else bytes(stored).decode(errors="backslashreplace")


def _note(key: tuple[str, str, str]) -> None:
    _readers[key] = None
    while len(_readers) > REMEMBERED_READERS:
        try:
            _readers.popitem(last=False)
        except KeyError:  # another thread was faster
            return
