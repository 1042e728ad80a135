"""What all backends of one ZooKeeper client share: its sessions, and its own nodes in every line.

ZooKeeper forgets a node when its session ends, not when it is no longer renewed. So that a hold
ends with its ttl all the same, the store remembers what its process has in the lines, and the
session's thread deletes at every heartbeat what nobody renews, refreshes or comes for.
"""

from __future__ import annotations

import math
from contextlib import suppress
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from holdfast.claim import Claim
from holdfast.core.contract import Guarantee, Runtime, Settings
from holdfast.errors import BackendUnavailable, Incompatible
from holdfast.io import clock
from holdfast.stores.zookeeper.client.packets import Listing, pack_acl
from holdfast.stores.zookeeper.node import ClaimNode, ZooKeeperEntry
from holdfast.stores.zookeeper.pending import PendingDelete, PendingDeletes
from holdfast.stores.zookeeper.queue import NodeQueue, encode_name
from holdfast.stores.zookeeper.session import ZooKeeperOptions, ZooKeeperSession

if TYPE_CHECKING:
    from holdfast.stores.zookeeper.backend import ZooKeeperBackend

__all__ = ["ZooKeeperStore"]

SERVICE_TTL = 10
"""The ttl of the session that only looks: it holds nothing."""


class ZooKeeperStore:
    """One ensemble as a URL describes it, for one client."""

    guarantees = frozenset(
        {
            Guarantee.EXCLUSIVE,
            Guarantee.SHARED,
            Guarantee.SLOTS,
            Guarantee.FIFO,
            Guarantee.FENCED,
            Guarantee.SURVIVES_SERVER_LOSS,
            Guarantee.CROSS_HOST,
            Guarantee.RECORDS,
            Guarantee.WATCH,
        }
    )
    shortest_ttl = 1.0
    longest_ttl = math.inf
    whole_seconds = True

    def __init__(self, options: ZooKeeperOptions, root: str, settings: Settings) -> None:
        self.options, self.settings = options, settings
        self.display = options.display
        self.root = f"{root}/{encode_name(settings.namespace)}"
        self.acl = pack_acl(options.acl)
        self.sessions: dict[int, ZooKeeperSession] = {}
        self.entries: dict[str, ZooKeeperEntry] = {}
        self.records_purged = -math.inf
        self.parent = lru_cache(maxsize=1024)(self._parent)
        """The node whose children are the line of a name."""
        self.pending_deletes = PendingDeletes(self.parent)
        self._users: set[int] = set()
        """Which backends are open: the last one to leave ends the sessions."""
        self._has_tasks = False

    def backend(self, runtime: Runtime) -> ZooKeeperBackend:
        from holdfast.stores.zookeeper.backend import ZooKeeperBackend

        if not runtime.blocking:
            self._has_tasks = True  # which don't read: kazoo's thread does, for all
            for session in list(self.sessions.values()):
                session.reader.shared = False
        backend = ZooKeeperBackend(self, runtime)
        self._users.add(id(backend))
        return backend

    def remove_backend(self, backend: ZooKeeperBackend) -> list[ZooKeeperSession]:
        """A backend is closed; the last one gets the sessions to end."""
        self._users.discard(id(backend))
        sessions: list[ZooKeeperSession] = []
        while self.sessions and not self._users:
            with suppress(KeyError):
                sessions.append(self.sessions.popitem()[1])
        if not self._users:
            self.entries.clear()
        return sessions

    def forget(self) -> None:
        """In a forked child. kazoo's clients are dropped without a word: they hang there."""
        for session in self.sessions.values():
            session.forget()
        self.sessions = {}
        self.entries = {}
        self.pending_deletes = PendingDeletes(self.parent)

    def session(self, key: int) -> ZooKeeperSession:
        """The session for a ttl of so many seconds, opened if need be; 0 for one to look with."""
        session = self.sessions.get(key)
        if session is None or not session.reusable:
            self._check_open()
            # No mutex: a signal's handler may come at any point, and want a session itself.
            session = self._new_session(key, session)
            try:
                self._check_open()  # once more: the last one to leave may not have seen it
            except BackendUnavailable:
                self.sessions.pop(key, None)
                raise
        session.open()
        return session

    def _check_open(self) -> None:
        if not self._users:
            raise BackendUnavailable(f"{self.display} was closed")

    def _new_session(self, key: int, dead: ZooKeeperSession | None) -> ZooKeeperSession:
        """A session instead of none, or of a dead one: the same for all who want one."""
        floors = [s.floor for s in list(self.sessions.values()) if s.floor is not None]
        floor = floors[0] if floors else None
        made = ZooKeeperSession(
            self.options, key or SERVICE_TTL, floor, self.clean_up, tasks=self._has_tasks
        )
        made.holds_nothing = key == 0
        if dead is None:
            return self.sessions.setdefault(key, made)
        self.sessions[key] = made = dead.successor.setdefault(0, made)
        return made

    def locks_path(self) -> str:
        return f"{self.root}/locks"

    def _parent(self, name: str) -> str:
        return f"{self.root}/locks/{encode_name(name)}"

    def entry(self, claim: Claim, now: float) -> ZooKeeperEntry:
        """What is known of a claim, made if it is new."""
        entry = self.entries.get(claim.owner)
        if entry is None:
            entry = ZooKeeperEntry(claim, math.ceil(claim.ttl), now)
            entry = self.entries.setdefault(claim.owner, entry)
        return entry

    # On the session's own thread

    def clean_up(self, session: ZooKeeperSession, now: float) -> None:
        """Deletes what nobody keeps, and who does not come although it is its turn."""
        # There may be many, at every heartbeat: no tuple for each, no call for those that are kept.
        for entry in list(self.entries.values()):
            node = entry.node
            if node is None or node.session != session.id:
                continue
            state = node.state
            if state.ended or (state.grant is not None and now <= state.ends):
                continue
            if self._end_unkept(entry, node, now):
                continue
            if state.grant is None and entry.is_absent(now):
                self._end_absent(session, entry, node)
        for pending in self.pending_deletes.all():
            if self.sessions.get(pending.key) is session:
                self.pending_deletes.retry(session, pending)

    def _end_unkept(
        self, entry: ZooKeeperEntry, node: ClaimNode, now: float, *, admitted: bool = False
    ) -> PendingDelete | None:
        """Ends a node that nobody keeps or comes for."""
        if not node.end(lambda state: entry.is_kept(state, now, admitted=admitted)):
            return None
        if entry.wake_signal is not None:
            entry.wake_signal.set()  # should somebody wait for it after all
        return self.pending_deletes.add(PendingDelete(entry.key, entry.claim, 0.0, node.path))

    def _end_absent(
        self, session: ZooKeeperSession, entry: ZooKeeperEntry, node: ClaimNode
    ) -> None:
        """Takes its place from one that does not come, if it is its turn."""
        parent = self.parent(entry.claim.name)

        def answered(request: Any) -> None:
            if request.error is None and _is_admitted(node, request.value, parent):
                pending = self._end_unkept(entry, node, clock.now(), admitted=True)
                if pending is not None:
                    self.pending_deletes.retry(session, pending)

        session.send(Listing(parent).then(answered))


def _is_admitted(node: ClaimNode, nodes: list[str], where: str) -> bool:
    try:
        queue = NodeQueue(nodes, where)
    except Incompatible:
        return False
    index = queue.index(node.name)
    return index is not None and index < queue.admitted
