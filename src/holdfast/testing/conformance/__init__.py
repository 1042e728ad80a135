"""What every store must do, as a user sees it: the rules of Holdfast through both doors.

>>> from holdfast.testing import Flavour, Harness, conformance
>>> class Memory(Harness):
...     name, url, between_processes = "memory", "memory://", False
>>> conformance.run(conformance.RULES["holding.a_block_is_held"], Memory(), Flavour.ASYNCIO)
"""

from __future__ import annotations

import asyncio

from holdfast.testing.conformance import (
    cancelling,
    closing,
    crashing,
    elections,
    failing,
    holding,
    inspecting,
    jobs,
    keeping,
    several,
    sharing,
    slots,
    waiting,
)
from holdfast.testing.conformance.bench import Bench, conformance
from holdfast.testing.harness import Harness
from holdfast.testing.rules import Flavour, Rule

__all__ = ["RULES", "Bench", "run"]

RULES = conformance
_THEMES = (
    holding,
    waiting,
    keeping,
    sharing,
    slots,
    several,
    elections,
    jobs,
    inspecting,
    closing,
    cancelling,
    failing,
    crashing,
)

LONGEST_RULE_SECONDS = 120.0


def run(rule: Rule[Bench], harness: Harness, flavour: Flavour) -> None:
    """Runs one rule on a running store through one door; raises what it found."""
    asyncio.run(_run(rule, harness, flavour))


async def _run(rule: Rule[Bench], harness: Harness, flavour: Flavour) -> None:
    bench = Bench(harness, flavour)
    try:
        async with asyncio.timeout(LONGEST_RULE_SECONDS):
            await rule.body(bench)
    finally:
        if rule.knobs:
            harness.heal()
        await bench.close()
