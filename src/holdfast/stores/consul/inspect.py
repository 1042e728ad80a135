"""What ``consul://`` shows people about a name and about its servers: values and texts, pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from holdfast.claim import LockInfo
from holdfast.core import ordered
from holdfast.core.contract import Finding
from holdfast.core.ordered import Entry

__all__ = ["SessionLimits", "limits_finding", "lock_info", "servers_finding"]

_TTL = re.compile(r"(\d{1,6}(?:\.\d{1,9})?)s", re.ASCII)
FEWEST_SERVERS = 3


class SessionLimits(NamedTuple):
    """How long Consul keeps a session that is not renewed any more."""

    ttl: float
    delay: float

    @classmethod
    def read(cls, info: Mapping[str, Any]) -> SessionLimits | None:
        """From Consul's description of a session. ``None`` for a ttl that Holdfast never sets:
        the session belongs to other software."""
        ttl = _TTL.fullmatch(info["TTL"])
        return None if ttl is None else cls(float(ttl[1]), int(info["LockDelay"]) / 1e9)

    @property
    def notice(self) -> str:
        end = f"if its holder dies, Consul ends it {self.ttl:g} to {2 * self.ttl:g} s"
        delay = f", plus a lock-delay of {self.delay:g} s" if self.delay else ""
        return f"{end} after its last renewal{delay}"


def lock_info(name: str, queue: Iterable[Entry], limits: Mapping[str, SessionLimits]) -> LockInfo:
    """Holders and waiters of a name; ``limits`` is by session.

    Consul does not say how much time a session has left. The answer has the session's whole ttl
    plus its lock-delay, and 0 for an entry whose session has ended."""
    remaining = {session: sum(each) for session, each in limits.items()}
    notice = max(limits.values()).notice if limits else ""
    return ordered.lock_info(name, queue, remaining)._replace(notice=notice)


def servers_finding(peers: int) -> Finding | None:
    """A warning if the loss of one server stops the store."""
    if peers >= FEWEST_SERVERS:
        return None
    detail = f"{peers} server(s): with fewer than three, the loss of one server stops all locks"
    return Finding("servers", detail, "warning")


def limits_finding(shortest_ttl: float, lock_delay: float) -> Finding:
    floor = f"the shortest ttl is {shortest_ttl:g} s (session_ttl_min)"
    if lock_delay:
        return Finding("limits", f"{floor}; the lock-delay is {lock_delay:g} s")
    detail = (
        "no lock-delay: after a session is destroyed by hand, the next claim is granted at once"
    )
    return Finding("limits", f"{floor}; {detail} (see lock_delay)")
