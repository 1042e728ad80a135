"""Guarded reads and writes in the lock's own etcd: each checks that the hold's entry still exists.

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

__all__ = ["EtcdGuard", "guard"]


def guard(lease: Any) -> EtcdGuard:
    """Returns a guard for keys of the etcd that stores the lease's lock. Raises ``TypeError`` if
    the lock is in another store."""
    return EtcdGuard(lease)


class EtcdGuard(OwnStoreGuard):
    """Reads and writes keys of etcd while the hold exists; raises ``StaleFence`` after that."""

    store = "Etcd"

    def _own(self) -> str:
        root: str = self._backend.store.names.root
        return root.removesuffix("locks/")

    async def _transact(self, key: str, request: bytes) -> dict[str, Any]:
        """Sends one request in a transaction that checks the hold's entry. Returns its reply.
        Raises ``StaleFence`` if the entry is gone."""
        grant = self._lease._hold.grant
        mine = Ref(*grant.ref).exists()
        answer = await self._backend.gateway.post(TXN, requests.txn([mine], [request]))
        if not answer.get("succeeded"):
            raise await self._refused(key)
        reply: dict[str, Any] = answer["responses"][0]
        return reply

    async def _get(self, key: str) -> bytes | None:
        request = b'{"request_range":{"key":"%b"}}' % requests.encoded(key)
        found = (await self._transact(key, request))["response_range"].get("kvs")
        return b64decode(found[0].get("value", "")) if found else None

    async def _put(self, key: str, value: bytes) -> None:
        parts = requests.encoded(key), b64encode(value)
        await self._transact(key, b'{"request_put":{"key":"%b","value":"%b"}}' % parts)

    async def _delete(self, key: str) -> bool:
        reply = await self._transact(key, requests.delete(requests.encoded(key)))
        return int(reply["response_delete_range"].get("deleted", 0)) > 0
