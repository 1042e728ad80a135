"""A guarded write in the lock's own Consul: the write, if the session still locks the lock's key.

with holdfast.connect("consul://localhost") as locks, locks.lock("config") as lease:
    fencing.consul.guard(lease).put("app/config", "…")    # StaleFence once the hold has ended
"""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from typing import Any

from holdfast.fencing.own_store import OwnStoreGuard
from holdfast.stores.consul import requests
from holdfast.stores.consul.agent import READ, Refused, SessionGone
from holdfast.stores.consul.agent import TXN as WRITE
from holdfast.stores.consul.session import Ref

__all__ = ["Guard", "guard"]


def guard(lease: Any) -> Guard:
    """Keys of the Consul that the lease's lock is in; raises ``TypeError`` if it is elsewhere."""
    return Guard(lease)


class Guard(OwnStoreGuard):
    """Keys of Consul, while the hold lasts."""

    store = "Consul"

    def _own(self) -> str:
        root: str = self._backend.store.names.root
        return root.removesuffix("locks/")

    async def _ask(self, key: str, operation: bytes, line: bytes) -> list[dict[str, Any]] | None:
        """One transaction; ``None`` if the operation itself did not fit."""
        grant = self._lease._hold.grant
        store = self._backend.store
        ref = store.moved.get(grant.claim.owner) or Ref(*grant.ref)
        held = requests.locked_by(ref.key.encode(), ref.session)
        try:
            answer: list[dict[str, Any]] = await self._backend.agent.txn(
                requests.txn(held, operation), line=line
            )
        except SessionGone:
            raise await self._refused(key) from None
        except Refused as refused:
            if 0 in refused.failed:
                raise await self._refused(key) from None
            return None
        return answer

    async def _get(self, key: str) -> bytes | None:
        found = await self._ask(key, requests.get(_plain(key)), READ)
        return b64decode(found[-1]["Value"] or "") if found else None

    async def _put(self, key: str, value: bytes) -> None:
        await self._ask(key, requests.write(_plain(key), b64encode(value)), WRITE)

    async def _delete(self, key: str) -> bool:
        if await self._get(key) is None:
            return False
        await self._ask(key, requests.delete(_plain(key)), WRITE)
        return True


def _plain(key: str) -> bytes:
    """The key as it stands between quotes in JSON."""
    return json.dumps(key)[1:-1].encode()
