"""How a task waits for the last reply of a pipeline. Only the asyncio client loads this."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from holdfast.io.aio import WORLD
from holdfast.stores.zookeeper.client.connection import SharedConnection

__all__ = ["WORLD", "AsyncCompletion", "attach"]


class AsyncCompletion:
    """A task that waits for a reply."""

    __slots__ = ("_future", "_loop")

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._future: asyncio.Future[bool] = self._loop.create_future()

    def done(self) -> None:
        if asyncio._get_running_loop() is self._loop:
            self._finish(True)
            return
        with suppress(RuntimeError):  # the loop is closed, so no task waits
            self._loop.call_soon_threadsafe(self._finish, True)

    def _finish(self, answered: bool) -> None:
        if not self._future.done():
            self._future.set_result(answered)

    async def wait(self, connection: SharedConnection, seconds: float) -> bool:
        """Returns whether the reply came within so many seconds; reads on this event loop."""
        connection.attach(self._loop)
        timer = self._loop.call_later(max(0.0, seconds), self._finish, False)
        try:
            return await self._future
        finally:
            timer.cancel()


def attach(connection: SharedConnection) -> None:
    """Reads on the running event loop from now on."""
    connection.attach(asyncio.get_running_loop())
