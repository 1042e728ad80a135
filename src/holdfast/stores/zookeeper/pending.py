"""Deletes that the thread of the heartbeats retries until the nodes are gone.

A delete may be lost with its connection. The node would then stay for as long as its session
exists, and the claims behind it would wait for that long.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from holdfast.claim import Claim, Mode
from holdfast.io import clock
from holdfast.stores.zookeeper.client.packets import (
    ANY_VERSION,
    Delete,
    Listing,
    Multi,
    NoNode,
    Read,
    Request,
)
from holdfast.stores.zookeeper.queue import digest, slot_name, slots_to_end
from holdfast.stores.zookeeper.session import ZooKeeperSession

__all__ = ["PendingDelete", "PendingDeletes", "deletion"]


class PendingDelete(NamedTuple):
    """A claim whose nodes must be deleted, and the key of its session."""

    key: int
    claim: Claim
    until: float
    """Until then a late create of the claim may still make a node."""
    path: str = ""
    """The node to delete, if its owner may join the queue again; empty for all its nodes."""


def deletion(parent: str, path: str, slots: tuple[int, ...], version: int = ANY_VERSION) -> Request:
    """Deletes a claim's node together with its slots. ``version`` is the version of the data that
    the slots were read from: the delete fails if the claim has taken other slots since."""
    if not slots:
        return Delete(path, version)
    slot_deletes = [Delete(f"{parent}/{slot_name(slot)}") for slot in slots]
    return Multi([Delete(path, version), *slot_deletes])


class PendingDeletes:
    """The pending deletes of one client, at most one per owner."""

    def __init__(self, parent: Callable[[str], str]) -> None:
        self._parent = parent
        self._pending: dict[str, PendingDelete] = {}

    def all(self) -> list[PendingDelete]:
        return list(self._pending.values())

    def add(self, pending: PendingDelete) -> PendingDelete:
        """Adds a delete; it is retried until the nodes are gone."""
        self._pending[pending.claim.owner] = pending
        return pending

    def cancel(self, owner: str) -> None:
        """Drops the delete of an owner that is about to create a node, which must stay. The owner
        deletes its other nodes itself."""
        self._pending.pop(owner, None)

    def remove(self, pending: PendingDelete) -> None:
        """Removes a delete that is done, unless another one has replaced it."""
        found = self._pending.pop(pending.claim.owner, None)
        if found is not None and found is not pending:
            self._pending.setdefault(pending.claim.owner, found)

    # On the thread of the heartbeats, or the thread that reads a reply

    def retry(self, session: ZooKeeperSession, pending: PendingDelete) -> None:
        """Deletes the nodes that still exist; removes the pending delete if there are none."""
        if not pending.path:
            self._retry_all(session, pending)
        elif pending.claim.mode is Mode.SLOTS:
            self._retry_one(session, pending, pending.path)
        else:
            session.send(
                Delete(pending.path).then(lambda request: self._delete_answered(pending, request))
            )

    def _delete_answered(self, pending: PendingDelete, request: Request) -> None:
        if request.error is None or isinstance(request.error, NoNode):
            self.remove(pending)

    def _retry_all(self, session: ZooKeeperSession, pending: PendingDelete) -> None:
        owner, parent = pending.claim.owner, self._parent(pending.claim.name)

        def listed(request: Any) -> None:
            nodes = request.value if request.error is None else []
            own = [node for node in nodes if f".{digest(owner)}." in node]
            answered = request.error is None or isinstance(request.error, NoNode)
            if answered and not own and clock.now() >= pending.until:
                self.remove(pending)
            for node in own:
                self._retry_one(session, pending, f"{parent}/{node}")

        session.send(Listing(parent).then(listed))

    def _retry_one(self, session: ZooKeeperSession, pending: PendingDelete, path: str) -> None:
        def read(request: Any) -> None:
            if request.error is not None:
                if pending.path:
                    self._delete_answered(pending, request)
            # If the owner has created a new node since, this delete was cancelled before that.
            elif self._pending.get(pending.claim.owner) is pending:
                slots, version = slots_to_end(request.value[0]).slots, request.value[1].version
                session.send(deletion(self._parent(pending.claim.name), path, slots, version))

        session.send(Read(path).then(read))
