"""What every store must do, as a user sees it: the rules of Holdfast through both clients.

>>> from holdfast.testing import Flavour, Harness, conformance
>>> class Memory(Harness):
...     name, url, between_processes = "memory", "memory://", False
>>> conformance.run(conformance.RULES["holding.a_block_is_held"], Memory(), Flavour.ASYNCIO)
"""

from __future__ import annotations

from holdfast.testing.conformance import (
    cancelling,
    closing,
    crashing,
    elections,
    failing,
    handing,
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

__all__ = ["RULES", "Bench", "cases", "run"]

RULES = conformance
cases, run = RULES.cases, RULES.run
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
    handing,
)
