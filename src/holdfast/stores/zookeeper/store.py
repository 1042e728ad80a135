"""What all backends of one ZooKeeper client share: its sessions, and its claims in the queues.

ZooKeeper deletes a node when its session ends, not when a hold is no longer renewed. A hold must
still end with its ttl. So the store keeps a table of the claims of its process, and at every
heartbeat their thread deletes the nodes of claims that are not renewed or refreshed, or
whose owner does not take the lock.
"""

from __future__ import annotations

import math
import os
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
from holdfast.stores.zookeeper.session import HeartbeatTask, ZooKeeperOptions, ZooKeeperSession

if TYPE_CHECKING:
    from holdfast.stores.zookeeper.backend import ZooKeeperBackend

__all__ = ["ZooKeeperStore"]

SERVICE_TTL = 10
"""The ttl of the session that holds nothing and only reads."""
MOST_IDLE_SESSIONS = 4
"""How many sessions without claims are kept when another one is opened."""
IDLE_SESSION_SECONDS = 60.0
"""A session without claims for this long is closed."""


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
    longest_ttl = 20 * 24 * 3600.0  # a session's timeout is in ms, of 32 bits with a sign
    whole_seconds = True

    def __init__(self, options: ZooKeeperOptions, root: str, settings: Settings) -> None:
        self.options, self.settings = options, settings
        self.display = options.display
        self.root = f"{root}/{encode_name(settings.namespace)}"
        self.acl = pack_acl(options.access.acl)
        self.sessions: dict[int, ZooKeeperSession] = {}
        self._closing: dict[int, ZooKeeperSession] = {}
        """Sessions that are being closed as idle; see ``_close_if_idle``."""
        self.entries: dict[str, ZooKeeperEntry] = {}
        self.releasing: dict[str, int] = {}
        """By owner: the key of the session of a hold that is being released. It has no entry."""
        self.records_purged = -math.inf
        self.parent = lru_cache(maxsize=1024)(self._parent)
        """The path of the node whose children are the queue of a name."""
        self.pending_deletes = PendingDeletes(self.parent)
        self._users: set[int] = set()
        """The open backends: when the last one is closed, the sessions end."""
        self._process = os.getpid()

    def backend(self, runtime: Runtime) -> ZooKeeperBackend:
        from holdfast.stores.zookeeper.backend import ZooKeeperBackend

        backend = ZooKeeperBackend(self, runtime)
        self._users.add(id(backend))
        return backend

    def remove_backend(self, backend: ZooKeeperBackend) -> list[ZooKeeperSession]:
        """Notes that a backend is closed. Returns the sessions to end if it was the last one."""
        self._users.discard(id(backend))
        sessions: list[ZooKeeperSession] = []
        while self.sessions and not self._users:
            with suppress(KeyError):
                sessions.append(self.sessions.popitem()[1])
        if not self._users:
            self.entries.clear()
        return sessions

    def forget(self) -> None:
        """In a forked child: drops the sessions, which are the parent's. In the same process, when
        a client changes its event loop, nothing is dropped: a session belongs to no event loop."""
        if os.getpid() == self._process:
            return
        self._process = os.getpid()
        for session in self.sessions.values():
            session.forget()
        self.sessions = {}
        self._closing = {}
        self.entries = {}
        self.releasing = {}
        self.pending_deletes = PendingDeletes(self.parent)

    def session(self, key: int) -> ZooKeeperSession:
        """The session for ttls of ``key`` seconds, which may not be connected; 0 for the session
        that holds nothing. Raises ``BackendUnavailable`` if the store was closed."""
        session = self.sessions.get(key)
        if session is None and (kept := self._closing.pop(key, None)) is not None:
            session = self.sessions.setdefault(key, kept)  # it is in use again: not closed
        if session is None:
            self._check_open()
            self._close_idle(MOST_IDLE_SESSIONS)
            # No mutex: a signal handler may run at any line and need a session itself.
            session = self._new_session(key)
            try:
                self._check_open()  # again: the last backend may have closed before it was there
            except BackendUnavailable:
                self.sessions.pop(key, None)
                raise
        return session

    def _check_open(self) -> None:
        if not self._users:
            raise BackendUnavailable(f"{self.display} was closed")

    def _new_session(self, key: int) -> ZooKeeperSession:
        """A new session: the same one for concurrent callers."""
        made = self._make_session(key or SERVICE_TTL, self.clean_up)
        made.holds_nothing = key == 0
        return self.sessions.setdefault(key, made)

    def _make_session(self, ttl: float, task: HeartbeatTask) -> ZooKeeperSession:
        floors = [s.floor for s in list(self.sessions.values()) if s.floor is not None]
        return ZooKeeperSession(self.options, ttl, floors[0] if floors else None, task)

    def session_alone(self, key: int) -> ZooKeeperSession:
        """A session for one hold, which is not in the table. Raises as ``session``."""
        self._check_open()
        return self._make_session(key, lambda session, moment: None)

    def _close_idle(self, kept: int) -> None:
        """Closes the sessions without claims, except those that were opened last. Servers limit the
        connections per client address; ttls may be many."""
        sessions = list(self.sessions.items())
        idle = [(key, session) for key, session in sessions if self._is_idle(key, session)]
        for key, session in idle[: max(0, len(idle) - kept)]:
            self._close_if_idle(key, session)

    def _close_if_idle(self, key: int, session: ZooKeeperSession) -> None:
        """Closes a session on which nothing depends. At the same time another thread may look up
        the session for a new claim, and a closed session would end that claim's hold. So the
        session is removed from the table first. A claim has its entry before its session is looked
        up: a claim that found the session before the removal is seen here; a later claim takes the
        session back from ``_closing``, or finds none and opens another one."""
        self._closing[key] = session
        taken = self.sessions.pop(key, None)
        if taken is None:  # another thread closes it
            return
        if taken is not session:  # another thread has replaced it
            self.sessions.setdefault(key, taken)
            self._closing.pop(key, None)
        elif not self._is_idle(key, session):
            self.sessions.setdefault(key, session)
            self._closing.pop(key, None)
        elif self._closing.pop(key, None) is session:
            session.close()

    def _is_idle(self, key: int, session: ZooKeeperSession) -> bool:
        """Whether nothing depends on a session, as far as is known now."""
        if session.holds_nothing or session.watches or session.refusal:
            return False
        for entry in list(self.entries.values()):
            node = entry.node
            if entry.key == key or (node is not None and node.moving_to == key):
                return False
        if key in list(self.releasing.values()):
            return False
        return all(pending.key != key for pending in self.pending_deletes.all())

    def locks_path(self) -> str:
        return f"{self.root}/locks"

    def _parent(self, name: str) -> str:
        return f"{self.root}/locks/{encode_name(name)}"

    def entry(self, claim: Claim, now: float) -> ZooKeeperEntry:
        """The entry of a claim; created for a new claim."""
        entry = self.entries.get(claim.owner)
        if entry is None:
            entry = ZooKeeperEntry(claim, math.ceil(claim.ttl), now)
            entry = self.entries.setdefault(claim.owner, entry)
        return entry

    # On the thread of the heartbeats

    def clean_up(self, session: ZooKeeperSession, now: float) -> None:
        """Ends nodes that are not kept, and admitted nodes of absent owners; retries deletes."""
        key = int(session.ttl)
        if self.sessions.get(key) is not session or not self._is_idle(key, session):
            session.idle_since = now
        elif now - session.idle_since > IDLE_SESSION_SECONDS:
            self._close_if_idle(key, session)
            return
        # Runs for every entry at every heartbeat: no tuples, and no calls for nodes that are kept.
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
        """Ends a node that is not kept. Returns the pending delete, or ``None`` if it is kept."""
        if not node.end(lambda state: entry.is_kept(state, now, admitted=admitted)):
            return None
        if entry.wake_signal is not None:
            entry.wake_signal.set()  # in case its owner waits after all
        return self.pending_deletes.add(PendingDelete(entry.key, entry.claim, 0.0, node.path))

    def _end_absent(
        self, session: ZooKeeperSession, entry: ZooKeeperEntry, node: ClaimNode
    ) -> None:
        """Ends the node of an absent owner, if the queue admits it."""
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
