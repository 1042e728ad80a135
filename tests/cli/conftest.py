"""The command, and a terminal to use it on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from cli.processes import Cli
from cli.screen import Shell


@pytest.fixture
def cli(tmp_path: Path) -> Iterator[Cli]:
    """The command on a store of its own."""
    made = Cli(tmp_path)
    yield made
    made.end()


@pytest.fixture
def shell(cli: Cli) -> Iterator[Shell]:
    """A terminal with a shell in it."""
    made = Shell(cli)
    yield made
    made.end()
