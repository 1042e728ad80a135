"""Packages that only these tests need, from the extra ``dev``."""

from __future__ import annotations

import importlib
from types import ModuleType

import pytest

from servers.missing import required

__all__ = ["needed"]


def needed(name: str) -> ModuleType:
    """The module. A skip where it is not installed, or a failure where servers are required."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        if required():
            raise
        pytest.skip(f"{name} is not installed; see `make venv`")
