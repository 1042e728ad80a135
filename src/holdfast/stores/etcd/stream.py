"""Watches without a WebSocket: one HTTP stream for each, blocking or asyncio.

Needed where etcd asks for a password, since its gateway passes no credentials from a WebSocket
on, and behind proxies that know no WebSockets.
"""

from __future__ import annotations

import json
from collections.abc import Collection

from holdfast.io.long_poll import Call, Listening
from holdfast.stores.etcd.watch import Watch

__all__ = ["StreamWatches"]

WATCH = b"POST /v3/watch"
MOST_UNREAD_BYTES = 16 * 2**20
"""How much of a text may come before its end does."""


class StreamWatches:
    """As many watches as there is room for streams; the others are told to look again."""

    def __init__(self, listening: Listening) -> None:
        self._listening = listening
        self._streams: dict[str, tuple[Watch, Call, bytearray]] = {}

    async def begin(self, owner: str, keys: str, ends_only: bool, until: float) -> Watch:
        watch = Watch(0, owner)
        filters = ',"filters":["NOPUT"]' if ends_only else ""
        body = f'{{"create_request":{{{keys}{filters}}}}}'.encode()
        call = await self._listening.begin(owner, WATCH, body, until, stream=True)
        if call is None:
            watch.broken = True
        else:
            self._streams[owner] = watch, call, bytearray()
        return watch

    def hung(self, session: str) -> Watch | None:
        return None

    async def subscription(
        self, session: str, keys: str, live: Collection[str], until: float
    ) -> Watch | None:
        """None: it would take up a stream for good."""
        return None

    async def woken(self, owner: str, until: float) -> bool:
        stream = self._streams.get(owner)
        if stream is None:
            return True
        woken = await self._listening.woken(owner, until)
        _read(*stream)
        return woken

    async def end(self, watch: Watch) -> None:
        stream = self._streams.pop(watch.owner, None)
        if stream is not None:
            self._listening.end(stream[1])

    def distrust(self) -> None:
        """Every stream has a connection of its own, which ends with it."""

    def nudge(self, owner: str) -> None:
        self._listening.nudge(owner)

    def forget(self) -> None:
        self._streams.clear()
        self._listening.forget()

    def close(self) -> None:
        self._listening.close()


def _read(watch: Watch, call: Call, rest: bytearray) -> None:
    """Takes in what came: one JSON text per line."""
    pieces, call.pieces = call.pieces, []
    rest += b"".join(pieces)
    *lines, tail = rest.split(b"\n")
    rest[:] = tail
    try:
        for line in lines:
            if line:
                watch.learn(json.loads(line).get("result") or {"canceled": True})
    except (AttributeError, LookupError, RecursionError, TypeError, ValueError):
        watch.broken = True  # it is not etcd that speaks
    if call.broken or call.reply is not None or len(rest) > MOST_UNREAD_BYTES:
        watch.broken = True
