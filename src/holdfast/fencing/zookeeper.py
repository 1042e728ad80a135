"""Guarded writes in the lock's own ZooKeeper: a write succeeds only while the lock's node exists.

with holdfast.connect("zookeeper://localhost") as locks, locks.lock("config") as lease:
    fencing.zookeeper.guard(lease).put("/app/config", "…")    # StaleFence once it has ended
"""

from __future__ import annotations

from typing import Any

from holdfast.errors import BackendUnavailable
from holdfast.fencing.own_store import OwnStoreGuard
from holdfast.stores.zookeeper.client.packets import (
    Check,
    Delete,
    Multi,
    NodeExists,
    NoNode,
    Persistent,
    Plain,
    Read,
    Request,
    Sync,
    Write,
)

__all__ = ["ZooKeeperGuard", "guard"]

TRIES = 8


def guard(lease: Any) -> ZooKeeperGuard:
    """A guard for nodes of the ZooKeeper that stores the lease's lock. Raises ``TypeError`` if the
    lock is in another store."""
    return ZooKeeperGuard(lease)


class ZooKeeperGuard(OwnStoreGuard):
    """Nodes of ZooKeeper, while the hold lasts. Keys are paths, such as ``/app/config``."""

    store = "ZooKeeper"

    def _own(self) -> str:
        return f"{self._backend.store.root}/"

    def _key(self, key: str) -> str:
        path = super()._key(key)
        if not path.startswith("/") or path.endswith("/") or "//" in path:
            raise ValueError(f"a node's path begins with a slash and has no empty part: {key!r}")
        return path

    async def _change(self, key: str, change: Request) -> Exception | None:
        """Executes a change in one transaction with the check of the hold. Returns the error of the
        change, or ``None``; raises ``StaleFence`` if the hold has ended."""
        _, _, hold = self._lease._hold.grant.ref
        multi = Multi([Check(hold), change])
        await self._backend.request(await self._backend.any_session(), multi)
        if not multi.failed:
            return None
        if isinstance(multi.value[0], NoNode):
            raise await self._refused(key)
        wrong: Exception = multi.value[1]
        return wrong

    async def _get(self, key: str) -> bytes | None:
        # ZooKeeper has no transaction that reads. The hold is checked by a write after the read: if
        # it exists then, it existed during the read.
        _, _, hold = self._lease._hold.grant.ref
        session = await self._backend.any_session()
        read, check = Read(key), Multi([Check(hold)])
        await self._backend.request(session, Sync(key), read, check)
        if check.failed:
            raise await self._refused(key)
        return None if read.error is not None else bytes(read.value[0])

    async def _put(self, key: str, value: bytes) -> None:
        change: Request = Write(key, value)
        for _ in range(TRIES):
            wrong = await self._change(key, change)
            if wrong is None:
                return
            if isinstance(wrong, NodeExists):  # another client created it
                change = Write(key, value)
            elif isinstance(wrong, NoNode):
                if isinstance(change, Plain):
                    parent = key.rpartition("/")[0]
                    await self._backend.make_node(
                        await self._backend.any_session(), parent, Persistent
                    )
                change = Plain(key, value, self._backend.store.acl)
            else:
                raise wrong
        raise BackendUnavailable(f"{key!r} was created and deleted several times during the write")

    async def _delete(self, key: str) -> bool:
        wrong = await self._change(key, Delete(key))
        if wrong is not None and not isinstance(wrong, NoNode):
            raise wrong
        return wrong is None
