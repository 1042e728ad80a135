"""A job per interval for the asyncio client: the twin of ``primitives.every.Every``."""

from __future__ import annotations

from holdfast.primitives.every import EveryRules
from holdfast.primitives.lock_async import AsyncLock
from holdfast.primitives.once_async import AsyncOnce

__all__ = ["AsyncEvery"]


class AsyncEvery(EveryRules[AsyncLock], AsyncOnce):
    """A job of the asyncio client that runs once per interval."""
