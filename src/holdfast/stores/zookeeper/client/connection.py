"""One connection of a session, used by many threads and by the tasks of one event loop at once.

Every caller sends its own requests. It does not matter who reads: one of the waiting threads reads
for all threads, an event loop has a reader of its own, and the thread of the heartbeats reads if no
other does. Each of them gives every reply to the thread or task that waits for it.

A session needs this, and not a pool: its requests are executed in order, and its heartbeats must
go on while its event loop is blocked. Several requests are sent and waited for as one. (The shared
mode of ``io.blocking`` waits for one reply at a time.)

A signal handler may interrupt its own thread while that is sending or reading. If the handler then
uses the connection itself, the connection ends: it is unknown how much was sent or read.
"""

from __future__ import annotations

import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

from holdfast.io.blocking import wait_for
from holdfast.io.clock import now
from holdfast.io.connection import PENDING, READ, WRITE, Broken
from holdfast.io.wakeups import poller
from holdfast.stores.zookeeper.client.completion import (
    LONGEST_WAIT_SECONDS,
    BlockingCompletion,
)
from holdfast.stores.zookeeper.client.greeting import ZooKeeperStream
from holdfast.stores.zookeeper.client.packets import (
    EVENT_XID,
    MOST_FRAME_BYTES,
    ConnectionLost,
    Request,
    read_event,
)

if TYPE_CHECKING:
    import asyncio  # imported in functions below: the blocking client does not load it

__all__ = ["ConnectionListener", "SharedConnection"]

MOST_XID = 2**31 - 1
FOLLOW_SECONDS = 0.25
"""A thread for which another thread reads looks for its reply itself this often: a signal handler
may occupy the other one."""
UNUSED_SECONDS = 0.05
_REPLY = struct.Struct("!iqi")
_HANDLER = "a signal handler used it while its own thread did"
_ENDED = (IndexError, ValueError, AttributeError)
"""What a thread may find in a connection that a signal handler has ended under it."""


class ConnectionListener(Protocol):
    """What a connection reports to its session, on the thread that reads."""

    def node_changed(self, path: str) -> None:
        """A watch has fired."""
        ...

    def disconnected(self, connection: SharedConnection) -> None:
        """It has ended; called at least once."""
        ...


