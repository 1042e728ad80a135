"""The log, under the name ``holdfast``. ``logging`` is loaded with the first line that is told:
a program that holds a lock for a moment never pays for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["at_first_line", "debug", "exception", "info", "warning"]

_prepare: list[Callable[[], None]] = []


def at_first_line(prepare: Callable[[], None]) -> None:
    """Calls this once, before the first line is told: where the lines go is set up there."""
    _prepare.append(prepare)


def debug(text: str, *values: object) -> None:
    _logger().debug(text, *values, stacklevel=2)


def info(text: str, *values: object) -> None:
    _logger().info(text, *values, stacklevel=2)


def warning(text: str, *values: object) -> None:
    _logger().warning(text, *values, stacklevel=2)


def exception(text: str, *values: object) -> None:
    """With the traceback of the exception that is being handled."""
    _logger().exception(text, *values, stacklevel=2)


def _logger() -> Any:
    import logging

    while _prepare:
        _prepare.pop()()
    return logging.getLogger("holdfast")
