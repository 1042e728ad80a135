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
from holdfast.stores.zookeeper.client.completion import BlockingCompletion, Completion
from holdfast.stores.zookeeper.client.connection import (
    KazooLog,
    ZooKeeperClient,
    close_inherited,
    end_session,
    make_client,
    submit,
)
from holdfast.stores.zookeeper.client.handler import KazooHandler
from holdfast.stores.zookeeper.client.packets import Exists, Request
from holdfast.stores.zookeeper.client.reader import SharedReader

__all__ = ["NEVER", "HeartbeatTask", "Watches", "ZooKeeperOptions", "ZooKeeperSession"]

log = logging.getLogger("holdfast")

BEATS_PER_TTL = 10
KEPT_HEARTBEATS = 64
SLACK_SECONDS = 0.05
RETIRE_SECONDS = 15.0
USUAL_TICK_SECONDS = 2.0
"""What ZooKeeper's own sample configuration has."""
NEVER = float("-inf")
Callback = Callable[[], None]
_ANSWERS = (BadVersionError, NodeExistsError, NoNodeError, NotEmptyError)


@dataclass(frozen=True, slots=True)
class ZooKeeperOptions:
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
        self._first: dict[str, Callback] = {}
        """The only one for nearly every path, and the only one who takes itself out again."""
        self._others: dict[tuple[str, Callback], None] = {}
        """Those who came when there was one: not many, so they are looked through."""

    def __bool__(self) -> bool:
        return bool(self._first or self._others)

    def add(self, path: str, callback: Callback) -> None:
        if self._first.setdefault(path, callback) != callback:
            self._others[path, callback] = None

    def remove(self, path: str, callback: Callback) -> None:
        self._others.pop((path, callback), None)
        if self._first.get(path) == callback:
            self._first.pop(path, None)

    def of(self, path: str) -> list[Callback]:
        first = self._first.get(path)
        found = [] if first is None else [first]
        if self._others:
            found += [callback for watched, callback in list(self._others) if watched == path]
        return found

    def all(self) -> list[Callback]:
        return [*list(self._first.values()), *[callback for _, callback in list(self._others)]]


