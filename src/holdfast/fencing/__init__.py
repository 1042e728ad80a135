"""The resource's half of fencing: a resource remembers the highest fence that entered it, and
refuses a lower one.

``fencing.sql``, ``.redis`` and ``.file`` guard resources. Each is imported when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.fencing import file, redis, sql

__all__ = ["file", "redis", "sql"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'holdfast.fencing' has no attribute {name!r}")
    return import_module(f"holdfast.fencing.{name}")
