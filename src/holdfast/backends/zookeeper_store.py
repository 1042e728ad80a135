"""What all backends of one ZooKeeper door share: its sessions, and its own nodes in every line.

ZooKeeper forgets a node when its session ends, not when it is no longer renewed. So that a hold
ends with its ttl all the same, the store remembers what its process has in the lines, and the
session's thread deletes at every heartbeat what nobody renews, refreshes or comes for.
"""

from __future__ import annotations

import math
import threading
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from kazoo.exceptions import NoNodeError

from holdfast.backends.zookeeper_line import Line, digest, encode_name, read_data, slot_name
from holdfast.claim import Claim, Grant
from holdfast.core.contract import (
    GRACE_SECONDS,
    STALE_SECONDS,
    Guarantee,
    Runtime,
    Settings,
)
from holdfast.errors import BackendUnavailable, Incompatible
from holdfast.runtimes import clock
from holdfast.wires.zookeeper import Options, Session
from holdfast.wires.zookeeper_asks import Ask, Delete, Listing, Multi, Read, pack_acl

if TYPE_CHECKING:
    from holdfast.backends.zookeeper import ZooKeeperBackend
    from holdfast.backends.zookeeper_wait import Preview
    from holdfast.wires.zookeeper_calls import Wake

__all__ = ["Debt", "Entry", "ZooKeeperStore", "deletion"]

SERVICE_TTL = 10
"""The ttl of the session that only looks: it holds nothing."""
GOODBYE_SECONDS = 1.0


class Entry:
    """One claim's node, as far as this process knows."""

    __slots__ = (
        "asked",
        "attended",
        "behind",
        "claim",
        "ends",
        "grant",
        "key",
        "moving",
        "node",
        "path",
        "preview",
        "refreshed",
        "session",
        "signal",
        "taking",
        "token",
        "unsure",
        "version",
    )

    def __init__(self, claim: Claim, key: int, now: float) -> None:
        self.claim, self.key = claim, key
        self.asked = False
        """Whether its create was sent: until the path is known there may or may not be a node."""
        self.unsure = False
        """Whether a create was ever not answered: it may still make a node."""
        self.refreshed = now
        self.attended: float | None = None
        """When the last attempt or wait for it ended; ``None`` during one."""
        self.behind = 0
        self.taking = False
        self.signal: Wake | None = None
        """What a wait for it waits for."""
        self.reset()

    def reset(self) -> None:
        """It has no node any more."""
        self.path = self.node = ""
        self.session = 0
        self.token = 0
        self.version = 0
        """Of the node's data, as far as known."""
        self.moving = 0
        """The key of the session that an unanswered request moves it to."""
        self.grant: Grant | None = None
        self.ends = math.inf
        """Until when its last renewal keeps it, once it is granted."""
        self.preview: Preview | None = None

    def stand(self, path: str, session: int, token: int) -> None:
        """It has one."""
        self.path, self.node = path, path[path.rindex("/") + 1 :]
        self.session, self.token = session, token

    def forsaken(self, now: float) -> bool:
        """Whether nobody keeps it any more."""
        if self.grant is not None:
            return now > self.ends
        return now > self.refreshed + STALE_SECONDS

    def unattended(self, now: float) -> bool:
        """Whether nobody would come if it were its turn."""
        left = self.attended
        return self.grant is None and left is not None and now > left + GRACE_SECONDS


class Debt(NamedTuple):
    """A claim that is to leave no node, in the session of this key."""

    key: int
    claim: Claim
    until: float
    """Until then a late request of its own may still make one."""


def deletion(parent: str, path: str, slots: tuple[int, ...]) -> Ask:
    """The end of one claim: its node, and its slots with it."""
    if not slots:
        return Delete(path)
    return Multi([Delete(path), *(Delete(f"{parent}/{slot_name(slot)}") for slot in slots)])


