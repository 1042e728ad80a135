"""Looking up a host's name, and connecting to its addresses, within one deadline.

The system's look-up can't be given a time, so it runs on one thread per process, and the caller
waits for it no longer than it may. Whoever asks for a name that is being looked up gets that
answer: a look-up that hangs is never begun again beside itself.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from holdfast.runtimes import lifetime
from holdfast.runtimes.clock import now
from holdfast.runtimes.one_thread import OneThread

try:
    from _queue import Empty, SimpleQueue
except ImportError:
    from queue import Empty, SimpleQueue

__all__ = ["Found", "Lookup", "is_address", "look_up", "look_up_now", "open_socket", "resolver"]

Found = tuple[Any, Any, int, str, Any]
"""An address as ``socket.getaddrinfo`` gives it."""


class Lookup:
    """One caller's question."""

    __slots__ = ("_answer", "_error", "_tell", "given_up", "host", "port")

    def __init__(self, host: str, port: int, tell: Callable[[], object]) -> None:
        self.host, self.port, self._tell = host, port, tell
        self.given_up = False
        """Whether nobody waits for it any more."""
        self._answer: list[Found] = []
        self._error: Exception | None = OSError(0, f"looking up {host} took too long")

    def answer(self, found: list[Found], error: Exception | None) -> None:
        """On the resolver's thread."""
        self._answer, self._error = found, error
        self._tell()

    def result(self) -> list[Found]:
        """What was found; raises what the look-up raised, or that it took too long."""
        if self._error is not None:
            raise self._error.with_traceback(None)
        return self._answer


class _Resolver:
    def __init__(self) -> None:
        self._asked: SimpleQueue[Lookup] = SimpleQueue()
        self._one = OneThread("holdfast-resolver", self._run)

    def ask(self, lookup: Lookup) -> None:
        """Has it looked up; raises ``OSError`` if no thread can be started for that."""
        try:
            self._one.start()
        except RuntimeError as error:
            raise OSError(0, f"looking up {lookup.host}: {error}") from None
        self._asked.put(lookup)

    def _run(self) -> None:
        waiting: deque[Lookup] = deque()
        while True:
            lookup = waiting.popleft() if waiting else self._asked.get()
            if lookup.given_up:
                continue
            found, error = _look_up(lookup.host, lookup.port)
            with suppress(Empty):  # whoever has asked meanwhile
                while True:
                    waiting.append(self._asked.get_nowait())
            asked, waiting = waiting, deque()
            for one in (lookup, *asked):
                if (one.host, one.port) == (lookup.host, lookup.port):
                    one.answer(found, error)
                else:
                    waiting.append(one)

    def forked(self) -> None:
        self._asked = SimpleQueue()
        self._one.forked()


resolver = _Resolver()
lifetime.at_fork(resolver)


def _look_up(host: str, port: int) -> tuple[list[Found], Exception | None]:
    try:
        return look_up_now(host, port), None
    except Exception as error:  # noqa: BLE001 - it belongs to whoever asked
        return [], error


def look_up_now(host: str, port: int) -> list[Found]:
    """For as long as it takes; at once for what is an address already."""
    return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)


def is_address(host: str) -> bool:
    """Whether nothing has to be looked up."""
    for family in (socket.AF_INET, socket.AF_INET6):
        with suppress(OSError, ValueError):
            socket.inet_pton(family, host.partition("%")[0])
            return True
    return False


def look_up(host: str, port: int, until: float) -> list[Found]:
    """The addresses of a host; raises ``OSError``, by then at the latest."""
    if is_address(host):
        return look_up_now(host, port)
    told: SimpleQueue[None] = SimpleQueue()
    lookup = Lookup(host, port, lambda: told.put(None))
    resolver.ask(lookup)
    try:
        with suppress(Empty):
            told.get(timeout=max(0.0, until - now()))
        return lookup.result()
    finally:
        lookup.given_up = True


def open_socket(host: str, port: int, until: float) -> socket.socket:
    """Connects to the first address of a host that lets us; raises ``OSError`` by then."""
    found = look_up(host, port, until)
    failure: OSError | None = None
    for number, (family, kind, protocol, _, address) in enumerate(found):
        left = until - now()
        if left <= 0:
            break
        sock = socket.socket(family, kind, protocol)
        try:
            # The last address may use up what is left; the others must leave some for the rest.
            sock.settimeout(left / (len(found) - number))
            sock.connect(address)
        except OSError as error:
            sock.close()
            failure = error
        except BaseException:
            sock.close()
            raise
        else:
            return sock
    raise failure or TimeoutError()
