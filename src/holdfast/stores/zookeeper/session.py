"""A ZooKeeper session: its connection, its certain time, its watches, and pipelined requests.

A session serves threads and tasks. Both send their requests themselves. A thread also reads the
replies itself; for tasks kazoo's thread reads them.

From when on time is certain. The leader decides when a session expires. It knows of a client's
heartbeats by what the servers report to it every half tick; a reply to the client does not prove
that the leader knows. So a heartbeat (any read, timed from before it was sent) counts once a
*write* that was sent a tick later has been answered: the majority has executed that write, behind
the server's report. The requested session timeout is longer than the ttl by this delay.
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
"""``tickTime`` in ZooKeeper's sample configuration."""
NEVER = float("-inf")
Callback = Callable[[], None]
_ANSWERS = (BadVersionError, NodeExistsError, NoNodeError, NotEmptyError)


@dataclass(frozen=True, slots=True)
class ZooKeeperOptions:
    """The options of a URL: where the ensemble is and how to connect to it."""

    hosts: str
    display: str
    request_seconds: float
    acl: Sequence[ACL] = field(default=tuple(OPEN_ACL_UNSAFE))
    client: dict[str, Any] = field(default_factory=dict, repr=False)
    """kazoo's options for authentication."""
    tls: ssl.SSLContext | None = field(default=None, repr=False)
    tick: float | None = None
    """The servers' tick in seconds, if the URL names it."""


