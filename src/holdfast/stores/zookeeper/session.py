"""A ZooKeeper session: who is alive, since when that is certain, and requests in pipelines.

One session serves both worlds: threads and tasks send their requests themselves and wait for the
last answer in their own way: a thread reads it itself, for tasks kazoo's thread does.

What makes a moment certain. A session's life is counted by the leader, from what the servers
tell it every half tick about whom they have heard: an answer proves neither. So a heartbeat
(any read, timed from before it was sent) counts once a *write* was sent a tick later and was
answered: the write went through a majority, behind the server's report. Sessions are asked for
with a reserve over the ttl that pays for this delay.
"""

from __future__ import annotations

import logging
import os
import ssl
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from kazoo.exceptions import (
    AuthFailedError,
    BadVersionError,
    NoAuthError,
    NodeExistsError,
    NoNodeError,
    NotEmptyError,
)
from kazoo.security import ACL, OPEN_ACL_UNSAFE

from holdfast.errors import BackendUnavailable, Unsupported
from holdfast.io.clock import now
from holdfast.stores.zookeeper.client.calls import BlockingCall, Call
from holdfast.stores.zookeeper.client.connection import (
    Client,
    Quiet,
    drop,
    make_client,
    say_goodbye,
    submit,
)
from holdfast.stores.zookeeper.client.handler import Handler
from holdfast.stores.zookeeper.client.packets import Ask, Exists
from holdfast.stores.zookeeper.client.reader import Reader

__all__ = ["NEVER", "Chores", "Options", "Session", "Watches"]

log = logging.getLogger("holdfast")

BEATS_PER_TTL = 10
KEPT_MARKS = 64
SLACK_SECONDS = 0.05
RETIRE_SECONDS = 15.0
USUAL_TICK_SECONDS = 2.0
"""What ZooKeeper's own sample configuration has."""
NEVER = float("-inf")
Signal = Callable[[], None]
_ANSWERS = (BadVersionError, NodeExistsError, NoNodeError, NotEmptyError)


@dataclass(frozen=True, slots=True)
class Options:
    """Where the ensemble is and how to speak to it."""

    hosts: str
    display: str
    request_seconds: float
    acl: Sequence[ACL] = field(default=tuple(OPEN_ACL_UNSAFE))
    client: dict[str, Any] = field(default_factory=dict, repr=False)
    """What kazoo needs to show who we are."""
    tls: ssl.SSLContext | None = field(default=None, repr=False)
    tick: float | None = None
    """The length of the servers' tick in seconds, where the URL says so."""


class Watches:
    """The watches of one session: who is told of the events of a node, by its path.

    Each step is atomic and none waits for another: a signal's handler may run between any two of
    them, and wait for a lock of the same session itself.
    """

    def __init__(self) -> None:
        self._first: dict[str, Signal] = {}
        """The only one for nearly every path, and the only one who takes itself out again."""
        self._others: dict[tuple[str, Signal], None] = {}
        """Those who came when there was one: not many, so they are looked through."""

    def __bool__(self) -> bool:
        return bool(self._first or self._others)

    def add(self, path: str, signal: Signal) -> None:
        if self._first.setdefault(path, signal) != signal:
            self._others[path, signal] = None

    def remove(self, path: str, signal: Signal) -> None:
        self._others.pop((path, signal), None)
        if self._first.get(path) == signal:
            self._first.pop(path, None)

    def of(self, path: str) -> list[Signal]:
        first = self._first.get(path)
        found = [] if first is None else [first]
        if self._others:
            found += [signal for watched, signal in list(self._others) if watched == path]
        return found

    def all(self) -> list[Signal]:
        return [*list(self._first.values()), *[signal for _, signal in list(self._others)]]


