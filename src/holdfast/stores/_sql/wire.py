"""The wire to MySQL or PostgreSQL: a few connections, shared by all who ask.

Its two worlds are in ``sql_blocking`` and ``sql_async``.
"""

from __future__ import annotations

from typing import Protocol, TypeVar

from holdfast.core.contract import Runtime, Settings
from holdfast.stores._sql.aio import AsyncWire
from holdfast.stores._sql.blocking import BlockingWire
from holdfast.stores._sql.connection import Connection, Dial

__all__ = ["Wire", "make_wire"]

Request = TypeVar("Request")
Answer = TypeVar("Answer")
Request_contra = TypeVar("Request_contra", contravariant=True)
Answer_co = TypeVar("Answer_co", covariant=True)


class Wire(Protocol[Request_contra, Answer_co]):
    """What both wires have."""

    async def request(
        self, request: Request_contra, owner: str = "", until: float | None = None
    ) -> Answer_co: ...

    def forget(self) -> None: ...

    async def close(self) -> None: ...


def make_wire(
    runtime: Runtime, dial: Dial[Connection[Request, Answer]], settings: Settings, display: str
) -> Wire[Request, Answer]:
    """By the world that it is for."""
    limit, seconds = settings.connections, settings.request_seconds
    if runtime.blocking:
        return BlockingWire(dial, limit, seconds, display)
    return AsyncWire(dial, limit, seconds, display)
