"""The log, under the name ``holdfast``. ``logging`` is imported with the first log line: a program
that holds a lock for a moment never imports it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["at_first_line", "debug", "exception", "info", "warning"]

_prepare: list[Callable[[], None]] = []


def at_first_line(prepare: Callable[[], None]) -> None:
    """Calls ``prepare`` once, before the first log line: it sets up where log lines go."""
    _prepare.append(prepare)


def debug(text: str, *values: object) -> None:
    _logger().debug(text, *values, stacklevel=2)


def info(text: str, *values: object) -> None:
    _logger().info(text, *values, stacklevel=2)


def warning(text: str, *values: object) -> None:
    _logger().warning(text, *values, stacklevel=2)


def exception(text: str, *values: object) -> None:
    """Logs with the traceback of the current exception."""
    _logger().exception(text, *values, stacklevel=2)


def _logger() -> Any:
    import logging

    while _prepare:
        _prepare.pop()()
    return logging.getLogger("holdfast")
