"""The log, under the name ``holdfast``. ``logging`` is imported with the first log line: a program
that holds a lock for a moment never imports it.

The parts are ``holdfast.lock``, ``holdfast.renew`` and ``holdfast.store``. What happens at every
acquire is logged at DEBUG only: by the observer ``holdfast.observe.Logging``, and the steps of a
wait by ``tracer``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

__all__ = [
    "at_first_line",
    "debug",
    "exception",
    "info",
    "tracer",
    "wants_info",
    "wants_warning",
    "warning",
]

DEBUG, INFO, WARNING = 10, 20, 30
_prepare: list[Callable[[], None]] = []
_traced: dict[str, Any] = {}


def at_first_line(prepare: Callable[[], None]) -> None:
    """Calls ``prepare`` once, before the first log line: it sets up where log lines go."""
    _prepare.append(prepare)


def tracer(part: str) -> Callable[..., None] | None:
    """As ``debug`` with this part; ``None`` unless its lines are wanted.

    It is two look-ups then. Where nothing has imported ``logging``, no line is wanted.
    """
    logger = _traced.get(part)
    if logger is None:
        if "logging" not in sys.modules:
            return None
        import logging  # waits if another thread is importing it at this moment

        logger = _traced[part] = logging.getLogger(f"holdfast.{part}")
    return partial(debug, part=part) if logger.isEnabledFor(DEBUG) else None


def wants_info(part: str = "") -> bool:
    """Whether a line of ``info`` would be logged."""
    return bool(_logger(part).isEnabledFor(INFO))


def wants_warning(part: str = "") -> bool:
    """Whether a line of ``warning`` would be logged."""
    return bool(_logger(part).isEnabledFor(WARNING))


def debug(text: str, *values: object, part: str = "", **about: object) -> None:
    """Logs under ``holdfast.<part>``; the record's ``holdfast`` attribute is ``about``."""
    _logger(part).debug(text, *values, stacklevel=2, extra={"holdfast": about})


def info(text: str, *values: object, part: str = "", **about: object) -> None:
    """Logs under ``holdfast.<part>``; the record's ``holdfast`` attribute is ``about``."""
    _logger(part).info(text, *values, stacklevel=2, extra={"holdfast": about})


def warning(text: str, *values: object, part: str = "", **about: object) -> None:
    """Logs under ``holdfast.<part>``; the record's ``holdfast`` attribute is ``about``."""
    _logger(part).warning(text, *values, stacklevel=2, extra={"holdfast": about})


def exception(text: str, *values: object, part: str = "", **about: object) -> None:
    """As ``warning``, with the traceback of the current exception."""
    _logger(part).exception(text, *values, stacklevel=2, extra={"holdfast": about})


def _logger(part: str) -> Any:
    import logging

    while _prepare:
        _prepare.pop()()
    return logging.getLogger(f"holdfast.{part}" if part else "holdfast")
