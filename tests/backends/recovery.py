"""Who holds a name across a fault, by its own word, and how long it stays taken after that."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Self

import holdfast
from holdfast.errors import HoldfastError
from holdfast.runtimes.clock import now

__all__ = ["CALM", "SOON", "Believer", "Recovery", "Tell", "next_token", "recovers"]

BEAT_SECONDS = 1.0
SLACK_BEATS = 8
"""A request that gets no answer is given up after five seconds, and tried again within two."""
CALM = 20.0
"""The ttl of those who are not to lose what they hold."""
SOON = 60.0
"""Far more than two ttls and an election, on a machine that is busy: what counts is the order."""
Tell = Callable[[str, object], None]
"""pytest's ``record_property``."""


class Recovery:
    """Takes and gives back a lock of its own, with a second's pause, from the fault on.

    Each of these beats is a second or more in which the store worked. An election has none, and
    a machine that is busy has fewer of them, for whatever keeps the next holder waiting keeps the
    beat waiting, too. So their number can be held to what is documented, unlike seconds.
    """

    def __init__(self, url: str, namespace: str) -> None:
        self._url, self._namespace = url, namespace
        self._beats = 0
        self._began = now()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat)

    def _beat(self) -> None:
        locks = holdfast.connect(self._url, namespace=self._namespace, ttl=CALM, patience=SOON)
        with locks:
            while not self._over.wait(BEAT_SECONDS):
                with suppress(HoldfastError), locks.lock("beat", timeout=SOON):
                    self._beats += 1

    def within(self, seconds: float, tell: Tell) -> None:
        """Somebody has the name again: after no more beats than so many seconds have."""
        beats, took = self._beats, now() - self._began
        tell("recovery", f"{took:.1f} s, {beats} beats; documented: {seconds:.1f} s")
        assert beats <= seconds / BEAT_SECONDS + SLACK_BEATS, f"{beats} beats in {took:.1f} s"

    def __enter__(self) -> Self:
        self._began = now()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


def next_token(url: str, namespace: str) -> tuple[int, float]:
    """Takes the lock; the token, and when the block was entered."""
    with (
        holdfast.connect(url, namespace=namespace, ttl=CALM, patience=SOON) as locks,
        locks.lock("name", timeout=SOON) as lease,
    ):
        return lease.token, now()


def recovers(url: str, namespace: str, bound: float, tell: Tell) -> tuple[int, float]:
    """As above, within what is documented."""
    with Recovery(url, namespace) as recovery:
        found = next_token(url, namespace)
        recovery.within(bound, tell)
    return found


class Believer:
    """A thread that holds a lock and notes, until it knows better, that it does."""

    def __init__(self, url: str, namespace: str, name: str, ttl: float) -> None:
        self.locks = holdfast.connect(url, namespace=namespace, ttl=ttl)
        self.lease = self.locks.lock(name, timeout=30).acquire()
        assert self.lease is not None
        self.token = self.lease.token
        self.reason = ""
        self.believed_until = 0.0
        """The last moment at which it held by its own word."""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._believe)
        self._thread.start()

    def _believe(self) -> None:
        assert self.lease is not None
        moment = now()  # before the look: who is held up in between has not believed for longer
        while not self._over.is_set() and self.lease.held:
            self.believed_until = moment
            self._over.wait(0.002)
            moment = now()
        if self.lease.lost:
            self.reason = self.lease.reason

    def lost(self, seconds: float) -> bool:
        """Whether it has learnt within so many seconds that its hold is over."""
        self._thread.join(seconds)
        return not self._thread.is_alive() and bool(self.lease is not None and self.lease.lost)

    def loses(self, url: str, namespace: str, bound: float, tell: Tell) -> None:
        """The next one gets it within the bound, after this one has stopped believing."""
        token, entered = recovers(url, namespace, bound, tell)
        assert token > self.token
        assert self.lost(SOON), "two held at the same time"
        assert self.believed_until <= entered

    def close(self) -> None:
        self._over.set()
        self._thread.join()
        with suppress(HoldfastError):
            if self.lease is not None:
                self.lease.release()
        self.locks.close()
