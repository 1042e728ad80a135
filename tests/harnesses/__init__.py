"""The stores under test, one file each: each module lists its ``HARNESSES``.

``HOLDFAST_STORES=redis,etcd`` runs these alone.
"""

from __future__ import annotations

import importlib
import os
import pkgutil

from holdfast.testing import Harness

__all__ = ["harness_classes", "modules"]


def modules() -> list[str]:
    """The names of the files in this folder."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def harness_classes() -> dict[str, type[Harness]]:
    """Every harness by its name; a store without one is missed by the shape tests."""
    found: dict[str, type[Harness]] = {}
    for name in modules():
        module = importlib.import_module(f"{__name__}.{name}")
        for harness in getattr(module, "HARNESSES", ()):
            found[harness.name] = harness
    chosen = os.environ.get("HOLDFAST_STORES")
    if chosen:
        found = {name: found[name] for name in chosen.split(",")}
    return found
