"""The proxy's thread: moves bytes between clients and the server, as its settings allow."""

import contextlib
import os
import selectors
import socket
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass

from servers.ports import LOOPBACK
from servers.relay import Relay, Side

_TICK_SECONDS = 0.05
_ANSWER_SECONDS = 10.0


@dataclass
class Counts:
    """What went through. A request is a burst of client bytes that follows a reply."""

    connections: int = 0
    requests: int = 0
    bytes_to_server: int = 0
    bytes_to_client: int = 0


class Pump:
    """Everything but `do` and `join` runs on the pump's own thread, so nothing needs a lock."""

    def __init__(self, port: int, target: tuple[str, int], *, host: str = LOOPBACK) -> None:
        self.host, self.port = host, port
        self.target = target
        self.counts = Counts()
        self.relays: list[Relay] = []
        self.stalled = False
        self.holding = False
        self.added_delay = 0.0
        self.drop: tuple[bytes, threading.Event] | None = None
        self.listener: socket.socket | None = None
        self.ending = False
        self._todo: list[tuple[Callable[[], None], threading.Event]] = []
        self._waker, self._woken = socket.socketpair()
        self._woken.setblocking(False)
        self.open_client()
        _pumps.add(self)
        self._thread = threading.Thread(target=self._run, name="proxy", daemon=True)
        self._thread.start()

    def do(self, action: Callable[[], None]) -> None:
        done = threading.Event()
        self._todo.append((action, done))
        self._waker.send(b"!")
        if not done.wait(_ANSWER_SECONDS):
            raise RuntimeError("the proxy's thread does not answer")

    def join(self) -> None:
        self._thread.join(_ANSWER_SECONDS)
        self.drop_handles()

    def drop_handles(self) -> None:
        """Closes what this process has open, without a word to the peers."""
        for wire in (self._waker, self._woken, self.listener):
            if wire is not None:
                wire.close()
        for relay in self.relays:
            relay.close()

    def open_client(self) -> None:
        if self.listener is None:
            listener = socket.socket()
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((self.host, self.port))
            listener.listen(512)
            listener.setblocking(False)
            self.listener = listener

    def close_client(self) -> None:
        if self.listener is not None:
            self.listener.close()
            self.listener = None
        self.cut_all()

    def cut_all(self) -> None:
        for relay in self.relays:
            relay.reset()
        self.relays.clear()

    def drop_next(self, drop: tuple[bytes, threading.Event] | None) -> None:
        """Which reply to drop, or none: who was to lose one and has not yet is spared."""
        self.drop = drop
        for relay in self.relays:
            relay.drops_next_reply = False

    def _run(self) -> None:
        while not self.ending:
            with contextlib.closing(selectors.DefaultSelector()) as selector:
                self._register(selector)
                ready = selector.select(self._patience())
            for key, _ in ready:
                if key.data is not None:
                    key.data()
            for relay in list(self.relays):
                self._guarded(relay, self._flush)
            self._run_todo()
        self.close_client()

    def _register(self, selector: selectors.BaseSelector) -> None:
        selector.register(self._woken, selectors.EVENT_READ, self._drain)
        # Unaccepted, a connection is made by the kernel and then hears nothing.
        if self.listener is not None and not self.stalled:
            selector.register(self.listener, selectors.EVENT_READ, self._accept)
        for relay in [] if self.stalled else self.relays:
            for side in (relay.client, relay.server):
                held = self.holding and side is relay.client
                if events := relay.interest(side, held):
                    selector.register(side.wire, events, self._reader(relay, side))

    def _reader(self, relay: Relay, side: Side) -> Callable[[], None]:
        return lambda: self._guarded(relay, lambda relay: self._read(relay, side))

    def _patience(self) -> float:
        """Until the next delayed byte is due; a tick at the most."""
        now = time.monotonic()
        times = [
            side.due[0][0] - now
            for relay in self.relays
            for side in (relay.client, relay.server)
            if side.due and side.due[0][0] > now
        ]
        return max(0.0, min([_TICK_SECONDS, *times]))

    def _drain(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._woken.recv(4096)

    def _run_todo(self) -> None:
        while self._todo:
            action, done = self._todo.pop(0)
            action()
            done.set()

    def _accept(self) -> None:
        assert self.listener is not None
        with contextlib.suppress(OSError):
            client, _ = self.listener.accept()
            upstream = socket.socket()
            relay = Relay(client, upstream)
            for wire in (client, upstream):
                wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            # A refusal shows up as an error on the first read, and resets the client as well.
            upstream.connect_ex(self.target)
            self.counts.connections += 1
            self.relays.append(relay)

    def _guarded(self, relay: Relay, action: Callable[[Relay], None]) -> None:
        """A socket error on one side resets both."""
        if relay not in self.relays:
            return
        try:
            action(relay)
        except BlockingIOError:
            pass
        except OSError:
            relay.reset()
            self.relays.remove(relay)

    def _read(self, relay: Relay, side: Side) -> None:
        if side.ended:
            return
        if side is relay.server and relay.drops_next_reply and side.wire.recv(1, socket.MSG_PEEK):
            assert self.drop is not None
            event, self.drop = self.drop[1], None
            relay.reset()
            self.relays.remove(relay)
            event.set()
            return
        self._count(relay, side, relay.read(side, self.added_delay))

    def _count(self, relay: Relay, side: Side, data: bytes) -> None:
        if side is relay.server:
            self.counts.bytes_to_client += len(data)
            relay.asked = relay.asked and not data
        elif data:
            self.counts.bytes_to_server += len(data)
            self.counts.requests += not relay.asked
            relay.asked = True
            if self.drop is not None and self.drop[0] in data:
                relay.drops_next_reply = relay.drops_next_reply or not any(
                    other.drops_next_reply for other in self.relays
                )

    def _flush(self, relay: Relay) -> None:
        if self.stalled:
            return
        relay.flush(relay.server)
        if not self.holding:
            relay.flush(relay.client)
        if relay.over:
            relay.close()
            self.relays.remove(relay)


_pumps: weakref.WeakSet[Pump] = weakref.WeakSet()


def _forget_in_child() -> None:
    # A reset is only sent when the last copy of a socket closes, and a forked child has copies.
    for pump in _pumps:
        pump.drop_handles()


os.register_at_fork(after_in_child=_forget_in_child)
