"""The hubs: one that another thread closes ends its waits without an error; no wake-up is lost."""

from __future__ import annotations

import asyncio
import socket
import time

import pytest

from holdfast.io.clock import now
from holdfast.io.wakeups import AsyncWakeupHub, BlockingWakeupHub


class ClosedMeanwhile:
    """A subscription that another thread closes in the middle of one of its methods."""

    def __init__(self, hub: BlockingWakeupHub, method: str) -> None:
        self._hub, self._method = hub, method
        self._reading, self._writing = socket.socketpair()
        self._writing.send(b"x")

    def fileno(self) -> int:
        self._close_in("fileno")
        return self._reading.fileno()

    def read(self) -> list[str]:
        self._close_in("read")
        return []

    def _close_in(self, method: str) -> None:
        if method == self._method:
            self._hub.close()
            raise ValueError("I/O operation on closed epoll object")

    def close(self) -> None:
        self._reading.close()
        self._writing.close()


@pytest.mark.parametrize("method", ["fileno", "read"])
def test_closing_ends_a_wait_without_an_error(method: str) -> None:
    hub = BlockingWakeupHub()
    hub.attach(ClosedMeanwhile(hub, method))
    assert hub.wait("key", now() + 30)


@pytest.mark.parametrize("method", ["fileno", "read"])
def test_a_broken_subscription_of_an_open_hub_raises(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = BlockingWakeupHub()
    broken = ClosedMeanwhile(hub, method)
    hub.attach(broken)
    with monkeypatch.context() as patched:
        patched.setattr(hub, "close", lambda: None)
        with pytest.raises(ValueError, match="closed"):
            hub.wait("key", now() + 30)
    hub.close()
    broken.close()


def test_a_wake_up_is_kept_if_the_wait_has_just_run_out() -> None:
    """The loop ends the wait by its timer, and runs the next timer before the waiting task."""

    async def wait_twice() -> tuple[bool, bool]:
        hub = AsyncWakeupHub()
        waiting = asyncio.create_task(hub.wait("key", now() + 0.01))
        await asyncio.sleep(0)
        asyncio.get_running_loop().call_later(0.02, hub.wake, "key")
        time.sleep(0.05)  # both timers are due in the same turn of the loop
        return await waiting, await hub.wait("key", now() + 30)

    assert asyncio.run(wait_twice()) == (False, True)
