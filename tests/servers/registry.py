"""Servers that many tests share: started by the first that asks, ended with the session."""

from collections.abc import Callable
from typing import Any, ParamSpec, Protocol, TypeVar


class _Startable(Protocol):
    @property
    def alive(self) -> bool: ...
    def start(self) -> Any: ...
    def close(self) -> None: ...


P = ParamSpec("P")
S = TypeVar("S", bound=_Startable)


class Servers:
    """`servers.of(RedisServer, persist=True)`: one per kind and options, running when given."""

    def __init__(self) -> None:
        self._known: dict[object, Any] = {}

    def of(self, kind: Callable[P, S], *args: P.args, **options: P.kwargs) -> S:
        key = (kind, args, repr(sorted(options.items())))
        if key not in self._known:
            server = kind(*args, **options)
            try:
                server.start()
            except BaseException:
                server.close()
                raise
            self._known[key] = server
        found: S = self._known[key]
        self._mend(found)
        return found

    def close(self) -> None:
        for server in self._known.values():
            server.close()
        self._known.clear()

    def _mend(self, server: Any) -> None:
        """A test may leave a server paused or dead; the next one must not suffer for it."""
        for node in getattr(server, "nodes", [server]):
            if node.alive and node.paused:
                node.resume()
        if not server.alive:
            server.start()
