"""An attempt with a short deadline, on a server that does not answer. For both SQL stores."""

from __future__ import annotations

import asyncio
import secrets

import pytest

from holdfast.claim import Grant
from holdfast.core.contract import Backend, Settings
from holdfast.core.drive import run_now
from holdfast.errors import BackendUnavailable
from holdfast.io.clock import now
from holdfast.io.runtime_aio import AsyncioRuntime
from holdfast.io.runtime_blocking import BlockingRuntime
from holdfast.url import open_store
from servers.proxy import Proxy
from stores.claims import claim_of

__all__ = ["gives_up_in_time"]

LONG = 600.0
"""The timeout of a request without a deadline: longer than any test."""


def gives_up_in_time(proxy: Proxy, mode: str, *, blocking: bool, connected: bool) -> None:
    """Check that an attempt ends at its deadline, with or without an open connection."""
    store = open_store(
        f"{proxy.url}?mode={mode}",
        Settings(namespace=f"t{secrets.token_hex(6)}", request_seconds=LONG),
    )
    if blocking:
        run_now(_attempt(store.backend(BlockingRuntime()), proxy, connected))
    else:

        async def on_a_loop() -> None:
            await _attempt(store.backend(AsyncioRuntime()), proxy, connected)

        asyncio.run(on_a_loop())


async def _attempt(backend: Backend, proxy: Proxy, connected: bool) -> None:
    first = await backend.attempt(claim_of(), join=True)
    assert isinstance(first, Grant)
    assert await backend.release(first)
    if not connected:
        backend.forget()
    proxy.stall()
    try:
        began = now()
        with pytest.raises(BackendUnavailable):
            await backend.attempt(claim_of(), join=True, until=began + 0.3)
        assert now() - began < LONG / 10
    finally:
        proxy.resume()
        await backend.close()
