"""TLS to PostgreSQL: all connections, of both clients and modes; untrusted certificates."""

from __future__ import annotations

import psycopg
import pytest

from holdfast.errors import BackendUnavailable
from servers.postgres import PostgresServer
from servers.registry import Servers
from stores import sql_helpers
from stores.sql_helpers import LONG, MODES, Clients, release_to_waiter

clients, only_woken = sql_helpers.clients, sql_helpers.only_woken

ENCRYPTED = """
SELECT s.ssl FROM pg_stat_ssl s JOIN pg_stat_activity a USING (pid) WHERE a.application_name = %s"""


@pytest.fixture
def server(servers: Servers) -> PostgresServer:
    return servers.of(PostgresServer, tls=True)


@pytest.mark.usefixtures("only_woken")
@pytest.mark.parametrize("mode", MODES)
def test_all_goes_over_tls(
    server: PostgresServer, clients: Clients, namespace: str, mode: str
) -> None:
    """Two clients hold in turn. From the second time on both are subscribed, and only the wake-up
    ends a wait. None of their connections is unencrypted."""
    url = f"{server.url}&mode={mode}&application_name={namespace}"

    async def body() -> None:
        ours, theirs = clients.open(url, ttl=LONG), clients.open(url, ttl=LONG)
        lease = await ours.lock("name").acquire()
        assert lease is not None
        for client in (theirs, ours, theirs, ours):
            lease = await release_to_waiter(lease, client.lock("name"), theirs)
        with psycopg.connect(server.url) as admin:
            encrypted = [row[0] for row in admin.execute(ENCRYPTED, (namespace,))]
        assert len(encrypted) >= 2
        assert all(encrypted)
        assert {finding.detail for finding in await ours.check()} >= {"TLS"}
        assert await lease.release() is True

    clients.run(body)


@pytest.mark.parametrize("mode", MODES)
def test_an_unknown_certificate_is_refused(
    server: PostgresServer, clients: Clients, mode: str
) -> None:
    """sslmode and the other options of libpq are passed on."""
    distrustful = f"{server.url.split('?')[0]}?sslmode=verify-full&sslrootcert=system&mode={mode}"

    async def body() -> None:
        stranger = clients.open(distrustful, timeout=None, patience=0.2)
        with pytest.raises(BackendUnavailable, match=r"(?i)certificate|SSL"):
            await stranger.lock("name").acquire()

    clients.run(body)
