"""Damaged data: every method raises ``Incompatible`` with the lock's name and changes nothing;
other names are listed as usual."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence

import pytest

from holdfast.claim import Claim, Grant, Mode
from holdfast.errors import Incompatible
from holdfast.io.clock import now
from holdfast.testing import Flavour
from holdfast.testing.contract import Bench, Peer
from servers.redis import RedisServer
from servers.registry import Servers
from stores.redis.helpers import blocking_and_asyncio, over
from stores.redis.test_writes import join_queue
from stores.redlock.helpers import Nodes, three

__all__ = ["three"]

LARGEST = 2**53 - 1
SECONDS = 30.0
BAD_NUMBERS = (
    "",
    "x",
    "-1",
    "1.5",
    "1e30",
    "nan",
    "inf",
    "0x10",
    str(2**53),
    "9" * 400,
    "\n",
    "1 2",
)
ENTRIES = (
    "",
    "x",
    "s 1",
    "n 1 2 3 - l",
    "s 99999999999999999999 1 1 0 l",
    "n 1 1 1 70000 l",
    "[" * 9,
)


@pytest.fixture
def server(servers: Servers) -> RedisServer:
    return servers.of(RedisServer)


def _fields(server: RedisServer, key: str) -> dict[str, str]:
    found = server.ask("HGETALL", key)
    assert isinstance(found, list)
    return {str(field): str(value) for field, value in zip(found[::2], found[1::2], strict=True)}


def _damages(fields: dict[str, str]) -> Iterator[tuple[str, str | None]]:
    """Pairs of a field and its damaged value; ``None`` deletes the field."""
    for field in fields:
        if field in ("v", "x", "xl", "i") or field.startswith(("l:", "s:")):
            continue  # free text, or wrong only in combination with other fields
        for value in ENTRIES if ":" in field else ("2",) if field == "b" else BAD_NUMBERS:
            yield field, value
    for field in fields:
        if field.startswith(("h:", "w:", "s:")):
            yield field, None


async def _renew(peer: Peer, grant: Grant, *, shorten: bool) -> None:
    """Raises the reason of a failed renewal, which a batch returns as a value."""
    work = peer.backend.renew([grant], [], until=now() + SECONDS, shorten=shorten)
    for reason in (await peer.run(work)).unknown.values():
        raise Incompatible(reason)


async def _every_method(
    server: RedisServer, key: str, peer: Peer, grant: Grant, claim: Claim
) -> int:
    """The number of methods that fail; each raises the right error and changes nothing."""
    words: list[tuple[str, Callable[[], Awaitable[object]]]] = [
        ("look", lambda: peer.look("name")),
        ("attempt", lambda: peer.attempt(claim)),
        ("release", lambda: peer.release(grant)),
        ("exchange", lambda: peer.exchange(grant, claim)),
        ("abandon", lambda: peer.abandon(claim)),
        ("revoke", lambda: peer.revoke("name")),
        ("renew", lambda: _renew(peer, grant, shorten=False)),
        ("shorten", lambda: _renew(peer, grant, shorten=True)),
    ]
    failed = 0
    for word, call in words:
        before, text = _fields(server, key), ""
        try:
            await call()
        except Incompatible as error:
            text = str(error)
        if text:
            assert "'name' can't be used: " in text
            assert _fields(server, key) == before, f"{word} was half done"
            failed += 1
    return failed


async def _check_damages(server: RedisServer, bench: Bench, peer: Peer, grant: Grant) -> None:
    key, claim = (
        f"{bench.namespace}:{{name}}",
        bench.claim(mode=grant.claim.mode, limit=grant.claim.limit),
    )
    whole = _fields(server, key)
    damages = list(_damages(whole))
    assert len(damages) > 50
    for field, value in damages:
        if value is None:
            server.ask("HDEL", key, field)
        else:
            server.ask("HSET", key, field, value)
        assert await _every_method(server, key, peer, grant, claim) > 0, f"{field}={value!r}"
        server.ask("DEL", key)
        server.ask("HSET", key, *(word for pair in whole.items() for word in pair))


@pytest.mark.parametrize("mode", [Mode.EXCLUSIVE, Mode.SLOTS])
@blocking_and_asyncio
def test_damaged_state_is_reported(server: RedisServer, flavour: Flavour, mode: Mode) -> None:
    """Damages each field, one after the other."""

    async def body(bench: Bench) -> None:
        peer, limit = bench.peer(), 2 if mode is Mode.SLOTS else 0
        grant = await peer.take(bench.claim(mode=mode, limit=limit))
        if limit:
            await peer.take(bench.claim(mode=mode, limit=limit))
        await join_queue(peer, bench.claim(mode=mode, limit=limit))
        await _check_damages(server, bench, peer, grant)

    over(server.url, flavour, body)


@pytest.mark.parametrize("word", ["release", "exchange", "revoke", "attempt"])
@blocking_and_asyncio
def test_a_failed_method_leaves_the_key_of_redis_py(
    server: RedisServer, flavour: Flavour, word: str
) -> None:
    """If a method fails, the key of redis-py's Lock keeps its owner."""

    async def body(bench: Bench) -> None:
        peer, claim, name = bench.peer(), bench.claim(bench.namespace), bench.namespace
        key = f"{bench.namespace}:{{{name}}}"
        grant = await peer.take(bench.claim(name))
        await peer.queue(claim)
        server.ask("HDEL", key, f"w:{claim.owner}")
        if word == "attempt":  # a grant that fails at its last step
            server.ask("DEL", key, name)
            server.ask("HSET", key, "v", "1", "t", str(LARGEST))
        before = _fields(server, key), server.ask("GET", name)
        words: dict[str, Callable[[], Awaitable[object]]] = {
            "release": lambda: peer.release(grant),
            "exchange": lambda: peer.exchange(grant, claim),
            "revoke": lambda: peer.revoke(name),
            "attempt": lambda: peer.attempt(claim),
        }
        with pytest.raises(Incompatible):
            await words[word]()
        assert (_fields(server, key), server.ask("GET", name)) == before

    over(f"{server.url}?interop=redis-py", flavour, body)


