"""A door's half of etcd with its requests counted, for tests below the contract."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from holdfast.backends.etcd import EtcdStore
from holdfast.backends.etcd_backend import EtcdBackend
from holdfast.claim import Busy, Claim, Grant, Mode, write_label
from holdfast.core.contract import Settings
from holdfast.core.drive import run_now
from holdfast.errors import BackendUnavailable
from holdfast.runtimes.blocking import BlockingRuntime
from holdfast.url import open_store
from holdfast.wires.http import Http, Reply

__all__ = ["Counting", "Peer", "claim_of", "peers"]


class Counting:
    """Counts requests, and can lose one: it is kept, and may be delivered later."""

    def __init__(self, http: Http) -> None:
        self.http, self.servers = http, http.servers
        self.asked: list[bytes] = []
        self.lose = b""
        self.lost: tuple[bytes, bytes] | None = None

    async def ask(self, line: bytes, body: bytes = b"", until: float | None = None) -> Reply:
        self.asked.append(line)
        if self.lose and self.lose in line:
            self.lose, self.lost = b"", (line, body)
            raise BackendUnavailable("lost on its way")
        return await self.http.ask(line, body, until)

    def forget(self) -> None:
        self.http.forget()

    async def close(self) -> None:
        await self.http.close()


class Peer:
    """A store and a blocking backend with counted requests."""

    def __init__(self, url: str, namespace: str) -> None:
        self.store: Any = open_store(url, Settings(namespace=namespace))
        assert isinstance(self.store, EtcdStore)
        self.backend: EtcdBackend = self.store.backend(BlockingRuntime())
        self.post = Counting(self.backend.gateway.http)
        self.backend.gateway.http = self.post

    def attempt(self, claim: Claim, join: bool = True) -> Grant | Busy:
        return run_now(self.backend.attempt(claim, join=join))

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


def claim_of(
    name: str = "name", mode: Mode = Mode.EXCLUSIVE, *, weight: int = 1, limit: int = 0
) -> Claim:
    label = write_label("host", 1, "thread", "")
    return Claim(name, mode, weight, limit, 30.0, secrets.token_hex(16), label)
