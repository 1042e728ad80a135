"""Guarded reads and writes in the lock's own etcd: each checks that the hold's entry still exists.

with holdfast.connect("etcd://localhost") as locks, locks.lock("config") as lease:
    config = fencing.etcd.guard(lease)
    old = config.get("app/config")
    config.put("app/config", changed(old))    # StaleFence once the hold has ended
"""

from __future__ import annotations

from typing import Any

from holdfast.fencing.own_store import OwnStoreGuard
from holdfast.stores.etcd import requests
from holdfast.stores.etcd.calls import TXN
from holdfast.stores.etcd.messages import TxnReply
from holdfast.stores.etcd.session import Ref

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

    async def _transact(self, key: str, request: bytes) -> TxnReply:
        """Sends one request in a transaction that checks the hold's entry. Returns its reply.
        Raises ``StaleFence`` if the entry is gone, or is another process's by now."""
        if self._lease._released:
            raise await self._refused(key)
        grant = self._lease._hold.grant
        mine = Ref(*grant.ref).exists()
        answer: TxnReply = await self._backend.calls.call(TXN, requests.txn([mine], [request]))
        if not answer.succeeded:
            raise await self._refused(key)
        return answer

    async def _get(self, key: str) -> bytes | None:
        request = requests.read(requests.only(key.encode()))
        found = (await self._transact(key, request)).range(0).kvs
        return found[0].value if found else None

    async def _put(self, key: str, value: bytes) -> None:
        await self._transact(key, requests.put(key.encode(), value))

    async def _delete(self, key: str) -> bool:
        return (await self._transact(key, requests.delete(key.encode()))).deleted(0)
