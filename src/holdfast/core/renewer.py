"""The renewer: what to renew when, what is doubtful, what is lost, what must be undone.

One per client, on a thread of its own over blocking wires, also for asyncio: a blocked event loop
must not lose locks. Registering a hold is one dict write; nothing here takes a lock, so a
destructor or an interrupt at any point leaves it whole.

Whatever the store does to that thread, ``judge`` tells in time who is doubtful or lost: the
watcher of the process (``core.watch``) calls it too.
"""

# Without "from __future__ import annotations": see holdfast.claim.
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple
from weakref import ref

from holdfast.claim import Claim, Grant
from holdfast.core import log
from holdfast.core.contract import REFRESH_SECONDS, Backend, Renewal, Runtime, Waiting
from holdfast.core.hold import CONFIRM_SECONDS, NEVER, Change, Hold, State
from holdfast.core.local_queue import Turn
from holdfast.core.planned import UNWATCHED, Planned, Watcher
from holdfast.errors import HoldfastError

__all__ = ["Renewer"]

LINGER_SECONDS = 5.0
"""How long an idle renewer stays planned, so that a busy loop of short holds never wakes it."""
UNDO_RETRY_SECONDS = (1.0, 3.0)
"""While the store can't be reached it is tried again so often, as long as it takes."""
LEAST_UNDO_SECONDS = 1.0
"""An undoing may take so long, although a hold is to be renewed meanwhile."""
FINISH_SECONDS = 5.0
"""How long the end of a client waits for a store that hangs, however much is to be released."""
UNDO_TIMES_SECONDS = (0.0, 1.5, 6.0)
"""An unknown outcome is undone at once and again later: a request may land after its undoing."""


GLANCE_SECONDS = 1.0
"""How often it is looked whether the connections or files that holds are in are still there."""
MISHAP_SECONDS = 0.5
MOST_LEFT_SECONDS = 10.0
SHORTEST_RETRY_SECONDS = 0.02
"""A renewal that failed is tried again after a tenth or so of what is left, which counts up to
the first, and not sooner than the second."""
UNHANDLED_SECONDS = 0.1
"""How soon a hold is looked at again that has no handle, or is just being extended."""


class Undo(NamedTuple):
    """A claim to abandon, when to do so next, and how often it was tried."""

    claim: Claim
    at: float
    times: int
    landed: bool
    """Whether all its requests were answered: one undoing is then enough."""


