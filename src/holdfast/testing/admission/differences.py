"""What a store does otherwise than ``core.queue``, because its page says so: one table."""

from __future__ import annotations

from typing import NamedTuple

from holdfast.core.contract import Guarantee
from holdfast.testing.guarantees import guarantees_of, row_of
from holdfast.testing.harness import Harness

__all__ = ["DIFFERENCES", "Difference", "difference_of"]


class Difference(NamedTuple):
    """One row of the table."""

    in_order: bool = True
    """Whether claims wait in order of arrival. Where they wait in another way (the server's own
    queue, or none), a grant must still fit beside all holders, and a refusal still needs a holder
    or another waiter as its reason; which waiter is next is not compared."""
    own_ends: bool = True
    """Whether every hold ends by its own ttl. Where it ends with a session or a connection, its end
    is not compared: other holds of the same client may move it."""

    exchange_wakes: bool = False
    """Whether an exchange with a claim that waits already only releases, which wakes that claim: an
    attempt on its behalf could grant it once more after it has ended."""
    turns_are_holds: bool = False
    """Whether a waiter whose turn it is may be shown as a holder, although nothing is written at
    that moment: other clients can't know whether it has entered. ``revoke`` may end its turn."""
    ends_with_connection: bool = False
    """Whether a hold ends with its connection: what is requested under a hold that was ended so may
    be unanswered."""
    woken_in_turn: bool = False
    """Whether a waiter looks at the one entry in front of it, and so is woken and admitted only
    when that waiter has entered or left, also where both fit at the same time."""
    exact_places: bool = True
    """Whether a place counts waiters alone. Elsewhere it may count holders, too, and waiters that
    have left: nobody lists a queue in order to wait in it."""


_OWN_QUEUE = Difference(in_order=False, own_ends=False, exchange_wakes=True)
_CONNECTION = _OWN_QUEUE._replace(ends_with_connection=True)
_SESSION = Difference(own_ends=False, exchange_wakes=True)

DIFFERENCES: dict[str, Difference] = {
    "redlock": _OWN_QUEUE,
    "zookeeper": _SESSION._replace(turns_are_holds=True),
    "etcd": _SESSION._replace(exact_places=False),
    "consul": _SESSION._replace(exact_places=False, turns_are_holds=True, woken_in_turn=True),
    "postgres-advisory": _CONNECTION,
    "mysql": Difference(exact_places=False),  # one statement joins the queue, and counts its lines
    "mysql-advisory": _CONNECTION,
}


def difference_of(harness: Harness) -> Difference:
    """The row of a store; for a store that has none, only what it declares about its queue."""
    row = DIFFERENCES.get(row_of(harness))
    return Difference(in_order=Guarantee.FIFO in guarantees_of(harness)) if row is None else row
