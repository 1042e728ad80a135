"""What both clients have inside: the store's backend, the renewer, the lines, who holds what."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from weakref import WeakMethod, ref

from holdfast.claim import Claim, FenceKeys, Grant, write_label
from holdfast.core import log
from holdfast.core.contract import Backend, Runtime, Store
from holdfast.core.hold import Ask, Hold, State
from holdfast.core.local_queue import Lines, Turn
from holdfast.core.renewer import Renewer
from holdfast.errors import HoldfastError

__all__ = ["Engine"]

KEPT_LABELS = 1024
SETTLED_SECONDS = 6.0
"""After so long a request has arrived, or never will."""
PROMPT_SECONDS = 0.25
"""How long a cancelled acquire waits for its own undoing before it goes on without."""


class Engine:
    """One connection to one store. ``core.acquire`` gets holds; the rest of them is here."""

    def __init__(
        self, store: Store, runtime: Runtime, renewer: Renewer, *, patience: float, epoch: int
    ) -> None:
        self.store, self.runtime, self.renewer = store, runtime, renewer
        self.patience, self.epoch = patience, epoch
        self.fence_keys = FenceKeys()
        self.backend: Backend = store.backend(runtime)
        self.lines = Lines(runtime)
        self.mine: dict[tuple[int, str], Hold] = {}
        """The newest hold of a thread or task and name: for re-entry and self-deadlocks."""
        self.releasing: set[str] = set()
        """Owners whose holds are just being released."""
        self.closed = False
        self.tell: Callable[[Callable[[str], object], str], None] = _tell_here
        """Has a callback called with a reason; never waits, and runs none of the user's code."""
        self.before_tell: Callable[[], None] = lambda: None
        """Before somebody asks to be told: raises if nobody could be."""
        self.who = "thread"
        """What holds through this client: a thread or a task."""
        self.on_enter: Callable[[Engine], None] | None = None
        self.on_fork: list[Callable[[], None]] = []
        self._labels: dict[tuple[str, str], str] = {}
        renewer.nudge = _weakly(WeakMethod(self.nudge))
        renewer.alive = runtime.alive  # the renewer lives among threads, and can't judge tasks

    def enter(self) -> None:
        """Before anything is asked of the store."""
        if self.closed:
            raise HoldfastError(f"this client to {self.store.display} is closed")
        if self.on_enter is not None:
            self.on_enter(self)

    def label(self, me: Hashable, note: str) -> str:
        """Who asks, for the store to keep and to tell others."""
        name = self.runtime.name_of(me)
        label = self._labels.get((name, note))
        if label is None:
            if len(self._labels) >= KEPT_LABELS:
                self._labels.clear()
            host, pid = self.runtime.where()
            label = self._labels[name, note] = write_label(host, pid, name, note)
        return label

    def nudge(self, claim: Claim) -> None:
        self.backend.nudge(claim)

    def take(self, grant: Grant, since: float, ask: Ask) -> Hold | None:
        """Makes a hold of a grant; ``None`` if its certain time is over already."""
        if grant.since is not None and grant.since < since:
            since = grant.since
        now = self.runtime.now()
        cap = None if ask.max_hold is None else now + ask.max_hold
        hold = Hold(grant, since, ask.renew, cap)
        if now >= hold.ends:
            return None
        hold.tell = self.tell
        self.renewer.add(hold)
        if self.closed:  # while the request was under way
            raise HoldfastError(f"this client to {self.store.display} was closed")
        return hold

    def release_local(self, hold: Hold) -> bool:
        """Ends a hold as far as this process goes; true for exactly one caller."""
        if not self.renewer.remove(hold):
            return False
        hold.state = State.RELEASED
        # Who re-enters makes its handle before it looks at the state, and we do the reverse: one
        # of the two sees the other, and if both do, the renewer finds it without a handle.
        if hold.nested and hold.handled():
            hold.state, hold.block = State.HELD, False
            self.renewer.add(hold)
            return False
        self.disown(hold)
        return True

    def disown(self, hold: Hold) -> None:
        """It no longer counts for re-entry."""
        key = hold.owned_as
        if key is not None and self.mine.get(key) is hold:
            self.mine.pop(key, None)

    def own(self, hold: Hold, me: Hashable) -> None:
        """It counts for re-entry by this thread or task."""
        hold.who = ref(me)
        hold.owned_as = key = id(me), hold.grant.claim.name
        self.mine[key] = hold

    def held_by(self, me: Hashable, name: str) -> Hold | None:
        """The newest hold of the name that this thread or task took."""
        hold = self.mine.get((id(me), name))
        return hold if hold is not None and hold.who() is me else None

    async def release(self, hold: Hold) -> bool | None:
        """Ends a hold; whether it was still ours, or ``None`` if the store did not tell."""
        claim = hold.grant.claim
        heir: Turn | None = None
        sent = self.runtime.now()
        try:  # from before it is let go: an interrupt anywhere in here is undone
            self.releasing.add(claim.owner)
            if not self.release_local(hold):
                return self._goes_on(hold)
            heir = self.lines.standing(claim.name)
            if heir is None:
                ours = await self.backend.release(hold.grant)
            else:
                ours, answer = await self.backend.exchange(hold.grant, heir.claim)
                await self._pass_on(heir, answer, sent)
        except HoldfastError as error:
            log.warning("releasing %r on %s failed: %s", claim.name, self.store.display, error)
            if heir is not None:
                self._unsure_of(heir)
            await self.undo(claim)
            if sent >= hold.ends:
                hold.lose("its certain time is over")
                return False
            return None
        except GeneratorExit:  # the loop is gone, and nothing can be awaited any more
            self.renewer.undo(claim)
            raise
        except BaseException:  # cancelled or interrupted: the request may or may not have landed
            if heir is not None:
                self._unsure_of(heir)
            await self.undo(claim)
            raise
        finally:
            self.releasing.discard(claim.owner)
        if not ours or sent >= hold.ends:
            hold.lose("its certain time is over" if ours else "the store had it no longer")
            return False
        return True

    def _goes_on(self, hold: Hold) -> bool:
        """Whether a hold that was not ours to end was re-entered: it ends with that handle. One
        that the renewer no longer has is just being lost."""
        if hold.state is State.HELD and self.renewer.holds.get(hold.grant.claim.owner) is hold:
            return True
        self.disown(hold)
        return False

    async def _pass_on(self, heir: Turn, answer: object, sent: float) -> None:
        if isinstance(answer, Grant):
            heir.answer = answer, sent
            self.backend.nudge(heir.claim)
        if not heir.gone or heir.claim.owner in self.renewer.holds:
            return
        # It left while the exchange was under way, which lined it up or let it in anew.
        if heir.claim.owner in self.releasing:
            # It had won by itself, and its own release is on its way: that goes first.
            self.renewer.undo(heir.claim, after=SETTLED_SECONDS, landed=True)
        else:
            await self.undo(heir.claim)

    def _unsure_of(self, heir: Turn) -> None:
        """An exchange was not answered: it may have let its heir in, or may still do so after the
        heir has left and was undone."""
        heir.unsure = True
        self.backend.nudge(heir.claim)
        if heir.gone and heir.claim.owner not in self.renewer.holds:
            self.renewer.undo(heir.claim, after=SETTLED_SECONDS if heir.served else 0.0)

    async def undo(self, claim: Claim) -> None:
        """Leaves no trace of a claim whose outcome is unknown, whatever happens to the caller."""
        hold = self.renewer.holds.get(claim.owner)
        if hold is not None:
            self.release_local(hold)
        if self.runtime.blocking:
            self.renewer.undo(claim)  # at once, on the renewer's thread: an interrupt can't stop it
            if self.closed:  # unless that has ended, or is about to
                await self._abandon(claim)
            return
        # In order behind the claim's own requests; the renewer stands by if the loop ends first.
        self.renewer.undo(claim, after=2.0)
        await self.runtime.finish(self._abandon(claim), PROMPT_SECONDS)

    async def _abandon(self, claim: Claim) -> None:
        try:
            await self.backend.abandon(claim)
        except HoldfastError as error:
            log.debug("undoing %r on %s: %s", claim.name, self.store.display, error)
        else:
            self.renewer.undone(claim)

    def forked(self) -> None:
        """In a forked child: it holds nothing and touches nothing of its parent's."""
        self._labels.clear()
        holds = list(self.renewer.holds.values())
        self.renewer.holds.clear()
        self.renewer.waits.clear()
        self.renewer.undoing.clear()
        self.renewer.dropped.clear()
        self.renewer.torn.clear()
        self.lines.clear()
        self.mine.clear()
        self.releasing.clear()
        for hold in holds:
            hold.callbacks, hold.on_doubt = [], None
            hold.lose("this process is a fork of the one that holds it")
        self.backend.forget()
        self.renewer.backend.forget()
        for hook in self.on_fork:
            hook()


def _weakly(method: WeakMethod[Callable[[Claim], None]]) -> Callable[[Claim], None]:
    """The renewer must not keep the client alive."""

    def call(claim: Claim) -> None:
        alive = method()
        if alive is not None:
            alive(claim)

    return call


def _tell_here(callback: Callable[[str], object], reason: str) -> None:
    callback(reason)
