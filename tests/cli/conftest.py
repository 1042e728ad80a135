"""The command, and a terminal to use it on."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from cli.processes import Cli
from cli.screen import Shell
from holdfast.core import log


@pytest.fixture(autouse=True)
def log_as_it_was() -> Iterator[None]:
    """A verb that runs in this process sends the log to standard error; others want it back."""
    yield
    log._prepare.clear()
    logger = logging.getLogger("holdfast")
    logger.propagate = True
    for handler in list(logger.handlers):
        logger.removeHandler(handler)


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
