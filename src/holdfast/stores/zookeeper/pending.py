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
from holdfast.stores.zookeeper.client.packets import ANY_VERSION, Ask, Delete, Listing, Multi, Read
from holdfast.stores.zookeeper.queue import digest, slot_name, slots_to_end
from holdfast.stores.zookeeper.session import Session

__all__ = ["Debt", "Debts", "deletion"]


class Debt(NamedTuple):
    """A claim that is to leave no node, in the session of this key."""

    key: int
    claim: Claim
    until: float
    """Until then a late request of its own may still make one."""
    path: str = ""
    """The one node that is meant, where its owner may line up anew; else all that it has."""


def deletion(parent: str, path: str, slots: tuple[int, ...], version: int = ANY_VERSION) -> Ask:
    """The end of one claim: its node, and its slots with it. Who has read which slots it has names
    the version that said so: it may be taking others."""
    if not slots:
        return Delete(path, version)
    ends = [Delete(f"{parent}/{slot_name(slot)}") for slot in slots]
    return Multi([Delete(path, version), *ends])


class Debts:
    """The debts of one client, one for an owner."""

    def __init__(self, parent: Callable[[str], str]) -> None:
        self._parent = parent
        self._owed: dict[str, Debt] = {}

    def all(self) -> list[Debt]:
        return list(self._owed.values())

    def owe(self, debt: Debt) -> Debt:
        """Sees to it that it is deleted, however often that takes."""
        self._owed[debt.claim.owner] = debt
        return debt

    def forgive(self, owner: str) -> None:
        """Before its owner makes a node again, which is not meant: what else it finds of its own
        there it deletes itself."""
        self._owed.pop(owner, None)

    def settled(self, debt: Debt) -> None:
        found = self._owed.pop(debt.claim.owner, None)
        if found is not None and found is not debt:
            self._owed.setdefault(debt.claim.owner, found)

    # From the session's own thread, and whichever reads

    def settle(self, session: Session, debt: Debt) -> None:
        """Deletes what is still there; if nothing is, that was it."""
        if not debt.path:
            self._settle_all(session, debt)
        elif debt.claim.mode is Mode.SLOTS:
            self._settle_one(session, debt, debt.path)
        else:
            session.send(Delete(debt.path).then(lambda ask: self._deleted(debt, ask)))

    def _deleted(self, debt: Debt, ask: Ask) -> None:
        if ask.error is None or isinstance(ask.error, NoNodeError):
            self.settled(debt)

    def _settle_all(self, session: Session, debt: Debt) -> None:
        owner, parent = debt.claim.owner, self._parent(debt.claim.name)

        def listed(ask: Any) -> None:
            nodes = ask.value if ask.error is None else []
            own = [node for node in nodes if f".{digest(owner)}." in node]
            answered = ask.error is None or isinstance(ask.error, NoNodeError)
            if answered and not own and clock.now() >= debt.until:
                self.settled(debt)
            for node in own:
                self._settle_one(session, debt, f"{parent}/{node}")

        session.send(Listing(parent).then(listed))

    def _settle_one(self, session: Session, debt: Debt, path: str) -> None:
        def read(ask: Any) -> None:
            if ask.error is not None:
                if debt.path:
                    self._deleted(debt, ask)
            # A node that its owner has made since was read after that had been forgiven.
            elif self._owed.get(debt.claim.owner) is debt:
                slots, version = slots_to_end(ask.value[0]).slots, ask.value[1].version
                session.send(deletion(self._parent(debt.claim.name), path, slots, version))

        session.send(Read(path).then(read))
