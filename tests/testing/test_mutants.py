"""The contract suite catches broken stores: each mutant of the memory store fails its rule."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest

from harnesses.memory import MemoryHarness
from holdfast.claim import Busy, Claim, Grant, Mode, Record
from holdfast.core import admit
from holdfast.core.contract import Guarantee, Page, Renewal
from holdfast.core.queue import MICROS, HeldClaim, NameState, QueuedClaim
from holdfast.errors import BackendUnavailable
from holdfast.stores.memory import Ledger, MemoryBackend, MemoryStore
from holdfast.testing import Flavour, conformance, contract
from holdfast.testing import harness as testing_harness
from holdfast.testing.conformance import bench as conformance_bench
from holdfast.testing.contract import keeping, line

Patch = pytest.MonkeyPatch
MUTANTS: dict[str, tuple[str, Callable[[Patch], None]]] = {}


def mutant(rule: str) -> Callable[[Callable[[Patch], None]], Callable[[Patch], None]]:
    """A way to break the store, and the rule that must notice."""

    def add(patch: Callable[[Patch], None]) -> Callable[[Patch], None]:
        MUTANTS[patch.__name__] = rule, patch
        return patch

    return add


def change(patch: Patch, owner: Any, word: str, make: Callable[[Any], Any]) -> None:
    """Puts something in the place of a method, made from the method."""
    patch.setattr(owner, word, make(getattr(owner, word)))


@mutant("taking.nobody_releases_another_s_hold")
def release_ignores_the_owner(patch: Patch) -> None:
    def release(self: NameState[Any], owner: str, now: int) -> bool:
        return bool(self.revoke(now))

    patch.setattr(NameState, "release", release)


@mutant("taking.tokens_grow")
def tokens_start_over(patch: Patch) -> None:
    def make(grant: Callable[..., Grant]) -> Callable[..., Grant]:
        return lambda *args: grant(*args)._replace(token=1)

    change(patch, NameState, "_grant", make)


@mutant("taking.a_held_name_is_busy")
def everything_fits(patch: Patch) -> None:
    patch.setattr(admit, "fits", lambda *_: True)


@mutant("taking.an_owner_gets_the_same_grant_again")
def a_retry_is_a_stranger(patch: Patch) -> None:
    def make(attempt: Callable[..., Grant | Busy]) -> Callable[..., Grant | Busy]:
        def strange(self: NameState[Any], claim: Claim, *rest: Any, **more: Any) -> Grant | Busy:
            return attempt(self, claim._replace(owner=secrets.token_hex()), *rest, **more)

        return strange

    change(patch, NameState, "attempt", make)


@mutant("taking.not_joining_leaves_no_trace")
def everybody_joins(patch: Patch) -> None:
    def make(wait: Callable[..., str]) -> Callable[..., str]:
        return lambda self, claim, now, join, wall: wait(self, claim, now, True, wall)

    change(patch, NameState, "_wait", make)


@mutant("taking.names_do_not_touch")
def names_fold_case(patch: Patch) -> None:
    def make(name: Callable[..., Any]) -> Callable[..., Any]:
        return lambda self, key: name(self, key.lower())

    change(patch, MemoryBackend, "_name", make)


@mutant("taking.declares_what_the_table_says")
def a_promise_is_dropped(patch: Patch) -> None:
    patch.setattr(MemoryStore, "guarantees", MemoryStore.guarantees - {Guarantee.RECORDS})


@mutant("taking.release_says_whether_it_was_ours")
def release_always_says_yes(patch: Patch) -> None:
    def make(release: Callable[..., bool]) -> Callable[..., bool]:
        return lambda self, owner, now: release(self, owner, now) or True

    change(patch, NameState, "release", make)


@mutant("line.nobody_barges_in")
def nobody_is_in_front(patch: Patch) -> None:
    patch.setattr(NameState, "_ahead_of", lambda self, owner: [])


@mutant("line.a_release_wakes_the_waiter")
def nobody_is_woken(patch: Patch) -> None:
    patch.setattr(Ledger, "wake", lambda self, state: None)


@mutant("line.who_does_not_come_is_skipped")
def nobody_is_skipped(patch: Patch) -> None:
    patch.setattr(QueuedClaim, "is_over", lambda self, now: False)


@mutant("line.abandoning_leaves_no_trace")
def abandoning_forgets_the_line(patch: Patch) -> None:
    def abandon(self: NameState[Any], owner: str, now: int) -> None:
        self.holds.pop(owner, None)

    patch.setattr(NameState, "abandon", abandon)


@mutant("line.abandoning_a_hold_lets_the_next_in")
def abandoning_forgets_the_hold(patch: Patch) -> None:
    def abandon(self: NameState[Any], owner: str, now: int) -> None:
        self.queue.pop(owner, None)

    patch.setattr(NameState, "abandon", abandon)


@mutant("line.exchange_hands_over")
def exchange_keeps_the_hold(patch: Patch) -> None:
    async def exchange(
        self: MemoryBackend, grant: Grant, claim: Claim
    ) -> tuple[bool, Grant | Busy]:
        return True, await self.attempt(claim, join=True)

    patch.setattr(MemoryBackend, "exchange", exchange)


@mutant("line.exchange_does_not_deafen_a_waiter")
def exchange_replaces_the_signal(patch: Patch) -> None:
    def deafening(self: MemoryBackend, state: NameState[Any], claim: Claim) -> None:
        if claim.owner in state.queue:
            state.queue[claim.owner].wake = self.runtime.signal()

    patch.setattr(MemoryBackend, "_prepare_wake", deafening)


@mutant("line.a_nudge_ends_a_wait")
def nudges_are_not_heard(patch: Patch) -> None:
    patch.setattr(MemoryBackend, "nudge", lambda self, claim: None)


@mutant("keeping.a_hold_ends_with_its_ttl")
def holds_never_end(patch: Patch) -> None:
    def make(start: Callable[..., None]) -> Callable[..., None]:
        return lambda self, *args: start(self, *args[:-1], args[-1] + 1000 * MICROS)

    change(patch, HeldClaim, "__init__", make)


@mutant("keeping.a_hold_ends_with_its_ttl")
def holds_end_early(patch: Patch) -> None:
    def make(start: Callable[..., None]) -> Callable[..., None]:
        def early(self: HeldClaim, claim: Claim, *args: Any) -> None:
            start(self, claim, *args[:-1], args[-1] - int(claim.ttl / 2 * MICROS))

        return early

    change(patch, HeldClaim, "__init__", make)


@mutant("keeping.renewing_never_revives")
def renewing_takes_the_name_again(patch: Patch) -> None:
    async def renew(self: MemoryBackend, grants: Iterable[Grant], *_: Any, **__: Any) -> Renewal:
        for grant in grants:
            claim = grant.claim
            state, now = self._state(claim.name)
            held = HeldClaim(claim, grant.token, grant.slots, now, now + int(claim.ttl * MICROS))
            state.holds[claim.owner] = held
        return Renewal()

    patch.setattr(MemoryBackend, "renew", renew)


@mutant("keeping.renewing_keeps_a_hold")
def renewing_does_nothing(patch: Patch) -> None:
    async def renew(self: MemoryBackend, *_: Any, **__: Any) -> Renewal:
        return Renewal()

    patch.setattr(MemoryBackend, "renew", renew)


@mutant("keeping.revoking_ends_a_hold")
def revoking_spares_the_holder(patch: Patch) -> None:
    async def revoke(self: MemoryBackend, name: str) -> list[int]:
        return [held.token for held in self._state(name)[0].holds.values()]

    patch.setattr(MemoryBackend, "revoke", revoke)


@mutant("sharing.a_waiting_writer_is_not_overtaken")
def readers_overtake(patch: Patch) -> None:
    def make(fits: Callable[..., bool]) -> Callable[..., bool]:
        return lambda mode, *rest: mode is Mode.SHARED or fits(mode, *rest)

    change(patch, admit, "fits", make)


@mutant("sharing.readers_hold_together")
def readers_are_alone(patch: Patch) -> None:
    def make(fits: Callable[..., bool]) -> Callable[..., bool]:
        return lambda mode, weight, limit, taken: not taken

    change(patch, admit, "fits", make)


@mutant("slots.slots_are_distinct")
def slots_are_given_twice(patch: Patch) -> None:
    patch.setattr(admit, "free_slots", lambda weight, *_: tuple(range(weight)))


@mutant("slots.a_limit_binds_while_in_use")
def limits_are_not_compared(patch: Patch) -> None:
    patch.setattr(admit, "check_limit", lambda *_, **__: None)


@mutant("looking.a_record_needs_a_live_hold")
def anybody_records(patch: Patch) -> None:
    async def record(self: MemoryBackend, grant: Grant, value: str, renewer: float) -> bool:
        name, now = self._name(grant.claim.name), self.ledger.now()
        name.record = (Record(value, grant.token, 0.0), now, now + renewer)
        return True

    patch.setattr(MemoryBackend, "record", record)


@mutant("looking.a_survey_finds_all_in_pages")
def the_last_page_is_lost(patch: Patch) -> None:
    def make(survey: Callable[..., Any]) -> Callable[..., Any]:
        async def first_page(self: MemoryBackend, *args: Any) -> Page:
            page: Page = await survey(self, *args)
            return page._replace(cursor=None)

        return first_page

    change(patch, MemoryBackend, "survey", make)


TRIES = 5


@pytest.mark.parametrize("name", list(MUTANTS))
def test_a_broken_store_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rule, patch = MUTANTS[name]
    contract.run(contract.RULES[rule], MemoryHarness(), Flavour.BLOCKING)
    # Nobody needs long here: what does not come at once never comes.
    for module in (line, keeping):
        monkeypatch.setattr(module, "SOON", 0.5)
    monkeypatch.setattr(line, "ACROSS", 1.0)
    patch(monkeypatch)
    with pytest.raises((AssertionError, TimeoutError)):
        _run_often(rule)


def _run_often(rule: str) -> None:
    """A machine that stands still can hide one run: what ended early is then not seen early."""
    for _ in range(TRIES):
        contract.run(contract.RULES[rule], MemoryHarness(), Flavour.BLOCKING)


@pytest.mark.parametrize("silent", [False, True])
@pytest.mark.parametrize(
    "rule", ["keeping.a_hold_outlives_its_ttl", "several.what_is_held_is_renewed_meanwhile"]
)
def test_a_hold_that_is_not_renewed_is_caught(
    rule: str, silent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However often it is tried, whether its holder knows or not."""

    async def renew(self: MemoryBackend, *_: Any, **__: Any) -> Renewal:
        if silent:
            return Renewal()
        raise BackendUnavailable("nobody renews")

    monkeypatch.setattr(MemoryBackend, "renew", renew)
    monkeypatch.setattr(conformance_bench, "TRIES", 2)
    monkeypatch.setattr(testing_harness, "LEAST_KEPT_TTL", 0.3)
    with pytest.raises(AssertionError):
        conformance.run(conformance.RULES[rule], MemoryHarness(), Flavour.BLOCKING)


def test_a_harness_says_what_it_lacks() -> None:
    rule = contract.RULES["ending.a_restarted_server_goes_on"]
    assert rule.lacks(MemoryHarness(), list(Guarantee)) == "memory has no KILL"
    needy = replace(rule, needs=frozenset({Guarantee.FIFO}), knobs=frozenset())
    assert needy.lacks(MemoryHarness(), []) == "memory has no FIFO"
    assert needy.lacks(MemoryHarness(), [Guarantee.FIFO]) == ""
