"""What the suite asks of a store under test: a server, a URL and the knobs that break it.

A harness is written once per store. It starts a private server, or none where the store is
embedded, and says which faults it can cause. The suite makes a namespace of its own for every
test, so one running server serves them all.
"""

from __future__ import annotations

import enum
from typing import ClassVar, Self

__all__ = ["Harness", "Knob", "KnobMissing"]

LEAST_KEPT_TTL = 2.5


class Knob(enum.StrEnum):
    """A fault that a harness can cause."""

    PAUSE = "PAUSE"
    """``pause`` and ``resume``: the server stops answering and goes on, nothing lost."""
    KILL = "KILL"
    """``kill`` and ``restart``: the server dies without a word and comes back with its data."""
    CUT = "CUT"
    """``cut``: every connection through ``proxied_url`` is reset; new ones work."""
    STALL = "STALL"
    """``stall`` and ``unstall``: nothing passes through the proxy either way; connections stay."""
    HOLD_REPLIES = "HOLD_REPLIES"
    """``hold_replies`` and ``let_replies``: requests arrive, their replies wait at the proxy."""
    DROP_REPLY = "DROP_REPLY"
    """``drop_next_reply``: the next request arrives, its reply is lost with its connection."""


class KnobMissing(Exception):
    """A knob was turned that this harness does not have."""


class Harness:
    """One store under test. Subclass it, set ``name``, and override what the store has.

    >>> class MyHarness(Harness):
    ...     name = "memory"
    ...     url = "memory://"
    >>> with MyHarness() as harness:
    ...     harness.url
    'memory://'
    """

    name: ClassVar[str]
    """Its row in ``holdfast.testing.guarantees``; a name of your own for your own store."""
    repeats: ClassVar[str] = ""
    """The row that it is held to instead, if these are other servers of a store that is there."""
    ttl: float = 1.0
    """A short ttl that the store can honour in tests."""
    extra_recovery: float = 0.0
    """Seconds that the store's own sessions add to ttl + 1 s after a holder's crash."""
    outage_recovery: float = 5.0
    """Seconds after which the store works again once it was resumed or restarted."""
    shortens: bool = True
    """Whether a hold can be made to end sooner than it was to. Where it can't, ``extend`` with a
    shorter ttl changes what the holder counts on, and a crash is seen by the longer one."""
    between_processes: bool = True
    """Whether other processes can reach the store by its URL."""
    knobs: frozenset[Knob] = frozenset()

    url: str = ""
    """What ``holdfast.connect`` takes, straight to the server; valid once started."""

    @property
    def kept_ttl(self) -> float:
        """For holds that must be renewed in time, also by a machine that stumbles for a second."""
        return max(self.ttl, LEAST_KEPT_TTL)

    @property
    def proxied_url(self) -> str:
        """The same store through the fault proxy; the plain URL where there is none."""
        return self.url

    def start(self) -> None:
        """Starts the server; returns once it answers."""

    def stop(self) -> None:
        """Ends what ``start`` began, by its own process id."""

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def pause(self) -> None:
        raise self._missing(Knob.PAUSE)

    def resume(self) -> None:
        raise self._missing(Knob.PAUSE)

    def kill(self) -> None:
        raise self._missing(Knob.KILL)

    def restart(self) -> None:
        raise self._missing(Knob.KILL)

    def cut(self) -> None:
        raise self._missing(Knob.CUT)

    def stall(self) -> None:
        raise self._missing(Knob.STALL)

    def unstall(self) -> None:
        raise self._missing(Knob.STALL)

    def hold_replies(self) -> None:
        raise self._missing(Knob.HOLD_REPLIES)

    def let_replies(self) -> None:
        raise self._missing(Knob.HOLD_REPLIES)

    def drop_next_reply(self) -> None:
        raise self._missing(Knob.DROP_REPLY)

    def heal(self) -> None:
        """Ends every fault that is still there; called after each test that turned a knob."""

    def _missing(self, knob: Knob) -> KnobMissing:
        return KnobMissing(f"the harness {self.name!r} has no {knob}")
