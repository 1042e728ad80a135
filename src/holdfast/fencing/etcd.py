"""A guarded write in the lock's own etcd: the write, if the lock's key is still there.

with holdfast.connect("etcd://localhost") as locks, locks.lock("config") as lease:
    config = fencing.etcd.guard(lease)
    old = config.get("app/config")
    config.put("app/config", changed(old))    # StaleFence once the hold has ended
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from typing import Any

from holdfast.fencing.own_store import OwnStoreGuard
from holdfast.stores.etcd import requests
from holdfast.stores.etcd.session import TXN, Ref

__all__ = ["Guard", "guard"]


def guard(lease: Any) -> Guard:
    """Keys of the etcd that the lease's lock is in; raises ``TypeError`` if it is elsewhere."""
    return Guard(lease)


class Guard(OwnStoreGuard):
    """Keys of etcd, while the hold lasts."""

    store = "Etcd"

    def _own(self) -> str:
        root: str = self._backend.store.names.root
        return root.removesuffix("locks/")

    async def _ask(self, key: str, request: bytes) -> dict[str, Any]:
        """One transaction: the hold's key is as it was when it was granted."""
        grant = self._lease._hold.grant
        mine = Ref(*grant.ref).stands()
        answer = await self._backend.gateway.post(TXN, requests.txn([mine], [request]))
        if not answer.get("succeeded"):
            raise await self._refused(key)
        done: dict[str, Any] = answer["responses"][0]
        return done

    async def _get(self, key: str) -> bytes | None:
        request = b'{"request_range":{"key":"%b"}}' % requests.encoded(key)
        found = (await self._ask(key, request))["response_range"].get("kvs")
        return b64decode(found[0].get("value", "")) if found else None

    async def _put(self, key: str, value: bytes) -> None:
        words = requests.encoded(key), b64encode(value)
        await self._ask(key, b'{"request_put":{"key":"%b","value":"%b"}}' % words)

    async def _delete(self, key: str) -> bool:
        done = await self._ask(key, requests.delete(requests.encoded(key)))
        return int(done["response_delete_range"].get("deleted", 0)) > 0
