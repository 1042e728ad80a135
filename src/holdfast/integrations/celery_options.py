"""What the options of a Celery task may be: told when the app starts, not when the task runs."""

from __future__ import annotations

import inspect
import re
import string
from typing import Any

from holdfast import Locks

__all__ = ["check_options"]


def check_options(task: Any, locks: Locks | None) -> None:
    """Raises ``ValueError`` or ``TypeError`` for an option of a task that can't be, and
    ``Unsupported`` if it needs records and the store has none."""
    if task.until not in ("start", "done"):
        raise ValueError(f"until is 'start' or 'done'; not {task.until!r}")
    for option in ("serial", "unique", "once"):
        _check_name(task, option, getattr(task, option))
    _check_seconds(task, "max_wait", task.max_wait)
    if (task.unique or task.once) and locks is not None:
        locks.once("any", keep=1 if task.keep is None else task.keep)


def _check_name(task: Any, option: str, template: object) -> None:
    if template in (None, False) or (option == "once" and template is True):
        return
    if not isinstance(template, str):
        raise TypeError(f"{task.name}: {option} is a name such as 'order:{{pk}}'; not {template!r}")
    arguments = inspect.signature(task.run).parameters
    for _, field, _, _ in string.Formatter().parse(template):
        if field is not None and re.split(r"[.\[]", field)[0] not in arguments:
            raise ValueError(f"{template!r}: {task.name} has no argument {field!r}")


def _check_seconds(task: Any, option: str, value: object) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{task.name}: {option} is a number of seconds; not {value!r}")
    if not value >= 0:
        raise ValueError(f"{task.name}: {option} is not below 0; not {value!r}")
