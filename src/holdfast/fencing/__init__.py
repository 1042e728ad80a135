"""The resource's half of fencing: a resource remembers the highest fence that entered it, and
refuses a lower one.

``fencing.sql``, ``.redis``, ``.file`` and ``.http`` guard resources of their own;
``fencing.etcd``, ``.zookeeper`` and ``.consul`` write into the lock's own store. Each is imported
when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.fencing import consul, etcd, file, http, redis, sql, zookeeper

__all__ = ["consul", "etcd", "file", "http", "redis", "sql", "zookeeper"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'holdfast.fencing' has no attribute {name!r}")
    return import_module(f"holdfast.fencing.{name}")
