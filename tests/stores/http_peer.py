"""A backend of etcd or Consul that counts its requests, for tests of single requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

from holdfast.claim import Busy, Claim, Grant
from holdfast.core.contract import Settings
from holdfast.core.drive import run_now
from holdfast.errors import BackendUnavailable
from holdfast.io.runtime_aio import AsyncioRuntime
from holdfast.io.runtime_blocking import BlockingRuntime
from holdfast.testing import Flavour
from holdfast.url import open_store
from stores.claims import claim_of

__all__ = ["Counting", "Peer", "peers"]

T = TypeVar("T")
MOST_AT_ONCE = 8


class Counting:
    """Counts requests, and can hold one back, to be delivered later."""

    def __init__(self, http: Any) -> None:
        self.http = http
        """The ``Wire`` of the backend."""
        self.asked: list[bytes] = []
        self.read = 0
        """The number of bytes in all answers."""
        self.lose = b""
        self.lost: tuple[bytes, bytes] | None = None

    async def ask(self, line: bytes, body: bytes = b"", until: float | None = None) -> Any:
        self.asked.append(line)
        if self.lose and self.lose in line.lower():
            self.lose, self.lost = b"", (line, body)
            raise BackendUnavailable("lost by the test")
        reply = await self.http.ask(line, body, until)
        self.read += len(reply.body)
        return reply

    def forget(self) -> None:
        self.http.forget()

    async def close(self) -> None:
        await self.http.close()


class Peer:
    """A store and a backend with counted requests; blocking by default."""

    def __init__(self, url: str, namespace: str, flavour: Flavour = Flavour.BLOCKING) -> None:
        self.store: Any = open_store(url, Settings(namespace=namespace))
        self._loop = asyncio.Runner() if flavour is Flavour.ASYNCIO else None
        backend: Any = self.run(self._open())
        self.backend = backend
        requests = backend.calls if url.startswith("etcd") else backend.agent
        self.post = requests.wire = Counting(requests.wire)

    async def _open(self) -> Any:
        return self.store.backend(BlockingRuntime() if self._loop is None else AsyncioRuntime())

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine of the backend: at once, or on its event loop."""
        return run_now(work) if self._loop is None else self._loop.run(work)

    def attempt(self, claim: Claim, join: bool = True) -> Grant | Busy:
        answer: Grant | Busy = self.run(self.backend.attempt(claim, join=join))
        return answer

    def take(self, claim: Claim) -> Grant:
        answer = self.attempt(claim)
        assert isinstance(answer, Grant)
        return answer

    def take_many(self, number: int) -> list[Grant]:
        """Acquire so many locks with different names."""
        with ThreadPoolExecutor(MOST_AT_ONCE) as pool:
            return list(pool.map(lambda n: self.take(claim_of(f"name {n}")), range(number)))

    def close(self) -> None:
        self.run(self.backend.close())
        if self._loop is not None:
            self._loop.close()


@contextmanager
def peers(url: str, namespace: str) -> Iterator[Callable[..., Peer]]:
    """Yield a function that makes peers; all are closed at the end of the block."""
    made: list[Peer] = []

    def make(flavour: Flavour = Flavour.BLOCKING) -> Peer:
        made.append(Peer(url, namespace, flavour))
        return made[-1]

    try:
        yield make
    finally:
        for one in made:
            one.close()
