"""Records: values that outlive the hold under which they were written.

``<namespace>/records/<name>`` is a plain node. It is written in one transaction with the check
that the claim's own node is there, and deleted by whoever finds that its time is over.
"""

from __future__ import annotations

from typing import NamedTuple

from kazoo.exceptions import NoNodeError

from holdfast.claim import Grant, Record
from holdfast.errors import BackendUnavailable
from holdfast.stores._consensus.strict import digits, moment
from holdfast.stores.zookeeper.client.packets import (
    Ask,
    Check,
    Delete,
    Listing,
    Multi,
    Persistent,
    Plain,
    Read,
    Write,
)
from holdfast.stores.zookeeper.queue import decode_name, encode_name, unreadable
from holdfast.stores.zookeeper.session import Session
from holdfast.stores.zookeeper.trips import Trips

__all__ = ["Recording"]

TRIES = 8
PURGE_SECONDS = 600.0
PURGED_AT_ONCE = 500


class _Kept(NamedTuple):
    token: int
    keep_seconds: float
    value: str


def _write(token: int, keep_seconds: float, value: str) -> bytes:
    return f"{token} {keep_seconds!r}\n{value}".encode()


def _read(data: bytes) -> _Kept | None:
    """``None`` for what can't be read."""
    try:
        head, _, value = data.decode().partition("\n")
        token, keep = head.split(" ")
        return _Kept(digits(token), moment(float(keep)), value)
    except ValueError:
        return None


class Recording(Trips):
    """The part of the backend that keeps values."""

    def _record_path(self, name: str) -> str:
        return f"{self.store.root}/records/{encode_name(name)}"

    async def record(self, grant: Grant, value: str, keep_seconds: float) -> bool:
        _, _, hold = grant.ref
        session = await self.looking()
        path = self._record_path(grant.claim.name)
        data = _write(grant.token, keep_seconds, value)
        change: Ask = Write(path, data)
        for _ in range(TRIES):
            multi = Multi([Check(hold), change])
            await self.ask(session, multi)
            if not multi.failed:
                await self._purge(session)
                return True
            if isinstance(multi.value[0], NoNodeError):
                return False
            if not isinstance(multi.value[1], NoNodeError):  # somebody made it meanwhile
                change = Write(path, data)
                continue
            if isinstance(change, Plain):
                await self.make(session, f"{self.store.root}/records", Persistent)
            change = Plain(path, data, self.store.acl)
        raise BackendUnavailable(f"{self.where(grant.claim.name)}: the record can't be written")

    async def recall(self, name: str) -> Record | None:
        session = await self.looking()
        read = Read(self._record_path(name))
        await self.ask(session, read)
        if read.error is not None:
            return None
        kept = _read(read.value[0])
        if kept is None:
            raise unreadable(f"the record of {self.where(name)}")
        age = self._wall(session) - read.value[1].mtime / 1000
        if age >= kept.keep_seconds:
            await self.ask(session, Delete(read.path, read.value[1].version))
            return None
        return Record(kept.value, kept.token, age)

    def _wall(self, session: Session) -> float:
        """The servers' time, as the session's last new node told it; else our own."""
        told, moment = session.clock
        return told + self.runtime.now() - moment if told else self.runtime.wall()

    async def _purge(self, session: Session) -> None:
        """Now and then deletes records whose time is over and that nobody asked for again."""
        now = self.runtime.now()
        if now - self.store.records_purged < PURGE_SECONDS:
            return
        self.store.records_purged = now
        listing = Listing(f"{self.store.root}/records")
        await self.ask(session, listing)
        names = [decode_name(node) for node in (listing.value or ())[:PURGED_AT_ONCE]]
        reads = [Read(self._record_path(name)) for name in names]
        if reads:
            await self.ask(session, *reads)
        wall = self._wall(session)
        over: list[Ask] = []
        for read in reads:
            kept = _read(read.value[0]) if read.error is None else None
            if kept is not None and wall - read.value[1].mtime / 1000 >= kept.keep_seconds:
                over.append(Delete(read.path, read.value[1].version))
        if over:
            await self.ask(session, *over)
