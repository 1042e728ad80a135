"""A door's half of etcd or Consul with its requests counted, for tests below the contract."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from holdfast.claim import Busy, Claim, Grant
from holdfast.core.contract import Settings
from holdfast.core.drive import run_now
from holdfast.errors import BackendUnavailable
from holdfast.runtimes.blocking import BlockingRuntime
from holdfast.url import open_store
from holdfast.wires.http import Http, Reply

__all__ = ["Counting", "Peer", "peers"]


class Counting:
    """Counts requests, and can lose one: it is kept, and may be delivered later."""

    def __init__(self, http: Http) -> None:
        self.http, self.servers = http, http.servers
        self.asked: list[bytes] = []
        self.read = 0
        """How many bytes of answers there were."""
        self.lose = b""
        self.lost: tuple[bytes, bytes] | None = None

    async def ask(self, line: bytes, body: bytes = b"", until: float | None = None) -> Reply:
        self.asked.append(line)
        if self.lose and self.lose in line:
            self.lose, self.lost = b"", (line, body)
            raise BackendUnavailable("lost on its way")
        reply = await self.http.ask(line, body, until)
        self.read += len(reply.body)
        return reply

    def forget(self) -> None:
        self.http.forget()

    async def close(self) -> None:
        await self.http.close()


class Peer:
    """A store and a blocking backend with counted requests."""

    def __init__(self, url: str, namespace: str) -> None:
        self.store: Any = open_store(url, Settings(namespace=namespace))
        backend: Any = self.store.backend(BlockingRuntime())
        self.backend = backend
        client = backend.gateway if url.startswith("etcd") else backend.agent
        self.post = client.http = Counting(client.http)

    def attempt(self, claim: Claim, join: bool = True) -> Grant | Busy:
        answer: Grant | Busy = run_now(self.backend.attempt(claim, join=join))
        return answer

    def take(self, claim: Claim) -> Grant:
        answer = self.attempt(claim)
        assert isinstance(answer, Grant)
        return answer


@contextmanager
def peers(url: str, namespace: str) -> Iterator[Callable[[], Peer]]:
    """Makes peers, and closes them in the end."""
    made: list[Peer] = []

    def make() -> Peer:
        made.append(Peer(url, namespace))
        return made[-1]

    yield make
    for one in made:
        run_now(one.backend.close())
