"""The heartbeats of all ZooKeeper sessions of the process, on one thread.

It never waits for a server: it sends what a socket takes at once, and reads what has arrived. So
neither a blocked event loop nor a server that hangs delays the heartbeats of any session.
"""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress
from typing import NamedTuple, Protocol

from holdfast.core import log
from holdfast.io import lifetime
from holdfast.io.blocking import wait_for
from holdfast.io.clock import now
from holdfast.io.connection import READ, WRITE
from holdfast.io.threads import OneThread
from holdfast.stores.zookeeper.client.connection import SharedConnection

__all__ = ["HeartbeatSession", "Turn", "heartbeats"]

LONGEST_PAUSE_SECONDS = 60.0
FAILURE_PAUSE_SECONDS = 1.0


class Turn(NamedTuple):
    """What a session needs after its turn."""

    at: float
    """When it needs its next turn."""
    connection: SharedConnection | None = None
    """What to read from before that, if a reply is due that perhaps nobody else reads."""


class HeartbeatSession(Protocol):
    """A session with heartbeats."""

    def beat(self, moment: float) -> Turn | None:
        """Sends a heartbeat if one is due; ``None`` once the session needs no more. Never
        blocks."""
        ...


class _Heartbeats:
    def __init__(self) -> None:
        self._sessions: dict[HeartbeatSession, None] = {}
        self._one = OneThread("holdfast-heartbeats", self._run)
        self._pair = _socket_pair()

    def add(self, session: HeartbeatSession) -> None:
        """Gives the session its turns from now on. Raises ``RuntimeError`` if the system allows no
        more threads."""
        self._sessions[session] = None
        self._one.start()
        self.wake()

    def wake(self) -> None:
        """Looks at all sessions now: one may need an earlier turn."""
        if threading.current_thread() is not self._one.thread:
            with suppress(OSError):  # full of wake-ups already
                self._pair[1].send(b"\0")

    def _run(self) -> None:
        while True:
            try:
                self._round()
            except Exception:  # noqa: BLE001 - without it all sessions would expire
                log.exception("a round of the ZooKeeper heartbeats failed; they continue")
                time.sleep(FAILURE_PAUSE_SECONDS)

    def _round(self) -> None:
        """Gives all sessions their turn, and waits for what comes next."""
        until, reads = now() + LONGEST_PAUSE_SECONDS, list[SharedConnection]()
        for session in list(self._sessions):
            # Removed first: a thread that connects during the turn adds the session again.
            self._sessions.pop(session, None)
            turn = self._turn(session)
            if turn is None:
                continue
            self._sessions[session] = None
            until = min(until, turn.at)
            if turn.connection is not None:
                reads.append(turn.connection)
        self._wait(until, reads)

    def _turn(self, session: HeartbeatSession) -> Turn | None:
        try:
            return session.beat(now())
        except Exception:  # noqa: BLE001 - the others need their heartbeats
            log.exception("a heartbeat of a ZooKeeper session failed; it continues")
            return Turn(now() + FAILURE_PAUSE_SECONDS)

    def _wait(self, until: float, connections: list[SharedConnection]) -> None:
        held = [each for each in connections if each.hold_descriptor(self)]
        wake = self._pair[0].fileno()
        wishes = {each.fd: READ | WRITE if each.unsent else READ for each in held}
        found = wait_for({**wishes, wake: READ}, until)
        for each in connections:
            each.let_descriptor_go(self)
        if wake in found:
            with suppress(OSError):
                self._pair[0].recv(4096)
        for each in held:
            if each.fd in found and not each.in_use:
                each.collect()

    def forked(self) -> None:
        """In a forked child: the thread and the sessions are the parent's."""
        for end in self._pair:
            end.close()
        self._sessions, self._pair = {}, _socket_pair()
        self._one.forked()


def _socket_pair() -> tuple[socket.socket, socket.socket]:
    pair = socket.socketpair()
    for end in pair:
        end.setblocking(False)
    return pair


heartbeats = _Heartbeats()
lifetime.at_fork(heartbeats)
