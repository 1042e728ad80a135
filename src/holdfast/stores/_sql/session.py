"""Sessions that hold locks: one connection each, shared by a client and its renewer.

A session carries one request at a time, under its mutex. The request may come from a thread of
the client, from its event loop or from the renewer's thread: ``SessionDriver`` is written once,
over the ``World`` that waits for descriptors. The registry belongs to the store.
"""

from __future__ import annotations

import os
import select
import socket
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from math import inf
from typing import Any, Generic, TypeVar

from holdfast.claim import Grant
from holdfast.errors import BackendUnavailable
from holdfast.io.clock import now
from holdfast.io.connection import PENDING, READ, WRITE, World
from holdfast.stores._sql.connection import Dial, SqlConnection, SqlRefused

__all__ = ["SessionDriver", "SessionFailures", "SessionRegistry", "SqlSession", "ended"]

C = TypeVar("C", bound=SqlConnection)
C_co = TypeVar("C_co", bound=SqlConnection, covariant=True)

# Sessions of a loop that was closed, in the same process: their holds go on until their ttl. A
# reference keeps the garbage collector from closing them, which would end the holds now.
_kept: list[SqlConnection] = []


class SqlSession(Generic[C_co]):
    """One connection, and the claim that it holds or waits for."""

    __slots__ = (
        "__weakref__",
        "at_head",
        "connection",
        "ending",
        "grant",
        "mutex",
        "nudged",
        "parity",
        "pending",
        "queued_at",
        "until",
        "wake",
        "watched",
    )

    def __init__(self, connection: C_co) -> None:
        self.connection = connection
        self.mutex = threading.Lock()
        self.grant: Grant | None = None
        """The grant that the session holds, if any."""
        self.at_head = False
        """True if the session is at the head of the queue for slots."""
        self.pending = False
        """True while a reply is pending: that of a wait, or of a renewal that timed out."""
        self.parity = 0
        """Changes with each hold, so that the server can tell two holds of a session apart."""
        self.queued_at = 0.0
        """When the session began to wait. A grant received since then may be that old."""
        self.until = inf
        """Deadline of the current attempt for each reply; it may be earlier than the usual one."""
        self.nudged = False
        self.wake: Callable[[], None] | None = None
        """Ends the wait for this session's reply, if a thread or task waits."""
        self.watched: set[object] = set()
        """The waits for its descriptor. While there is one it is not closed: the number may be
        given to another socket, and an event loop would not notice. The last wait closes it."""
        self.ending = False
        """True if the connection is to be closed as soon as nothing waits for it."""

    def nudge(self) -> None:
        """Ends the current wait for a reply, or the next one."""
        self.nudged = True
        self.wake_waiter()

    def wake_waiter(self) -> None:
        """Makes a waiting thread or task check again: the reply may have been read already."""
        wake = self.wake
        if wake is not None:
            wake()

    def end(self) -> None:
        """Closes the connection; while a thread or task waits for it, makes that see its end and
        close it."""
        self.ending = True  # before the look: a wait that ends now looks at it after it has gone
        if self.watched:
            self.connection.sever()
        else:
            self.connection.close()

    def watch(self, wait: object) -> None:
        """Keeps the descriptor open for a wait."""
        self.watched.add(wait)

    def unwatch(self, wait: object) -> None:
        """Ends a wait for the descriptor. Closes a connection that was to be closed meanwhile."""
        self.watched.discard(wait)
        if self.ending and not self.watched:
            self.connection.close()

    def alive(self) -> bool:
        """True unless the server has ended the session. Sends nothing."""
        connection = self.connection
        return connection.open and (self.pending or connection.is_alive())


SessionFailures = dict[SqlSession[Any], BackendUnavailable]


