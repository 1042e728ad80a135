"""The renewer: what to renew when, what is doubtful, what is lost, what must be undone.

One per client, on its own thread over blocking I/O, also for asyncio: a blocked event loop must not
lose locks. Registering a hold is one dict write. Nothing here takes a lock, so a destructor or an
interrupt at any point leaves it consistent.

A store can block that thread, but not ``check_ends``, which reports doubtful and lost holds: the
watcher of the process (``core.watcher``) calls it too.
"""

# Without "from __future__ import annotations": see holdfast.lazy.
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple
from weakref import ref

from holdfast.claim import Claim, Grant
from holdfast.core import log
from holdfast.core.backoff import RENEWAL_RETRY_SHARE, UNDO_BACKOFF, UNDO_RETRY_SECONDS
from holdfast.core.breaking import NEWS_SECONDS, why_lost
from holdfast.core.contract import (
    REFRESH_SECONDS,
    STALE_SECONDS,
    Backend,
    Renewal,
    Runtime,
    Waiting,
)
from holdfast.core.hold import CONFIRM_SECONDS, NEVER, Change, Hold, State
from holdfast.core.local_queue import LocalWaiter
from holdfast.core.watcher import FAILURE_PAUSE_SECONDS, NO_WATCHER, Plannable, PlannedLoop
from holdfast.errors import BackendUnavailable, HoldfastError

if TYPE_CHECKING:
    from holdfast.core.events import Events, LockUse

__all__ = ["Renewer"]

IDLE_SECONDS = 5.0
"""How long an idle renewer stays planned, so that a busy loop of short holds never wakes it."""
LEAST_UNDO_SECONDS = 1.0
"""The request of an undo has at least this long, also if a hold is due for renewal."""
FINISH_SECONDS = 0.5
LONGEST_FINISH_SECONDS = 5.0
LEAST_FINISH_SECONDS = 0.05
SLOW_ANSWERS = 3
"""``close`` waits this long without any answer, however much is to be released: half a second, or
three times as long as the store's answers have taken before, five seconds at the most. Less, 50 ms,
if the store has not answered a caller for as long already, and nothing is held or waits. The
renewer's thread then goes on for at most five seconds in the background."""
NEW_CONNECTION = 2
"""The first answer came over a new connection, which takes several round trips, and so may the
first request of the renewer: ``close`` waits twice as long as that answer took, too."""
UNDO_TIMES_SECONDS = (0.0, 1.5, 6.0)
"""A claim of unknown outcome is undone at once and again later: its request may arrive after the
first undo."""
LATEST_ARRIVAL_SECONDS = 6.0
"""After this time a request has arrived at the store, or never will."""
MOST_UNDOS = 10_000
"""Of more claims to undo, the oldest are left to end by themselves in the store, if they do."""
PARTLY_REACHED_SECONDS = 1.0
MOST_FAILED_UNDOS = 8
"""A store that has answered within the first value may be unreachable in part, such as a node of a
cluster: then so many undos may fail before the others have to wait."""
GLANCE_SECONDS = 1.0
"""How often the renewer checks that the connections or files of holds still exist."""
COLLECT_SECONDS = 0.25
RECOUNT_SECONDS = 1.0
"""The entry of a waiter tells how many wait behind it in its client. If that changes, it is
refreshed after the first value, so that several changes need one request, and not again within the
second."""
LEAST_RENEWAL_SECONDS = 0.05
"""The request of a renewal has at least this long."""
MOST_LEFT_SECONDS = 10.0
SHORTEST_RETRY_SECONDS = 0.02
"""A failed renewal is sent again after about a tenth of the time that is left. That time counts up
to the first value, and the pause is at least the second."""
HANDLE_CHECK_SECONDS = 0.1
"""How soon to check a hold again that has no handle, or is being extended."""


class Undo(NamedTuple):
    """A claim to abandon, when to do so next, and how often it was done."""

    claim: Claim
    at: float
    landed: bool
    """Whether all its requests were answered: one undo is then enough."""
    gone_at: float
    """When the claim has ended in the store by itself, if its ttl ends it there."""
    times: int = 0
    failures: int = 0


