"""Compares a store with ``core.queue``, step by step.

``comparison`` sends each request to the store and to the reference, and raises ``AssertionError``
where the answers differ. ``machine`` draws the requests; it needs the package ``hypothesis``.
``DIFFERENCES`` lists what a store may do otherwise, because its page says so.

>>> from holdfast.testing import Flavour, Harness, admission
>>> class Memory(Harness):
...     name, url, between_processes = "memory", "memory://", False
>>> with admission.Comparison(admission.Surroundings(Memory(), Flavour.BLOCKING)) as compared:
...     first = compared.claim("name", client=0)
...     compared.attempt(first)
...     second = compared.claim("name", client=1)
...     compared.attempt(second)
...     compared.release(first)
...     compared.come(second)
"""

from __future__ import annotations

from holdfast.testing.admission.comparison import (
    ComparedClaim,
    Comparison,
    Surroundings,
    VirtualClock,
)
from holdfast.testing.admission.differences import DIFFERENCES, Difference

__all__ = [
    "DIFFERENCES",
    "ComparedClaim",
    "Comparison",
    "Difference",
    "Surroundings",
    "VirtualClock",
]
