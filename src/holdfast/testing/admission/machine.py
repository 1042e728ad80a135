"""Draws requests for a ``Comparison``: a state machine of Hypothesis.

>>> from holdfast.testing import Flavour, Harness
>>> from holdfast.testing.admission import machine
>>> class Memory(Harness):
...     name, url, between_processes = "memory", "memory://", False
>>> machine.run(machine.Surroundings(Memory(), Flavour.BLOCKING), examples=2, steps=10)
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import ClassVar, NamedTuple

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

from holdfast.claim import Mode
from holdfast.core.contract import Guarantee
from holdfast.testing.admission.comparison import LONG, ComparedClaim, Comparison, Surroundings

__all__ = ["Surroundings", "run"]

NAMES = ("a", "b", "slots")
LIMIT = 3
TTLS = (LONG - 10.0, LONG, LONG + 10.0)
TIMES = (0.01, 0.3, 1.9, 2.1, 14.9, 15.1, LONG - 0.1, LONG + 0.1)
"""Under virtual time: around the ends of reservations, of waiters and of holds."""


class Request(NamedTuple):
    """What is drawn for one step. Each kind of request uses some of it."""

    kind: str
    name: str
    reads: bool
    weight: int
    other: int
    """1: a claim of the other kind; 2: another limit."""
    client: int
    join: bool
    choice: int
    """Which of the claims so far, counted from the newest."""
    by_renewer: bool
    shorten: bool
    ttl: float
    behind: int
    seconds: float
    chance: int


OFTEN = ("attempt", "attempt", "attempt", "come", "release", "release", "exchange")
ALL = (*OFTEN, "again", "renew", "extend", "abandon", "revoke", "record", "expire", "advance")
REQUESTS = st.builds(
    Request,
    kind=st.sampled_from(ALL),
    name=st.sampled_from(NAMES),
    reads=st.booleans(),
    weight=st.integers(1, LIMIT),
    other=st.integers(0, 9),
    client=st.integers(0, 2),
    join=st.sampled_from((True, True, True, False)),
    choice=st.integers(0, 9),
    by_renewer=st.booleans(),
    shorten=st.booleans(),
    ttl=st.sampled_from(TTLS),
    behind=st.integers(0, 3),
    seconds=st.sampled_from(TIMES),
    chance=st.integers(1, 100),
)


class _Machine(RuleBasedStateMachine):
    """Claims that are over are chosen as well: requests arrive late and twice.

    Which requests are drawn does not depend on the answers: a store may answer otherwise when the
    same requests are sent again. A request that finds no claim to be about is a new attempt."""

    at: ClassVar[Surroundings]
    rare: ClassVar[int]

    def __init__(self) -> None:
        super().__init__()
        self.compared = Comparison(self.at)

    def teardown(self) -> None:
        self.compared.close()

    @rule(request=REQUESTS)
    def send(self, request: Request) -> None:
        if not self.compared.void:
            getattr(self, f"_{request.kind}")(request)

    def _claims(self) -> list[ComparedClaim]:
        return list(self.compared.claims.values())

    def _granted(self) -> list[ComparedClaim]:
        """The claims that hold, or have held."""
        return [one for one in self._claims() if one.grant is not None]

    def _about(
        self,
        request: Request,
        claims: list[ComparedClaim],
        send: Callable[[ComparedClaim], None],
    ) -> None:
        if claims:
            send(claims[-1 - request.choice % len(claims)])
        else:
            self._attempt(request)

    def _shared_or_exclusive(self, request: Request) -> Mode:
        shared = request.reads and Guarantee.SHARED in self.at.guarantees
        return Mode.SHARED if shared else Mode.EXCLUSIVE

    def _new(self, request: Request) -> ComparedClaim:
        """A claim that suits its name; some are of the other kind, or have another limit."""
        mode, weight, limit = self._shared_or_exclusive(request), 1, 0
        slots = (request.name == "slots") != (request.other == 1)
        if slots and Guarantee.SLOTS in self.at.guarantees:
            mode, weight, limit = Mode.SLOTS, request.weight, LIMIT + (request.other == 2)
        return self.compared.claim(
            request.name,
            mode,
            client=request.client,
            weight=weight,
            limit=limit,
            join=request.join,
        )

    def _attempt(self, request: Request) -> None:
        self.compared.attempt(self._new(request))

    def _again(self, request: Request) -> None:
        send = partial(self.compared.attempt, by_renewer=request.by_renewer)
        self._about(request, self._claims(), send)

    def _come(self, request: Request) -> None:
        woken = [one for one in self._claims() if self.compared.has_turn(one)]
        self._about(request, woken, self.compared.come)

    def _release(self, request: Request) -> None:
        send = partial(self.compared.release, by_renewer=request.by_renewer)
        self._about(request, self._granted(), send)

    def _exchange(self, request: Request) -> None:
        self._about(request, self._granted(), partial(self._exchange_with_next, request))

    def _exchange_with_next(self, request: Request, one: ComparedClaim) -> None:
        """With a waiter of the same client and name, or with a claim that has not waited."""
        for other in self._claims():
            same = other.claim.name == one.claim.name and other.client is one.client
            if same and other is not one and self.compared.waits(other):
                self.compared.exchange(one, other)
                return
        mode, weight = one.claim.mode, request.weight
        if mode is not Mode.SLOTS:
            mode, weight = self._shared_or_exclusive(request), 1
        limit, client = one.claim.limit, self.at.clients.index(one.client)
        name = self.compared.name_of(one)
        following = self.compared.claim(name, mode, client=client, weight=weight, limit=limit)
        self.compared.exchange(one, following)

    def _renew(self, request: Request) -> None:
        """A batch: of some claims, holding or waiting or over."""
        claims = self._claims()
        batch = [one for number, one in enumerate(claims) if (number + request.choice) % 3]
        self.compared.renew(batch, request.behind)

    def _extend(self, request: Request) -> None:
        send = partial(self.compared.extend, ttl=request.ttl, shorten=request.shorten)
        self._about(request, self._granted(), send)

    def _abandon(self, request: Request) -> None:
        send = partial(self.compared.abandon, by_renewer=request.by_renewer)
        self._about(request, self._claims(), send)

    def _revoke(self, request: Request) -> None:
        self.compared.revoke(request.name, request.client)

    def _record(self, request: Request) -> None:
        send = partial(self.compared.record, value=str(request.behind))
        self._about(request, self._granted(), send)

    def _expire(self, request: Request) -> None:
        """Rare: it takes as long as the shortest ttl of the store."""
        if not self.at.virtual and request.chance <= self.rare:
            one = self._new(request._replace(weight=1, other=0, join=False))
            self.compared.expire(request.name, one.claim.mode, limit=one.claim.limit)
        else:
            self._attempt(request)

    def _advance(self, request: Request) -> None:
        if self.at.virtual:
            self.compared.advance(request.seconds)
        else:
            self._attempt(request)


def run(
    surroundings: Surroundings,
    *,
    examples: int,
    steps: int,
    rare: int = 3,
    search: bool = False,
) -> None:
    """Runs so many examples of so many requests each; raises ``AssertionError`` with the requests
    to which a store answers otherwise than the reference.

    The examples are always the same ones. With ``search`` they are others each time, and a fault is
    reduced to the fewest requests, which may take minutes on a slow store. ``rare`` is how often,
    in percent, a hold is left to expire in real time."""
    kind = type("AdmissionMachine", (_Machine,), {"at": surroundings, "rare": rare})
    chosen = settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        derandomize=not search,
        database=None,
        phases=[Phase.generate, Phase.shrink] if search else [Phase.generate],
        report_multiple_bugs=False,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    run_state_machine_as_test(kind, settings=chosen)
