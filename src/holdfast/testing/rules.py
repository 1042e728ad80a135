"""A rule is one test body, written once; a catalogue holds the rules of one level.

A body is a coroutine over a bench, whichever client or backend stands behind it. What a rule
needs of the store and of its harness is said where the rule is written, and nothing else
decides whether it runs. A ``Case`` is a rule in one of the two worlds: what a test runner runs.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from holdfast.core.contract import Guarantee
from holdfast.testing import loops
from holdfast.testing.guarantees import guarantees_of, hands_over
from holdfast.testing.harness import Harness, Knob

__all__ = ["Case", "Catalogue", "Flavour", "Rule"]

LONGEST_RULE_SECONDS = 120.0


class Flavour(enum.StrEnum):
    """Which of the two worlds drives a store."""

    BLOCKING = "blocking"
    ASYNCIO = "asyncio"


class Closing(Protocol):
    """What a bench must be able to do: end what a rule has begun."""

    async def close(self) -> None: ...


B = TypeVar("B", bound=Closing)


@dataclass(frozen=True, eq=False)
class Rule(Generic[B]):
    """One thing that every store must do."""

    name: str
    theme: str
    body: Callable[[B], Awaitable[None]]
    needs: frozenset[Guarantee]
    knobs: frozenset[Knob]
    between_processes: bool
    flavours: frozenset[Flavour]
    slow: bool
    """Whether it waits for long by nature (a request's time, a stale waiter's): for runs that
    have the time."""
    sleeps: bool
    """Whether it sleeps most of its time, and neither looks at nor touches what is not its own:
    rules that do can run at the same time, in threads."""
    hand_over: bool = False
    """Whether it hands a lease over."""

    def lacks(self, harness: Harness, guarantees: Collection[Guarantee]) -> str:
        """Why the rule does not apply to a store; empty if it does."""
        missing: list[str] = sorted(self.needs.difference(guarantees))
        missing += sorted(self.knobs - harness.knobs)
        if self.between_processes and not harness.between_processes:
            missing.append("other processes")
        if self.hand_over and not hands_over(harness):
            missing.append("hand-over")
        return f"{harness.name} has no {', '.join(missing)}" if missing else ""


@dataclass(frozen=True, eq=False)
class Case:
    """A rule in one world. ``str()`` is its name in a report."""

    rule: Rule[Any]
    flavour: Flavour
    _run: Callable[[Rule[Any], Harness, Flavour], None]

    def lacks(self, harness: Harness) -> str:
        """Why it does not apply to a running store; empty if it does."""
        return self.rule.lacks(harness, guarantees_of(harness))

    def run(self, harness: Harness) -> None:
        """Runs it on a running store; raises what it found."""
        self._run(self.rule, harness, self.flavour)

    def __str__(self) -> str:
        return f"{self.flavour}-{self.rule.name}"


class Catalogue(Generic[B]):
    """The rules of one level, in the order in which they were written."""

    def __init__(self, bench: Callable[[Harness, Flavour], B]) -> None:
        self._bench = bench
        self._rules: dict[str, Rule[B]] = {}

    def __iter__(self) -> Iterator[Rule[B]]:
        return iter(self._rules.values())

    def __len__(self) -> int:
        return len(self._rules)

    def __getitem__(self, name: str) -> Rule[B]:
        return self._rules[name]

    def cases(self) -> list[Case]:
        """Every rule in every world that it is for."""
        return [
            Case(rule, flavour, self.run)
            for flavour in Flavour
            for rule in self
            if flavour in rule.flavours
        ]

    def run(self, rule: Rule[B], harness: Harness, flavour: Flavour) -> None:
        """Runs one rule on a running store; raises what it found."""
        loops.run(self._play(rule, harness, flavour))

    async def _play(self, rule: Rule[B], harness: Harness, flavour: Flavour) -> None:
        bench = self._bench(harness, flavour)
        try:
            async with asyncio.timeout(LONGEST_RULE_SECONDS):
                await rule.body(bench)
        finally:
            if rule.knobs:
                harness.heal()
            await bench.close()

    def rule(
        self,
        *needs: Guarantee,
        knobs: Iterable[Knob] = (),
        between_processes: bool = False,
        flavours: Iterable[Flavour] = tuple(Flavour),
        slow: bool = False,
        sleeps: bool = False,
        hand_over: bool = False,
    ) -> Callable[[Callable[[B], Awaitable[None]]], Callable[[B], Awaitable[None]]]:
        """Adds the decorated body under its own name."""

        def add(body: Callable[[B], Awaitable[None]]) -> Callable[[B], Awaitable[None]]:
            theme = body.__module__.rpartition(".")[2]
            name = f"{theme}.{body.__name__}"
            if name in self._rules:
                raise ValueError(f"two rules are called {name}")
            self._rules[name] = Rule(
                name,
                theme,
                body,
                frozenset(needs),
                frozenset(knobs),
                between_processes,
                frozenset(flavours),
                slow,
                sleeps,
                hand_over,
            )
            return body

        return add
