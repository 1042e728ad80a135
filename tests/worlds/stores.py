"""A store by its name, for tests that run over all of them."""

from __future__ import annotations

import pytest

from harnesses import harness_classes

__all__ = ["every_store"]


def every_store(*left_out: str) -> pytest.MarkDecorator:
    """Parametrises ``harness`` with each store once, without its other servers."""
    names = [
        name
        for name, kind in harness_classes().items()
        if not kind.repeats and name not in left_out
    ]
    return pytest.mark.parametrize("harness", names, indirect=True)
