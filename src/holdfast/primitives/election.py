"""Leader election: a lock whose holder is the leader, and whose changes can be observed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from holdfast.claim import Holder, Mode
from holdfast.core.backoff import WATCH_RETRY_SECONDS
from holdfast.core.drive import run_now
from holdfast.durations import Duration, timeout_seconds
from holdfast.errors import BackendUnavailable, NotHeld
from holdfast.one_process import OneProcess
from holdfast.primitives.lock import Lock, LockBase

if TYPE_CHECKING:
    from holdfast.core.engine import Engine
    from holdfast.primitives.options import LockOptions

__all__ = ["Election", "ElectionBase"]

K = TypeVar("K", bound=LockBase[Any])

WATCH_SECONDS = 5.0
"""How long one ``watch`` request of the backend may take before the leader is read again."""
NOT_SEEN = object()
"""No leader was read yet: differs from every token and from ``None``."""


class ElectionBase(OneProcess, Generic[K]):
    """The leader is the holder of the name. Its note is what other processes see of it."""

    _lock: type[K]

    def __init__(self, engine: Engine, name: str, options: LockOptions) -> None:
        self.name = name
        self._engine = engine
        self._campaign = self._lock(engine, name, options, Mode.EXCLUSIVE)
        self._campaign._leads = True

    def campaign(self) -> K:
        """A lock whose block is entered as leader; the asyncio block is cancelled when leadership
        ends."""
        return self._campaign

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r} on {self._engine.store.display}>"

    async def _leader(self) -> Holder | None:
        self._engine.enter()
        holders = (await self._engine.backend.look(self.name)).holders
        return max(holders, key=lambda holder: holder.token, default=None)

    async def _next(self, seen: object, until: float | None) -> Holder | None:
        """Waits until the leader's token is not ``seen``, and returns the leader (``None``: no
        leader). Raises ``TimeoutError`` at ``until``, ``BackendUnavailable`` after an outage of
        ``patience``."""
        runtime = self._engine.runtime
        outage_since: float | None = None
        while True:
            try:
                leader = await self._leader()
                outage_since = None
                token = leader.token if leader else None
                if token != seen:
                    return leader
                wake = runtime.now() + WATCH_SECONDS
                limit = wake if until is None else min(until, wake)
                await self._engine.backend.watch(self.name, token, limit)
            except BackendUnavailable:
                now = runtime.now()
                outage_since = now if outage_since is None else outage_since
                if now - outage_since > self._engine.patience:
                    raise
                await runtime.sleep(runtime.between(*WATCH_RETRY_SECONDS))
            if until is not None and runtime.now() >= until:
                raise TimeoutError(f"the leader of {self.name!r} did not change in time")

    async def _resign(self) -> None:
        holds = list(self._engine.renewer.holds.values())
        led = [hold for hold in holds if hold.block and hold.grant.claim.name == self.name]
        if not led:
            raise NotHeld(f"this client does not lead {self.name!r}")
        for hold in led:
            await self._engine.release(hold)


class Election(ElectionBase[Lock]):
    """An election of the blocking client."""

    _lock = Lock

    def leader(self) -> Holder | None:
        """The leader at this moment, or ``None``."""
        return run_now(self._leader())

    def observe(self, timeout: Duration | None = None) -> Iterator[Holder | None]:
        """Yields the leader, then each new leader; ``None`` while there is none.

        With a timeout the iteration ends when the leader did not change for so long.
        """
        return self._observe(timeout_seconds(timeout))

    def _observe(self, seconds: float | None) -> Iterator[Holder | None]:
        seen: object = NOT_SEEN
        while True:
            until = None if seconds is None else self._engine.runtime.now() + seconds
            try:
                leader = run_now(self._next(seen, until))
            except TimeoutError:
                return
            yield leader
            seen = leader.token if leader else None

    def resign(self) -> None:
        """Ends the leadership that this client won. Its block goes on, without the lock."""
        run_now(self._resign())