class SessionRegistry(Generic[C]):
    """All sessions of one store: by owner while they hold or wait, else idle."""

    def __init__(self, max_idle: int) -> None:
        self.max_idle = max_idle
        self._process = os.getpid()
        self.by_owner: dict[str, SqlSession[C]] = {}
        self.idle: list[SqlSession[C]] = []
        self.attempting: dict[str, object] = {}
        """The owners for which an attempt is running."""
        self.unknown: dict[str, list[C]] = {}
        """By owner: connections that broke during a request, so that it is unknown what their
        sessions hold."""
        self.users = 0

    def borrow(self) -> SqlSession[C] | None:
        """Returns a live idle session, or None."""
        while True:
            try:
                session = self.idle.pop()
            except IndexError:
                return None
            if session.connection.open and not session.connection.has_input():
                return session
            session.connection.close()

    def give_back(self, session: SqlSession[C]) -> None:
        """Makes a session that holds nothing idle. Closes it if there are enough, or if the store
        has no user any more: an acquire may be undone while another thread closes the client."""
        session.grant, session.at_head, session.nudged, session.until = None, False, False, inf
        session.parity ^= 1
        if len(self.idle) < self.max_idle and session.connection.open:
            self.idle.append(session)
        else:
            session.end()
        if self.users <= 0:
            self._end_idle()

    def let_go(self, owner: str, session: SqlSession[C], *, clean: bool) -> None:
        """Ends an owner's use of a session. A clean session holds nothing and is kept; another one
        may hold something and is dropped."""
        if clean:
            self.by_owner.pop(owner, None)
            self.give_back(session)
        else:
            self.lose(owner, session)

    def lose(self, owner: str, session: SqlSession[C]) -> None:
        """Drops a broken session. It may still hold locks on the server until ``end_unknown``."""
        if self.by_owner.get(owner) is session:
            self.by_owner.pop(owner, None)  # unless another thread has just done so
        session.end()
        session.grant = None
        self.unknown.setdefault(owner, []).append(session.connection)
        while len(self.unknown) > 1000:  # the oldest: their idle timeout ends them
            del self.unknown[next(iter(self.unknown))]

    async def end_unknown(self, owner: str, end: Callable[[C], Awaitable[object]]) -> None:
        """Ends the sessions of an owner whose state is unknown."""
        unknown = self.unknown.pop(owner, [])
        try:
            while unknown:
                await end(unknown[-1])
                unknown.pop()
        finally:
            if unknown:
                self.unknown[owner] = unknown

    def forget(self) -> None:
        """In a forked child the sessions are the parent's. In a later event loop of the same
        process the idle ones are closed."""
        used, idle, same = self.by_owner.values(), self.idle, self._process == os.getpid()
        self.by_owner, self.idle, self.unknown, self.attempting = {}, [], {}, {}
        self._process = os.getpid()
        for session in idle:
            session.connection.close() if same else session.connection.forget()
        for session in used:
            if same:
                _kept.append(session.connection)
            else:
                session.connection.forget(keep_number=bool(session.watched))

    def remove_user(self) -> None:
        """Called by a backend that closes. Closes idle sessions; the last user closes all."""
        self.users -= 1
        self._end_idle()
        if self.users <= 0:
            for owner, session in list(self.by_owner.items()):
                self.lose(owner, session)  # one that waits on the server would go on waiting there

    def _end_idle(self) -> None:
        idle, self.idle = self.idle, []
        for session in idle:
            session.end()


def ended(sessions: list[SqlSession[C]]) -> list[SqlSession[C]]:
    """Returns the sessions that have ended. Sends nothing; skips sessions that are in use."""
    poll = select.poll()
    by_fileno: dict[int, SqlSession[C]] = {}
    gone: list[SqlSession[C]] = []
    for session in sessions:
        fileno = session.connection.fd  # read once: another thread may close it here
        if fileno < 0:
            gone.append(session)
        elif not session.pending and not session.mutex.locked():
            by_fileno[fileno] = session
            poll.register(fileno, select.POLLIN)
    for fileno, _ in poll.poll(0):
        session = by_fileno[fileno]
        if session.mutex.acquire(blocking=False):
            if not session.alive():
                gone.append(session)
            session.mutex.release()
    return gone