class Session:
    """One kazoo client. Ephemeral nodes and watches live and die with its ``id``."""

    def __init__(
        self,
        options: Options,
        ttl: float,
        floor: float | None,
        chores: Chores,
        *,
        tasks: bool = False,
    ) -> None:
        self.options, self.ttl, self.floor = options, ttl, floor
        self.id = 0
        """The session's number on the servers; 0 where there is none."""
        self.up = False
        self.used = False
        """Whether it was ever connected: before that nothing can have been sent."""
        self.timeout = 0.0
        """What the server granted."""
        self.proven = NEVER
        """Since when a ttl is certain, by the last write that was answered."""
        self.clock = (0.0, 0.0)
        """The servers' wall clock at some moment of ours."""
        self.refusal = ""
        self.denied = False
        """Whether the servers did not believe who we are."""
        self.looks_only = False
        """Whether it holds nothing, so that any timeout will do."""
        self.dead = False
        self.watching = Watches()
        self.after: dict[int, Session] = {}
        """The one that has taken the place of a dead one, under the key 0."""
        self.reader = Reader(shared=options.tls is None and not tasks)
        self._chores = chores
        self._marks: deque[float] = deque(maxlen=KEPT_MARKS)
        self._base = NEVER
        self._beat_at = self._up_at = 0.0
        self._beating: tuple[Ask, float] | None = None
        self._arrivals: dict[Signal, None] = {}
        self._log = Quiet()
        self._client: Client | None = None
        self._opener: dict[int, object] = {}
        """Who opens it, under the key 0: one does."""
        self._process = os.getpid()

    # Opening and ending

    def open(self) -> None:
        """Starts to connect, unless another is at it. Returns at once."""
        me = object()
        try:
            if self._opener.setdefault(0, me) is me:
                self._start()
        finally:
            if self._client is None and self._opener.get(0) is me:
                del self._opener[0]

    def _start(self) -> None:
        patience = max(0.2, min(self.options.request_seconds, self.ttl) / 2)
        self._client = make_client(
            self,
            Handler(patience, self.options.tls, self.reader),
            self._log,
            hosts=self.options.hosts,
            timeout=max(self.ttl, 1.0),
            **self.options.client,
        )
        self._client.start_async()
        if self.dead:  # closed in this moment
            say_goodbye(self._client, 0.0)

    def close(self, seconds: float) -> None:
        """Ends the session at once, as far as the server can be reached."""
        self.dead = True
        client = self._client
        if client is not None:
            say_goodbye(client, seconds)

    def forget(self) -> None:
        """In a forked child, where kazoo's thread is not: not a word to the servers."""
        if self._client is not None and os.getpid() != self._process:
            drop(self._client)

    @property
    def wanted(self) -> bool:
        """Whether to go on with it: a refusal stays one, anything else that ended starts anew."""
        return bool(self.refusal) or not self.dead

    def retire(self) -> None:
        """Gives up a session that could not be reached for so long that it must be over.

        Servers that have lost their data refuse a client that has seen more than they know.
        """
        lost = now() - self._up_at
        if not self.up and self.used and lost > max(3 * self.timeout, RETIRE_SECONDS):
            self.close(0.0)

    # What kazoo's thread says

    def settle(self, floor: float) -> float | None:
        self.floor = floor
        if self.ttl < floor and not self.looks_only:
            self.refusal = f"ZooKeeper's shortest session here is {floor:g} s"
            self._end()
            return None
        return self.ttl + self.lag + self.ttl / BEATS_PER_TTL + SLACK_SECONDS

    @property
    def lag(self) -> float:
        """How late the leader may hear of a heartbeat: half a tick, taken twice.

        The shortest session is two ticks, unless somebody has set ``minSessionTimeout``, which no
        server tells. So a tick is taken to be no shorter than the usual one, unless the URL says
        so."""
        tick = USUAL_TICK_SECONDS if self.options.tick is None else self.options.tick
        return max((self.floor or 0.0) / 2, tick)

    def connected(self, began: float, granted: float) -> None:
        client = self._client
        assert client is not None
        asked = client._session_timeout / 1000
        if granted < asked - 0.001 and not self.looks_only:
            self.refusal = self._too_short(granted)
            say_goodbye(client, 0.0)
        if client._session_id != self.id:
            self._marks.clear()
            self.proven = NEVER
        self.id, self.timeout = client._session_id or 0, granted
        self._base, self._beat_at, self._beating = began, began, None
        self.up = not self.refusal
        self.used = self.used or self.up
        self._wake(list(self._arrivals))

    def _too_short(self, granted: float) -> str:
        longest = int((granted - self.lag - SLACK_SECONDS) / (1 + 1 / BEATS_PER_TTL))
        enough = f"enough for {longest} s" if longest > 0 else "too short for any ttl"
        words = f"ZooKeeper's longest session here is {granted:g} s, {enough}"
        if self.options.tick is None and (self.floor or 0.0) < 2 * USUAL_TICK_SECONDS:
            words += f" with a tick of {USUAL_TICK_SECONDS:g} s; if it is shorter, say so: ?tick="
        return words

    def disconnected(self, *, ended: bool) -> None:
        if self.up:
            self._up_at = now()
        self.up = False
        if ended:
            self.id = 0
            client = self._client
            # Anything but an expired session is the end of the client.
            state = "" if client is None else str(client.client_state)
            if client is not None and state != "EXPIRED_SESSION":
                self.denied = state == "AUTH_FAILED"
                self._end()
        self._wake(self.watching.all())

    def _end(self) -> None:
        self.dead = True
        self._wake(list(self._arrivals))

    def _wake(self, signals: Iterable[Signal]) -> None:
        for signal in signals:
            with suppress(RuntimeError):  # an event loop that was closed in this moment
                signal()

    def beat(self) -> float | None:
        moment = now()
        interval = self.ttl / BEATS_PER_TTL
        if self._beating is not None:
            ask, sent = self._beating
            if ask.value is None and ask.error is None:
                silent = moment - sent > max(self.timeout / 5, min(1.0, self.timeout / 2))
                return None if silent else interval
            if ask.error is None:
                self._marks.append(sent)
            self._beating = None
        if moment >= self._beat_at:
            self._beat_at = moment + interval
            self._tidy(moment)
            ask = Exists("/")
            self._beating = ask, moment
            self.send(ask)
        return max(0.0, self._beat_at - moment)

    def _tidy(self, moment: float) -> None:
        try:
            self._chores(self, moment)
        except Exception:  # kazoo's thread must go on
            log.exception("tidying up on %s failed", self.options.display)

    # Certain time

    def since(self, sent: float, number: int) -> float:
        """When a ttl began that a write proves, which was sent then and has been answered in
        the session of this number; never, if that has ended since."""
        heard = self._base
        for mark in reversed(tuple(self._marks)):  # kazoo's thread adds to them
            if mark <= sent - self.lag:
                heard = max(heard, mark)
                break
        certain = min(sent, heard + self.timeout - self.ttl)
        if self.id != number:  # last, since what was read before may be the next session's
            return NEVER
        self.proven = max(self.proven, certain)
        return certain

    def proven_since(self, number: int) -> float:
        """What the last write has proven for the session of this number."""
        proven = self.proven
        return proven if self.id == number else NEVER

    # Requests

    def arrival(self, signal: Signal) -> bool:
        """Calls the signal once it is connected or dead; false if it is so already."""
        self._arrivals[signal] = None
        if self.up or self.dead:
            self._arrivals.pop(signal, None)
            return False
        return True

    def leave(self, signal: Signal) -> None:
        self._arrivals.pop(signal, None)

    def check(self) -> None:
        """Raises unless requests can be sent now."""
        if self.refusal:
            raise Unsupported(f"{self.options.display}: a ttl of {self.ttl:g} s: {self.refusal}")
        if self.denied:
            raise Unsupported(f"{self.options.display} refuses our user and password")
        if not self.up:
            trouble = f": {self._log.trouble}" if self._log.trouble else ""
            raise BackendUnavailable(f"{self.options.display} is not connected{trouble}")

    def send(self, *asks: Ask) -> None:
        """Puts requests on the wire, back to back. The last one's ``call`` is told the end."""
        client = self._client
        assert client is not None
        submit(client, asks)

    def start(self, call: Call, *asks: Ask) -> None:
        """Sends requests back to back; ``finish`` waits for them."""
        asks[-1].call = call
        try:
            self.send(*asks)
        except BaseException:  # an interrupt
            for ask in asks:
                ask.withdraw()
            raise

    async def finish(self, call: Call, seconds: float, *asks: Ask) -> None:
        """Waits for all answers of what was started.

        A request that failed keeps its ``error`` where that is an answer; anything else is
        raised as ``BackendUnavailable``. What was not sent when the time is over never is.
        """
        answered = False
        try:
            answered = await call.wait(seconds, self.reader)
        finally:
            if not answered:
                for ask in asks:
                    ask.withdraw()
        self._judge(answered, seconds, asks)

    def ask(self, seconds: float, asks: Sequence[Ask]) -> None:
        """``start`` and ``finish``, for a thread."""
        call = asks[-1].call = BlockingCall()
        answered = False
        try:
            self.send(*asks)
            answered = self.reader.wait(call, seconds)
        finally:
            if not answered:
                for ask in asks:
                    ask.withdraw()
        self._judge(answered, seconds, asks)

    def _judge(self, answered: bool, seconds: float, asks: Sequence[Ask]) -> None:
        if not answered:
            raise BackendUnavailable(
                f"{self.options.display} did not answer within {max(0.0, seconds):.1f} s"
            )
        for ask in asks:
            if ask.error is not None and not isinstance(ask.error, _ANSWERS):
                raise self._failure(ask.error) from ask.error

    def _failure(self, error: Exception) -> Exception:
        where = self.options.display
        # Not worth another try, unlike servers that can't be reached.
        if isinstance(error, NoAuthError):
            return Unsupported(f"{where} does not let us: these nodes are another user's")
        if isinstance(error, AuthFailedError):
            return Unsupported(f"{where} refuses our user and password")
        trouble = self._log.trouble or type(error).__name__
        return BackendUnavailable(f"{where} lost the connection: {trouble}")

    # Watches

    def happened(self, path: str) -> None:
        self._wake(self.watching.of(path))

    def watch(self, path: str, signal: Signal) -> None:
        """Calls the signal at every event of this node, and when the connection breaks."""
        self.watching.add(path, signal)

    def unwatch(self, path: str, signal: Signal) -> None:
        self.watching.remove(path, signal)


Chores = Callable[[Session, float], None]
"""What is done on kazoo's thread at every heartbeat: it must not wait for anything."""