class ZooKeeperSession:
    """One kazoo client. Ephemeral nodes and watches live and die with its ``id``."""

    def __init__(
        self,
        options: ZooKeeperOptions,
        ttl: float,
        floor: float | None,
        heartbeat_task: HeartbeatTask,
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
        self.holds_nothing = False
        """Whether it holds nothing, so that any timeout will do."""
        self.dead = False
        self.watches = Watches()
        self.successor: dict[int, ZooKeeperSession] = {}
        """The one that has taken the place of a dead one, under the key 0."""
        self.reader = SharedReader(shared=options.tls is None and not tasks)
        self._heartbeat_task = heartbeat_task
        self._heartbeats: deque[float] = deque(maxlen=KEPT_HEARTBEATS)
        self._connected_since = NEVER
        self._next_heartbeat = self._last_up = 0.0
        self._open_heartbeat: tuple[Request, float] | None = None
        self._connect_callbacks: dict[Callback, None] = {}
        self._log = KazooLog()
        self._client: ZooKeeperClient | None = None
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
        connect_seconds = max(0.2, min(self.options.request_seconds, self.ttl) / 2)
        self._client = make_client(
            self,
            KazooHandler(connect_seconds, self.options.tls, self.reader),
            self._log,
            hosts=self.options.hosts,
            timeout=max(self.ttl, 1.0),
            **self.options.client,
        )
        self._client.start_async()
        if self.dead:  # closed in this moment
            end_session(self._client, 0.0)

    def close(self, seconds: float) -> None:
        """Ends the session at once, as far as the server can be reached."""
        self.dead = True
        client = self._client
        if client is not None:
            end_session(client, seconds)

    def forget(self) -> None:
        """In a forked child, where kazoo's thread is not: not a word to the servers."""
        if self._client is not None and os.getpid() != self._process:
            close_inherited(self._client)

    @property
    def reusable(self) -> bool:
        """Whether to go on with it: a refusal stays one, anything else that ended starts anew."""
        return bool(self.refusal) or not self.dead

    def retire(self) -> None:
        """Gives up a session that could not be reached for so long that it must be over.

        Servers that have lost their data refuse a client that has seen more than they know.
        """
        lost = now() - self._last_up
        if not self.up and self.used and lost > max(3 * self.timeout, RETIRE_SECONDS):
            self.close(0.0)

    # What kazoo's thread says

    def negotiate(self, floor: float) -> float | None:
        self.floor = floor
        if self.ttl < floor and not self.holds_nothing:
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
        if granted < asked - 0.001 and not self.holds_nothing:
            self.refusal = self._describe_too_short(granted)
            end_session(client, 0.0)
        if client._session_id != self.id:
            self._heartbeats.clear()
            self.proven = NEVER
        self.id, self.timeout = client._session_id or 0, granted
        self._connected_since, self._next_heartbeat, self._open_heartbeat = began, began, None
        self.up = not self.refusal
        self.used = self.used or self.up
        self._wake(list(self._connect_callbacks))

    def _describe_too_short(self, granted: float) -> str:
        longest = int((granted - self.lag - SLACK_SECONDS) / (1 + 1 / BEATS_PER_TTL))
        enough = f"enough for {longest} s" if longest > 0 else "too short for any ttl"
        words = f"ZooKeeper's longest session here is {granted:g} s, {enough}"
        if self.options.tick is None and (self.floor or 0.0) < 2 * USUAL_TICK_SECONDS:
            words += f" with a tick of {USUAL_TICK_SECONDS:g} s; if it is shorter, say so: ?tick="
        return words

    def disconnected(self, *, ended: bool) -> None:
        if self.up:
            self._last_up = now()
        self.up = False
        if ended:
            self.id = 0
            client = self._client
            # Anything but an expired session is the end of the client.
            state = "" if client is None else str(client.client_state)
            if client is not None and state != "EXPIRED_SESSION":
                self.denied = state == "AUTH_FAILED"
                self._end()
        self._wake(self.watches.all())

    def _end(self) -> None:
        self.dead = True
        self._wake(list(self._connect_callbacks))

    def _wake(self, callbacks: Iterable[Callback]) -> None:
        for callback in callbacks:
            with suppress(RuntimeError):  # an event loop that was closed in this moment
                callback()

    def heartbeat(self) -> float | None:
        moment = now()
        interval = self.ttl / BEATS_PER_TTL
        if self._open_heartbeat is not None:
            request, sent = self._open_heartbeat
            if request.value is None and request.error is None:
                silent = moment - sent > max(self.timeout / 5, min(1.0, self.timeout / 2))
                return None if silent else interval
            if request.error is None:
                self._heartbeats.append(sent)
            self._open_heartbeat = None
        if moment >= self._next_heartbeat:
            self._next_heartbeat = moment + interval
            self._run_heartbeat_task(moment)
            request = Exists("/")
            self._open_heartbeat = request, moment
            self.send(request)
        return max(0.0, self._next_heartbeat - moment)

    def _run_heartbeat_task(self, moment: float) -> None:
        try:
            self._heartbeat_task(self, moment)
        except Exception:  # kazoo's thread must go on
            log.exception("tidying up on %s failed", self.options.display)

    # Certain time

    def since(self, sent: float, number: int) -> float:
        """When a ttl began that a write proves, which was sent then and has been answered in
        the session of this number; never, if that has ended since."""
        heard = self._connected_since
        for mark in reversed(tuple(self._heartbeats)):  # kazoo's thread adds to them
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

    def add_connect_callback(self, callback: Callback) -> bool:
        """Calls the signal once it is connected or dead; false if it is so already."""
        self._connect_callbacks[callback] = None
        if self.up or self.dead:
            self._connect_callbacks.pop(callback, None)
            return False
        return True

    def remove_connect_callback(self, callback: Callback) -> None:
        self._connect_callbacks.pop(callback, None)

    def check(self) -> None:
        """Raises unless requests can be sent now."""
        if self.refusal:
            raise Unsupported(f"{self.options.display}: a ttl of {self.ttl:g} s: {self.refusal}")
        if self.denied:
            raise Unsupported(f"{self.options.display} refuses our user and password")
        if not self.up:
            trouble = f": {self._log.trouble}" if self._log.trouble else ""
            raise BackendUnavailable(f"{self.options.display} is not connected{trouble}")

    def send(self, *requests: Request) -> None:
        """Puts requests on the wire, back to back. The last one's ``call`` is told the end."""
        client = self._client
        assert client is not None
        submit(client, requests)

    def start(self, completion: Completion, *requests: Request) -> None:
        """Sends requests back to back; ``finish`` waits for them."""
        requests[-1].completion = completion
        try:
            self.send(*requests)
        except BaseException:  # an interrupt
            for request in requests:
                request.withdraw()
            raise

    async def finish(self, completion: Completion, seconds: float, *requests: Request) -> None:
        """Waits for all answers of what was started.

        A request that failed keeps its ``error`` where that is an answer; anything else is
        raised as ``BackendUnavailable``. What was not sent when the time is over never is.
        """
        answered = False
        try:
            answered = await completion.wait(seconds, self.reader)
        finally:
            if not answered:
                for request in requests:
                    request.withdraw()
        self._raise_failure(answered, seconds, requests)

    def request(self, seconds: float, requests: Sequence[Request]) -> None:
        """``start`` and ``finish``, for a thread."""
        completion = requests[-1].completion = BlockingCompletion()
        answered = False
        try:
            self.send(*requests)
            answered = self.reader.wait(completion, seconds)
        finally:
            if not answered:
                for request in requests:
                    request.withdraw()
        self._raise_failure(answered, seconds, requests)

    def _raise_failure(self, answered: bool, seconds: float, requests: Sequence[Request]) -> None:
        if not answered:
            raise BackendUnavailable(
                f"{self.options.display} did not answer within {max(0.0, seconds):.1f} s"
            )
        for request in requests:
            if request.error is not None and not isinstance(request.error, _ANSWERS):
                raise self._failure(request.error) from request.error

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

    def node_changed(self, path: str) -> None:
        self._wake(self.watches.of(path))

    def watch(self, path: str, callback: Callback) -> None:
        """Calls the signal at every event of this node, and when the connection breaks."""
        self.watches.add(path, callback)

    def unwatch(self, path: str, callback: Callback) -> None:
        self.watches.remove(path, callback)


HeartbeatTask = Callable[[ZooKeeperSession, float], None]
"""What is done on kazoo's thread at every heartbeat: it must not wait for anything."""
