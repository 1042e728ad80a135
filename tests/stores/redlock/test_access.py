"""Redlock over TLS, with a password, and with only the ACL rights that the docs list."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from harnesses.redlock import mark_as_new
from holdfast.claim import Mode
from holdfast.errors import BackendUnavailable
from holdfast.testing import Flavour
from holdfast.testing.contract import Bench
from servers.ensemble import Ensemble
from servers.redis import RedisServer
from stores.redis.helpers import blocking_and_asyncio, over

PASSWORD = "p@ss/w:rd"
QUOTED = "p%40ss%2Fw%3Ard"


@pytest.fixture(scope="module")
def trusted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of three masters with TLS and a password, with their certificates as trusted."""
    masters = [RedisServer(tls=True, password=PASSWORD) for _ in range(3)]
    with Ensemble(masters) as nodes:
        trusted = _trust(nodes, tmp_path_factory.mktemp("trust") / "all.pem")
        url = f"redlock://:{QUOTED}@{nodes.hosts}?tls=on&ssl_ca_certs={trusted}"
        mark_as_new(url)
        yield url


def _trust(nodes: Ensemble[RedisServer], path: Path) -> Path:
    certificates = [node.tls.certificate.read_text() for node in nodes.nodes if node.tls]
    path.write_text("".join(certificates))
    return path


async def _everything(bench: Bench) -> None:
    """Run every script once, and one wake-up between two clients."""
    ours, theirs = bench.peer(), bench.peer()
    grant = await ours.take(bench.claim())
    getting = asyncio.create_task(theirs.get(bench.claim()))
    await asyncio.wait([getting], timeout=0.2)
    renewed = await ours.renew([grant])
    assert (renewed.lost, renewed.unknown) == ({}, {})
    assert await ours.release(grant)
    granted = await getting
    assert granted.token > grant.token
    await theirs.abandon(granted.claim)
    reader = await ours.take(bench.claim("rw", Mode.SHARED))
    assert await theirs.revoke("rw") == [reader.token]
    slots = await ours.take(bench.claim("slots", Mode.SLOTS, weight=2, limit=3))
    assert (await theirs.look("slots")).holders[0].slots == slots.slots
    assert (await ours.exchange(slots, slots.claim._replace(owner="next")))[0] is True
    assert {each.name for each in await theirs.survey()} == {"slots"}
    assert not [each for each in await theirs.probe() if each.level == "broken"]


@blocking_and_asyncio
def test_tls_with_a_password(trusted: str, flavour: Flavour) -> None:
    """The same settings are used for all nodes."""
    over(trusted, flavour, _everything)


@blocking_and_asyncio
def test_certificates_that_can_t_be_verified_are_refused(trusted: str, flavour: Flavour) -> None:
    """A node whose certificate is not trusted has no vote."""

    async def body(bench: Bench) -> None:
        with pytest.raises(BackendUnavailable, match="certificate verify failed"):
            await bench.peer().attempt(bench.claim())

    over(trusted.partition("&")[0], flavour, body)


@blocking_and_asyncio
def test_the_error_for_a_wrong_password_does_not_show_it(trusted: str, flavour: Flavour) -> None:
    """Neither the error nor the displayed URL contains the password."""

    async def body(bench: Bench) -> None:
        peer = bench.peer()
        with pytest.raises(BackendUnavailable, match="needs 2 of 3 nodes") as caught:
            await peer.attempt(bench.claim())
        assert "wr0ng" not in str(caught.value)
        _, causes = str(caught.value).split(" nodes: ")
        assert len(set(re.findall(r":(\d+)", causes))) == len(re.findall(r":\d+", causes)) == 3
        assert "wr0ng" not in repr(peer.store.display)

    over(trusted.replace(QUOTED, "wr0ng"), flavour, body)


# As docs/stores/redlock.md lists it.
ALLOWED = (
    "~locks:redlock:* ~holdfast:redlock:run &locks%3Aredlock:wake:* +evalsha +eval +script|load "
    "+time +hmget +hset +hget +hgetall +hexists +hdel +pexpire +info +publish +pubsub|numsub "
    "+subscribe +unsubscribe +scan"
)


@blocking_and_asyncio
def test_a_user_with_only_the_rights_of_the_documentation(flavour: Flavour) -> None:
    """No other command is sent to a node, not even by ``holdfast init``."""
    users = [f"worker on >secret resetchannels {ALLOWED}"]
    with Ensemble([RedisServer(users=users) for _ in range(3)]) as nodes:
        url = f"redlock://worker:secret@{nodes.hosts}"
        mark_as_new(url)

        async def body(bench: Bench) -> None:
            bench.namespace = "locks"
            await _everything(bench)

        over(url, flavour, body)
