"""Trips to the ensemble, for either world: what every part of the backend stands on."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import cast

from kazoo.exceptions import NodeExistsError, NoNodeError

from holdfast.core.contract import Runtime, Signal
from holdfast.errors import BackendUnavailable
from holdfast.stores.zookeeper.client.calls import AsyncCall, BlockingCall, Call, Wake
from holdfast.stores.zookeeper.client.packets import Ask, Container, Create, Persistent
from holdfast.stores.zookeeper.session import Session
from holdfast.stores.zookeeper.store import ZooKeeperStore

__all__ = ["Trips"]

DEEPEST_PATH = 64
GOODBYE_SECONDS = 1.0


class Trips:
    """Asks and waits, blocking or not."""

    def __init__(self, store: ZooKeeperStore, runtime: Runtime) -> None:
        self.store, self.runtime = store, runtime
        self._call: type[Call] = BlockingCall if runtime.blocking else AsyncCall

    def where(self, name: str) -> str:
        """A name for messages."""
        return f"{name!r} on {self.store.display}"

    async def ready(self, key: int, until: float | None = None) -> Session:
        """The session of a ttl, connected; raises if that takes longer than a request may."""
        known = self.store.sessions.get(key)
        if known is not None and known.up and not known.dead:
            return known
        session = self.store.session(key)
        if session.up:
            return session
        patience = self.runtime.now() + self.store.settings.request_seconds
        signal = self.runtime.signal()
        if session.arrival(signal.set):
            try:
                await self.runtime.wait(signal, patience if until is None else min(until, patience))
            finally:
                session.leave(signal.set)
        session.retire()
        session.check()
        return session

    async def looking(self) -> Session:
        """Any session: to look, it does not matter which."""
        for key, session in list(self.store.sessions.items()):
            if session.up:
                return await self.ready(key)
        return await self.ready(0)

    def seconds(self, until: float | None) -> float:
        """How long a request may take."""
        seconds = self.store.settings.request_seconds
        return seconds if until is None else min(seconds, until - self.runtime.now())

    async def ask(self, session: Session, *asks: Ask, until: float | None = None) -> None:
        """One trip: requests back to back, and all their answers."""
        if self.runtime.blocking:
            session.ask(self.seconds(until), asks)
            return
        call = self._call()
        session.start(call, *asks)
        await session.finish(call, self.seconds(until), *asks)

    def wake_up(self) -> Wake:
        """What ``listen`` waits for."""
        return BlockingCall() if self.runtime.blocking else self.runtime.signal()

    async def listen(self, session: Session, wake: Wake, until: float) -> None:
        """Until it is set: by an event of the session, or by anybody else."""
        if isinstance(wake, BlockingCall):
            session.reader.wait(wake, until - self.runtime.now())
        else:
            await self.runtime.wait(cast("Signal", wake), until)

    async def make(
        self,
        session: Session,
        path: str,
        leaf: type[Create] = Container,
        until: float | None = None,
    ) -> None:
        """Makes a node where it is missing, and what is missing above it."""
        missing: list[Create] = [leaf(path, b"", self.store.acl)]
        paths = [path]
        for _ in range(DEEPEST_PATH):
            await self.ask(session, missing[-1], until=until)
            error = missing[-1].error
            if isinstance(error, NoNodeError):
                paths.append(paths[-1].rpartition("/")[0])
                missing.append(Persistent(paths[-1], b"", self.store.acl))
                continue
            if error is not None and not isinstance(error, NodeExistsError):
                raise BackendUnavailable(f"{self.store.display} does not make {path!r}") from error
            missing.pop()
            paths.pop()
            if not missing:
                return
            missing[-1] = type(missing[-1])(paths[-1], b"", self.store.acl)
        raise BackendUnavailable(f"{self.store.display}: {path!r} vanished again and again")

    async def say_goodbye(self, sessions: Sequence[Session]) -> None:
        """Ends sessions, and with them whatever they still hold."""
        for session in sessions:
            if self.runtime.blocking:
                session.close(GOODBYE_SECONDS)
            else:
                await asyncio.to_thread(session.close, GOODBYE_SECONDS)
