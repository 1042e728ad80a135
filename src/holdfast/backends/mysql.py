"""``mysql://``: lease rows by default, named locks (``GET_LOCK``) with ``?mode=advisory``."""

from __future__ import annotations

from holdfast.backends.mysql_dial import OPTIONS, Dialler
from holdfast.backends.mysql_lease import LeaseBackend
from holdfast.backends.mysql_lease_sql import LeaseStatements
from holdfast.backends.mysql_listen import Hanger
from holdfast.backends.mysql_schema import schema_sql
from holdfast.core.contract import Guarantee, Runtime, Settings, Store
from holdfast.errors import Unsupported
from holdfast.url import Url
from holdfast.wires.mysql_async import AsyncWire
from holdfast.wires.mysql_blocking import BlockingWire

__all__ = ["LeaseStore", "open_store", "schema_sql"]

_OURS = ("mode", "prefix")
_NOT_HERE = {Guarantee.SURVIVES_SERVER_LOSS, Guarantee.WATCH}


def open_store(url: Url, settings: Settings) -> Store:
    """``mysql://user:password@host:3306/database``, with options."""
    url.refuse_unknown(*OPTIONS, *_OURS)
    mode = url.options.get("mode", "lease")
    if mode == "lease":
        return LeaseStore(url, settings)
    if mode == "advisory":
        raise Unsupported("mysql:// has no advisory mode yet: use lease rows")
    raise ValueError(f"mode={mode!r}: mysql:// has the modes lease and advisory")


class LeaseStore:
    """Lease rows: a hold ends by itself with its ttl."""

    guarantees = frozenset(Guarantee) - _NOT_HERE
    shortest_ttl = 0.05
    longest_ttl = 10 * 365 * 86400.0
    whole_seconds = False

    def __init__(self, url: Url, settings: Settings) -> None:
        self.display = str(url)
        self._settings = settings
        self._dialler = Dialler(url, settings, "lease")
        self._statements = LeaseStatements(self._dialler.schema, settings.namespace)

    def backend(self, runtime: Runtime) -> LeaseBackend:
        dialler, settings = self._dialler, self._settings
        kind = BlockingWire if runtime.blocking else AsyncWire
        wire = kind(dialler.enter, settings.connections, settings.request_seconds, self.display)
        hanger = Hanger(
            dialler.greet, lambda: dialler.galera, dialler.schema, settings.request_seconds
        )
        return LeaseBackend(runtime, wire, hanger, self._statements, self.display)
