"""Looking up a host's name, and connecting to its addresses, within one deadline.

The system's look-up can't be given a time, so it runs on a thread of its own, and the caller
waits for it no longer than it may. Whoever asks for a name that is being looked up gets that
answer: a look-up that hangs is never begun again beside itself. A few names are looked up at the
same time, so that one that hangs does not keep a client from the other hosts of its store.
"""

from __future__ import annotations

import select
import socket
import ssl
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from holdfast.io import lifetime
from holdfast.io.clock import now
from holdfast.io.threads import OneThread

try:
    from _queue import Empty, SimpleQueue
except ImportError:
    from queue import Empty, SimpleQueue

__all__ = [
    "Found",
    "Lookup",
    "Readable",
    "is_address",
    "look_up",
    "look_up_now",
    "open_socket",
    "readable",
    "resolver",
]

MOST_THREADS = 4
"""So many names are looked up at the same time; a thread is started when it is first needed."""
Found = tuple[Any, Any, int, str, Any]
"""An address as ``socket.getaddrinfo`` gives it."""
Readable = Callable[[float], object]
"""Waits so many milliseconds; true if there is something to read."""


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
        self._mutex = threading.Lock()
        """Taken by the resolver's own threads only: an interrupt never strikes there."""
        self._under_way: dict[tuple[str, int], list[Lookup]] = {}
        self._threads = [OneThread("holdfast-resolver", self._run) for _ in range(MOST_THREADS)]

    def ask(self, lookup: Lookup) -> None:
        """Has it looked up; raises ``OSError`` if no thread can be started for that."""
        self._asked.put(lookup)  # before the look at what is under way: see _run
        try:
            self._threads[0].start()
        except RuntimeError as error:
            lookup.given_up = True
            raise OSError(0, f"looking up {lookup.host}: {error}") from None
        self._start_idle()

    def _start_idle(self) -> None:
        """Starts one thread more than are at work."""
        with suppress(RuntimeError):  # no more threads: those that there are come to it
            for one in self._threads[: len(self._under_way) + 1]:
                one.start()

    def _run(self) -> None:
        while True:
            lookup = self._asked.get()
            if lookup.given_up or not self._begin(lookup):
                continue
            if self._asked.qsize():  # it was put before this one was seen to be under way
                self._start_idle()
            found, error = _look_up(lookup.host, lookup.port)
            with self._mutex:
                asked = self._under_way.pop((lookup.host, lookup.port))
            for one in asked:
                one.answer(found, error)

    def _begin(self, lookup: Lookup) -> bool:
        """Whether it is to be looked up: it may wait for a look-up that is under way."""
        with self._mutex:
            asked = self._under_way.setdefault((lookup.host, lookup.port), [])
            asked.append(lookup)
            return len(asked) == 1

    def forked(self) -> None:
        self._asked = SimpleQueue()
        self._mutex = threading.Lock()
        self._under_way = {}
        for one in self._threads:
            one.forked()


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
        try:
            # The last address may use up what is left; the others must leave some for the rest.
            share = left / (len(found) - number)
            return _connect(socket.socket(family, kind, protocol), address, share)
        except OSError as error:  # also of a family that this system does not have
            failure = error
    raise failure or TimeoutError()


def _connect(sock: socket.socket, address: Any, seconds: float) -> socket.socket:
    try:
        sock.settimeout(seconds)
        sock.connect(address)
    except BaseException:
        sock.close()
        raise
    return sock


def readable(sock: socket.socket, write_seconds: float) -> Readable | None:
    """How to wait for the socket. Nothing where only the socket's own timeout can tell: TLS may
    have read already what poll would wait for.

    That timeout costs a poll before every write, too. The kernel's own costs nothing and will do
    for writes, which hardly ever wait. For reads it won't: a read that a signal interrupts is
    begun anew, and all of its time with it.
    """
    if isinstance(sock, ssl.SSLSocket) or not hasattr(select, "poll"):
        return None
    limit = struct.pack("@ll", int(write_seconds), int(write_seconds % 1 * 1_000_000))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
    sock.settimeout(None)
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return poll.poll