class Renewer(PlannedLoop):
    """All holds and waiters of a client, and the loop that keeps them alive."""

    def __init__(
        self, runtime: Runtime, backend: Backend, display: str, *, sessions: bool = False
    ) -> None:
        super().__init__(runtime)
        self.backend, self.display = backend, display
        self._sessions = sessions
        """Whether holds end with a session of the client, which lives on while it is answered."""
        self.finish_by = NEVER
        """When ``close`` stops waiting, unless the store answers before that."""
        self._recount_at = NEVER
        self._recounted_at = -NEVER
        self._answer_seconds = self._first_answer_seconds = 0.0
        self._answered_at = -NEVER
        self._silent_since = NEVER
        """When the first request was sent that the store has not answered, since its last
        answer."""
        self._undo_tries = 0
        self._undo_again_at = -NEVER
        """No undo is tried before this: the last one failed, and the others would fail, too."""
        self.holds: dict[str, Hold] = {}
        self.waits: dict[str, tuple[Claim, ref[LocalWaiter]]] = {}
        self.dropped: deque[Hold] = deque()
        self.undoing: dict[str, Undo] = {}
        self.watcher: Plannable = NO_WATCHER
        self.events: Events | None = None
        """What tells the observers of the client; ``None`` if there are none."""
        self.unlogged: deque[tuple[Hold, str]] = deque()
        """Losses that ``check_ends`` found: logging is I/O, so the renewer's thread does it."""
        self.interrupted_losses: deque[tuple[Hold, str]] = deque()
        """Losses whose callbacks were perhaps not all called, because of an interrupt."""
        self.registered = 0
        self.has_short_grant = False
        """Whether a hold from a direct grant was added, which needs a renewal soon."""
        self.refreshed_at = 0.0
        self._all_due = False
        """Whether to renew all holds in the next round, however long ago their last renewal is."""
        self._glances: Callable[[Sequence[Grant]], dict[str, str]] | None
        self._glances = getattr(backend, "glance", None)
        # A new hold should not have to wake the renewer for a glance, either.
        self._idle_seconds = IDLE_SECONDS if self._glances is None else GLANCE_SECONDS
        self.nudge: Callable[[Claim], None] = lambda claim: None
        """Wakes a waiter of the client whose entry in the store's queue is gone."""
        self.alive: Callable[[Hashable], bool] = runtime.alive
        """Whether a thread or task of the client can still end its block."""

    # Called by clients, from any thread.

    def add(self, hold: Hold) -> None:
        """Renews and watches a hold from now on."""
        self.holds[hold.grant.claim.owner] = hold
        self.registered += 1
        if hold.grant.seconds is not None:
            self.has_short_grant = True
        if self._glances is not None and hold.since + GLANCE_SECONDS < self.planned:
            self.plan(min(hold.next_at(), hold.since + GLANCE_SECONDS))
        elif hold.renew_at < self.planned or hold.doubtful_at < self.planned:
            self.plan(hold.next_at())
        if hold.doubtful_at < self.watcher.planned:
            self.watcher.plan(hold.doubtful_at)

    def reschedule(self, hold: Hold) -> None:
        """The times of a registered hold have changed, and may be earlier now."""
        self.plan(hold.next_at())
        self.watcher.plan(hold.doubtful_at)

    def renew_all(self) -> None:
        """Renews all holds now, and refreshes all waiters. Safe on the watcher's thread."""
        if self.holds or self.waits:
            self._all_due = True
            self.plan(float("-inf"))

    def remove(self, hold: Hold) -> bool:
        """Stops renewing and watching a hold; true for exactly one caller."""
        return self.holds.pop(hold.grant.claim.owner, None) is not None

    def drop(self, hold: Hold) -> None:
        """The last handle of a hold is gone: the renewer releases it. Safe in a destructor."""
        self.dropped.append(hold)
        self.plan(float("-inf"))

    def refresh_waiter(self, waiter: LocalWaiter) -> None:
        """Refreshes a waiter's entry in the store's queue from now on, while the waiter exists."""
        if not self.waits:
            self.refreshed_at = self.runtime.now()
        self.waits[waiter.claim.owner] = waiter.claim, ref(waiter)
        self.plan(self.refreshed_at + REFRESH_SECONDS)
        if waiter.waiting().behind:
            self.recount()

    def recount(self) -> None:
        """The number of waiters behind an entry in the store's queue may have changed."""
        if self.waits and self._recount_at == NEVER:
            at = self.runtime.now() + COLLECT_SECONDS
            self._recount_at = max(at, self._recounted_at + RECOUNT_SECONDS)
            self.plan(self._recount_at)

    def undo(self, claim: Claim, *, after: float = 0.0, landed: bool = False) -> None:
        """Removes a claim from the store, whatever the outcome of its requests; the first time
        after ``after`` seconds."""
        at = self.runtime.now() + after
        self.undoing[claim.owner] = Undo(claim, at, landed, at + _longest_life(claim))
        # A claim under a session does not end by itself. At the end all are undone, in one go.
        while len(self.undoing) > MOST_UNDOS and not (self._sessions or self.closing):
            with suppress(RuntimeError, StopIteration):  # another thread changes it, too
                self.undoing.pop(next(iter(self.undoing)), None)
        self.plan(max(at, self._undo_again_at))

    def undone(self, claim: Claim, *, ordered: bool) -> None:
        """The client itself has abandoned the claim. Unless that was in order behind the claim's
        own requests, one of these may still arrive: it is undone again later."""
        undo = self.undoing.get(claim.owner)
        if ordered or undo is None:
            self.undoing.pop(claim.owner, None)
            return
        at = self.runtime.now() + UNDO_TIMES_SECONDS[1]
        self.undoing[claim.owner] = undo._replace(at=at, times=1, failures=0)
        self.plan(at)

    def answered(
        self, sent: float, use: "LockUse | None" = None, operation: str | None = "attempt"
    ) -> None:
        """The store has answered a request that was sent at ``sent``. Observers are told of the
        operation, if it has a name; of the attempt of a ``use`` by ``use.tell_attempt``."""
        now = self.runtime.now()
        if self._answered_at == -NEVER:
            self._first_answer_seconds = now - sent
        self._answer_seconds = max(now - sent, 0.9 * self._answer_seconds)
        self._answered_at = now
        self._silent_since = NEVER
        if self.closing:
            self.finish_by = now + self.finish_seconds()
        if self.events is not None:
            if use is not None:
                use.attempt_seconds = now - sent
            elif operation is not None:
                self.events.answered(operation, now - sent)

    def unanswered(self, sent: float, error: BackendUnavailable) -> None:
        """The store has not answered a caller's request that was sent at ``sent``."""
        self._silent_since = min(self._silent_since, sent)
        if self.events is not None:
            self.events.unanswered("attempt", sent, error)

    def finish_seconds(self) -> float:
        """How long a store that hangs may delay a caller that has no time left."""
        slow, first = self._answer_seconds, self._first_answer_seconds
        seconds = max(FINISH_SECONDS, SLOW_ANSWERS * slow, NEW_CONNECTION * first)
        return min(seconds, LONGEST_FINISH_SECONDS)

    def close_seconds(self) -> float:
        """How long ``close`` waits for an answer of the store. The time that a caller has waited in
        vain counts, unless something is surely stored that ``close`` has to remove."""
        silent = max(0.0, self.runtime.now() - self._silent_since)
        if self.holds or self.waits:
            silent = 0.0
        return max(LEAST_FINISH_SECONDS, self.finish_seconds() - silent)

    def close(self) -> None:
        """Ends the loop soon; ``finish`` follows. May be called again."""
        if not self.closing:
            self.finish_by = self.runtime.now() + self.close_seconds()
            self.closing = True
        self.signal.set()

    # Called on the renewer's thread.

    async def run(self) -> None:
        """The loop. It ends only when the client is closed."""
        while not self.closing:
            self.planned = NEVER  # a hold that is added from here on wakes the loop
            at = await self._guarded_round()
            if at == NEVER and self.registered:
                self.registered = 0
                at = self.runtime.now() + self._idle_seconds
            if self.has_short_grant:  # more may follow: look again before they have to wake us
                self.has_short_grant = False
                at = min(at, self.runtime.now() + CONFIRM_SECONDS / 2)
            await self._sleep(at)

    async def _guarded_round(self) -> float:
        try:
            return await self.round()
        except Exception:  # noqa: BLE001 - without a renewer the client would lose every hold
            text = "a round of the renewer for %s failed; it continues"
            log.exception(text, self.display, part="renew")
            return self.runtime.now() + FAILURE_PAUSE_SECONDS

    async def round(self) -> float:
        """Does all that is due once; returns when the next round is due."""
        await self._glance()
        self._finish_losses()
        self._check_holds()
        await self._renew_due()
        self._check_holds()
        while self.dropped:
            self._release_dropped(self.dropped.popleft())
        await self._undo_due()
        return self._next_at()

    async def _glance(self) -> None:
        """Finds holds whose connection or file is gone, without a request, if the store can."""
        if self._glances is not None and self.holds:
            grants = [hold.grant for hold in list(self.holds.values())]
            until = self._reasons_until()
            for owner, reason in self._glances(grants).items():
                hold = self.holds.get(owner)
                if hold is not None:
                    self.lose(hold, await self._why_lost(hold, hold.grant, reason, until))

    def _reasons_until(self) -> float:
        """Until when the store may tell why holds are lost: the renewal of others must not wait."""
        now = self.runtime.now()
        return min(now + NEWS_SECONDS, self._request_until(now))

    async def _why_lost(self, hold: Hold, grant: Grant, reason: str, until: float) -> str:
        """The reason of the client that broke the hold, if the store tells it in time. If it does
        not, the end of the block asks again."""
        hold.reason_unread = True
        seconds = until - self.runtime.now()
        if seconds <= 0:
            return reason
        told = await why_lost(self.runtime, self.backend, grant, reason, seconds)
        hold.reason_unread = told is None
        return told or reason

    def check_ends(self, now: float) -> float:
        """Marks every hold that is doubtful or lost by the clock; returns when the next will be.

        Any thread may call this at any time: each loss is reported by one thread, once. Nothing in
        here waits or runs user code.
        """
        due = NEVER
        for hold in list(self.holds.values()):
            if now >= hold.ends:
                self._run_out(hold, now)
                continue
            if not hold.doubted and now >= hold.doubtful_at:
                left = f"{hold.ends - now:.1f} s are left"
                reason = f"renewal is overdue and {left}{_because(hold.cause)}"
                hold.mark_doubtful(reason)
                if hold.use is not None:
                    hold.use.events.doubtful(hold, reason)
            due = min(due, hold.ends if hold.doubted else hold.doubtful_at)
        return due

    def _check_holds(self) -> None:
        now = self.runtime.now()
        self.check_ends(now)
        self._log_losses()
        for hold in list(self.holds.values()):
            if hold.block and not self.alive(hold.acquired_by()):
                hold.block = False
                text = "%r: its thread or task ended inside the block"
                log.warning(text, self._named(hold), part="lock", name=hold.grant.claim.name)
                self.dropped.append(hold)
            elif hold.handles and not hold.has_handle():
                self._drop_without_handle(hold, now)

    def _drop_without_handle(self, hold: Hold, now: float) -> None:
        # An interrupt stopped its release, or the destructor of its handle, half-way. Or another
        # thread releases it at this moment, and has done so by the next check.
        if hold.without_handle_since is None:
            hold.without_handle_since = now
        elif now >= hold.without_handle_since + HANDLE_CHECK_SECONDS:
            self.dropped.append(hold)

    def _run_out(self, hold: Hold, now: float) -> None:
        """The certain time of a hold is over."""
        if hold.cap is not None and now >= hold.cap:
            reason = "max_hold is over"
        elif hold.renew:
            reason = f"it could not be renewed in time{_because(hold.cause)}"
        else:
            reason = "its ttl is over"
        if self.remove(hold):
            self.declare_lost(hold, reason)
            self.unlogged.append((hold, reason))
            # The store may still have it, if an answer was lost; and it is no longer renewed.
            self.undo(hold.grant.claim)

    def _log_losses(self) -> None:
        while self.unlogged:
            self._log_loss(*self.unlogged.popleft())

    def _log_loss(self, hold: Hold, reason: str) -> None:
        name, token, store = hold.grant.claim.name, hold.grant.token, self.display
        about = {"event": "lost", "store": store, "name": name, "token": token, "reason": reason}
        log.warning("lost %r on %s: %s", name, store, reason, part="lock", **about)

    def declare_lost(self, hold: Hold, reason: str) -> None:
        """The one place where a hold becomes lost, on any thread. The caller has removed it.

        Never waits. An interrupt may stop it half-way; ``_finish_losses`` then calls it again for
        the same hold, so it must be safe to repeat.
        """
        hold.mark_lost(reason)
        if hold.use is not None:
            hold.use.events.lost(hold, reason)

    def lose(self, hold: Hold, reason: str) -> bool:
        """Removes a hold, declares it lost and logs that; false if it has ended before."""
        if not self.remove(hold):
            return False
        self.declare_lost(hold, reason)
        self._log_loss(hold, reason)
        return True

    def lose_and_undo(self, hold: Hold, reason: str) -> None:
        """The store answered that a hold is lost: removes what may be left of it in the store. If
        an interrupt stops this half-way, the renewer does the rest."""
        try:
            if self.lose(hold, reason):
                self.undo(hold.grant.claim, landed=True)
        except BaseException:
            self.interrupted_losses.append((hold, reason))
            self.plan(float("-inf"))
            raise

    def _finish_losses(self) -> None:
        """Completes losses that an interrupt stopped half-way."""
        while self.interrupted_losses:
            hold, reason = self.interrupted_losses.popleft()
            self.remove(hold)
            if hold.state is not State.RELEASED:
                self.declare_lost(hold, reason)
                self.undo(hold.grant.claim, landed=True)

    async def _renew_due(self) -> None:
        # Before the clock is read: if it is set again from here on, there is another round.
        all_due, self._all_due = self._all_due, False
        now = self.runtime.now()
        holds = list(self.holds.values())
        refresh = bool(self.waits) and now >= self.refreshed_at + REFRESH_SECONDS
        full = all_due or refresh or any(hold.renew_at <= now for hold in holds)
        if now >= self._recount_at:
            self._recount_at, self._recounted_at = NEVER, now
        elif not full:
            return
        # Holds that are due soon are included: so a client sends one batch per interval.
        # A hold that never got a handle is not renewed: its acquire was interrupted, or goes on.
        share = 1 if all_due else 1 / 6
        soon = [hold for hold in holds if hold.renew_at <= now + share * hold.grant.claim.ttl]
        waits = self._live_waits(only_recount=not full)
        change = Change()
        begun: list[Hold] = []
        try:
            for hold in soon:
                if hold.has_handle():
                    begun.append(hold)
                    hold.begin_change(change)
            # A hold that is being extended is left to that extend.
            due = [hold for hold in begun if hold.is_first_change(change)]
            if due or waits:
                await self._renew(due, waits)
        finally:
            for hold in begun:
                hold.end_change(change)

    def _live_waits(self, *, only_recount: bool) -> list[Waiting]:
        """The entries in the store's queue, or only those whose number of waiters behind them has
        changed; undoes those whose waiter is gone without leaving."""
        if not only_recount:
            self.refreshed_at = self.runtime.now()
        waits = []
        for owner, (claim, waiter_ref) in list(self.waits.items()):
            waiter = waiter_ref()
            if waiter is not None and not waiter.gone:
                waiting = waiter.waiting()
                if not only_recount or waiting.behind != waiter.behind:
                    waiter.behind = waiting.behind
                    waits.append(waiting)
            elif self.waits.pop(owner, None) is not None:
                self.undo(claim)
        return waits

    async def _renew(self, due: list[Hold], waits: list[Waiting]) -> None:
        sent = self.runtime.now()
        grants = [hold.grant for hold in due]
        failure: Exception | None = None
        try:
            answer = await self.backend.renew(grants, waits, until=self._request_until(sent))
            if not answer.unknown:  # else it may be a request without an answer that took so long
                self.answered(sent, operation=None)
        except HoldfastError as error:
            failure = error
            answer = Renewal(unknown={grant.claim.owner: str(error) for grant in grants})
        except Exception as error:  # noqa: BLE001 - the renewer continues, whatever a store raises
            log.exception("renewing on %s failed unexpectedly", self.display, part="renew")
            failure = error
            answer = Renewal(unknown={grant.claim.owner: repr(error) for grant in grants})
        self._apply(due, grants, answer, sent)
        if self.events is not None:
            self._tell_renewed(self.events, sent, len(waits), grants, answer, failure)
        await self._apply_losses(due, grants, answer.lost)
        for waiting in waits:
            if waiting.claim.owner in answer.forgotten:
                self.nudge(waiting.claim)

    def _tell_renewed(
        self,
        events: "Events",
        sent: float,
        waits: int,
        grants: list[Grant],
        answer: Renewal,
        failure: Exception | None,
    ) -> None:
        unknown = [grant for grant in grants if grant.claim.owner in answer.unknown]
        if failure is None and answer.unknown and len(unknown) == len(grants):
            # Each hold has a request of its own there, and none of them was answered.
            failure = BackendUnavailable(next(iter(answer.unknown.values())))
        seconds = self.runtime.now() - sent
        if failure is None:
            events.answered("renew", seconds)
        else:
            events.unanswered("renew", sent, failure)
        error = "" if failure is None else type(failure).__name__
        failed = len(unknown) + len(answer.lost)  # the lost ones are told as such, too
        events.renewed(len(grants), waits, seconds, failed, error)

    def _request_until(self, now: float) -> float:
        """The deadline of a request: before a hold that is renewed becomes doubtful or lost. Holds
        that are not renewed need only the watcher, and shorten no deadline."""
        events = (hold.watch_at() for hold in list(self.holds.values()) if hold.renew)
        return max(min(events, default=NEVER), now + LEAST_RENEWAL_SECONDS)

    def _apply(self, due: list[Hold], grants: list[Grant], answer: Renewal, sent: float) -> None:
        """Applies the answer to a batch of renewals that was sent at ``sent``, but for losses."""
        now = self.runtime.now()
        since = sent if answer.since is None else min(sent, answer.since)
        for hold, grant in zip(due, grants, strict=True):
            claim = grant.claim
            if claim.owner in answer.lost:
                continue
            if claim.owner in answer.unknown:
                hold.cause = answer.unknown[claim.owner]
                # A hold from a direct grant has less time left than its ttl says.
                left = min(claim.ttl, MOST_LEFT_SECONDS, hold.ends - now)
                pause = self.runtime.between(*RENEWAL_RETRY_SHARE) * left
                hold.renew_at = now + max(SHORTEST_RETRY_SECONDS, pause)
            elif now < hold.ends and hold.state is State.HELD:
                hold.extended(since)

    async def _apply_losses(
        self, due: list[Hold], grants: list[Grant], lost: dict[str, str]
    ) -> None:
        """Loses what the store no longer has. Called after ``_apply``: the store may take a while
        to tell the reasons, and what was renewed must not wait for that."""
        until = self._reasons_until() if lost else NEVER
        for hold, grant in zip(due, grants, strict=True):
            reason = lost.get(grant.claim.owner)
            if reason is not None:
                self.lose_and_undo(hold, await self._why_lost(hold, grant, reason, until))

    def _release_dropped(self, hold: Hold) -> None:
        if self.remove(hold):
            hold.state = State.RELEASED
            self.undo(hold.grant.claim, landed=True)
            if hold.use is not None:
                hold.use.events.released(hold, None, later=True)

    async def _undo_due(self) -> None:
        now = self.runtime.now()
        if not self.undoing or now < self._undo_again_at:
            return
        self._drop_over_undos(now)
        due = [item for item in list(self.undoing.items()) if item[1].at <= now]
        # What is known to be stored before what may be. First undos before repeated ones: those may
        # still be held. The newest before the others: part of a store may be unreachable, and with
        # it the claims that failed long ago.
        due.sort(
            key=lambda each: (each[1].failures, not each[1].landed, each[1].times, -each[1].at)
        )
        failed = 0
        pressing = min((hold.next_at() for hold in list(self.holds.values())), default=NEVER)
        for owner, undo in due:
            # A slow store must not delay the renewal of a hold, also of a hold added since.
            # A store that hangs gets a moment, but not beyond the time when a hold is doubtful.
            now = self.runtime.now()
            until = min(self._request_until(now), max(pressing, now + LEAST_UNDO_SECONDS))
            failed += not await self._undo_one(owner, undo, until)
            now = self.runtime.now()
            partly = now < self._answered_at + PARTLY_REACHED_SECONDS
            if failed > (MOST_FAILED_UNDOS if partly else 0):
                delay = UNDO_BACKOFF.delay(self._undo_tries, self.runtime.between)
                self._undo_again_at = now + delay
                return
            if min([pressing, *self.plans]) <= now or self.closing:
                return

    def _drop_over_undos(self, now: float) -> None:
        """During an outage: drops undos whose claims have ended in the store by themselves."""
        # Where the store can glance, they end with a connection, perhaps much later.
        if self._glances is not None:
            return
        for owner, undo in list(self.undoing.items()):
            gone_at = undo.gone_at
            if self._sessions:  # some stores keep a session for twice its ttl
                gone_at = max(gone_at, self._answered_at + 2 * _longest_life(undo.claim))
            failing = undo.failures or self._undo_tries
            if failing and now >= gone_at and self.undoing.get(owner) is undo:
                del self.undoing[owner]

    async def _undo_one(self, owner: str, undo: Undo, until: float) -> bool:
        """Sends one undo; returns whether the store could be reached."""
        sent = self.runtime.now()
        try:
            await self.backend.abandon(undo.claim, until=until)
        except Exception as error:  # noqa: BLE001 - retried, whatever the error is
            name, store = undo.claim.name, self.display
            about = {"event": "undoing", "store": store, "name": name}
            log.debug("undoing %r on %s: %s", name, store, error, part="renew", **about)
            if self.events is not None:
                self.events.unanswered("abandon", sent, error)
            return self._undo_failed(owner, undo, isinstance(error, BackendUnavailable))
        self.answered(sent, operation="abandon")
        self._undo_tries = 0
        times = undo.times + 1
        if self.undoing.get(owner) is not undo:
            return True
        if undo.landed or times == len(UNDO_TIMES_SECONDS):
            del self.undoing[owner]
        else:
            at = self.runtime.now() + UNDO_TIMES_SECONDS[times]
            self.undoing[owner] = undo._replace(at=at, times=times, failures=0)
        return True

    def _undo_failed(self, owner: str, undo: Undo, unreachable: bool) -> bool:
        """Plans the next try of this undo; returns whether the store could be reached."""
        again = self.runtime.now()
        if unreachable:
            self._undo_tries += 1
            again += UNDO_BACKOFF.delay(undo.failures + 1, self.runtime.between)
        else:
            again += self.runtime.between(*UNDO_RETRY_SECONDS)
        if self.undoing.get(owner) is undo:
            self.undoing[owner] = undo._replace(at=again, failures=undo.failures + 1)
        return not unreachable

    def _next_at(self) -> float:
        times = [self._check_at(hold) for hold in list(self.holds.values())]
        if self.undoing:
            first = min([undo.at for undo in list(self.undoing.values())], default=NEVER)
            times.append(max(first, self._undo_again_at))
        if self.waits:
            times.append(min(self.refreshed_at + REFRESH_SECONDS, self._recount_at))
        else:
            self._recount_at = NEVER
        if self.holds and self._glances is not None:
            times.append(self.runtime.now() + GLANCE_SECONDS)
        return min(times, default=NEVER)

    def _check_at(self, hold: Hold) -> float:
        soon = self.runtime.now() + HANDLE_CHECK_SECONDS
        if not hold.has_handle():
            return soon
        if any(hold.pending_changes()):  # the extend plans the next renewal, unless interrupted
            return min(hold.watch_at(), max(hold.renew_at, soon))
        return hold.next_at()

    def _named(self, hold: Hold) -> str:
        return f"{hold.grant.claim.name} on {self.display}"

    async def finish(self, *, background: bool = False) -> None:
        """At the end of the client: releases all holds, removes all waiters, does all undos. On a
        store that does not answer it ends at ``finish_by``, however many there are; a few seconds
        later in the ``background``, because part of the store may answer."""
        more = LONGEST_FINISH_SECONDS if background else 0.0
        self.close()
        self._log_losses()
        for hold in list(self.holds.values()):
            if self.remove(hold):
                self.declare_lost(hold, "its client was closed")
                self.undo(hold.grant.claim, landed=True)
        for claim, _ in list(self.waits.values()):
            self.undo(claim, landed=True)
        undos = sorted(self.undoing.values(), key=lambda undo: not undo.landed)
        self.undoing.clear()
        failure: Exception | None = None
        for undo in undos:
            sent = self.runtime.now()
            try:
                if failure is not None and sent >= self.finish_by + more:
                    raise failure  # the store hangs: do not wait as long for each claim
                # If ``close`` has stopped waiting, one more try in the background costs nothing.
                until = max(self.finish_by, sent + FINISH_SECONDS)
                await self.backend.abandon(undo.claim, until=until)
                self.answered(sent, operation="abandon")
            except Exception as error:  # noqa: BLE001 - the others are to be released too
                failure = error
                # Of a claim of unknown outcome the caller has got an error: debug is enough.
                write = log.warning if undo.landed else log.debug
                write("could not release %r on %s: %s", undo.claim.name, self.display, error)
        if failure is None:  # so that its connections and sessions can be closed, too
            self.finish_by = self.runtime.now() + self.finish_seconds()


def _longest_life(claim: Claim) -> float:
    """How long a claim can be stored after its last request was sent, if nothing renews it."""
    return LATEST_ARRIVAL_SECONDS + 1.01 * max(claim.ttl, STALE_SECONDS)


def _because(cause: str) -> str:
    return f": {cause}" if cause else ""
