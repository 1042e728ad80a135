"""Name resolution with a deadline.

The system's look-up has no timeout, so it runs on a thread, and the caller waits for it until its
deadline. Callers that need the same name share one look-up: a look-up that hangs is never repeated
beside itself. A few names are looked up at the same time, so that a look-up that hangs does not
keep a client from the other hosts of its store.
"""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from holdfast.io import lifetime
from holdfast.io.clock import now
from holdfast.io.threads import OneThread

__all__ = [
    "Found",
    "Lookup",
    "is_address",
    "look_up",
    "look_up_now",
    "of_address",
    "resolver",
]

MOST_THREADS = 4
"""How many names are looked up at the same time. A thread is started when it is first needed."""
Found = tuple[Any, Any, int, str, Any]
"""An address as ``socket.getaddrinfo`` gives it."""


class Lookup:
    """A look-up, as one caller sees it."""

    __slots__ = ("_answer", "_error", "_notify", "given_up", "host", "port")

    def __init__(self, host: str, port: int, notify: Callable[[], object]) -> None:
        self.host, self.port, self._notify = host, port, notify
        self.given_up = False
        """Whether the caller no longer waits for it."""
        self._answer: list[Found] = []
        self._error: Exception | None = OSError(0, f"looking up {host} took too long")

    def answer(self, found: list[Found], error: Exception | None) -> None:
        """Sets the result and notifies the caller. Runs on a thread of the resolver."""
        self._answer, self._error = found, error
        self._notify()

    def result(self) -> list[Found]:
        """The addresses; raises the error of the look-up, or ``OSError`` if it took too long."""
        if self._error is not None:
            raise self._error.with_traceback(None)
        return self._answer


class _Resolver:
    def __init__(self) -> None:
        self._asked: queue.SimpleQueue[Lookup] = queue.SimpleQueue()
        self._mutex = threading.Lock()
        """Only the resolver's own threads acquire it: an interrupt never arrives there."""
        self._under_way: dict[tuple[str, int], list[Lookup]] = {}
        self._threads = [OneThread("holdfast-resolver", self._run) for _ in range(MOST_THREADS)]

    def ask(self, lookup: Lookup) -> None:
        """Queues a look-up; raises ``OSError`` if no thread can be started for it."""
        self._asked.put(lookup)  # before the check of what is under way: see _run
        try:
            self._threads[0].start()
        except RuntimeError as error:
            lookup.given_up = True
            raise OSError(0, f"looking up {lookup.host}: {error}") from None
        self._start_idle()

    def _start_idle(self) -> None:
        """Starts threads so that one more exists than are busy."""
        with suppress(RuntimeError):  # no more threads: an existing thread does it later
            for one in self._threads[: len(self._under_way) + 1]:
                one.start()

    def _run(self) -> None:
        while True:
            lookup = self._asked.get()
            if lookup.given_up or not self._begin(lookup):
                continue
            if self._asked.qsize():  # it was queued before this look-up counted as under way
                self._start_idle()
            found, error = _look_up(lookup.host, lookup.port)
            with self._mutex:
                asked = self._under_way.pop((lookup.host, lookup.port))
            for one in asked:
                one.answer(found, error)

    def _begin(self, lookup: Lookup) -> bool:
        """Whether to start this look-up; false if it waits for the same look-up under way."""
        with self._mutex:
            asked = self._under_way.setdefault((lookup.host, lookup.port), [])
            asked.append(lookup)
            return len(asked) == 1

    def forked(self) -> None:
        self._asked = queue.SimpleQueue()
        self._mutex = threading.Lock()
        self._under_way = {}
        for one in self._threads:
            one.forked()


resolver = _Resolver()
lifetime.at_fork(resolver)


def _look_up(host: str, port: int) -> tuple[list[Found], Exception | None]:
    try:
        return look_up_now(host, port), None
    except Exception as error:  # noqa: BLE001 - raised by Lookup.result, in the caller
        return [], error


def look_up_now(host: str, port: int) -> list[Found]:
    """Resolves without a timeout. Raises ``OSError``."""
    try:
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except UnicodeError:  # by the codec: an empty label, or one of more than 63 letters
        raise OSError(0, f"{host[:100]!r} is not the name of a host") from None


def of_address(host: str, port: int) -> list[Found]:
    """What a look-up gives for a host that is an address, at once."""
    # As bytes: text would be encoded by a codec, which is imported when it is first used, and an
    # interrupt in there leaves the import locked.
    return socket.getaddrinfo(host.encode("ascii"), port, type=socket.SOCK_STREAM)


def is_address(host: str) -> bool:
    """Whether the host is an IP address, which needs no look-up."""
    for family in (socket.AF_INET, socket.AF_INET6):
        with suppress(OSError, ValueError):
            socket.inet_pton(family, host.partition("%")[0])
            return True
    return False


def look_up(host: str, port: int, until: float) -> list[Found]:
    """The addresses of a host; raises ``OSError``, at ``until`` at the latest."""
    if is_address(host):
        return of_address(host, port)
    done: queue.SimpleQueue[None] = queue.SimpleQueue()
    lookup = Lookup(host, port, lambda: done.put(None))
    resolver.ask(lookup)
    try:
        with suppress(queue.Empty):
            done.get(timeout=max(0.0, until - now()))
        return lookup.result()
    finally:
        lookup.given_up = True
