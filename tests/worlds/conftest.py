"""Tests of other event loops, of gevent, of servers and of other Pythons: `make worlds`."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.testing import Flavour

HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)  # before anything is chosen by its marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All tests of this folder are for `make worlds`; a loop is for the asyncio client alone."""
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.worlds)
    items[:] = [item for item in items if not _blocking_on_uvloop(item)]


def _blocking_on_uvloop(item: pytest.Item) -> bool:
    callspec = getattr(item, "callspec", None)
    return (
        item.path == HERE / "test_uvloop.py"
        and callspec is not None
        and callspec.params.get("flavour") is Flavour.BLOCKING
    )
