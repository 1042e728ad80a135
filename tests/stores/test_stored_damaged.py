"""Foreign data among the keys of etcd and Consul.

Another program may have written anything there. Calls for the lock of that name raise
``Incompatible``; other names are not affected, and stored data never becomes part of a request."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple
from urllib.parse import quote, unquote

import pytest

from holdfast.claim import LockInfo, Mode
from holdfast.core.drive import run_now
from holdfast.errors import Incompatible
from holdfast.io.clock import now
from holdfast.testing import Flavour
from servers.consul import ConsulServer
from servers.etcd import EtcdServer
from servers.registry import Servers
from stores.claims import claim_of
from stores.http_peer import Peer, peers

SOON = 20.0
DAMAGED = [
    b"",
    b"\xff\xfe",
    b"[" * 100_000,
    b"{}",
    b"[]",
    b"null",
    b"[1]",
]
ETCD = [
    b'[true,1,1,0,1.0,[],0,"[]"]',
    b'["1",1,1,0,1.0,[],0,"[]"]',
    b'[1,1.5,1,0,1.0,[],0,"[]"]',
    b'[1,-1,1,0,1.0,[],0,"[]"]',
    b'[1,1,3,0,1.0,[],0,"[]"]',
    b'[1,1,1,null,1.0,[],0,"[]"]',
    b'[1,1,1,0,NaN,[],0,"[]"]',
    b'[1,1,1,0,1e999,[],0,"[]"]',
    b'[1,1,1,0,1e300,[],0,"[]"]',
    b'[1,1,1,0,"x",[],0,"[]"]',
    b'[1,1,1,0,1.0,5,0,"[]"]',
    b'[1,1,1,0,1.0,["a"],0,"[]"]',
    b'[1,1,1,0,1.0,[%b],0,"[]"]' % b",".join([b"0"] * 65_537),
    b'[1,1,1,0,1.0,[],9223372036854775808,"[]"]',
    b'[1,1,1,0,1.0,[],%b,"[]"]' % (b"9" * 5000),
    b"[1,1,1,0,1.0,[],0,5]",
]
CONSUL = [
    b'[true,0,1.0,"[]",0]',
    b'[1,null,1.0,"[]",0]',
    b'[1,0,Infinity,"[]",0]',
    b'[1,0,1e300,"[]",0]',
    b"[1,0,1.0,5,0]",
    b'[1,0,1.0,"[]",9223372036854775808]',
    b'[1,0,1.0,"[]","7"]',
]
KEYS = ["x", "l/w", "l/x/0", "q/w/0", "s/1_0/0", "s/-1/0", "s//0", "l/w/0/0", "", "ä/ö/ü"]


def _put_etcd(server: EtcdServer, key: str, value: bytes) -> None:
    body = {"key": b64encode(key.encode()).decode(), "value": b64encode(value).decode()}
    server.ask("/v3/kv/put", body)


def _remove_etcd(server: EtcdServer, key: str) -> None:
    server.ask("/v3/kv/deleterange", {"key": b64encode(key.encode()).decode()})


def _put_consul(server: ConsulServer, key: str, value: bytes) -> None:
    item = {"Verb": "set", "Key": key, "Value": b64encode(value).decode()}
    server.ask("/v1/txn", [{"KV": item}], method="PUT")


def _remove_consul(server: ConsulServer, key: str) -> None:
    server.ask("/v1/txn", [{"KV": {"Verb": "delete", "Key": key}}], method="PUT")


class Kind(NamedTuple):
    """The server of a store, and the invalid values and keys for it."""

    server: Any
    put: Callable[[Any, str, bytes], None]
    remove: Callable[[Any, str], None]
    values: list[bytes]
    keys: list[str]


KINDS = {
    "etcd": Kind(EtcdServer, _put_etcd, _remove_etcd, DAMAGED + ETCD, KEYS),
    "consul": Kind(
        ConsulServer,
        _put_consul,
        _remove_consul,
        DAMAGED + CONSUL,
        [*KEYS[1:-2], "n/x", "n/1_0", 'l/w/a","Verb":"delete', "l/w/" + "a" * 100, "x/y/z"],
    ),
}


@pytest.fixture(params=list(KINDS))
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


@pytest.fixture
def server(servers: Servers, kind: Kind) -> Any:
    return servers.of(kind.server)


@pytest.fixture
def peer(server: Any, namespace: str) -> Iterator[Callable[..., Peer]]:
    with peers(server.url, namespace) as make:
        yield make


def _listed(one: Peer) -> dict[str, LockInfo]:
    """List all names, in pages of two."""
    found, cursor = dict[str, LockInfo](), None
    for _ in range(100):
        page = one.run(one.backend.survey("", cursor, 2))
        found |= {info.name: info for info in page.infos}
        cursor = page.cursor
        if cursor is None:
            return found
    raise AssertionError("the pages never end")


def _refused(one: Peer) -> None:
    for work in (
        lambda: one.attempt(claim_of("damaged")),
        lambda: one.run(one.backend.look("damaged")),
        lambda: one.run(one.backend.revoke("damaged")),
    ):
        with pytest.raises(Incompatible, match="'damaged'"):
            work()


def _shown(one: Peer) -> None:
    found = _listed(one)
    assert "can't be read" in found["damaged"].notice
    assert (found["damaged"].holders, found["damaged"].waiters) == ((), ())
    assert [len(found[name].holders) for name in ("aaa", "zzz")] == [1, 1]


@pytest.mark.parametrize("flavour", list(Flavour))
def test_a_value_that_is_not_ours(
    peer: Callable[..., Peer], server: Any, kind: Kind, namespace: str, flavour: Flavour
) -> None:
    one = peer(flavour)
    for name in ("aaa", "zzz"):
        one.take(claim_of(name))
    key = f"{namespace}/locks/damaged/l/w/0"
    for value in kind.values:
        kind.put(server, key, value)
        _refused(one)
        _shown(one)
    kind.remove(server, key)
    one.take(claim_of("damaged"))


def test_a_key_that_is_not_ours(
    peer: Callable[..., Peer], server: Any, kind: Kind, namespace: str
) -> None:
    one = peer()
    for name in ("aaa", "zzz"):
        one.take(claim_of(name))
    for rest in kind.keys:
        key = f"{namespace}/locks/damaged/{rest}"
        kind.put(server, key, b"x")
        _refused(one)
        _shown(one)
        kind.remove(server, key)
    one.take(claim_of("damaged"))


NAMES = ["%41", "a b", "%zz", "ä", "~\n", "%c3%a4", "\u202e", 'q"', "back\\slash"]


def test_a_name_that_is_not_ours(
    peer: Callable[..., Peer], server: Any, kind: Kind, namespace: str
) -> None:
    """The name is listed once, with a notice, and the pages come to an end."""
    one = peer()
    for name in ("!first", "A", "zzz"):
        one.take(claim_of(name))
    for name in NAMES:
        kind.put(server, f"{namespace}/locks/{name}/l/w/0", b"x")
    kind.put(server, f"{namespace}/locks/no slash", b"x")
    found = _listed(one)
    for name in NAMES:
        assert name == "%41" or "can't be read" in found[unquote(name)].notice
    for name in ("!first", "A", "zzz"):
        assert len(found[name].holders) == 1
    one.take(claim_of("b"))


@pytest.mark.parametrize(
    "key", ["locks/a{}", "locks/a{}/l/w/0", "locks/a/l/w/0{}", "guards/a{}", "records/a{}"]
)
def test_what_is_stored_is_never_sent_as_a_request(
    servers: Servers, namespace: str, key: str
) -> None:
    """A key with quotes would otherwise inject commands into the request of a client that lists it,
    with the rights of that client."""
    server = servers.of(ConsulServer)
    victim = f"{namespace}-victim"
    _put_consul(server, victim, b"kept")
    hostile = key.format(f'","Verb":"delete","Key":"{victim}')
    _put_consul(server, f"{namespace}/{hostile}", b"[1]")
    with peers(f"{server.url}?lock_delay=1", namespace) as make:
        one = make()
        one.take(claim_of("b"))  # a new session with a lock-delay sweeps
        for work in (one.backend.survey("", None, 100), one.backend._sweep_records()):
            with suppress(Exception):  # whatever becomes of it
                one.run(work)
        with suppress(Exception):
            one.attempt(claim_of("a"))
    assert [kv["Key"] for kv in server.ask(f"/v1/kv/{quote(victim)}", None, method="GET")]


def test_a_hold_that_was_overwritten_is_lost(servers: Servers, namespace: str) -> None:
    """After a change of its ttl, when the entry on etcd is read and written again."""
    server = servers.of(EtcdServer)
    with peers(server.url, namespace) as make:
        one = make()
        grant = one.take(claim_of("name", Mode.SLOTS, limit=2))
        lease = grant.ref.session
        key = b64encode(grant.ref.key.encode()).decode()
        body = {"key": key, "value": b64encode(b"x").decode(), "lease": lease}
        server.ask("/v3/kv/put", body)
        longer = grant._replace(claim=grant.claim._replace(ttl=60.0))
        renewal = run_now(one.backend.renew([longer], [], until=now() + SOON))
        assert "overwritten" in renewal.lost[grant.claim.owner]


@pytest.mark.parametrize("value", [b"", b"[]", b"[1,2]", b"\xff", b'[1,"x",1,1,""]', b"[" * 99_999])
def test_a_record_that_is_not_ours(
    peer: Callable[..., Peer], server: Any, kind: Kind, namespace: str, value: bytes
) -> None:
    """It may be the result of a job. A job must not run again because its record can't be read."""
    one = peer()
    kind.put(server, f"{namespace}/records/damaged", value)
    with pytest.raises(Incompatible, match="'damaged'"):
        run_now(one.backend.recall("damaged"))
