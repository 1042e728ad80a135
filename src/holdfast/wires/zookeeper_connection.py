"""kazoo's connection, with its sending, its reading and its handshake made ours.

Every thread sends its own requests, behind those that wait already, and reads while it waits for
their answers. kazoo would have that done by its thread, which costs more system calls and two
changes of threads each time.
"""

from __future__ import annotations

import select
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from kazoo.exceptions import ConnectionDropped
from kazoo.protocol.connection import (
    CHILD_EVENT,
    DELETED_EVENT,
    PING_XID,
    WATCH_XID,
    ConnectionHandler,
)
from kazoo.protocol.serialization import CloseInstance, Connect, Ping, ReplyHeader

from holdfast.runtimes.clock import now
from holdfast.wires.zookeeper_handler import SEND_SECONDS, Listener, Wire
from holdfast.wires.zookeeper_turn import Reader

__all__ = ["Connection"]

MOST_XID = 2**31 - 1
_HEAD = struct.Struct("!iii")
_REPLY = struct.Struct("!iiqi")
_LENGTH_SIZE, _HEADER_SIZE = 4, 16
_EVENT = struct.Struct("!iii")
_PING = _HEAD.pack(8, PING_XID, Ping.type)


class Connection(ConnectionHandler):  # type: ignore[misc]
    """kazoo's connection, which also learns what sessions the server allows."""

    _socket: Any
    _write_sock: Any
    _read_sock: Any

    def __init__(self, client: Any, listener: Listener, **options: Any) -> None:
        super().__init__(client, client._conn_retry.copy(), **options)
        self._listener = listener
        self._sending = threading.RLock()
        self._packing = False
        """Whether requests are being packed: a signal's handler may come in between."""
        self._open = False
        """Whether requests can be sent: hands were shaken, and nobody was told of a loss yet."""
        self._unsent = bytearray()
        """What the socket did not take at once."""
        self._number = 0
        """Of the last request. It goes on with the next connection, so that an answer of an old
        one, however late it is read, is never taken for that of another request."""

    def _connect(self, host: str, hostip: str, port: int) -> tuple[float, float]:
        floor = self._listener.floor
        if floor is None:
            floor = self._shortest_session(host, hostip, port)
        timeout = self._listener.settle(floor)
        if timeout is None:
            self.client._stopped.set()
            raise ConnectionDropped("the server does not honour this ttl")
        self.client._session_timeout = int(timeout * 1000)
        began = now()
        read_ms, connect_ms = super()._connect(host, hostip, port)
        self._unsent.clear()
        self._open = True
        self._listener.connected(began, read_ms * 1.5 / 1000)
        return read_ms, connect_ms

    # Sending

    def flush(self) -> bool:
        """Sends all that waits, from any thread; false if that is left to kazoo's thread."""
        if not self.handler.any_thread:
            return False
        with self._sending:
            if not self._open or self._packing:
                return False
            try:
                self._send()
            except OSError as error:
                if error.errno is None:
                    raise  # not the socket's: an alarm's
            return not self._unsent

    def shut(self) -> None:
        """Nobody sends from here on: those whose answers are pending are about to be told."""
        with self._sending:
            self._open = False

    def _send(self) -> None:
        """Sends what waits, as far as the socket takes it."""
        self._packing = True
        try:
            self._pack()
            if self._unsent:
                del self._unsent[: self._socket.send_now(self._unsent)]
        except BaseException:
            # There is no telling any more which answers will come. kazoo's thread finds the end
            # of the connection, and tells all who wait for one.
            self._socket.shut()
            raise
        finally:
            self._packing = False

    def _pack(self) -> None:
        queue, pending = self.client._queue, self.client._pending
        while queue:
            request, answer = queue.popleft()
            self._number = (self._number % MOST_XID) + 1
            kind = request.type  # first: it decides what is sent
            body = request.serialize()
            self._unsent += _HEAD.pack(len(body) + 8, self._number, kind) + body
            # Before it is sent: should that fail, all that is pending is told so.
            pending.append((request, answer, self._number))

    # kazoo's thread

    def _send_request(self, read_timeout: float, connect_timeout: float) -> None:
        self._read_sock.recv(1)
        self._send_all()

    def _send_ping(self, connect_timeout: float) -> None:
        self.ping_outstanding.set()
        with self._sending:
            self._unsent += _PING
        self._send_all()

    def _send_all(self) -> None:
        """Waits for the socket where it must; others leave theirs to this meanwhile."""
        deadline = now() + SEND_SECONDS
        while True:
            with self._sending:
                self._send()
            if not self._unsent:
                return
            self._socket.wait(deadline)

    # Reading

    def read(self, wire: Wire) -> bool:
        """Takes in all answers that have arrived; false if there is something else, for kazoo.

        kazoo's own way around its loop, once for each answer, costs more than the answers do.
        """
        client = self.client
        buffer, at = wire.buffer, wire.at
        if at == len(buffer):
            return False  # the end
        while at + _REPLY.size <= len(buffer):
            length, xid, zxid, code = _REPLY.unpack_from(buffer, at)
            begin, at = at + _LENGTH_SIZE, at + _LENGTH_SIZE + length
            if at > len(buffer):
                break
            if xid == WATCH_XID:
                wire.at = at
                self._read_watch_event(buffer, begin + _HEADER_SIZE)
                continue
            pending: Any = client._pending[0] if client._pending else (None, None, 0)
            request, answer, expected = pending
            if request is not answer or xid != expected:
                return False
            wire.at = at
            if zxid > 0:
                client.last_zxid = zxid
            if not code and request.watcher is not None:
                client._data_watchers[request.path].add(request.watcher)
            request.take(code, buffer[begin:at], _HEADER_SIZE)
            # Last: should an interrupt come before, it is told once more, of a lost connection.
            try:
                client._pending.remove(pending)
            except ValueError:
                return False  # it was told so already
        return True

    def _read_watch_event(self, buffer: bytes, offset: int) -> None:
        """As kazoo does, but for what nobody here asks for."""
        kind, _, length = _EVENT.unpack_from(buffer, offset)
        begin = offset + _EVENT.size
        path = buffer[begin : begin + length].decode()
        client = self.client
        watchers = set(client._data_watchers.pop(path, ()))
        if kind in (DELETED_EVENT, CHILD_EVENT):
            watchers |= set(client._child_watchers.pop(path, ()))
        for watcher in () if client._stopped.is_set() else watchers:
            watcher(path)

    def read_until(self, over: Callable[[], bool], deadline: float) -> None:
        """On a thread that waits: reads for all, until its own wait is over, or somebody else has
        to read. ``relieve`` is to follow."""
        wire = self._socket
        if wire is None or not self._open or not self.handler.any_thread:
            return
        turn, me = wire.turn, Reader()
        try:
            if not turn.take(me) and not turn.steal(me):
                turn.wished = True
            elif wire.whole:
                self._read_until(wire, me, over, deadline)
        except BaseException:
            turn.leave(me)
            self.relieve()
            raise
        finally:
            try:
                turn.leave(me)
            finally:
                turn.leave(me)  # an interrupt right here must not keep it for ever

    def _read_until(
        self, wire: Wire, me: Reader, over: Callable[[], bool], deadline: float
    ) -> None:
        turn, poll = wire.turn, select.poll()
        try:
            bell = turn.bell
        except OSError:
            return  # no more handles: kazoo's thread needs none
        poll.register(wire.fileno(), select.POLLIN)
        poll.register(bell, select.POLLIN)
        try:
            while not over() and not turn.called and (left := deadline - now()) > 0:
                me.polling = True
                found = poll.poll(left * 1000)
                me.polling = False
                if not turn.of(me):
                    return
                for handle, _ in found:
                    if handle == bell:
                        turn.answer()
                    elif not self._read_some(wire):
                        return
        except BaseException as error:
            if not wire.whole:
                wire.shut()  # so that kazoo's thread looks at it
            if not isinstance(error, OSError) or error.errno is None:
                raise  # not the socket's: an alarm's, or an interrupt

    def _read_some(self, wire: Wire) -> bool:
        wire.whole = False
        goes_on = wire.fill() and self.read(wire)
        wire.whole = True
        return goes_on

    def relieve(self) -> None:
        """Calls kazoo's thread if something is to be read and nobody does."""
        wire, wake = self._socket, self._write_sock
        if wire is not None and wake is not None and wire.turn.free and self._awaited(wire):
            with suppress(OSError):  # it has been called often enough, or is gone
                wake.send(b"\0")

    def spared(self) -> bool:
        """On kazoo's thread: whether it may leave the reading to threads that wait."""
        wire = self._socket
        turn = wire.turn
        if turn.kazoos:
            if not turn.wished or self._awaited(wire):
                return False
            turn.wished = False
            turn.leave(turn)
        # Again, now that others can take it: who came in between counts on us.
        return not (self._awaited(wire) and turn.take(turn))

    def _awaited(self, wire: Wire) -> bool:
        client = self.client
        return bool(client._pending or self._unsent or wire.pending() or self._listener.watching)

    def _read_header(self, timeout: float) -> Any:
        message = self._socket.message()
        if message is None:
            return super()._read_header(timeout)
        header, offset = ReplyHeader.deserialize(message, 0)
        return header, message, offset

    def zk_loop(self) -> None:
        try:
            super().zk_loop()
        finally:
            self.close()  # whoever said goodbye may not have waited for it

    def _invoke(self, timeout: float, request: Any, xid: int | None = None) -> Any:
        # A server that hangs may still be connected to: the handshake has its own, short time.
        return super()._invoke(min(timeout, self.handler.connect_seconds), request, xid)

    def _shortest_session(self, host: str, hostip: str, port: int) -> float:
        """Asks a server for a session of a millisecond, and gives it back.

        The answer is two ticks unless somebody has set it; ZooKeeper has no other way to ask.
        """
        client = self.client
        with self._socket_error_handling():
            wire = self.handler.create_connection((hostip, port), host)
        try:
            self._socket = wire
            hello = Connect(0, 0, 1, 0, b"\0" * 16, False)
            answer: Any = self._invoke(client._session_timeout / 1000, hello)
            self._submit(CloseInstance, SEND_SECONDS, 1)
            return float(answer[0].time_out) / 1000
        finally:
            self._socket = None
            wire.close()
