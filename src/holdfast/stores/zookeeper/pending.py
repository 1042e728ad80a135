"""Claims that are to leave no node: what the session's thread deletes until it is gone.

A request to delete may get lost with its connection, and the node stays for as long as its session
does: those behind it would wait for that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from kazoo.exceptions import NoNodeError

from holdfast.claim import Claim, Mode
from holdfast.io import clock
from holdfast.stores.zookeeper.client.packets import (
    ANY_VERSION,
    Delete,
    Listing,
    Multi,
    Read,
    Request,
)
from holdfast.stores.zookeeper.queue import digest, slot_name, slots_to_end
from holdfast.stores.zookeeper.session import ZooKeeperSession

__all__ = ["PendingDelete", "PendingDeletes", "deletion"]


class PendingDelete(NamedTuple):
    """A claim that is to leave no node, in the session of this key."""

    key: int
    claim: Claim
    until: float
    """Until then a late request of its own may still make one."""
    path: str = ""
    """The one node that is meant, where its owner may line up anew; else all that it has."""


def deletion(parent: str, path: str, slots: tuple[int, ...], version: int = ANY_VERSION) -> Request:
    """The end of one claim: its node, and its slots with it. Who has read which slots it has names
    the version that said so: it may be taking others."""
    if not slots:
        return Delete(path, version)
    ends = [Delete(f"{parent}/{slot_name(slot)}") for slot in slots]
    return Multi([Delete(path, version), *ends])


class PendingDeletes:
    """The debts of one client, one for an owner."""

    def __init__(self, parent: Callable[[str], str]) -> None:
        self._parent = parent
        self._pending: dict[str, PendingDelete] = {}

    def all(self) -> list[PendingDelete]:
        return list(self._pending.values())

    def add(self, pending: PendingDelete) -> PendingDelete:
        """Sees to it that it is deleted, however often that takes."""
        self._pending[pending.claim.owner] = pending
        return pending

    def cancel(self, owner: str) -> None:
        """Before its owner makes a node again, which is not meant: what else it finds of its own
        there it deletes itself."""
        self._pending.pop(owner, None)

    def remove(self, pending: PendingDelete) -> None:
        found = self._pending.pop(pending.claim.owner, None)
        if found is not None and found is not pending:
            self._pending.setdefault(pending.claim.owner, found)

    # From the session's own thread, and whichever reads

    def retry(self, session: ZooKeeperSession, pending: PendingDelete) -> None:
        """Deletes what is still there; if nothing is, that was it."""
        if not pending.path:
            self._retry_all(session, pending)
        elif pending.claim.mode is Mode.SLOTS:
            self._retry_one(session, pending, pending.path)
        else:
            session.send(
                Delete(pending.path).then(lambda request: self._delete_answered(pending, request))
            )

    def _delete_answered(self, pending: PendingDelete, request: Request) -> None:
        if request.error is None or isinstance(request.error, NoNodeError):
            self.remove(pending)

    def _retry_all(self, session: ZooKeeperSession, pending: PendingDelete) -> None:
        owner, parent = pending.claim.owner, self._parent(pending.claim.name)

        def listed(request: Any) -> None:
            nodes = request.value if request.error is None else []
            own = [node for node in nodes if f".{digest(owner)}." in node]
            answered = request.error is None or isinstance(request.error, NoNodeError)
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
            # A node that its owner has made since was read after that had been forgiven.
            elif self._pending.get(pending.claim.owner) is pending:
                slots, version = slots_to_end(request.value[0]).slots, request.value[1].version
                session.send(deletion(self._parent(pending.claim.name), path, slots, version))

        session.send(Read(path).then(read))
