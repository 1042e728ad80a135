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
from holdfast.stores.zookeeper.node import Entry, Node
from holdfast.stores.zookeeper.pending import Debt, Debts
from holdfast.stores.zookeeper.queue import Line, encode_name
from holdfast.stores.zookeeper.session import Options, Session

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

    def __init__(self, options: Options, root: str, settings: Settings) -> None:
        self.options, self.settings = options, settings
        self.display = options.display
        self.root = f"{root}/{encode_name(settings.namespace)}"
        self.acl = pack_acl(options.acl)
        self.sessions: dict[int, Session] = {}
        self.entries: dict[str, Entry] = {}
        self.records_purged = -math.inf
        self.parent = lru_cache(maxsize=1024)(self._parent)
        """The node whose children are the line of a name."""
        self.debts = Debts(self.parent)
        self._users: set[int] = set()
        """Which backends are open: the last one to leave ends the sessions."""
        self._tasks = False

    def backend(self, runtime: Runtime) -> ZooKeeperBackend:
        from holdfast.stores.zookeeper.backend import ZooKeeperBackend

        if not runtime.blocking:
            self._tasks = True  # which don't read: kazoo's thread does, for all
            for session in list(self.sessions.values()):
                session.reader.shared = False
        backend = ZooKeeperBackend(self, runtime)
        self._users.add(id(backend))
        return backend

    def leave(self, backend: ZooKeeperBackend) -> list[Session]:
        """A backend is closed; the last one gets the sessions to end."""
        self._users.discard(id(backend))
        sessions: list[Session] = []
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
        self.debts = Debts(self.parent)

    def session(self, key: int) -> Session:
        """The session for a ttl of so many seconds, opened if need be; 0 for one to look with."""
        session = self.sessions.get(key)
        if session is None or not session.wanted:
            self._check()
            # No mutex: a signal's handler may come at any point, and want a session itself.
            session = self._made(key, session)
            try:
                self._check()  # once more: the last one to leave may not have seen it
            except BackendUnavailable:
                self.sessions.pop(key, None)
                raise
        session.open()
        return session

    def _check(self) -> None:
        if not self._users:
            raise BackendUnavailable(f"{self.display} was closed")

    def _made(self, key: int, dead: Session | None) -> Session:
        """A session instead of none, or of a dead one: the same for all who want one."""
        floors = [s.floor for s in list(self.sessions.values()) if s.floor is not None]
        floor = floors[0] if floors else None
        made = Session(self.options, key or SERVICE_TTL, floor, self.tidy, tasks=self._tasks)
        made.looks_only = key == 0
        if dead is None:
            return self.sessions.setdefault(key, made)
        self.sessions[key] = made = dead.after.setdefault(0, made)
        return made

    def lines(self) -> str:
        return f"{self.root}/locks"

    def _parent(self, name: str) -> str:
        return f"{self.root}/locks/{encode_name(name)}"

    def entry(self, claim: Claim, now: float) -> Entry:
        """What is known of a claim, made if it is new."""
        entry = self.entries.get(claim.owner)
        if entry is None:
            entry = Entry(claim, math.ceil(claim.ttl), now)
            entry = self.entries.setdefault(claim.owner, entry)
        return entry

    # On the session's own thread

    def tidy(self, session: Session, now: float) -> None:
        """Deletes what nobody keeps, and who does not come although it is its turn."""
        # There may be many, at every heartbeat: no tuple for each, no call for those that are kept.
        for entry in list(self.entries.values()):
            node = entry.node
            if node is None or node.session != session.id:
                continue
            term = node.term
            if term.over or (term.grant is not None and now <= term.ends):
                continue
            if self._drop(entry, node, now):
                continue
            if term.grant is None and entry.unattended(now):
                self._call_up(session, entry, node)
        for debt in self.debts.all():
            if self.sessions.get(debt.key) is session:
                self.debts.settle(session, debt)

    def _drop(self, entry: Entry, node: Node, now: float, *, its_turn: bool = False) -> Debt | None:
        """Ends a node that nobody keeps or comes for."""
        if not node.end(lambda term: entry.kept(term, now, its_turn=its_turn)):
            return None
        if entry.signal is not None:
            entry.signal.set()  # should somebody wait for it after all
        return self.debts.owe(Debt(entry.key, entry.claim, 0.0, node.path))

    def _call_up(self, session: Session, entry: Entry, node: Node) -> None:
        """Takes its place from one that does not come, if it is its turn."""
        parent = self.parent(entry.claim.name)

        def answered(ask: Any) -> None:
            if ask.error is None and _is_its_turn(node, ask.value, parent):
                debt = self._drop(entry, node, clock.now(), its_turn=True)
                if debt is not None:
                    self.debts.settle(session, debt)

        session.send(Listing(parent).then(answered))


def _is_its_turn(node: Node, nodes: list[str], where: str) -> bool:
    try:
        line = Line(nodes, where)
    except Incompatible:
        return False
    index = line.index(node.name)
    return index is not None and index < line.admitted
