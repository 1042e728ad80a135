"""What a conformance rule works with: clients on one store, real processes, and the clock.

Every body is written for the asyncio client's words and runs through both; see
``holdfast.testing.clients``. A task of the body is a thread to the blocking client.
"""

from __future__ import annotations

import asyncio
import secrets
import tempfile
import threading
import warnings
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

from holdfast.core.hold import grace_seconds
from holdfast.errors import BackendUnavailable, HoldfastError, LockLost, LockTimeout
from holdfast.io.clock import now
from holdfast.testing.clients import open_client
from holdfast.testing.guarantees import guarantees_of
from holdfast.testing.harness import Harness
from holdfast.testing.processes import Process
from holdfast.testing.rules import Catalogue, Flavour
from holdfast.testing.stalls import Stalls, in_some_try
from holdfast.testing.workers import Workers

if TYPE_CHECKING:
    from holdfast.core.contract import Guarantee
    from holdfast.locks_async import AsyncLocks

__all__ = [
    "SOON",
    "Bench",
    "Stalls",
    "calmly",
    "conformance",
    "eventually",
    "in_some_try",
    "once_in_time",
    "raises",
    "renewer_hung",
    "stopped_in_time",
    "times_out",
    "within",
]

T = TypeVar("T")
TRIES = 5
STALL_SECONDS = 0.5
"""A machine that stood still for less has not kept a renewer from renewing in time."""
SOON = 10.0
"""How long what happens at once may take on a busy machine."""
LONGEST_ANSWER_SECONDS = 5.0
"""How long a server on a busy machine may take to answer one request."""


class Bench:
    """One rule's surroundings: a namespace of its own on a running store."""

    def __init__(self, harness: Harness, flavour: Flavour) -> None:
        self.harness, self.flavour = harness, flavour
        self.namespace = f"t{secrets.token_hex(6)}"
        self.ttl, self.kept_ttl = harness.ttl, harness.kept_ttl
        self.recovery = harness.ttl + 1.0 + harness.extra_recovery
        """How long a killed holder may block others."""
        self.workers = Workers()
        self._clients: list[AsyncLocks] = []
        self._processes: list[Process] = []
        self._folder = tempfile.TemporaryDirectory(prefix="holdfast-test-")
        self.folder = Path(self._folder.name)

    @property
    def guarantees(self) -> frozenset[Guarantee]:
        """What the store promises."""
        return guarantees_of(self.harness)

    def client(self, *, proxied: bool = False, **options: Any) -> AsyncLocks:
        """Another client to the store, as another process would open it."""
        url = self.harness.proxied_url if proxied else self.harness.url
        options = {"namespace": self.namespace} | options
        client = open_client(url, self.flavour, self.workers.run, **options)
        self._clients.append(client)
        return client

    def process(self, flavour: Flavour | None = None, **options: Any) -> Process:
        """A real process with a client of its own, of the same flavour if none is given."""
        options = {"namespace": self.namespace} | options
        process = Process(self.harness.url, flavour or self.flavour, **options)
        self._processes.append(process)
        return process

    async def is_free(self, client: AsyncLocks, name: str) -> bool:
        """Whether nobody holds the name, waits for it or has it reserved."""
        info = await client.inspect(name)
        return not info.holders and not info.waiters

    async def freed(self, client: AsyncLocks, name: str, seconds: float = SOON) -> None:
        """Returns once nobody holds the name or waits for it."""
        await eventually(lambda: self.is_free(client, name), seconds, f"{name!r} was not freed")

    async def taken(self, client: AsyncLocks, name: str) -> None:
        """Returns once the name is held."""

        async def held() -> bool:
            return bool((await client.inspect(name)).holders)

        await eventually(held, SOON, f"{name!r} was not taken")

    async def in_line(self, client: AsyncLocks, name: str, count: int) -> None:
        """Returns once so many clients stand in the store's line."""

        async def stand() -> bool:
            return len((await client.inspect(name)).waiters) == count

        await eventually(stand, SOON, f"{count} did not come to stand in line for {name!r}")

    async def close(self) -> None:
        for process in self._processes:
            process.close()
        with warnings.catch_warnings():
            # A rule that failed half-way leaves holds behind; its own failure is what counts.
            warnings.simplefilter("ignore", ResourceWarning)
            for client in self._clients:
                try:
                    await client.close()
                except HoldfastError:
                    continue
        self.workers.close()
        self._folder.cleanup()