class Waker:
    """Lets a thread or task wait for input on a socket or for a call from any thread.

    The socket pair that carries a call costs more to make than a wait, so wakers are kept.
    """

    __slots__ = ("_inside", "_outside", "fd")

    def __init__(self) -> None:
        self._inside, self._outside = socket.socketpair()
        self._inside.setblocking(False)
        self._outside.setblocking(False)
        self.fd = self._inside.fileno()

    def call(self) -> None:
        """Ends the current wait, or the next one. From any thread."""
        with suppress(OSError):  # its buffer is full of calls, or it is closed
            self._outside.send(b"x")

    def drain(self) -> None:
        with suppress(BlockingIOError):
            self._inside.recv(4096)

    def close(self) -> None:
        self._inside.close()
        self._outside.close()


class WakerPool:
    """The wakers that are not in use: a stack without a lock."""

    def __init__(self) -> None:
        self._idle: list[Waker] = []
        self._closed = False

    def borrow(self) -> Waker:
        try:
            return self._idle.pop()
        except IndexError:
            return Waker()

    def give_back(self, waker: Waker) -> None:
        waker.drain()
        self._idle.append(waker)
        if self._closed:
            self.close()

    def forget(self) -> None:
        """In a forked child: a call through these sockets would reach the parent."""
        idle, self._idle = self._idle, []
        for waker in idle:
            waker.close()

    def close(self) -> None:
        self._closed = True
        while self._idle:
            with suppress(IndexError):  # another thread took the last one
                self._idle.pop().close()


class SessionDriver:
    """Sends requests on sessions, for threads or for the tasks of an event loop."""

    def __init__(self, world: World) -> None:
        self._world, self._wakers = world, WakerPool()

    async def open(self, dial: Dial[C], until: float) -> SqlSession[C]:
        return SqlSession(await dial(self._world, until))

    async def request(self, session: SqlSession[Any], request: Any, until: float) -> Any:
        """Sends one request and returns its reply. Reads a pending reply first. Closes a session
        that does not answer in time."""
        await self._lock(session, until)
        try:
            if session.pending:
                reply = await self._receive(session, until)
                with suppress(SqlRefused):  # only its end matters here
                    _taken(session, reply)
            session.connection.send(request)
            session.pending = True
            return _taken(session, await self._receive(session, until))
        except SqlRefused:
            raise
        except BaseException:  # also late, cancelled or interrupted: the reply is still to come
            session.end()
            raise
        finally:
            session.mutex.release()
            session.wake_waiter()

    async def begin(
        self, session: SqlSession[Any], request: Any, until: float, waits: Callable[[], bool]
    ) -> Any:
        """Sends a request that may wait on the server. Returns the reply; or None if ``waits``
        says, by what has come of the reply, that it does. Its reply is then pending."""
        await self._lock(session, until)
        try:
            session.connection.send(request)
            session.pending = True
            reply = await self._receive(session, until, waits)
            return None if reply is None and waits() else _taken(session, reply)
        except SqlRefused:
            raise
        except BaseException:
            session.end()
            raise
        finally:
            session.mutex.release()
            session.wake_waiter()

    async def request_all(
        self, requests: dict[SqlSession[Any], Any], until: float
    ) -> SessionFailures:
        """Sends one request on each session, and waits for all replies at the same time; the caller
        holds their mutexes. Returns the failures. A session whose reply is late stays open, with
        the reply pending."""
        failed: SessionFailures = {}
        late = {session for session in requests if session.pending}
        due = {
            session.connection.fd: session
            for session in requests
            if session in late or _sent(session, requests[session], failed)
        }
        while due and (ready := await self._ready(due, until)):
            for fd in ready:
                session = due[fd]
                if not _collected(session, failed):
                    continue
                if session in late and session not in failed:  # now its own request can be sent
                    late.discard(session)
                    if _sent(session, requests[session], failed):
                        continue
                del due[fd]
        return failed | {session: session.connection.late() for session in due.values()}

    async def collect_pending(self, session: SqlSession[Any], until: float) -> Any:
        """Returns the pending reply if it is complete, or if it has started and is complete by
        ``until``; else None."""
        await self._lock(session, until)
        try:
            reply = _arrived(session.connection)
            if reply is None and session.connection.reply_started():
                reply = await self._receive(session, until)
            return None if reply is None else _taken(session, reply)
        except SqlRefused:
            raise
        except BackendUnavailable:
            session.end()
            raise
        finally:
            session.mutex.release()
            session.wake_waiter()

    async def wait_for_reply(self, session: SqlSession[Any], until: float) -> None:
        """Returns when the pending reply starts to arrive, at a nudge, or at ``until``."""
        waker = self._wakers.borrow()
        session.wake = waker.call
        try:
            if not session.nudged and session.connection.open:
                # A task that reads its descriptor now calls ``wake_waiter`` at its end.
                reads = self._world.blocking or not session.mutex.locked()
                due = {session.connection.fd: session} if reads else {}
                await self._ready(due, until, waker)
        finally:
            session.wake = None
            session.nudged = False
            self._wakers.give_back(waker)

    def forget(self) -> None:
        """In a forked child: the waits are the parent's."""
        self._wakers.forget()

    def close(self) -> None:
        self._wakers.close()

    async def _lock(self, session: SqlSession[Any], until: float) -> None:
        """Acquires the session's mutex; raises if it takes too long."""
        mutex = session.mutex
        if mutex.acquire(blocking=False):
            return
        left = max(0.0, until - now())

        def give_up(taken: bool) -> None:
            if taken:
                mutex.release()

        if not await self._world.run(lambda: mutex.acquire(timeout=left), give_up):
            raise session.connection.broken("an earlier request is still under way")

    async def _receive(
        self,
        session: SqlSession[Any],
        until: float,
        enough: Callable[[], bool] | None = None,
    ) -> Any:
        """Returns the reply, or None if it is not complete by ``until``. Returns None early if
        ``enough`` says that the input read so far is sufficient."""
        connection = session.connection
        while (reply := connection.next()) is PENDING:
            if enough is not None and enough():
                return None
            if not await self._has_input(session, until):
                return None
            connection.collect()
            if connection.unsent:
                connection.flush()
        return reply

    async def _has_input(self, session: SqlSession[Any], until: float) -> object:
        """True when there is input; false at ``until``."""
        connection = session.connection
        if connection.unsent or not self._world.blocking or not connection.open:
            return await self._ready({connection.fd: session}, until)
        wait = object()
        try:  # the usual case of a thread, without a poll object of its own
            session.watch(wait)
            return connection.poll(max(0.0, until - now()) * 1000 + 1)
        finally:
            session.unwatch(wait)

    async def _ready(
        self, due: dict[int, SqlSession[Any]], until: float, waker: Waker | None = None
    ) -> list[int]:
        """The descriptors with input, or with room for what is not sent; nothing at ``until``."""
        wait = object()
        try:
            for session in due.values():
                session.watch(wait)
            fds = {
                fd: READ | WRITE if session.connection.unsent else READ
                for fd, session in due.items()
                if session.connection.open  # else another thread has closed it
            }
            if waker is not None:
                fds[waker.fd] = READ
            return await self._world.ready(fds, until)
        finally:
            for session in due.values():
                session.unwatch(wait)


