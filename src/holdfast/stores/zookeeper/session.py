"""A ZooKeeper session: its connection, its certain time, its watches, and pipelined requests.

A session serves threads and tasks at once, over one connection at a time. The caller that finds no
connection opens one, to another server if the last one is gone, and the session goes on there.

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
from typing import TYPE_CHECKING, Any, cast

from holdfast.core.contract import Runtime
from holdfast.errors import BackendUnavailable, HoldfastError, Unsupported
from holdfast.io.clock import between, now
from holdfast.io.connection import Broken, World
from holdfast.stores.zookeeper.client import greeting
from holdfast.stores.zookeeper.client.completion import BlockingCompletion, Completion
from holdfast.stores.zookeeper.client.connection import SharedConnection
from holdfast.stores.zookeeper.client.greeting import NO_SESSION, Access, Greeting, ZooKeeperStream
from holdfast.stores.zookeeper.client.heartbeats import Turn, heartbeats
from holdfast.stores.zookeeper.client.packets import (
    AuthFailed,
    BadVersion,
    Close,
    ConnectionLost,
    Exists,
    Multi,
    NoAuth,
    NodeExists,
    NoNode,
    NotEmpty,
    Request,
)

if TYPE_CHECKING:
    from holdfast.stores.zookeeper.client.aio import AsyncCompletion

__all__ = ["NEVER", "HeartbeatTask", "Watches", "ZooKeeperOptions", "ZooKeeperSession"]

log = logging.getLogger("holdfast")

BEATS_PER_TTL = 10
KEPT_HEARTBEATS = 64
SLACK_SECONDS = 0.05
RETIRE_SECONDS = 15.0
LEAST_CONNECT_SECONDS = 0.2
IN_USE_SECONDS = 0.01
"""A heartbeat comes this much later if another thread uses the connection at that moment."""
CLOSE_SECONDS = 5.0
"""How long an idle session may take to end."""
STUCK_SECONDS = 2.0
"""Another caller connects if the first one has not done so in this time: its event loop may be
blocked."""
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.05, 1.0
"""Between two tries to connect to all servers."""
USUAL_TICK_SECONDS = 2.0
"""``tickTime`` in ZooKeeper's sample configuration."""
NEVER = float("-inf")
Callback = Callable[[], None]
_ANSWERS = (BadVersion, NodeExists, NoNode, NotEmpty)


@dataclass(frozen=True, slots=True)
class ZooKeeperOptions:
    """The options of a URL: where the ensemble is and how to connect to it."""

    hosts: tuple[tuple[str, int], ...]
    display: str
    request_seconds: float
    access: Access = field(default_factory=Access, repr=False)
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


class Opening:
    """A connection that one caller opens, while others may wait for it."""

    __slots__ = ("callbacks", "ended", "failure", "until")

    def __init__(self) -> None:
        self.until = now() + STUCK_SECONDS
        """When it counts as stuck."""
        self.ended = False
        self.failure: HoldfastError | None = None
        """An error that is final for all who wait for it."""
        self.callbacks: dict[Callback, None] = {}

    def end(self) -> None:
        self.ended = True
        for callback in list(self.callbacks):
            with suppress(RuntimeError):  # the event loop was closed
                callback()


