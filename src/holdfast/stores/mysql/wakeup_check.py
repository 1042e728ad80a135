"""Whether those who wait can be called, as far as somebody who looks can tell.

Nobody is stirred by it: a session is looked for by the lock of its subscription, and what is
killed is the
query of a session that there is not, which a server that takes ``KILL`` answers in its own way.
"""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.stores.mysql.protocol import Reply
from holdfast.stores.mysql.sql import subscription_lock

__all__ = ["ask_for", "told_by"]

NO_SUCH_SESSION = 1094
_NOBODY = "-"


def ask_for(subscriptions: Sequence[str]) -> bytes:
    """One request: where the subscriptions hang, which of these sessions are shown to us, and a
    kill."""
    kill = b"KILL QUERY IS_USED_LOCK(%s)" % subscription_lock(_NOBODY)
    if not subscriptions:
        return kill
    hung = b", ".join(
        b"IS_USED_LOCK(%s)" % subscription_lock(subscription) for subscription in subscriptions
    )
    shown = b"SELECT ID FROM information_schema.PROCESSLIST WHERE ID IN (%s)" % hung
    return b"; ".join([b"SELECT " + hung, shown, kill])


def told_by(reply: Reply) -> str:
    """Why calls don't arrive; empty if they do."""
    if reply.failure is None or reply.failure.code != NO_SUCH_SESSION:
        said = f": {reply.failure.text}" if reply.failure else ""
        return f"KILL QUERY is not done here{said}"
    if not reply.results:
        return ""
    hung, shown = reply.results
    if None in hung.rows[0]:
        return (
            "not all who wait can be found from here: they are gone, or a proxy or another node "
            "is in between"
        )
    if not set(hung.rows[0]) <= {row[0] for row in shown.rows}:
        return "not all who wait are of this account, which may not call those of others"
    return ""