def _arrived(connection: SqlConnection) -> Any:
    """Returns the reply if it is complete now, without waiting; else None."""
    # In a loop: the end of a session may follow its last message.
    while (reply := connection.next()) is PENDING and connection.has_input():
        connection.collect()
    return None if reply is PENDING else reply


def _taken(session: SqlSession[Any], reply: Any) -> Any:
    """Marks the pending reply as received and returns it. Raises if there is none."""
    if reply is None:
        raise session.connection.late()
    session.pending = False
    if not session.connection.usable:
        session.end()
    return session.connection.for_caller(reply)


def _sent(session: SqlSession[Any], request: Any, failed: SessionFailures) -> bool:
    try:
        session.connection.send(request)
    except BackendUnavailable as error:
        session.end()
        failed[session] = error
        return False
    session.pending = True
    return True


def _collected(session: SqlSession[Any], failed: SessionFailures) -> bool:
    """Returns True when the reply is complete or can never arrive."""
    connection = session.connection
    try:
        connection.collect()
        if connection.unsent:
            connection.flush()
        reply = connection.next()
        if reply is PENDING:
            return False
        connection.checked(_taken(session, reply))
    except SqlRefused as error:
        failed[session] = error
    except BackendUnavailable as error:
        session.end()
        failed[session] = error
    return True