class ZooKeeperStore:
    """One ensemble as a URL describes it, for one door."""

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
        self.debts: dict[str, Debt] = {}
        self.records_purged = -math.inf
        self.parent = lru_cache(maxsize=1024)(self._parent)
        """The node whose children are the line of a name."""
        self._mutex = threading.Lock()
        self._users = 0
        self._tasks = False

    def backend(self, runtime: Runtime) -> ZooKeeperBackend:
        from holdfast.backends.zookeeper import ZooKeeperBackend

        self._users += 1
        if not runtime.blocking:
            self._tasks = True  # which don't read: kazoo's thread does, for all
            for session in list(self.sessions.values()):
                session.reader.shared = False
        return ZooKeeperBackend(self, runtime)

    def leave(self) -> list[Session]:
        """A backend is closed; the last one gets the sessions to end."""
        with self._mutex:
            self._users -= 1
            if self._users > 0:
                return []
            sessions = list(self.sessions.values())
            self.sessions.clear()
        self.entries.clear()
        return sessions

    def forget(self) -> None:
        """In a forked child. kazoo's clients are dropped without a word: they hang there."""
        self._mutex = threading.Lock()
        for session in self.sessions.values():
            session.forget()
        self.sessions = {}
        self.entries = {}
        self.debts = {}

    def session(self, key: int) -> Session:
        """The session for a ttl of so many seconds, opened if need be; 0 for one to look with."""
        session = self.sessions.get(key)
        if session is not None and session.wanted:
            return session
        with self._mutex:
            if self._users <= 0:
                raise BackendUnavailable(f"{self.display} was closed")
            session = self.sessions.get(key)
            if session is None or not session.wanted:
                known = [s.floor for s in self.sessions.values() if s.floor is not None]
                floor = known[0] if known else None
                ttl = key or SERVICE_TTL
                session = Session(self.options, ttl, floor, self.tidy, tasks=self._tasks)
                session.looks_only = key == 0
                self.sessions[key] = session
        session.open()
        return session

    def lines(self) -> str:
        return f"{self.root}/locks"

    def _parent(self, name: str) -> str:
        return f"{self.root}/locks/{encode_name(name)}"

    def entry(self, claim: Claim, now: float) -> Entry:
        """What is known of a claim's node, made if it is new."""
        entry = self.entries.get(claim.owner)
        if entry is None:
            entry = Entry(claim, math.ceil(claim.ttl), now)
            self.entries[claim.owner] = entry
        return entry

    # On the session's own thread

    def tidy(self, session: Session, now: float) -> None:
        """Deletes what nobody keeps, and who does not come although it is its turn."""
        # There may be many, at every heartbeat: no tuple for each, no call for those that are kept.
        for entry in list(self.entries.values()):
            kept = entry.grant is not None and now <= entry.ends
            if kept or entry.session != session.id or not entry.path:
                continue
            owner = entry.claim.owner
            if entry.forsaken(now):
                self.entries.pop(owner, None)
                if not entry.forsaken(now):
                    self.entries[owner] = entry  # it was renewed in this moment
                    continue
                if entry.signal is not None:
                    entry.signal.set()
                slots = entry.grant.slots if entry.grant is not None else ()
                session.send(deletion(self.parent(entry.claim.name), entry.path, slots))
            elif entry.unattended(now):
                self._call_up(session, owner, entry)
        for owner, debt in list(self.debts.items()):
            if self.sessions.get(debt.key) is session:
                self._settle(session, owner, debt)

    def _call_up(self, session: Session, owner: str, entry: Entry) -> None:
        parent = self.parent(entry.claim.name)

        def answered(ask: Any) -> None:
            its_turn = ask.error is None and _is_its_turn(entry, ask.value, parent)
            if its_turn and self.entries.pop(owner, None) is entry:
                session.send(Delete(entry.path))

        session.send(Listing(parent).then(answered))

    def _settle(self, session: Session, owner: str, debt: Debt) -> None:
        """Ends a claim that could not be abandoned when it should have been."""
        parent = self.parent(debt.claim.name)

        def read(ask: Any) -> None:
            if ask.error is None:
                slots = read_data(ask.value[0]).slots
                session.send(deletion(parent, ask.path, slots))

        def listed(ask: Any) -> None:
            nodes = ask.value if ask.error is None else []
            own = [node for node in nodes if f".{digest(owner)}." in node]
            answered = ask.error is None or isinstance(ask.error, NoNodeError)
            if answered and not own and clock.now() >= debt.until:
                self.debts.pop(owner, None)
            for node in own:
                session.send(Read(f"{parent}/{node}").then(read))

        session.send(Listing(parent).then(listed))


def _is_its_turn(entry: Entry, nodes: list[str], where: str) -> bool:
    try:
        line = Line(nodes, where)
    except Incompatible:
        return False
    index = line.index(entry.node)
    return index is not None and index < line.admitted and entry.unattended(clock.now())
