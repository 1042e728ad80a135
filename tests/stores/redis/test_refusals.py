"""What is final is raised by the first attempt: a wrong password, no rights, no such database, not
a Redis server. What may pass is not final."""

from __future__ import annotations

import asyncio
import http.server
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import redis
import redis.asyncio
from redis.credentials import CredentialProvider

import holdfast
from holdfast.errors import BackendUnavailable
from holdfast.io.connection import Broken
from holdfast.io.resp import RedisRefused
from holdfast.stores.redis.replies import login_refused, refusal, unreachable
from holdfast.stores.redis.url import NodeAddress
from holdfast.testing import Flavour
from servers.ensemble import Ensemble
from servers.redis import RedisServer
from servers.redis_sentinel import SentinelTrio
from stores.redis.helpers import blocking_and_asyncio

PASSWORD = "secret"
USERS = (
    "none on >pw ~* &* +@all -evalsha -eval",
    "reader on >pw ~* &* +@all -hset",
    "half on >pw ~* &* +@all -pexpire",
    "other on >pw ~other:* &* +@all",
)


@pytest.fixture(scope="module")
def servers_with_password() -> Iterator[Ensemble[RedisServer]]:
    with Ensemble([RedisServer(password=PASSWORD, users=USERS) for _ in range(3)]) as nodes:
        yield nodes


@pytest.fixture(scope="module")
def web_server() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def _acquire(flavour: Flavour, url: str | object) -> None:
    """Acquires and releases, with all the patience that a client has by default."""
    if flavour is Flavour.ASYNCIO:
        asyncio.run(_acquire_async(url))
        return
    with holdfast.connect(url) as locks, locks.lock("name"):
        pass


async def _acquire_async(url: str | object) -> None:
    async with holdfast.connect_async(url) as locks, locks.lock("name"):
        pass


def _refused_at_once(flavour: Flavour, url: str | object) -> str:
    with pytest.raises(BackendUnavailable) as raised:
        _acquire(flavour, url)
    assert raised.value.final
    assert "gave up" not in str(raised.value)
    assert PASSWORD not in str(raised.value)
    return str(raised.value)


@blocking_and_asyncio
@pytest.mark.parametrize(
    ("login", "database"),
    [(":wrong@", 0), ("nobody:pw@", 0), ("", 0), (f":{PASSWORD}@", 99)],
    ids=["password", "user", "no login", "database"],
)
def test_a_refused_login(
    servers_with_password: Ensemble[RedisServer], flavour: Flavour, login: str, database: int
) -> None:
    server = servers_with_password.nodes[0]
    _refused_at_once(flavour, f"redis://{login}{server.host}:{server.port}/{database}")


@blocking_and_asyncio
@pytest.mark.parametrize("user", ["none", "reader", "half", "other"])
def test_no_rights(
    servers_with_password: Ensemble[RedisServer], flavour: Flavour, user: str
) -> None:
    """To run a script, to run a command inside it, to use the key."""
    server = servers_with_password.nodes[0]
    server.ask("DEL", "holdfast:{name}")
    _refused_at_once(flavour, f"redis://{user}:pw@{server.host}:{server.port}/0")
    assert server.ask("HGET", "holdfast:{name}", "x") is None


@blocking_and_asyncio
def test_another_kind_of_server(web_server: str, flavour: Flavour) -> None:
    said = _refused_at_once(flavour, f"redis://{web_server}/0")
    assert "not a reply of Redis" in said


@blocking_and_asyncio
def test_a_server_that_is_no_cluster(
    servers_with_password: Ensemble[RedisServer], flavour: Flavour
) -> None:
    server = servers_with_password.nodes[0]
    url = f"redis+cluster://:{PASSWORD}@{server.host}:{server.port}"
    assert "cluster support disabled" in _refused_at_once(flavour, url)


def test_sentinels_name_a_master_that_refuses() -> None:
    with SentinelTrio(replicas=0) as trio:
        for flavour in Flavour:
            _refused_at_once(flavour, trio.url.replace("redis+sentinel://", "redis+sentinel://:x@"))


class Provider(CredentialProvider):
    """Gives each of these passwords once, and then the last one."""

    def __init__(self, *passwords: str) -> None:
        self.passwords = list(passwords)
        self.asked = 0

    def get_credentials(self) -> tuple[str]:
        self.asked += 1
        return (self.passwords.pop(0) if len(self.passwords) > 1 else self.passwords[0],)


def _client_of(flavour: Flavour, server: RedisServer, provider: Provider) -> Any:
    maker: Any = redis.Redis if flavour is Flavour.BLOCKING else redis.asyncio.Redis
    return maker(host=server.host, port=server.port, credential_provider=provider)


@blocking_and_asyncio
def test_expired_credentials_are_fetched_again(
    servers_with_password: Ensemble[RedisServer], flavour: Flavour
) -> None:
    provider = Provider("expired", PASSWORD)
    _acquire(flavour, _client_of(flavour, servers_with_password.nodes[0], provider))
    assert provider.asked >= 2


@blocking_and_asyncio
def test_credentials_that_stay_wrong_are_final(
    servers_with_password: Ensemble[RedisServer], flavour: Flavour
) -> None:
    provider = Provider("wrong")
    _refused_at_once(flavour, _client_of(flavour, servers_with_password.nodes[0], provider))
    assert provider.asked == 2


@blocking_and_asyncio
def test_most_nodes_of_a_redlock_refuse(
    servers_with_password: Ensemble[RedisServer], flavour: Flavour
) -> None:
    _refused_at_once(flavour, f"redlock://:wrong@{servers_with_password.hosts}")
    _refused_at_once(flavour, f"redlock://none:pw@{servers_with_password.hosts}")


@blocking_and_asyncio
def test_a_redlock_does_without_one_node_that_refuses(
    servers_with_password: Ensemble[RedisServer], web_server: str, flavour: Flavour
) -> None:
    first, second, _ = servers_with_password.hosts.split(",")
    options = "loss_protection=off"
    _acquire(flavour, f"redlock://:{PASSWORD}@{first},{second},{web_server}?{options}")


@pytest.mark.parametrize(
    "text",
    [
        "LOADING Redis is loading the dataset in memory",
        "MASTERDOWN Link with MASTER is down",
        "READONLY You can't write against a read only replica.",
        "BUSY Redis is busy running a script.",
        "NOREPLICAS Not enough good replicas to write.",
        "MISCONF Redis is configured to save RDB snapshots",
        "CLUSTERDOWN Hash slot not served",
        "ERR max number of clients reached",
        "OOM command not allowed when used memory > 'maxmemory'.",
    ],
)
def test_what_may_pass_is_not_final(text: str) -> None:
    error = refusal(RedisRefused(text), "redis://server", "name")
    assert isinstance(error, BackendUnavailable)
    assert not error.final


@pytest.mark.parametrize(
    "text",
    ["ERR max number of clients reached", "LOADING Redis is loading the dataset in memory"],
)
def test_a_login_that_may_succeed_later_is_not_final(text: str) -> None:
    assert not login_refused(NodeAddress("server", 6379), RedisRefused(text)).final


@pytest.mark.parametrize("error", [ConnectionResetError(), TimeoutError(), Broken("gone")])
def test_a_connection_that_breaks_is_not_final(error: OSError) -> None:
    assert not unreachable(NodeAddress("server", 6379), error, 5.0).final
