"""What every backend must do, below the doors: the contract of ``holdfast.core.contract``.

>>> from holdfast.testing import Flavour, Harness, contract
>>> class Memory(Harness):
...     name, url, between_processes = "memory", "memory://", False
>>> contract.run(contract.RULES["taking.tokens_grow"], Memory(), Flavour.BLOCKING)
"""

from __future__ import annotations

import asyncio

from holdfast.testing.contract import ending, keeping, line, looking, sharing, slots, taking
from holdfast.testing.contract.bench import Bench, Peer, contract
from holdfast.testing.harness import Harness
from holdfast.testing.rules import Flavour, Rule

__all__ = ["RULES", "Bench", "Peer", "run"]

RULES = contract
_THEMES = (taking, line, keeping, sharing, slots, looking, ending)

LONGEST_RULE_SECONDS = 120.0


def run(rule: Rule[Bench], harness: Harness, flavour: Flavour) -> None:
    """Runs one rule on a running store; raises what it found."""
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