class ZooKeeperSession:
    """Ephemeral nodes and watches exist as long as the session of its ``id``."""

    def __init__(
        self,
        options: ZooKeeperOptions,
        ttl: float,
        floor: float | None,
        heartbeat_task: HeartbeatTask,
    ) -> None:
        self.options, self.ttl, self.floor = options, ttl, floor
        self.id = 0
        """The session's id on the servers; 0 while there is none."""
        self.used = False
        """Whether it was ever connected: before that no request can have been sent."""
        self.timeout = 0.0
        """The session timeout that the server granted."""
        self.proven = NEVER
        """When the last certain ttl began, by the last answered write."""
        self.clock = (0.0, 0.0)
        """The servers' wall clock, and the moment on our clock when it showed that."""
        self.refusal = ""
        """Why the servers can't honour the ttl."""
        self.holds_nothing = False
        """Whether the session has no claims, so that any session timeout is enough."""
        self.dead = False
        """Whether it was closed."""
        self.idle_since = now()
        """When a heartbeat last found that the session is in use."""
        self.watches = Watches()
        self.connection: SharedConnection | None = None
        """The last connection, which may have ended."""
        self._known = NO_SESSION
        self._zxid = 0
        """The last change that any reply has shown: a server that lags behind that is no use."""
        self._hosts = deque(sorted(options.hosts, key=lambda _: between(0.0, 1.0)))
        """The servers, in the order in which to try them."""
        self._trouble = ""
        """Why the last try to connect failed, or the last connection ended."""
        self._heartbeat_task = heartbeat_task
        self._heartbeats: deque[float] = deque(maxlen=KEPT_HEARTBEATS)
        self._connected_since = NEVER
        self._next_heartbeat = self._last_up = self._close_by = 0.0
        self._open_heartbeat: tuple[Request, float] | None = None
        self._opening: dict[int, Opening] = {}
        """The call that opens a connection, under the key 0: only one does."""
        self._process = os.getpid()

    @property
    def up(self) -> bool:
        """Whether requests can be sent now."""
        connection = self.connection
        return connection is not None and not connection.over

    def check_connection(self) -> bool:
        """Whether requests can be sent now, as far as the socket shows it."""
        connection = self.connection
        if connection is None or connection.over:
            return False
        connection.check()
        return not connection.over

    # Opening

    async def open(self, runtime: Runtime, world: World, until: float) -> None:
        """Connects, unless it is connected. Tries all servers again and again; raises
        ``BackendUnavailable`` at ``until``, or sooner for what is final, and ``Unsupported`` if the
        servers can't honour the ttl."""
        pause = FIRST_PAUSE_SECONDS
        while True:
            self._check_usable()
            await self._open_once(runtime, world, until)
            left = until - now()
            if self.up or left <= 0:
                break
            await runtime.sleep(min(left, runtime.between(0.5, 1.0) * pause))
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
        self.check()

    async def _open_once(self, runtime: Runtime, world: World, until: float) -> None:
        mine = Opening()
        try:
            other = self._opening.setdefault(0, mine)
            if other is mine:
                await self._connect(world, until)
            else:
                await self._wait_for(runtime, other, until)
        except HoldfastError as error:
            mine.failure = error
            raise
        finally:
            if self._opening.get(0) is mine:
                del self._opening[0]
            mine.end()

    async def _wait_for(self, runtime: Runtime, other: Opening, until: float) -> None:
        """Waits for another caller that connects; takes its place if that one is stuck."""
        signal = runtime.signal()
        other.callbacks[signal.set] = None
        if not other.ended:
            await runtime.wait(signal, min(until, other.until))
        other.callbacks.pop(signal.set, None)
        if other.failure is not None:
            raise other.failure.with_traceback(None)
        if not other.ended and now() >= other.until and self._opening.get(0) is other:
            self._opening.pop(0, None)

    async def _connect(self, world: World, until: float) -> None:
        """Tries each server once."""
        # A server that is silent must leave time for the others.
        seconds = max(LEAST_CONNECT_SECONDS, min(self.options.request_seconds, self.ttl) / 2)
        for _ in range(len(self._hosts)):
            host, port = self._hosts[0]
            try:
                by = min(until, now() + seconds)
                if not await self._connect_to(world, host, port, by):  # it has expired: a new one
                    await self._connect_to(world, host, port, by)
                return
            except HoldfastError:  # final
                raise
            except OSError as error:
                # A try that the caller's deadline has cut short tells less than those before it.
                if not self._trouble or not isinstance(error, TimeoutError) or now() < until:
                    late = isinstance(error, TimeoutError)
                    text = "it did not answer in time" if late else error.strerror or error
                    self._trouble = f"{host}:{port}: {text}"
                self._hosts.rotate(-1)
            if now() >= until:
                return

    async def _connect_to(self, world: World, host: str, port: int, until: float) -> bool:
        """Connects to a server. Returns false if the session has expired."""
        tls = self.options.tls
        if self.floor is None:
            stream = await greeting.open_stream(world, host, port, tls, until)
            try:
                self.floor = await greeting.shortest_session(world, stream, until)
            finally:
                stream.close()
        milliseconds = int(self.negotiate(self.floor) * 1000)
        self._retire()
        stream = await greeting.open_stream(world, host, port, tls, until)
        known = self._known
        try:
            began = now()
            granted = await greeting.connect(world, stream, self._zxid, milliseconds, known, until)
            if not granted.timeout_ms:
                if not known.number:
                    raise Broken("the server grants no session")
                self._expire()
                stream.close()
                return False
            await self._prove(world, stream, until)
            if granted.timeout_ms < milliseconds and not self.holds_nothing:
                if known.number:  # it was long enough on another server
                    raise Broken(self._describe_too_short(granted.timeout_ms / 1000))
                self.refusal = self._describe_too_short(granted.timeout_ms / 1000)
                self._check_usable()
            self._install(stream, granted, began)
            return True
        except BaseException:
            with suppress(OSError):  # a new session that is not used ends now; a known one stays
                if not known.number:
                    stream.send(Close().pack(1))
            stream.close()
            raise

    async def _prove(self, world: World, stream: ZooKeeperStream, until: float) -> None:
        try:
            await self.options.access.prove(world, stream, until)
        except AuthFailed as error:
            raise self._wrong_password() from error

    def negotiate(self, floor: float) -> float:
        """The session timeout to request, if this is the servers' shortest one. Raises
        ``Unsupported``."""
        if self.ttl < floor and not self.holds_nothing:
            self.refusal = f"ZooKeeper's shortest session here is {floor:g} s"
            self._check_usable()
        return self.ttl + self.lag + self.ttl / BEATS_PER_TTL + SLACK_SECONDS

    @property
    def lag(self) -> float:
        """How late the leader may receive a heartbeat: half a tick, with a safety factor of two.

        The shortest session is two ticks, unless ``minSessionTimeout`` is set, which no server
        shows. So a tick is assumed to be at least the usual one, unless the URL names it."""
        tick = USUAL_TICK_SECONDS if self.options.tick is None else self.options.tick
        return max((self.floor or 0.0) / 2, tick)

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

    def _install(self, stream: ZooKeeperStream, granted: Greeting, began: float) -> None:
        """Uses a new connection from now on."""
        before, number = self.connection, granted.session.number
        if number != self.id:
            self._expire()
        self._known, self.timeout = granted.session, granted.timeout_ms / 1000
        self._connected_since, self._next_heartbeat, self._open_heartbeat = began, began, None
        self.id, self.used = number, True
        connection = self.connection = SharedConnection(stream, self)
        if before is not None and not before.over:  # two have connected: this session moved here
            before.end(Broken("replaced by a newer connection"))
        if self.dead:  # closed at the same time
            self.close()
        try:
            heartbeats.add(self)
        except RuntimeError as error:  # no more threads: the session would expire unnoticed
            connection.end(Broken(str(error)))

    def _expire(self) -> None:
        """The session of the last id has ended, and all its nodes with it."""
        self.id, self._known = 0, NO_SESSION
        self._heartbeats.clear()
        self.proven = NEVER
        self._wake(self.watches.all())

    def _retire(self) -> None:
        """Gives up a session that was without connection for so long that it must have expired.

        Servers that have lost their data refuse to reconnect a client with a newer state.
        """
        lost = now() - self._last_up
        if not self.up and lost > max(3 * self.timeout, RETIRE_SECONDS):
            self._zxid = 0
            self._expire()

    # Ending

    def disconnected(self, connection: SharedConnection) -> None:
        """A connection has ended: the session may go on over another one."""
        self._zxid = max(self._zxid, connection.zxid)
        if connection is self.connection:
            self._trouble = connection.reason
            self._last_up = now()
            self._hosts.rotate(-1)
        self._wake(self.watches.all())  # the server has dropped them, also if another one is in use

    def close(self, completion: Completion | None = None) -> Request:
        """Ends the session; returns the request for that. Does not wait."""
        self.dead = True
        self._close_by = now() + CLOSE_SECONDS
        request = Close()
        request.completion = completion
        self.send(request)
        return request

    def disconnect(self) -> None:
        """Ends the connection, after ``close``."""
        if self.connection is not None:
            self.connection.end(Broken("closed"))

    def forget(self) -> None:
        """In a forked child: sends nothing to the servers."""
        if self.connection is not None and os.getpid() != self._process:
            self.connection.forget()

    def _wake(self, callbacks: Iterable[Callback]) -> None:
        for callback in callbacks:
            with suppress(RuntimeError):  # the event loop was closed
                callback()

    # Heartbeats, on the thread of the heartbeats

    def beat(self, moment: float) -> Turn | None:
        """Sends a heartbeat if it is time; ends a connection whose heartbeat is not answered."""
        connection = self.connection
        if connection is None or connection.over:
            return None
        if connection.in_use:
            return Turn(moment + IN_USE_SECONDS)
        if self.dead:
            if moment > self._close_by:
                connection.end(Broken("closed"))
                return None
            return Turn(self._close_by, connection)
        at = self._heartbeat(connection, moment)
        due = self._open_heartbeat is not None or connection.unsent or connection.needs_reader
        return Turn(at, connection if due else None)

    def _heartbeat(self, connection: SharedConnection, moment: float) -> float:
        """Returns when to look again."""
        if self._open_heartbeat is not None:
            request, sent = self._open_heartbeat
            if request.value is None and request.error is None:
                return self._check_silence(connection, moment, sent)
            if request.error is None:
                self._heartbeats.append(sent)
            self._open_heartbeat = None
        if moment >= self._next_heartbeat:
            self._next_heartbeat = moment + self.ttl / BEATS_PER_TTL
            self._run_heartbeat_task(moment)
            if not self.dead:
                request = Exists("/")
                self._open_heartbeat = request, moment
                connection.send([request])
        return self._next_heartbeat

    def _check_silence(self, connection: SharedConnection, moment: float, sent: float) -> float:
        silent_at = sent + max(self.timeout / 5, min(1.0, self.timeout / 2))
        if moment < silent_at:
            return silent_at
        connection.collect()  # a process that was stopped may find the reply now
        heartbeat = self._open_heartbeat
        if heartbeat is not None and heartbeat[0].value is None and heartbeat[0].error is None:
            connection.end(Broken("the server does not answer"))
        return moment

    def _run_heartbeat_task(self, moment: float) -> None:
        try:
            self._heartbeat_task(self, moment)
        except Exception:  # the heartbeat must go on
            log.exception("the clean-up of nodes on %s failed", self.options.display)

    # Certain time

    def since(self, sent: float, number: int) -> float:
        """When the ttl began that is certain by a write, which was sent at ``sent`` and answered in
        the session with the id ``number``. ``NEVER`` if that session has ended since."""
        reported = self._connected_since
        for heartbeat in reversed(
            tuple(self._heartbeats)
        ):  # the thread of the heartbeats adds to them
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

    def _check_usable(self) -> None:
        if self.refusal:
            raise Unsupported(f"{self.options.display}: a ttl of {self.ttl:g} s: {self.refusal}")
        if self.dead:
            raise BackendUnavailable(f"{self.options.display} was closed")

    def check(self) -> None:
        """Raises ``Unsupported`` or ``BackendUnavailable`` unless requests can be sent now."""
        self._check_usable()
        if not self.up:
            trouble = f": {self._trouble}" if self._trouble else ""
            raise BackendUnavailable(f"{self.options.display} is not connected{trouble}")

    def send(self, *requests: Request) -> None:
        """Sends requests back to back. The last request's ``completion`` ends the wait."""
        connection = self.connection
        if connection is not None:
            connection.send(requests)
            return
        for request in requests:
            request.fail(ConnectionLost(self._trouble))

    def start(self, completion: Completion, *requests: Request) -> None:
        """Sends requests back to back; ``finish`` waits for their replies."""
        requests[-1].completion = completion
        self.send(*requests)

    async def finish(self, completion: Completion, seconds: float, *requests: Request) -> None:
        """Waits for all replies to the requests of ``start``.

        An error that is a normal reply (such as a missing node) stays in the request's ``error``;
        any other error is raised.
        """
        # After the sending: on an older connection that has ended the requests have failed.
        connection = self.connection
        if connection is None:
            answered = True  # they have failed
        elif isinstance(completion, BlockingCompletion):
            answered = connection.wait(completion, now() + seconds)
        else:
            answered = await cast("AsyncCompletion", completion).wait(connection, seconds)
        self._raise_failure(answered, seconds, requests)

    def request(self, seconds: float, requests: Sequence[Request]) -> None:
        """``start`` and ``finish``, for a thread."""
        completion = requests[-1].completion = BlockingCompletion()
        self.send(*requests)
        connection = self.connection
        answered = connection is None or connection.wait(completion, now() + seconds)
        self._raise_failure(answered, seconds, requests)

    def _raise_failure(self, answered: bool, seconds: float, requests: Sequence[Request]) -> None:
        if not answered:
            raise BackendUnavailable(
                f"{self.options.display} did not answer within {max(0.0, seconds):.1f} s"
            )
        for request in requests:
            error = request.error
            if error is None or (isinstance(error, _ANSWERS) and not isinstance(request, Multi)):
                continue  # a transaction has such answers in its results
            raise self._failure(error) from error

    def _failure(self, error: Exception) -> Exception:
        where = self.options.display
        # Final, unlike the loss of a connection.
        if isinstance(error, NoAuth):
            text = f"{where} denies access: these nodes are another user's"
            return BackendUnavailable(text, final=True)
        if isinstance(error, AuthFailed):
            return self._wrong_password()
        if isinstance(error, ConnectionLost):
            return BackendUnavailable(f"{where} lost the connection: {str(error) or self._trouble}")
        return BackendUnavailable(f"{where} answered a request with {error!r}")

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


HeartbeatTask = Callable[[ZooKeeperSession, float], Any]
"""Runs on the thread of the heartbeats at every heartbeat; must not block."""
