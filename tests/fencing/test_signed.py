"""Signed fences: who has no key can't make one, and guards that have the keys take no other."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import pickle
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis

import holdfast
from holdfast import Fence, Mode, StaleFence, UntrustedFence
from holdfast.claim import FenceKeys
from holdfast.fencing import file, http, sql
from holdfast.fencing import redis as fencing_redis
from holdfast.fencing.rule import as_fence
from servers.redis import RedisServer
from servers.registry import Servers

NEW, OLD = "new key, 16 bytes long or more", b"old key, 16 bytes long or more"
OTHER = "a key that nobody here knows"
PLAIN = Fence("order:42", Mode.EXCLUSIVE, (), 3, 17)
SLOTS = Fence("order:42", Mode.SLOTS, (1, 5), 3, 17)
POISON = Fence("order:42", Mode.EXCLUSIVE, (), 2**31 - 1, 2**63 - 1)

Guard = Callable[..., None]


def forgeries(fence: Fence) -> list[str]:
    """Texts that were never signed as they are: unsigned, by another key, one field changed."""
    signature = fence.signed(NEW).signature
    changed = [
        Fence("order:43", fence.mode, fence.slots, fence.epoch, fence.token, signature),
        Fence(fence.name, Mode.SHARED, (), fence.epoch, fence.token, signature),
        Fence(fence.name, Mode.SLOTS, (2,), fence.epoch, fence.token, signature),
        Fence(fence.name, fence.mode, fence.slots, fence.epoch + 1, fence.token, signature),
        Fence(fence.name, fence.mode, fence.slots, fence.epoch, fence.token + 1, signature),
    ]
    altered = signature[:-1] + ("0" if signature[-1] != "0" else "1")
    return [str(fence), str(fence.signed(OTHER)), *map(str, changed), f"{fence};{altered}"]


@pytest.mark.parametrize("fence", [PLAIN, SLOTS], ids=["lock", "semaphore"])
def test_the_first_key_signs_and_all_verify(fence: Fence) -> None:
    """A new key is added behind the old one everywhere, then put first, then the old one goes."""
    by_new, by_old = fence.signed([NEW, OLD]), fence.signed([OLD, NEW])
    assert by_new.signature != by_old.signature
    for signed in (by_new, by_old):
        assert Fence.parse(str(signed), [NEW, OLD]) == fence
        assert Fence.parse(str(signed), FenceKeys([OLD, NEW])) == fence
    with pytest.raises(UntrustedFence, match="none of the known keys"):
        Fence.parse(str(by_old), [NEW])
    with pytest.raises(UntrustedFence, match="it is not signed"):
        Fence.parse(str(fence), [NEW, OLD])


def test_the_signature_is_what_the_docs_say() -> None:
    """Programs in other languages can make and check it."""
    message = b"holdfast fence\n1;slots;1,5;3;17;order%3A42"
    expected = hmac.new(NEW.encode(), message, hashlib.sha256).hexdigest()
    assert str(SLOTS.signed(NEW)) == f"1;slots;1,5;3;17;order%3A42;{expected}"


@pytest.mark.parametrize("fence", [PLAIN, SLOTS], ids=["lock", "semaphore"])
def test_every_field_is_signed(fence: Fence) -> None:
    for text in forgeries(fence):
        with pytest.raises(UntrustedFence):
            Fence.parse(text, NEW)


def test_a_signature_is_no_part_of_the_fence() -> None:
    """Whether signed or not, and by which key: it is the same fence."""
    signed = PLAIN.signed(NEW)
    assert signed == PLAIN
    assert hash(signed) == hash(PLAIN)
    assert not signed < PLAIN
    assert signed <= PLAIN
    assert pickle.loads(pickle.dumps(signed)).signature == signed.signature
    assert Fence.parse(str(signed)).signature == signed.signature  # carried on by who has no key


@pytest.mark.parametrize(
    "signature", ["", "00", "G" * 64, "A" * 64, "0" * 65, "0" * 64 + ";x", "é" * 64]
)
def test_a_signature_has_one_form(signature: str) -> None:
    with pytest.raises(ValueError, match=";signature if it is signed"):
        Fence.parse(f"{PLAIN};{signature}")
    if signature:
        with pytest.raises(ValueError, match="not a fence"):
            as_fence(Fence("order:42", Mode.EXCLUSIVE, (), 3, 17, signature), NEW)


@pytest.mark.parametrize("damage", [" {}x", "{},{}", "{}0", ";{}", "9{}"])
def test_errors_do_not_show_the_signature(damage: str) -> None:
    """They are logged: who reads a log could put the text right and show it."""
    signed = PLAIN.signed(NEW)
    text = damage.format(signed, signed)
    for shown in (text, text.upper()):
        with pytest.raises(ValueError, match="not a fence") as caught:
            Fence.parse(shown)
        assert signed.signature[:40] not in str(caught.value).lower()


def test_keys_are_long_enough_and_never_shown() -> None:
    for short in ("fifteen bytes..", b"", "", ["long enough for a key", "short"]):
        with pytest.raises(ValueError, match="at least 16 bytes") as caught:
            FenceKeys([short] if isinstance(short, str | bytes) else short)
        assert "fifteen" not in str(caught.value)
    with pytest.raises(TypeError, match="bytes or text, not int"):
        FenceKeys([7])  # type: ignore[list-item]
    with pytest.raises(TypeError, match="can't be pickled"):
        pickle.dumps(FenceKeys(NEW))
    keys = FenceKeys([NEW, OLD])
    with holdfast.connect("memory://shown", fence_keys=keys) as locks, locks.lock("a") as lease:
        shown = [keys, locks, lease, lease.fence, locks._engine.__dict__, http.Gate(locks).__dict__]
        for text in map(repr, shown):
            assert "16 bytes long" not in text
            assert lease.fence.signature not in text
    for text in forgeries(PLAIN)[1:]:
        with pytest.raises(UntrustedFence) as caught:
            Fence.parse(text, keys)
        assert "16 bytes long" not in str(caught.value)
        assert text.rpartition(";")[2] not in str(caught.value)


def test_leases_of_both_clients_are_signed() -> None:
    async def body() -> None:
        async with holdfast.connect_async("memory://a", epoch=3, fence_keys=[NEW, OLD]) as locks:
            async with locks.lock("order:42") as lease:
                assert Fence.parse(str(lease.fence), NEW) == lease.fence
            async with locks.multi(["a", "b"]) as multi:
                assert all(Fence.parse(str(fence), NEW) for fence in multi.fences.values())

    asyncio.run(body())
    with holdfast.connect("memory://b", epoch=3, fence_keys=[NEW, OLD]) as locks:
        with locks.lock("order:42") as lease:
            assert Fence.parse(str(lease.fence), NEW) == lease.fence
        with locks.semaphore("s", 3, permits=2) as lease:
            assert Fence.parse(http.headers(lease)[http.HEADER], NEW).slots == (0, 1)
        with locks.multi(["a", "b"]) as multi:
            assert all(Fence.parse(str(fence), NEW) for fence in multi.fences.values())
    with holdfast.connect("memory://b") as locks, locks.lock("order:42") as lease:
        assert lease.fence.signature == ""


def at_sqlite(servers: Servers, folder: Path) -> Guard:
    connection = sqlite3.connect(folder / "shop.db")

    def guard(lease: Any, **options: Any) -> None:
        with connection:
            sql.guard(connection, "orders", lease, **options)

    return guard


def at_redis(servers: Servers, folder: Path) -> Guard:
    client = redis.Redis.from_url(servers.of(RedisServer).url)
    client.flushdb()
    return lambda lease, **options: fencing_redis.guard(client, "orders", lease, **options).enter()


def at_file(servers: Servers, folder: Path) -> Guard:
    def guard(lease: Any, **options: Any) -> None:
        with file.guard(folder / "ledger", lease, **options):
            pass

    return guard


def at_gate(servers: Servers, folder: Path) -> Guard:
    locks = holdfast.connect(f"memory://{folder.name}")

    def guard(lease: Any, **options: Any) -> None:
        with http.Gate(locks, **options).enter("orders", lease):
            pass

    return guard


@pytest.mark.parametrize("place", [at_sqlite, at_redis, at_file, at_gate], ids=lambda p: p.__name__)
def test_guards_with_keys_take_signed_fences_only(
    place: Callable[..., Guard], servers: Servers, tmp_path: Path
) -> None:
    """What is refused is not remembered either: a forged number locks nobody out."""
    guard = place(servers, tmp_path)
    for text in (*forgeries(PLAIN), *forgeries(SLOTS), str(POISON)):
        for source in (text, Fence.parse(text)):
            with pytest.raises(UntrustedFence):
                guard(source, fence_keys=[NEW, OLD])
    guard(str(PLAIN.signed(OLD)), fence_keys=[NEW, OLD])
    guard(PLAIN.signed(NEW), fence_keys=[NEW, OLD])
    with pytest.raises(StaleFence):
        guard(Fence("order:42", Mode.EXCLUSIVE, (), 3, 16).signed(NEW), fence_keys=NEW)


def test_a_lease_is_this_processs_own(tmp_path: Path) -> None:
    """It needs no signature: nobody outside can hand one in."""
    with holdfast.connect("memory://own") as locks, locks.lock("order:42") as lease:
        with file.guard(tmp_path / "ledger", lease, fence_keys=[NEW]):
            pass
        with pytest.raises(UntrustedFence):
            file.guard(tmp_path / "ledger", lease.fence, fence_keys=[NEW])


def test_a_gate_has_the_keys_of_its_client() -> None:
    with holdfast.connect("memory://gated", fence_keys=[NEW]) as locks:
        gate = http.Gate(locks)
        with pytest.raises(UntrustedFence):
            gate.enter("orders", str(POISON))
        with gate.enter("orders", str(PLAIN.signed(NEW))):
            pass


def wsgi(app_options: dict[str, Any]) -> Callable[[str], tuple[int, bytes]]:
    def app(environ: Any, start_response: Any) -> list[bytes]:
        start_response("200 OK", [])
        return [b"done"]

    fenced = http.WsgiFence(app, **app_options)

    def send(text: str) -> tuple[int, bytes]:
        status: list[str] = []
        body: Any = fenced({"HTTP_HOLDFAST_FENCE": text}, lambda answer, _: status.append(answer))
        answer = b"".join(body)
        getattr(body, "close", lambda: None)()
        return int(status[0][:3]), answer

    return send


def asgi(app_options: dict[str, Any]) -> Callable[[str], tuple[int, bytes]]:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"done"})

    fenced = http.AsgiFence(app, **app_options)

    def send(text: str) -> tuple[int, bytes]:
        answer: list[Any] = []

        async def collect(message: Any) -> None:
            answer.append(message)

        headers = [(b"holdfast-fence", text.encode("latin-1"))]
        asyncio.run(fenced({"type": "http", "headers": headers}, collect, collect))  # type: ignore[arg-type]
        return answer[0]["status"], answer[1]["body"]

    return send


@pytest.mark.parametrize("serve", [wsgi, asgi])
def test_a_middleware_with_keys(serve: Callable[..., Callable[[str], tuple[int, bytes]]]) -> None:
    """One forged request with the highest number there is does not lock the holder out."""
    send = serve({"fence_keys": [NEW, OLD]})
    for text in (str(POISON), *forgeries(PLAIN)):
        status, body = send(text)
        assert status == 403
        assert b"urn:holdfast:untrusted-fence" in body
    assert send(str(PLAIN.signed(OLD))) == (200, b"done")
    status, body = send(str(Fence("order:42", Mode.EXCLUSIVE, (), 3, 16).signed(NEW)))
    assert status == 409
    assert PLAIN.signed(NEW).signature.encode() not in body
    assert send("nonsense")[0] == 400


def test_a_middleware_has_the_keys_of_its_gate() -> None:
    """Else its own early check would remember what the gate refuses."""
    with holdfast.connect("memory://both", fence_keys=[NEW]) as locks:
        send = wsgi({"gate": http.Gate(locks)})
        assert send(str(POISON))[0] == 403
        assert send(str(PLAIN.signed(NEW)))[0] == 200


def test_a_handlers_refusal_is_told_alike() -> None:
    problem = http.problem(UntrustedFence("it is not signed"))
    assert problem.status == 403
