"""What every backend must do, below the clients: the contract of ``holdfast.core.contract``.

>>> from holdfast.testing import Flavour, Harness, contract
>>> class Memory(Harness):
...     name, url, between_processes = "memory", "memory://", False
>>> contract.run(contract.RULES["taking.tokens_grow"], Memory(), Flavour.BLOCKING)
"""

from __future__ import annotations

from holdfast.testing.contract import (
    ending,
    handing,
    keeping,
    line,
    looking,
    sharing,
    slots,
    taking,
)
from holdfast.testing.contract.bench import Bench, Peer, contract

__all__ = ["RULES", "Bench", "Peer", "cases", "run"]

RULES = contract
cases, run = RULES.cases, RULES.run
_THEMES = (taking, line, keeping, sharing, slots, looking, ending, handing)
