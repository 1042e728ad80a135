"""Tests of the integrations with the frameworks' real servers and workers: `make integrations`."""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)  # before anything is chosen by its marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All tests of this folder are for `make integrations`."""
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.integrations)
