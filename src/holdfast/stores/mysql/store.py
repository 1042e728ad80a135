"""``mysql://``: lease rows by default, named locks (``GET_LOCK``) with ``?mode=advisory``."""

from __future__ import annotations

from holdfast.core.contract import Guarantee, Runtime, Settings, Store
from holdfast.stores._sql.connection import make_pool
from holdfast.stores.mysql.backend import LeaseBackend
from holdfast.stores.mysql.connect import Dialler
from holdfast.stores.mysql.connection import Sessions
from holdfast.stores.mysql.login import OPTIONS
from holdfast.stores.mysql.row_cas import Wire
from holdfast.stores.mysql.schema import schema_sql
from holdfast.stores.mysql.sql import LeaseStatements
from holdfast.stores.mysql.wakeups import Hanger
from holdfast.stores.mysql_advisory.backend import AdvisoryBackend
from holdfast.stores.mysql_advisory.sql import AdvisoryStatements
from holdfast.url import Url

__all__ = ["AdvisoryStore", "LeaseStore", "open_store", "schema_sql"]

_OURS = ("mode", "prefix")
_NOT_HERE = {Guarantee.SURVIVES_SERVER_LOSS, Guarantee.WATCH}


def open_store(url: Url, settings: Settings) -> Store:
    """``mysql://user:password@host:3306/database``, with options."""
    url.refuse_unknown(*OPTIONS, *_OURS)
    mode = url.options.get("mode", "lease")
    if mode == "lease":
        return LeaseStore(url, settings)
    if mode == "advisory":
        return AdvisoryStore(url, settings)
    raise ValueError(f"mode={mode!r}: mysql:// has the modes lease and advisory")


class _Common:
    """What both modes have: a dialler, and a wire for short requests."""

    mode: str
    shortest_ttl = 0.05
    whole_seconds = False

    def __init__(self, url: Url, settings: Settings) -> None:
        self.display = str(url)
        self._settings = settings
        self._dialler = Dialler(url, settings, self.mode)

    def _wire(self, runtime: Runtime) -> Wire:
        return make_pool(runtime, self._dialler.enter, self._settings, self.display)


class LeaseStore(_Common):
    """Lease rows: a hold ends by itself with its ttl."""

    mode = "lease"
    guarantees = frozenset(Guarantee) - _NOT_HERE
    longest_ttl = 10 * 365 * 86400.0

    def __init__(self, url: Url, settings: Settings) -> None:
        super().__init__(url, settings)
        self._statements = LeaseStatements(self._dialler.schema, settings.namespace)

    def backend(self, runtime: Runtime) -> LeaseBackend:
        dialler, seconds = self._dialler, self._settings.request_seconds
        hanger = Hanger(dialler.greet_to_stay, lambda: dialler.galera, self._statements, seconds)
        return LeaseBackend(runtime, self._wire(runtime), hanger, self._statements, self.display)


class AdvisoryStore(_Common):
    """Named locks: a hold ends with its connection, or when that is idle for its ttl."""

    mode = "advisory"
    guarantees = frozenset(Guarantee) - _NOT_HERE - {Guarantee.FIFO, Guarantee.SHARED}
    longest_ttl = 365 * 86400.0  # the most that wait_timeout takes

    def __init__(self, url: Url, settings: Settings) -> None:
        super().__init__(url, settings)
        self._statements = AdvisoryStatements(self._dialler.schema, settings.namespace)
        self._sessions = Sessions(settings.connections)

    def backend(self, runtime: Runtime) -> AdvisoryBackend:
        self._sessions.users += 1
        return AdvisoryBackend(
            runtime,
            self._wire(runtime),
            self._dialler.enter_session,
            self._sessions,
            self._statements,
            self._settings,
            self.display,
        )
