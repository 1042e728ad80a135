"""Every schedule of a small Redis store with direct grants: certain times of two holders never
overlap, and tokens differ and grow.

One client holds the lock, two more want it. Requests arrive late or in any order, replies get lost,
a server refuses to write, wake-ups arrive late or not at all, holds expire, waiters give up. The
rules are those of ``lua/`` and of ``core``, on a clock of a few ticks. Variants that are known to
be wrong must be caught: that shows that the check works.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pytest

CLIENTS = (0, 1, 2)
NO_CLIENT = -1
LAST_TICK, TTL, DIRECT_TICKS = 4, 3, 2
IDLE, WAITING, HOLDING, OVER = range(4)
NOTHING, ATTEMPT, RENEWAL, RELEASE, LEAVING = range(5)


class Client(NamedTuple):
    """What one client knows, and its request in flight."""

    phase: int = IDLE
    asked: int = -1
    """The time at which its last attempt was sent."""
    certain: int = 0
    last: int = 0
    """The last token of the name, from the reply to its last attempt."""
    request: int = NOTHING
    sent: int = -1
    inbox: tuple[int, ...] = ()
    """Tokens of the wake-ups in flight to this client."""

    def plain(self) -> Client:
        """Without data that no longer matters, so that equivalent states are equal."""
        if self.phase == OVER:
            return Client(OVER, request=self.request)
        return self._replace(
            asked=self.asked if self.phase == WAITING else -1,
            last=self.last if self.phase == WAITING else 0,
            certain=self.certain if self.phase == HOLDING else 0,
        )


class Store(NamedTuple):
    holder: int = NO_CLIENT
    end: int = 0
    counter: int = 0
    queue: tuple[int, ...] = ()


class World(NamedTuple):
    now: int
    store: Store
    clients: tuple[Client, ...]
    granted: int
    """The token of the last hold that was entered."""

    def put(self, at: int, client: Client, store: Store | None = None) -> World:
        clients = (*self.clients[:at], client.plain(), *self.clients[at + 1 :])
        return self._replace(clients=clients, store=store or self.store)


class Wrong(Exception):
    """Two clients hold at once, a token is repeated, or an undelivered grant is kept."""


class Rules:
    """The rules of scripts and clients; a variant overrides one of them."""

    def token(self, store: Store, now: int) -> int:
        return max(store.counter + 1, now)

    def told_if_refused(self) -> bool:
        """Whether a wake-up is sent although the server refused to write the grant."""
        return False

    def certain_from(self, client: Client, now: int) -> int:
        return client.asked

    def believes(self, client: Client, token: int) -> bool:
        return token > client.last

    def takes_back(self) -> bool:
        """Whether an undelivered direct grant is undone."""
        return True

    # ---- the server

    def expired(self, store: Store, now: int) -> Store:
        return store._replace(holder=NO_CLIENT) if store.end <= now else store

    def granted(self, store: Store, at: int, end: int, now: int) -> Store:
        queue = tuple(each for each in store.queue if each != at)
        return Store(at, end, self.token(store, now), queue)

    def lands(self, world: World, at: int) -> Iterator[World]:
        """All outcomes of the request in flight of one client."""
        client, now = world.clients[at], world.now
        store, done = self.expired(world.store, now), client._replace(request=NOTHING)
        if client.request == ATTEMPT:
            yield from self._attempt(world, at, done, store)
        elif client.request == RENEWAL:
            if store.holder != at:
                yield world.put(at, done._replace(phase=OVER))
                return
            kept = store._replace(end=max(store.end, now + TTL))
            certain = max(client.certain, client.sent + TTL)
            yield world.put(at, done._replace(certain=certain), kept)
            yield world.put(at, done, kept)  # its reply is lost
        elif client.request == LEAVING:
            queue = tuple(each for each in store.queue if each != at)
            holder = NO_CLIENT if store.holder == at else store.holder
            yield world.put(at, done, store._replace(queue=queue, holder=holder))
        else:
            yield from self._release(world.put(at, done), at, store)

    def _attempt(self, world: World, at: int, client: Client, store: Store) -> Iterator[World]:
        asked = client._replace(asked=client.sent, phase=IDLE)
        if store.holder in (at, NO_CLIENT):
            # Waiters before it, if any, were not refreshed in time, and are skipped.
            held = store._replace(end=max(store.end, world.now + TTL))
            if store.holder == NO_CLIENT:
                held = self.granted(store._replace(queue=()), at, world.now + TTL, world.now)
            yield self.enters(world.put(at, asked, held), at, held.counter, client.sent + TTL)
            yield world.put(at, asked, held)  # its reply is lost
        if store.holder != at and (store.holder != NO_CLIENT or store.queue[:1] not in ((), (at,))):
            queue = store.queue if at in store.queue else (*store.queue, at)
            joined = store._replace(queue=queue)
            yield world.put(at, asked._replace(phase=WAITING, last=store.counter), joined)
            yield world.put(at, asked, joined)

    def _release(self, world: World, at: int, store: Store) -> Iterator[World]:
        if store.holder != at:
            yield world._replace(store=store)
            return
        refused = world
        free = store._replace(holder=NO_CLIENT)
        if store.queue:
            first = store.queue[0]
            direct = self.granted(free, first, world.now + DIRECT_TICKS, world.now)
            waiter = world.clients[first]
            woken = waiter._replace(inbox=(*waiter.inbox, direct.counter))
            yield world.put(first, woken, direct)
            if self.told_if_refused():
                refused = world.put(first, woken)
            undelivered = Store(NO_CLIENT, 0, direct.counter, store.queue[1:])
            yield world._replace(store=undelivered if self.takes_back() else direct)
        else:
            yield world._replace(store=free)
        yield refused

    # ---- the clients

    def enters(self, world: World, at: int, token: int, certain: int) -> World:
        """Enters a hold, unless its time is over already."""
        client = world.clients[at]
        if certain <= world.now:
            return world.put(at, client._replace(phase=IDLE))
        if token <= world.granted:
            raise Wrong(f"token {token} after {world.granted}")
        entered = client._replace(phase=HOLDING, certain=certain)
        return world.put(at, entered)._replace(granted=token)

    def hears(self, world: World, at: int) -> Iterator[World]:
        """A waiter receives one of the wake-ups in flight to it."""
        client = world.clients[at]
        for index, token in enumerate(client.inbox):
            rest = client._replace(inbox=client.inbox[:index] + client.inbox[index + 1 :])
            if self.believes(client, token):
                certain = self.certain_from(client, world.now) + DIRECT_TICKS
                yield self.enters(world.put(at, rest), at, token, certain)
            else:
                yield world.put(at, rest._replace(phase=IDLE))

    def acts(self, world: World, at: int) -> Iterator[World]:
        """All next steps of a client."""
        client, now = world.clients[at], world.now
        if client.request != NOTHING:
            yield from self.lands(world, at)
            return
        if client.phase in (IDLE, WAITING) and client.sent < now:
            yield world.put(at, client._replace(request=ATTEMPT, sent=now, phase=IDLE))
        if client.phase == WAITING:
            yield from self.hears(world, at)
            yield world.put(at, client._replace(request=LEAVING, phase=OVER, inbox=()))
        if client.phase == HOLDING:
            if client.sent < now:
                yield world.put(at, client._replace(request=RENEWAL, sent=now))
            yield world.put(at, client._replace(request=RELEASE, phase=OVER))

    def steps(self, world: World) -> Iterator[World]:
        for at in CLIENTS:
            yield from self.acts(world, at)
        if world.now < LAST_TICK:
            yield world._replace(now=world.now + 1)


def judge(world: World) -> None:
    """Raises ``Wrong`` if an invariant is broken."""
    sure = [c for c in world.clients if c.phase == HOLDING and c.certain > world.now]
    if len(sure) > 1:
        raise Wrong(f"two hold at once: {world}")
    store = world.store
    if store.holder != NO_CLIENT and store.end > world.now:
        holder = world.clients[store.holder]
        if holder.phase == WAITING and store.counter not in holder.inbox:
            raise Wrong(f"an undelivered grant is kept: {world}")


def check(rules: Rules) -> int:
    """Visits every schedule. Returns the number of states."""
    held = Client(HOLDING, certain=TTL, sent=0)
    first = World(0, Store(0, TTL, 1), (held, Client(), Client()), 1)
    seen, todo = {first}, [first]
    while todo:
        for world in rules.steps(todo.pop()):
            if world in seen:
                continue
            judge(world)
            seen.add(world)
            todo.append(world)
    return len(seen)


def test_no_schedule_has_two_holders() -> None:
    assert check(Rules()) > 10_000


class ToldBeforeWritten(Rules):
    def told_if_refused(self) -> bool:
        return True


class CertainFromTheWakeUp(Rules):
    def certain_from(self, client: Client, now: int) -> int:
        return now


class TokenFromTheClock(Rules):
    def token(self, store: Store, now: int) -> int:
        return now


class OldWakeUpsCount(Rules):
    def believes(self, client: Client, token: int) -> bool:
        return True


class UnheardGrantsStay(Rules):
    def takes_back(self) -> bool:
        return False


@pytest.mark.parametrize(
    "wrong",
    [
        ToldBeforeWritten,
        CertainFromTheWakeUp,
        TokenFromTheClock,
        OldWakeUpsCount,
        UnheardGrantsStay,
    ],
)
def test_a_wrong_rule_is_caught(wrong: type[Rules]) -> None:
    with pytest.raises(Wrong):
        check(wrong())