async def eventually(
    condition: Callable[[], Awaitable[bool]], seconds: float, otherwise: str
) -> None:
    """Asks until the condition holds; fails with ``otherwise`` when the time is over."""
    deadline = now() + seconds
    while not await condition():
        assert now() < deadline, f"{otherwise} within {seconds:g} s"
        await asyncio.sleep(0.01)


async def calmly(work: Callable[[float], Awaitable[T]], seconds: float = 0.05) -> T:
    """The result of work that is given a short timeout. A server on a busy machine may not answer
    one request in that time; then the work is done again with a longer timeout. The last one is
    long enough for any server that answers at all."""
    for timeout in (seconds, 1.0):
        try:
            return await work(timeout)
        except BackendUnavailable:
            continue
    return await work(LONGEST_ANSWER_SECONDS)


async def once_in_time(work: Callable[[], Awaitable[bool]]) -> None:
    """Runs work whose holds must be renewed in time. It is repeated only if holds ended while the
    machine stood still; on a machine that does not, a single loss fails the rule."""
    for _ in range(TRIES):
        with Stalls() as stalls:
            if await work():
                return
        stood = stalls.seconds
        assert stood >= STALL_SECONDS, f"a hold that was to be kept has ended ({stood:.2f} s late)"
    raise AssertionError(f"holds that were to be kept have ended, {TRIES} times out of {TRIES}")


async def stopped_in_time(
    lock: AbstractAsyncContextManager[Any], ttl: float, trouble: Callable[[], object] = bool
) -> bool:
    """Stays in the block, where there is trouble, until it is stopped. Returns whether any of its
    time was left then; none may be left only if the machine stood still."""
    left = 0.0
    with Stalls() as stalls, raises(LockLost):
        async with lock as lease:
            trouble()
            try:
                await asyncio.sleep(ttl + SOON)
            finally:
                left = lease.remaining
    assert left > 0 or stalls.seconds > grace_seconds(ttl) / 2
    return left > 0


@contextmanager
def renewer_hung(client: AsyncLocks) -> Iterator[None]:
    """The thread that renews stands still in its next renewal, whatever time it was given: as in a
    look-up of a name, or in a driver of a database."""
    backend = client._renewer_thread.renewer.backend
    renew, let_go = backend.renew, threading.Event()

    async def attach(*what: Any, **how: Any) -> Any:
        let_go.wait(6 * SOON)
        return await renew(*what, **how)

    backend.renew = attach  # type: ignore[method-assign]
    try:
        yield
    finally:
        backend.renew = renew  # type: ignore[method-assign]
        let_go.set()


async def times_out(lock: AbstractAsyncContextManager[Any]) -> LockTimeout:
    """Waits for the block without success; returns the error."""
    with raises(LockTimeout) as raised:
        async with lock:
            pass
    error: LockTimeout = raised.error
    return error


async def within(seconds: float, work: Awaitable[Any]) -> Any:
    """The work's result; fails if it takes longer."""
    async with asyncio.timeout(seconds):
        return await work


class raises:  # noqa: N801 - reads as the word it is
    """A block that must raise the error; ``.error`` is what it raised."""

    def __init__(self, kind: type[BaseException] | tuple[type[BaseException], ...]) -> None:
        self._kind = kind
        self.error: Any = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, _: object) -> bool:
        assert kind is not None, f"{self._kind} was not raised"
        self.error = error
        return issubclass(kind, self._kind)


conformance: Catalogue[Bench] = Catalogue(Bench)
