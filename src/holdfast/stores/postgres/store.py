"""``postgresql://``: lease rows by default, advisory locks with ``?mode=advisory``."""

from __future__ import annotations

from holdfast.core.contract import Guarantee, Runtime, Settings, Store
from holdfast.stores._sql.connection import make_pool
from holdfast.stores.postgres.backend import LeaseBackend, LeaseStatements
from holdfast.stores.postgres.connect import LIBPQ_OPTIONS, Dialler, address_of
from holdfast.stores.postgres.connection import PostgresConnection, PostgresSessions
from holdfast.stores.postgres.schema import schema_sql
from holdfast.stores.postgres.shared import PostgresPool
from holdfast.stores.postgres_advisory.backend import AdvisoryBackend
from holdfast.stores.postgres_advisory.requests import AdvisoryStatements
from holdfast.url import Url, parse_url

__all__ = ["AdvisoryStore", "LeaseStore", "open_store", "schema_sql"]

_OURS = ("listen_url", "mode", "prefix", "schema")
_NOT_HERE = {Guarantee.SURVIVES_SERVER_LOSS, Guarantee.WATCH}


def open_store(url: Url, settings: Settings) -> Store:
    """``postgresql://user:password@host:5432/database``, with options."""
    url.refuse_unknown(*LIBPQ_OPTIONS, *_OURS)
    mode = url.options.get("mode", "lease")
    if mode == "lease":
        return LeaseStore(url, settings)
    if mode == "advisory":
        return AdvisoryStore(url, settings)
    raise ValueError(f"mode={mode!r}: postgresql:// has the modes lease and advisory")


class _Common:
    """What both modes have: a dialler, a wire for short requests, a way to listen."""

    mode: str
    shortest_ttl = 0.05
    whole_seconds = False

    def __init__(self, url: Url, settings: Settings) -> None:
        self.display = str(url)
        self._settings = settings
        self._dialler = Dialler(url, settings, self.mode)
        self._listen_address = self._dialler.address
        if "listen_url" in url.options:
            listen = parse_url(url.options["listen_url"])
            if listen.scheme != url.scheme:
                raise ValueError(f"listen_url is {listen.scheme}://, not {url.scheme}://")
            listen.refuse_unknown(*LIBPQ_OPTIONS)
            self._listen_address = address_of(listen, settings)

    def _dial(self, by: float) -> PostgresConnection:
        raise NotImplementedError

    def _listen(self, channel: str, by: float) -> PostgresConnection:
        return self._dialler.listen(self._listen_address, channel, by)

    def _make_pool(self, runtime: Runtime) -> PostgresPool:
        return make_pool(runtime, self._dial, self._settings, self.display)


class LeaseStore(_Common):
    """Lease rows: a hold ends by itself with its ttl."""

    mode = "lease"
    guarantees = frozenset(Guarantee) - _NOT_HERE
    longest_ttl = 10 * 365 * 86400.0

    def __init__(self, url: Url, settings: Settings) -> None:
        super().__init__(url, settings)
        self._statements = LeaseStatements(self._dialler.schema)

    def _dial(self, by: float) -> PostgresConnection:
        return self._dialler.enter(self._statements.prepared, by)

    def backend(self, runtime: Runtime) -> LeaseBackend:
        return LeaseBackend(
            runtime,
            self._make_pool(runtime),
            self._listen,
            self._statements,
            self._settings,
            self.display,
            self._listen_address is not self._dialler.address,
        )


class AdvisoryStore(_Common):
    """Advisory locks: a hold ends with its connection, or when that is idle for its ttl."""

    mode = "advisory"
    guarantees = frozenset(Guarantee) - _NOT_HERE - {Guarantee.FIFO}
    longest_ttl = 2_000_000.0  # the server counts it in milliseconds of 31 bits

    def __init__(self, url: Url, settings: Settings) -> None:
        super().__init__(url, settings)
        self._statements = AdvisoryStatements(self._dialler.schema)
        self._sessions = PostgresSessions(settings.connections)

    def _dial(self, by: float) -> PostgresConnection:
        return self._dialler.enter((), by)

    def _dial_session(self, by: float) -> PostgresConnection:
        return self._dialler.enter_session(self._statements.prepared, by)

    def backend(self, runtime: Runtime) -> AdvisoryBackend:
        self._sessions.users += 1
        return AdvisoryBackend(
            runtime,
            self._make_pool(runtime),
            self._listen,
            self._dial_session,
            self._sessions,
            self._statements,
            self._settings,
            self.display,
        )
