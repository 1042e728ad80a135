"""One connection through the proxy: two sockets, and what is on its way between them."""

import collections
import selectors
import socket
import struct
import time

_CHUNK = 65_536
# Closing with no time to linger sends a reset instead of an orderly end.
_RESET = struct.pack("ii", 1, 0)


class Side:
    """One direction's receiver: its socket and the bytes due to it, each with its time."""

    def __init__(self, wire: socket.socket) -> None:
        wire.setblocking(False)
        self.wire = wire
        self.due: collections.deque[tuple[float, bytes]] = collections.deque()
        self.ended = False
        self.told_end = False

    def put(self, data: bytes, delay: float) -> None:
        self.due.append((time.monotonic() + delay, data))

    def send(self) -> None:
        """Sends what is due, as far as the socket takes it."""
        while self.due and self.due[0][0] <= time.monotonic():
            when, data = self.due.popleft()
            try:
                sent = self.wire.send(data)
            except BlockingIOError:
                sent = 0
            if sent < len(data):
                self.due.appendleft((when, data[sent:]))
                return

    def reset(self) -> None:
        self.wire.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self.wire.close()


class Relay:
    """A client's connection and ours to the server. The proxy's thread alone touches it."""

    def __init__(self, client: socket.socket, server: socket.socket) -> None:
        self.client = Side(client)
        self.server = Side(server)
        self.drops_next_reply = False  # the next reply is swallowed and the connection reset
        self.asked = False  # the client has sent something since the server's last reply

    def read(self, side: Side, delay: float) -> bytes:
        """Reads from one side and queues it for the other; b"" for nothing or the end."""
        try:
            data = side.wire.recv(_CHUNK)
        except BlockingIOError:
            return b""
        if data:
            self.other(side).put(data, delay)
        else:
            side.ended = True
        return data

    def other(self, side: Side) -> Side:
        return self.server if side is self.client else self.client

    def flush(self, side: Side) -> None:
        """Sends what is due to a side, and the end of the stream after the last byte."""
        side.send()
        if self.other(side).ended and not side.due and not side.told_end:
            side.told_end = True
            side.wire.shutdown(socket.SHUT_WR)

    def interest(self, side: Side, held: bool) -> int:
        """What to wait for on a side; `held` means that nothing may be sent to it now."""
        events = 0 if side.ended else selectors.EVENT_READ
        if not held and side.due and side.due[0][0] <= time.monotonic():
            events |= selectors.EVENT_WRITE
        return events

    @property
    def over(self) -> bool:
        return self.client.told_end and self.server.told_end

    def reset(self) -> None:
        self.client.reset()
        self.server.reset()

    def close(self) -> None:
        self.client.wire.close()
        self.server.wire.close()