DAMAGES: Sequence[tuple[str, ...]] = (
    ("HSET", "t", "x"),
    ("HSET", "xe", "1e300"),
    ("HSET", "w", "many"),
    ("HSET", "n", "3", "b", "11"),
    ("HSET", "n", "1", "b", "1"),
    ("HSET", "w", "1", "i", "1", "q", str(LARGEST)),
    ("HSET", "w", "1", "i", "1", "q", "1", "l:1", "somebody"),
)


@pytest.mark.parametrize("damage", [*DAMAGES, ("SET", "text")], ids="-".join)
@blocking_and_asyncio
def test_a_list_shows_the_other_names(
    server: RedisServer, flavour: Flavour, damage: tuple[str, ...]
) -> None:
    """The damaged name is listed with a notice."""

    async def body(bench: Bench) -> None:
        peer, key = bench.peer(), f"{bench.namespace}:{{name}}"
        await peer.take(bench.claim("a"))
        await peer.take(bench.claim("z"))
        if damage[0] == "HSET":
            await peer.take(bench.claim())
        server.ask(damage[0], key, *damage[1:])
        with pytest.raises(Incompatible, match=r"redis://.*'name'.*delete its key"):
            await peer.look("name")
        found = {info.name: info for info in await peer.survey()}
        assert {"a", "name", "z"} == set(found)
        assert len(found["a"].holders) == len(found["z"].holders) == 1
        assert "what is stored under this name can't be read" in found["name"].notice

    over(server.url, flavour, body)


@blocking_and_asyncio
def test_tokens_end_before_they_repeat(server: RedisServer, flavour: Flavour) -> None:
    """Above 2^53 a script can't count by one: it fails instead."""

    async def body(bench: Bench) -> None:
        peer, theirs, key = bench.peer(), bench.peer(), f"{bench.namespace}:{{name}}"
        first = await peer.take(bench.claim())
        server.ask("HSET", key, "t", str(LARGEST - 1))
        await peer.release(first)
        last = await peer.take(bench.claim())
        assert last.token == LARGEST
        waiter = bench.claim()
        await join_queue(theirs, waiter)
        assert await peer.release(last)
        for mode in (Mode.EXCLUSIVE, Mode.SHARED):
            with pytest.raises(Incompatible, match=r"'name'.*2\^53.*epoch"):
                await theirs.attempt(waiter._replace(mode=mode))

    over(server.url, flavour, body)


@blocking_and_asyncio
def test_a_node_with_damaged_state_has_no_vote(three: Nodes, flavour: Flavour) -> None:
    """The other nodes decide; if too few are left, the error says so."""

    async def body(bench: Bench) -> None:
        peer, key = bench.peer(), f"{bench.namespace}:redlock:{{name}}"
        for damage in (("HSET", "c", "x"), ("HSET", "n", "1", "h:o", "n 1"), ("SET", "text")):
            grant = await peer.take(bench.claim("other"))
            for node in three.nodes[:1]:
                node.ask(damage[0], key, *damage[1:])
            hold = await peer.get(bench.claim())
            assert len((await peer.look("name")).holders) == 1
            assert await peer.release(hold)
            for node in three.nodes[1:]:
                node.ask("DEL", key)
                node.ask(damage[0], key, *damage[1:])
            words = (
                peer.attempt(bench.claim()),
                peer.look("name"),
                peer.release(hold),
                peer.revoke("name"),
                peer.abandon(hold.claim),
            )
            for word in words:
                with pytest.raises(Incompatible, match=r"redlock://.*'name'"):
                    await word
            found = {info.name: info for info in await peer.survey()}
            assert "can't be read" in found["name"].notice
            assert len(found["other"].holders) == 1
            await peer.release(grant)
            for node in three.nodes:
                node.ask("DEL", key)

    over(three.url, flavour, body)


@blocking_and_asyncio
def test_the_tokens_of_a_majority_end_before_they_repeat(three: Nodes, flavour: Flavour) -> None:
    async def body(bench: Bench) -> None:
        peer, key = bench.peer(), f"{bench.namespace}:redlock:{{name}}"
        await peer.release(await peer.take(bench.claim()))
        for node in three.nodes:
            node.ask("HSET", key, "c", str(LARGEST - 1))
        last = await peer.take(bench.claim())
        assert last.token == LARGEST
        await peer.release(last)
        for node in three.nodes:
            node.ask("HSET", key, "c", str(LARGEST))
        with pytest.raises(Incompatible, match=r"'name'.*2\^53"):
            await peer.attempt(bench.claim())

    over(three.url, flavour, body)


@blocking_and_asyncio
def test_a_quarantine_without_an_end_is_reported(servers: Servers, flavour: Flavour) -> None:
    """Even if its end is out of range."""
    server = servers.of(RedisServer)

    async def body(bench: Bench) -> None:
        peer, key = bench.peer(), f"{bench.namespace}:loss"
        await peer.queue(bench.claim())
        server.ask("HSET", key, "barred", str(LARGEST))
        assert "grants nothing before" in (await peer.queue(bench.claim())).reason
        server.ask("HSET", key, "barred", "soon")
        with pytest.raises(Incompatible):
            await peer.attempt(bench.claim())

    over(f"{server.url}?loss_protection=on", flavour, body)