class Watches:
    """The watches of one session: callbacks by the path of a node.

    Lock-free: each step is atomic and waits for no other, since a signal handler may run between
    any two steps and wait for a lock of the same session itself.
    """

    def __init__(self) -> None:
        self._first: dict[str, Callback] = {}
        """The first callback of each path: nearly always the only one."""
        self._others: dict[tuple[str, Callback], None] = {}
        """Further callbacks of the same paths: few, so a linear search is enough."""

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
    """One kazoo client. Ephemeral nodes and watches exist as long as the session of its ``id``."""

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
        """The session's id on the servers; 0 while there is none."""
        self.up = False
        self.used = False
        """Whether it was ever connected: before that no request can have been sent."""
        self.timeout = 0.0
        """The session timeout that the server granted."""
        self.proven = NEVER
        """When the last certain ttl began, by the last answered write."""
        self.clock = (0.0, 0.0)
        """The servers' wall clock, and the moment on our clock when it showed that."""
        self.refusal = ""
        self.denied = False
        """Whether authentication failed."""
        self.holds_nothing = False
        """Whether the session has no claims, so that any session timeout is enough."""
        self.dead = False
        self.idle_since = now()
        """When a heartbeat last found that the session is in use."""
        self.watches = Watches()
        self.successor: dict[int, ZooKeeperSession] = {}
        """The session that has replaced this dead one, under the key 0."""
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
        """The call that opens the session, under the key 0: only one does."""
        self._process = os.getpid()

    # Opening and ending

    def open(self) -> None:
        """Starts to connect, unless another call does. Returns at once."""
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
        if self.dead:  # closed at the same time
            end_session(self._client, 0.0)

    def close(self, seconds: float) -> None:
        """Ends the session, waiting at most so many seconds for the server."""
        self.dead = True
        client = self._client
        if client is not None:
            end_session(client, seconds)

    def forget(self) -> None:
        """In a forked child, which has no kazoo thread: sends nothing to the servers."""
        if self._client is not None and os.getpid() != self._process:
            close_inherited(self._client)

    @property
    def reusable(self) -> bool:
        """Whether to use it further: a refusal is final, any other dead session is replaced."""
        return bool(self.refusal) or not self.dead

    def retire(self) -> None:
        """Closes a session that was without connection for so long that it must have expired.

        Servers that have lost their data refuse to reconnect a client with a newer state.
        """
        lost = now() - self._last_up
        if not self.up and self.used and lost > max(3 * self.timeout, RETIRE_SECONDS):
            self.close(0.0)

    # Called by kazoo's thread

    def negotiate(self, floor: float) -> float | None:
        self.floor = floor
        if self.ttl < floor and not self.holds_nothing:
            self.refusal = f"ZooKeeper's shortest session here is {floor:g} s"
            self._end()
            return None
        return self.ttl + self.lag + self.ttl / BEATS_PER_TTL + SLACK_SECONDS

    @property
    def lag(self) -> float:
        """How late the leader may receive a heartbeat: half a tick, with a safety factor of two.

        The shortest session is two ticks, unless ``minSessionTimeout`` is set, which no server
        shows. So a tick is assumed to be at least the usual one, unless the URL names it."""
        tick = USUAL_TICK_SECONDS if self.options.tick is None else self.options.tick
        return max((self.floor or 0.0) / 2, tick)

    def connected(self, began: float, granted: float) -> None:
        client = self._client
        assert client is not None
        wanted = client._session_timeout / 1000
        if granted < wanted - 0.001 and not self.holds_nothing:
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
        enough = f"use ttl={longest} or less, or" if longest > 0 else "too short for any ttl:"
        text = f"ZooKeeper's longest session here is {granted:g} s: {enough} raise the servers' "
        text += "maxSessionTimeout"
        if self.options.tick is None and (self.floor or 0.0) < 2 * USUAL_TICK_SECONDS:
            text += (
                f". A tick of {USUAL_TICK_SECONDS:g} s is assumed: if the servers' is shorter, add "
            )
            text += "?tick=SECONDS to the URL"
        return text

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
            with suppress(RuntimeError):  # the event loop was closed
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
            log.exception("the clean-up of nodes on %s failed", self.options.display)

    # Certain time

    def since(self, sent: float, number: int) -> float:
        """When the ttl began that is certain by a write, which was sent at ``sent`` and answered in
        the session with the id ``number``. ``NEVER`` if that session has ended since."""
        reported = self._connected_since
        for heartbeat in reversed(tuple(self._heartbeats)):  # kazoo's thread adds to them
            if heartbeat <= sent - self.lag:
                reported = max(reported, heartbeat)
                break
        certain = min(sent, reported + self.timeout - self.ttl)
        if self.id != number:  # last: the values read above may be the next session's
            return NEVER
        self.proven = max(self.proven, certain)
        return certain

    def proven_since(self, number: int) -> float:
        """``proven``, if the session still has the id ``number``; else ``NEVER``."""
        proven = self.proven
        return proven if self.id == number else NEVER

    # Requests

    def add_connect_callback(self, callback: Callback) -> bool:
        """Calls back once the session is connected or dead; false if it is so already."""
        self._connect_callbacks[callback] = None
        if self.up or self.dead:
            self._connect_callbacks.pop(callback, None)
            return False
        return True

    def remove_connect_callback(self, callback: Callback) -> None:
        self._connect_callbacks.pop(callback, None)

    def check(self) -> None:
        """Raises ``Unsupported`` or ``BackendUnavailable`` unless requests can be sent now."""
        if self.refusal:
            raise Unsupported(f"{self.options.display}: a ttl of {self.ttl:g} s: {self.refusal}")
        if self.denied:
            raise self._wrong_password()
        if not self.up:
            trouble = f": {self._log.trouble}" if self._log.trouble else ""
            raise BackendUnavailable(f"{self.options.display} is not connected{trouble}")

    def send(self, *requests: Request) -> None:
        """Sends requests back to back. The last request's ``completion`` ends the wait."""
        client = self._client
        assert client is not None
        submit(client, requests)

    def start(self, completion: Completion, *requests: Request) -> None:
        """Sends requests back to back; ``finish`` waits for their replies."""
        requests[-1].completion = completion
        try:
            self.send(*requests)
        except BaseException:  # an interrupt
            for request in requests:
                request.withdraw()
            raise

    async def finish(self, completion: Completion, seconds: float, *requests: Request) -> None:
        """Waits for all replies to the requests of ``start``.

        An error that is a normal reply (such as a missing node) stays in the request's ``error``;
        any other error is raised. A request that is not sent by the deadline is never sent.
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
        # Final, unlike the loss of a connection.
        if isinstance(error, NoAuthError):
            text = f"{where} denies access: these nodes are another user's"
            return BackendUnavailable(text, final=True)
        if isinstance(error, AuthFailedError):
            return self._wrong_password()
        trouble = self._log.trouble or type(error).__name__
        return BackendUnavailable(f"{where} lost the connection: {trouble}")

    def _wrong_password(self) -> BackendUnavailable:
        text = f"{self.options.display} refuses our user and password"
        return BackendUnavailable(text, final=True)

    # Watches

    def node_changed(self, path: str) -> None:
        self._wake(self.watches.of(path))

    def watch(self, path: str, callback: Callback) -> None:
        """Calls back at every event of this node, and when the connection breaks."""
        self.watches.add(path, callback)

    def unwatch(self, path: str, callback: Callback) -> None:
        self.watches.remove(path, callback)


HeartbeatTask = Callable[[ZooKeeperSession, float], None]
"""Runs on kazoo's thread at every heartbeat; must not block."""
