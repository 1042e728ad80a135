"""Waiting for something to read from a plain blocking socket, in time whatever signals come."""

from __future__ import annotations

import select
import socket
import ssl
import struct
from collections.abc import Callable

__all__ = ["Readable", "readable"]

Readable = Callable[[float], object]
"""Waits so many milliseconds; true if there is something to read."""


def readable(sock: socket.socket, write_seconds: float) -> Readable | None:
    """How to wait for the socket. Nothing where only the socket's own timeout can tell: TLS may
    have read already what poll would wait for.

    That timeout costs a poll before every write, too. The kernel's own costs nothing and will do
    for writes, which hardly ever wait. For reads it won't: a read that a signal interrupts is
    begun anew, and all of its time with it.
    """
    if isinstance(sock, ssl.SSLSocket) or not hasattr(select, "poll"):
        return None
    limit = struct.pack("@ll", int(write_seconds), int(write_seconds % 1 * 1_000_000))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
    sock.settimeout(None)
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return poll.poll
