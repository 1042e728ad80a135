"""How long a name stays taken after its holder, in time that does not depend on the machine."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Self

import holdfast
from holdfast.errors import HoldfastError
from holdfast.runtimes.clock import now

__all__ = ["Recovery", "Tell"]

BEAT_SECONDS = 1.0
SLACK_BEATS = 8
"""A request that gets no answer is given up after five seconds, and tried again within two."""
CALM = 20.0
SOON = 60.0
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