class SharedConnection:
    """From the end of the greeting to the end of the connection. It is not opened again."""

    def __init__(self, stream: ZooKeeperStream, listener: ConnectionListener) -> None:
        stream.frames.most_bytes = MOST_FRAME_BYTES
        self._stream, self._listener = stream, listener
        self.fd = stream.fd
        self.over = False
        self.reason = ""
        """Why it has ended."""
        self.zxid = 0
        """The last change that a reply has shown."""
        self._mutex = threading.RLock()
        self._user = 0
        """The thread that is sending or reading."""
        self._xid = 0
        self._used_at = now()
        self._pending: deque[Request] = deque()
        self._answered: deque[Request | str] = deque()
        """Requests with their replies, and the paths of events, that nobody was told of yet."""
        self._waiting: dict[BlockingCompletion, int] = {}
        """The threads that wait, by what they wait for."""
        self._reader: dict[int, BlockingCompletion] = {}
        """The thread that reads for the others, under the key 0: taking the role is atomic."""
        self._polling: dict[object, None] = {}
        """Who waits for the descriptor now, and keeps its number from being reused."""
        self._pollers: list[Callable[[float], list[tuple[int, int]]]] = []
        self._pair: tuple[socket.socket, socket.socket] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    # Sending and reading, by any thread; neither waits

    @property
    def unsent(self) -> bool:
        """Whether the socket has not taken all yet."""
        return bool(self._stream.unsent)

    @property
    def in_use(self) -> bool:
        """Whether another thread is sending or reading now: nearly never for long, but a signal
        handler may have interrupted it."""
        if not self._mutex.acquire(blocking=False):
            return True
        self._mutex.release()
        return False

    def send(self, requests: Sequence[Request]) -> None:
        """Sends requests back to back. If the connection ends before their replies, or has ended,
        they fail with ``ConnectionLost``."""
        me = threading.get_ident()
        if self._user == me:
            self.end(Broken(_HANDLER))
        try:
            with self._mutex:
                if not self.over:
                    self._user = me
                    self._pending.extend(requests)  # first: if the sending fails, all of them fail
                    self._stream.send(self._pack(requests))
                    self._user = 0
                    self._used_at = now()
        except BaseException as error:  # noqa: BLE001 - raised again by _fail
            self._fail(error)
        if self.over:
            for request in requests:
                request.fail(ConnectionLost(self.reason))
        elif self._stream.unsent:
            self._send_later()

    def _pack(self, requests: Sequence[Request]) -> bytes:
        packets = []
        for request in requests:
            self._xid = xid = (self._xid % MOST_XID) + 1
            packets.append(request.pack(xid))
        return b"".join(packets)

    def check(self) -> None:
        """Finds out whether the server has closed a connection that was not used for a while, and
        that perhaps no thread has read from since: a request on it would have an unknown
        outcome."""
        if now() - self._used_at > UNUSED_SECONDS:
            self.collect()

    def collect(self) -> None:
        """Reads what has arrived, sends what was left over, and tells those who wait."""
        me = threading.get_ident()
        if self._user == me:
            self.end(Broken(_HANDLER))
        try:
            with self._mutex:
                if not self.over:
                    self._user = me
                    self._stream.collect()
                    if self._stream.unsent:
                        self._stream.flush()
                    self._read_replies()
                    self._user = 0
            self._tell()
        except BaseException as error:  # noqa: BLE001 - raised again by _fail
            self._fail(error)
        if self.over:
            self._fail_all()

    def _read_replies(self) -> None:
        pending, next_frame = self._pending, self._stream.next
        while (frame := next_frame()) is not PENDING:
            try:
                xid, zxid, code = _REPLY.unpack_from(frame)
                if xid == EVENT_XID:
                    self._answered.append(read_event(frame[_REPLY.size :]))
                    continue
            except (struct.error, ValueError) as error:
                raise Broken(f"not ZooKeeper's: {error}") from None
            if not pending or pending[0].xid != xid:
                raise Broken("not ZooKeeper's: a reply without a request")
            if zxid > 0:
                self.zxid = zxid
            request = pending[0]
            request.answer(code, frame[_REPLY.size :])
            self._answered.append(request)
            pending.popleft()  # last: an interrupt before this line loses no request

    def _tell(self) -> None:
        """Tells of replies and events, outside of the mutex: what is told may send requests."""
        answered = self._answered
        while answered:
            try:
                item = answered[0]
            except IndexError:  # another thread does the same
                return
            if isinstance(item, str):
                self._listener.node_changed(item)
            else:
                item.finish()
            try:  # noqa: SIM105 - cheaper than suppress, once per reply
                answered.remove(item)  # last: after an interrupt it is told again
            except ValueError:
                pass

    # The end

    def _fail(self, error: BaseException) -> None:
        """Ends the connection by an error; raises it again unless it is the connection's own."""
        ended, self._user = self.over, 0
        self.end(error)
        own = isinstance(error, Broken) or (isinstance(error, OSError) and error.errno is not None)
        if not own and not (ended and isinstance(error, _ENDED)):
            raise error

    def end(self, error: BaseException) -> None:
        """Ends the connection. All requests without a reply fail; their outcome is unknown."""
        with self._mutex:
            if not self.over:
                own = isinstance(error, OSError)
                self.reason = str(error) if own else "an interrupt stopped a request on it"
                self.over = True
            self._stream.shut()
        self._fail_all()
        self._interrupt_poll()
        self._leave_loop()
        self._listener.disconnected(self)

    def _fail_all(self) -> None:
        lost = ConnectionLost(self.reason)
        for item in list(self._answered):
            if not isinstance(item, str):
                item.finish()
        for request in list(self._pending):
            request.fail(lost)
        self._answered.clear()
        self._pending.clear()

    def _dispose(self) -> None:
        """Closes the descriptor, once nobody waits for it."""
        if self.over and not self._polling and self._loop is None:
            self._stream.close()
            pair, self._pair = self._pair, None
            for end in pair or ():
                end.close()

    def forget(self) -> None:
        """In a forked child: the connection is the parent's. Sends nothing."""
        self.over, self.reason = True, "it belongs to the parent process"
        self._stream.forget(keep_number=self._loop is not None)
        for end in self._pair or ():
            end.close()

    # Threads that wait

    def hold_descriptor(self, user: object) -> bool:
        """Keeps the descriptor from being closed, for a user that waits for it; false if the
        connection has ended."""
        self._polling[user] = None
        return not self.over

    def let_descriptor_go(self, user: object) -> None:
        self._polling.pop(user, None)
        if self.over:
            self._dispose()

    @property
    def needs_reader(self) -> bool:
        """Whether replies are due that no thread waits for, nor an event loop."""
        read_by_loop = self._loop is not None and not self._loop.is_closed()
        return bool(self._pending) and not self._waiting and not read_by_loop

    def wait(self, completion: BlockingCompletion, until: float, *, reply: bool = True) -> bool:
        """Waits for a reply, or with ``reply=False`` for an event; reads if no other thread does.
        Returns whether it came by ``until``."""
        try:
            try:
                return self._wait(completion, until, reply)
            finally:
                self._leave(completion)
        except BaseException:
            # An interrupt, perhaps before the line above: other threads need a reader.
            self._leave(completion)
            raise

    def _wait(self, completion: BlockingCompletion, until: float, reply: bool) -> bool:
        self._waiting[completion] = threading.get_ident()
        while not completion.answered and not self.over and (left := until - now()) > 0:
            if self._takes_role(completion):
                self._poll(completion, until)
            elif reply:
                completion.sleep(min(left, FOLLOW_SECONDS))
                if not completion.answered:
                    self.collect()
            else:
                completion.sleep(left)
        if self.over:
            self._fail_all()
        return completion.answered

    def _takes_role(self, completion: BlockingCompletion) -> bool:
        """Whether this thread has to read; also if it has the role already, below a handler."""
        reader = self._reader.setdefault(0, completion)
        return reader is completion or self._waiting.get(reader) == self._waiting[completion]

    def _poll(self, completion: BlockingCompletion, until: float) -> None:
        """Waits for the descriptor, or for ``completion``, and reads."""
        wake = self._wakeup_fd()
        if not self.hold_descriptor(completion):  # until _leave
            return
        completion.interrupt = self._interrupt_poll
        if completion.answered:
            return
        found = self._ready(wake, until)
        completion.interrupt = None
        if wake in found:
            self._drain()
        if self.fd in found:
            self.collect()

    def _ready(self, wake: int, until: float) -> list[int]:
        """Waits for one of the two descriptors."""
        if self._stream.unsent:
            return wait_for({self.fd: READ | WRITE, wake: READ}, until)
        # Taken and put back: it must not be used twice at once, below a signal handler.
        poll = self._pollers.pop() if self._pollers else poller(self.fd, wake)
        left = max(0.0, min(until - now(), LONGEST_WAIT_SECONDS))
        found = [fd for fd, _ in poll(left * 1000)]
        self._pollers.append(poll)
        return found

    def _leave(self, completion: BlockingCompletion) -> None:
        self._waiting.pop(completion, None)
        if self._reader.get(0) is completion:
            self._reader.pop(0, None)
        if 0 not in self._reader:
            for other in list(self._waiting):
                other.poke()
                break
        self.let_descriptor_go(completion)

    def _wakeup_fd(self) -> int:
        pair = self._pair
        if pair is None:
            pair = socket.socketpair()
            for end in pair:
                end.setblocking(False)
            self._pair = pair
        return pair[0].fileno()

    def _interrupt_poll(self) -> None:
        pair = self._pair
        if pair is not None:
            with suppress(OSError):  # full already, or closed
                pair[1].send(b"\0")

    def _drain(self) -> None:
        pair = self._pair
        if pair is not None:
            with suppress(OSError):
                pair[0].recv(4096)

    # The event loop

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Reads on this event loop from now on. Call it on the loop's own thread."""
        if self._loop is loop:
            return
        from holdfast.io.aio import watch

        try:
            if self.hold_descriptor(loop):
                watch(loop, self.fd, READ, self.collect)
                self._loop = loop
                if self._stream.unsent:
                    self._send_later()
        finally:
            self.let_descriptor_go(loop)
        if self.over:  # perhaps ended by another thread meanwhile
            self._leave_loop()

    def _send_later(self) -> None:
        """Sends what was left over once the socket takes more."""
        loop = self._loop
        if loop is None or loop.is_closed():
            self._interrupt_poll()
        elif _runs_here(loop):
            loop.add_writer(self.fd, self._writable)
        else:
            with suppress(RuntimeError):  # closed just now
                loop.call_soon_threadsafe(self._send_later)
            self._interrupt_poll()

    def _writable(self) -> None:
        self.collect()
        loop = self._loop
        if loop is not None and not self._stream.unsent:
            loop.remove_writer(self.fd)

    def _leave_loop(self) -> None:
        """Stops the reading by the event loop, on its own thread, and then closes the descriptor:
        a number that is closed first may be another file's by then."""
        loop = self._loop
        if loop is not None and not loop.is_closed():
            if not _runs_here(loop):
                with suppress(RuntimeError):  # closed just now
                    loop.call_soon_threadsafe(self._leave_loop)
                    return
            else:
                loop.remove_reader(self.fd)
                loop.remove_writer(self.fd)
        self._loop = None
        self._dispose()


def _runs_here(loop: asyncio.AbstractEventLoop) -> bool:
    import asyncio

    return asyncio._get_running_loop() is loop
