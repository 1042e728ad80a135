"""Guarded keys in the lock's own Consul: a write is applied if the hold's session still locks it.

with holdfast.connect("consul://localhost") as locks, locks.lock("config") as lease:
    fencing.consul.guard(lease).put("app/config", "…")    # StaleFence once the hold has ended
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from typing import Any

from holdfast.fencing.own_store import OwnStoreGuard
from holdfast.stores.consul import requests
from holdfast.stores.consul.agent import READ, SessionGone, TransactionRefused
from holdfast.stores.consul.agent import TXN as WRITE

__all__ = ["ConsulGuard", "guard"]


def guard(lease: Any) -> ConsulGuard:
    """Keys in the Consul of the lease's lock. Raises ``TypeError`` for a lock of another store."""
    return ConsulGuard(lease)


class ConsulGuard(OwnStoreGuard):
    """Reads and writes keys of Consul while the hold lasts."""

    store = "Consul"

    def _own(self) -> str:
        root: str = self._backend.store.names.root
        return root.removesuffix("locks/")

    async def _ask(self, key: str, operation: bytes, line: bytes) -> list[dict[str, Any]] | None:
        """Checks the hold and applies the operation in one transaction. ``None`` if the operation
        itself failed; raises ``StaleFence`` if the hold has ended."""
        grant = self._lease._hold.grant
        ref = self._backend.store.ref_of(grant)
        held = requests.locked_by(ref.key.encode(), ref.session)
        try:
            answer: list[dict[str, Any]] = await self._backend.agent.txn(
                requests.txn(held, operation), line=line
            )
        except SessionGone:
            raise await self._refused(key) from None
        except TransactionRefused as refused:
            if 0 in refused.failed:
                raise await self._refused(key) from None
            return None
        return answer

    async def _get(self, key: str) -> bytes | None:
        found = await self._ask(key, requests.get(requests.quotable(key)), READ)
        return b64decode(found[-1]["Value"] or "") if found else None

    async def _put(self, key: str, value: bytes) -> None:
        await self._ask(key, requests.write(requests.quotable(key), b64encode(value)), WRITE)

    async def _delete(self, key: str) -> bool:
        if await self._get(key) is None:
            return False
        await self._ask(key, requests.delete(requests.quotable(key)), WRITE)
        return True