class Renewer(Planned):
    """All that a client holds or waits for, and the loop that keeps it."""

    def __init__(self, runtime: Runtime, backend: Backend, display: str) -> None:
        super().__init__(runtime)
        self.backend, self.display = backend, display
        self.holds: dict[str, Hold] = {}
        self.waits: dict[str, tuple[Claim, ref[Turn]]] = {}
        self.dropped: deque[Hold] = deque()
        self.undoing: dict[str, Undo] = {}
        self.watch: Watcher = UNWATCHED
        self.unlogged: deque[tuple[str, str]] = deque()
        """Losses that ``judge`` found: logging is I/O, and left to the renewer's thread."""
        self.torn: deque[tuple[Hold, str]] = deque()
        """Losses of which perhaps not everybody was told."""
        self.registered = 0
        self.hurried = False
        """Whether a hold came that was granted for a moment only."""
        self.refreshed_at = 0.0
        self._glances: Callable[[Sequence[Grant]], dict[str, str]] | None
        self._glances = getattr(backend, "glance", None)
        # A hold must not have to tell the renewer that a glance is due, either.
        self._linger_seconds = LINGER_SECONDS if self._glances is None else GLANCE_SECONDS
        self.nudge: Callable[[Claim], None] = lambda claim: None
        """Wakes a waiter of the client whose place in the line is gone."""
        self.alive: Callable[[Hashable], bool] = runtime.alive
        """Whether a thread or task of the client's own world can still end its block."""

    # What clients say, from any thread.

    def add(self, hold: Hold) -> None:
        """Keeps a hold from now on."""
        self.holds[hold.grant.claim.owner] = hold
        self.registered += 1
        if hold.grant.seconds is not None:
            self.hurried = True
        if self._glances is not None and hold.since + GLANCE_SECONDS < self.planned:
            self.plan(min(hold.next_at(), hold.since + GLANCE_SECONDS))
        elif hold.renew_at < self.planned or hold.doubtful_at < self.planned:
            self.plan(hold.next_at())
        if hold.doubtful_at < self.watch.planned:
            self.watch.plan(hold.doubtful_at)

    def reschedule(self, hold: Hold) -> None:
        """The times of a hold that is kept have changed, and may come earlier now."""
        self.plan(hold.next_at())
        self.watch.plan(hold.doubtful_at)

    def remove(self, hold: Hold) -> bool:
        """Keeps it no longer; answers whether it was kept: true for exactly one caller."""
        return self.holds.pop(hold.grant.claim.owner, None) is not None

    def drop(self, hold: Hold) -> None:
        """Its last handle is gone. Safe in a destructor."""
        self.dropped.append(hold)
        self.plan(float("-inf"))

    def stand(self, turn: Turn) -> None:
        """Keeps a place in the store's line from now on, while somebody waits there."""
        if not self.waits:
            self.refreshed_at = self.runtime.now()
        self.waits[turn.claim.owner] = turn.claim, ref(turn)
        self.plan(self.refreshed_at + REFRESH_SECONDS)

    def undo(self, claim: Claim, *, after: float = 0.0, landed: bool = False) -> None:
        """Sees to it that nothing is left of a claim, whatever became of its requests."""
        undo = self.undoing[claim.owner] = Undo(claim, self.runtime.now() + after, 0, landed)
        self.plan(undo.at)

    def undone(self, claim: Claim) -> None:
        """The client has abandoned it itself, in order behind the claim's own requests."""
        self.undoing.pop(claim.owner, None)

    # What the renewer does.

    async def run(self) -> None:
        """The loop: ends only when the client is closed."""
        while not self.closing:
            self.planned = NEVER  # whoever registers from here on tells us
            at = await self._guarded_round()
            if at == NEVER and self.registered:
                self.registered = 0
                at = self.runtime.now() + self._linger_seconds
            if self.hurried:  # more may come: it looks by itself, before they have to wake it
                self.hurried = False
                at = min(at, self.runtime.now() + CONFIRM_SECONDS / 2)
            await self._sleep(at)

    async def _guarded_round(self) -> float:
        try:
            return await self.round()
        except Exception:  # noqa: BLE001 - without a renewer every hold of the client would be lost
            log.exception("keeping what is held on %s failed; it goes on", self.display)
            return self.runtime.now() + MISHAP_SECONDS

    async def round(self) -> float:
        """One look at everything; answers when the next is due."""
        self._glance()
        self._lose_torn()
        self._watch_clocks()
        await self._renew_due()
        self._watch_clocks()
        while self.dropped:
            await self._release_dropped(self.dropped.popleft())
        await self._undo_due()
        return self._next_at()

    def _glance(self) -> None:
        """Where holds end with a connection or file, one that is gone is seen without asking."""
        if self._glances is not None and self.holds:
            grants = [hold.grant for hold in list(self.holds.values())]
            for owner, reason in self._glances(grants).items():
                hold = self.holds.get(owner)
                if hold is not None:
                    self.lose(hold, reason)

    def judge(self, now: float) -> float:
        """Tells of every hold that is doubtful or lost by the clock; answers when the next will be.

        Any thread may do so at any time: of a loss one tells, and it is told once. Nothing in here
        waits, and no code of the user's is run.
        """
        due = NEVER
        for hold in list(self.holds.values()):
            if now >= hold.ends:
                self._run_out(hold, now)
                continue
            if not hold.doubted and now >= hold.doubtful_at:
                left = f"{hold.ends - now:.1f} s are left"
                hold.doubt(f"renewal is overdue and {left}{_because(hold.cause)}")
            due = min(due, hold.ends if hold.doubted else hold.doubtful_at)
        return due

    def _watch_clocks(self) -> None:
        now = self.runtime.now()
        self.judge(now)
        self._log_losses()
        for hold in list(self.holds.values()):
            if hold.block and not self.alive(hold.who()):
                hold.block = False
                log.warning("%r: its thread or task ended inside the block", self._named(hold))
                self.dropped.append(hold)
            elif hold.handles and not hold.handled():
                self._find_orphan(hold, now)

    def _find_orphan(self, hold: Hold, now: float) -> None:
        # An interrupt tore its release or its handle's destructor apart; or somebody releases it
        # in this very moment, and is done by the next look.
        if hold.orphaned is None:
            hold.orphaned = now
        elif now >= hold.orphaned + UNHANDLED_SECONDS:
            self.dropped.append(hold)

    def _run_out(self, hold: Hold, now: float) -> None:
        if hold.cap is not None and now >= hold.cap:
            reason = "max_hold is over"
        elif hold.renew:
            reason = f"it could not be renewed in time{_because(hold.cause)}"
        else:
            reason = "its ttl is over"
        if self.remove(hold):
            hold.lose(reason)
            self.unlogged.append((hold.grant.claim.name, reason))
            # The store may think otherwise, if an answer was lost: nobody renews it any more.
            self.undo(hold.grant.claim)

    def _log_losses(self) -> None:
        while self.unlogged:
            name, reason = self.unlogged.popleft()
            log.warning("lost %r on %s: %s", name, self.display, reason)

    def lose(self, hold: Hold, reason: str) -> bool:
        """Declares a hold lost; false if it had been released or lost before."""
        if not self.remove(hold):
            return False
        hold.lose(reason)
        log.warning("lost %r on %s: %s", hold.grant.claim.name, self.display, reason)
        return True

    def give_up(self, hold: Hold, reason: str) -> None:
        """The store says that a hold is lost; whatever it still has of it is undone. If an
        interrupt tears this apart, the renewer does the rest."""
        try:
            if self.lose(hold, reason):
                self.undo(hold.grant.claim, landed=True)
        except BaseException:
            self.torn.append((hold, reason))
            self.plan(float("-inf"))
            raise

    def _lose_torn(self) -> None:
        while self.torn:
            hold, reason = self.torn.popleft()
            self.remove(hold)
            if hold.state is not State.RELEASED:
                hold.lose(reason)
                self.undo(hold.grant.claim, landed=True)

    async def _renew_due(self) -> None:
        now = self.runtime.now()
        holds = list(self.holds.values())
        refresh = bool(self.waits) and now >= self.refreshed_at + REFRESH_SECONDS
        if not refresh and not any(hold.renew_at <= now for hold in holds):
            return
        # What is due soon goes along: holds of one client end up in one batch per interval.
        # One that never got a handle is not renewed: its acquire was torn apart, or is not done.
        soon = [hold for hold in holds if hold.renew_at <= now + hold.grant.claim.ttl / 6]
        waits = self._waiting()
        change = Change()
        begun: list[Hold] = []
        try:
            for hold in soon:
                if hold.handled():
                    begun.append(hold)
                    hold.begin(change)
            # One that is just being extended is left to that.
            due = [hold for hold in begun if hold.is_turn_of(change)]
            if due or waits:
                await self._renew(due, waits)
        finally:
            for hold in begun:
                hold.end(change)

    def _waiting(self) -> list[Waiting]:
        """Who stands in the store's line; who is gone without a word is undone."""
        waits = []
        for owner, (claim, turn_ref) in list(self.waits.items()):
            turn = turn_ref()
            if turn is not None and not turn.gone:
                waits.append(turn.waiting())
            elif self.waits.pop(owner, None) is not None:
                self.undo(claim)
        return waits

    async def _renew(self, due: list[Hold], waits: list[Waiting]) -> None:
        sent = self.runtime.now()
        self.refreshed_at = sent
        grants = [hold.grant for hold in due]
        try:
            answer = await self.backend.renew(grants, waits, until=self._patience(sent))
        except HoldfastError as error:
            answer = Renewal(unknown={grant.claim.owner: str(error) for grant in grants})
        except Exception as error:  # noqa: BLE001 - the renewer goes on, whatever a store does
            log.exception("renewing on %s failed unexpectedly", self.display)
            answer = Renewal(unknown={grant.claim.owner: repr(error) for grant in grants})
        self._learn(due, grants, answer, sent)
        for waiting in waits:
            if waiting.claim.owner in answer.forgotten:
                self.nudge(waiting.claim)

    def _patience(self, now: float) -> float:
        """Until when a request may take, so that no hold becomes doubtful or lost meanwhile that is
        to be renewed. The others need nothing but the watcher, and take no time from these."""
        events = (hold.watch_at() for hold in list(self.holds.values()) if hold.renew)
        return max(min(events, default=NEVER), now + 0.05)

    def _learn(self, due: list[Hold], grants: list[Grant], answer: Renewal, sent: float) -> None:
        now = self.runtime.now()
        since = sent if answer.since is None else min(sent, answer.since)
        for hold, grant in zip(due, grants, strict=True):
            claim = grant.claim
            if claim.owner in answer.lost:
                self.give_up(hold, answer.lost[claim.owner])
            elif claim.owner in answer.unknown:
                hold.cause = answer.unknown[claim.owner]
                # One that was granted for a moment has less to lose time with than its ttl says.
                left = min(claim.ttl, MOST_LEFT_SECONDS, hold.ends - now)
                pause = self.runtime.between(0.05, 0.15) * left
                hold.renew_at = now + max(SHORTEST_RETRY_SECONDS, pause)
            elif now < hold.ends and hold.state is State.HELD:
                hold.extended(since)

    async def _release_dropped(self, hold: Hold) -> None:
        if self.remove(hold):
            hold.state = State.RELEASED
            self.undo(hold.grant.claim, landed=True)

    async def _undo_due(self) -> None:
        now = self.runtime.now()
        due = [item for item in list(self.undoing.items()) if item[1].at <= now]
        due.sort(key=lambda item: item[1].times)  # what may still be held comes before repeats
        pressing = min((hold.next_at() for hold in list(self.holds.values())), default=NEVER)
        for owner, undo in due:
            # A store that is slow must not keep us from a hold, nor from one that came meanwhile;
            # one that hangs gets a moment, but not beyond the time to tell that a hold is doubtful.
            now = self.runtime.now()
            patience = min(self._patience(now), max(pressing, now + LEAST_UNDO_SECONDS))
            await self._undo_one(owner, undo, patience)
            if min([pressing, *self.plans]) <= self.runtime.now():
                return

    async def _undo_one(self, owner: str, undo: Undo, until: float) -> None:
        try:
            await self.backend.abandon(undo.claim, until=until)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is tried again
            log.debug("undoing %r on %s: %s", undo.claim.name, self.display, error)
            again = self.runtime.now() + self.runtime.between(*UNDO_RETRY_SECONDS)
            if self.undoing.get(owner) is undo:
                self.undoing[owner] = undo._replace(at=again)
            return
        times = undo.times + 1
        if self.undoing.get(owner) is not undo:
            return
        if undo.landed or times == len(UNDO_TIMES_SECONDS):
            del self.undoing[owner]
        else:
            at = self.runtime.now() + UNDO_TIMES_SECONDS[times]
            self.undoing[owner] = undo._replace(at=at, times=times)

    def _next_at(self) -> float:
        times = [self._look_at(hold) for hold in list(self.holds.values())]
        times += [undo.at for undo in list(self.undoing.values())]
        if self.waits:
            times.append(self.refreshed_at + REFRESH_SECONDS)
        if self.holds and self._glances is not None:
            times.append(self.runtime.now() + GLANCE_SECONDS)
        return min(times, default=NEVER)

    def _look_at(self, hold: Hold) -> float:
        soon = self.runtime.now() + UNHANDLED_SECONDS
        if not hold.handled():
            return soon
        if any(hold.under_way()):  # whoever extends it plans the next renewal; unless interrupted
            return min(hold.watch_at(), max(hold.renew_at, soon))
        return hold.next_at()

    def _named(self, hold: Hold) -> str:
        return f"{hold.grant.claim.name} on {self.display}"

    async def finish(self) -> None:
        """The end of the client: releases all that is still held, or waits, or is to be undone."""
        self._log_losses()
        for hold in list(self.holds.values()):
            if self.remove(hold):
                hold.lose("its client was closed")
                self.undoing[hold.grant.claim.owner] = Undo(hold.grant.claim, 0.0, 0, landed=True)
        for claim, _ in list(self.waits.values()):
            self.undoing[claim.owner] = Undo(claim, 0.0, 0, landed=True)
        undos = list(self.undoing.values())
        self.undoing.clear()
        until = self.runtime.now() + FINISH_SECONDS
        failure: Exception | None = None
        for undo in undos:
            try:
                if failure is not None and self.runtime.now() >= until:
                    raise failure  # it hangs: not as long again for each
                await self.backend.abandon(undo.claim, until=until)
                until = self.runtime.now() + FINISH_SECONDS
            except Exception as error:  # noqa: BLE001 - the others are to be released too
                failure = error
                # Whether it ever arrived nobody knows, and its caller was told so.
                tell = log.warning if undo.landed else log.debug
                tell("could not release %r on %s: %s", undo.claim.name, self.display, error)


def _because(cause: str) -> str:
    return f": {cause}" if cause else ""
