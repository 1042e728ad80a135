"""The store of examples/memcached_store passes the suite of all stores, and has its own rules."""

from __future__ import annotations

import gc
import importlib.util
import secrets
import socket
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import holdfast
from harnesses.asleep import Asleep
from holdfast.claim import Busy, Claim, Grant, Mode, write_label
from holdfast.core.contract import Guarantee, Settings
from holdfast.core.drive import run_now
from holdfast.errors import BackendUnavailable, GuaranteeNotMet, Incompatible
from holdfast.io.clock import now
from holdfast.io.connection import PENDING, Broken
from holdfast.io.runtime_blocking import BlockingRuntime
from holdfast.testing import Case, Flavour, Harness, conformance, contract
from holdfast.testing.admission import machine
from holdfast.testing.guarantees import guarantees_of
from holdfast.url import open_store
from servers.memcached import KEEPS, MemcachedServer
from servers.redis import RedisServer
from servers.registry import Servers

EXAMPLE = Path(__file__).parents[2] / "examples" / "memcached_store"
# The rules of conformance wait for long on a store that pushes nothing: with the slow tests.
CASES = [
    pytest.param(case, id=str(case), marks=[pytest.mark.faults] * slow)
    for case, slow in [
        *((case, case.rule.slow) for case in contract.cases()),
        *((case, True) for case in conformance.cases()),
    ]
]
asleep = Asleep()


def example_harness() -> Any:
    """The module ``harness`` of the example."""
    name = "memcached_store_harness"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, EXAMPLE / "harness.py")
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


@pytest.fixture(scope="module", params=["memcached"])
def harness() -> Iterator[Harness]:
    with example_harness().MemcachedHarness() as harness:
        yield harness


@pytest.mark.parametrize("case", CASES)
def test_it_keeps_the_rules(request: pytest.FixtureRequest, harness: Harness, case: Case) -> None:
    if lack := case.lacks(harness):
        pytest.skip(lack)
    asleep.run(request, harness, case)


@pytest.mark.parametrize("flavour", list(Flavour))
def test_it_admits_as_the_reference(harness: Harness, flavour: Flavour) -> None:
    surroundings = machine.Surroundings(harness, flavour)
    machine.run(surroundings, examples=12, steps=25)
    surroundings.close()
    assert surroundings.compared > 25, "the machine stood still for too much of the time"


@pytest.fixture(scope="module")
def installed() -> Iterator[None]:
    package = example_harness().Installed()
    yield
    package.close()


Peer = Callable[..., Any]


@pytest.fixture
def peer(installed: None) -> Iterator[Peer]:
    """Makes backends, each as another process would."""
    made: list[Any] = []

    def make(url: str, **settings: Any) -> Any:
        made.append(open_store(url, Settings(**settings)).backend(BlockingRuntime()))
        return made[-1]

    yield make
    for backend in made:
        run_now(backend.close())


def claim(name: str = "name", ttl: float = 30.0, note: str = "") -> Claim:
    label = write_label("host", 1, "thread", note)
    return Claim(name, Mode.EXCLUSIVE, 1, 0, ttl, secrets.token_hex(16), label)


def attempt(backend: Any, wanted: Claim) -> Grant | Busy:
    answer: Grant | Busy = run_now(backend.attempt(wanted, join=True))
    return answer


def granted(backend: Any, wanted: Claim) -> Grant:
    answer = attempt(backend, wanted)
    assert isinstance(answer, Grant), answer
    return answer


def test_it_declares_no_more_than_it_keeps(harness: Harness) -> None:
    assert guarantees_of(harness) == {
        Guarantee.EXCLUSIVE,
        Guarantee.SHARED,
        Guarantee.SLOTS,
        Guarantee.FIFO,
        Guarantee.FENCED,
        Guarantee.CROSS_HOST,
    }
    with pytest.raises(GuaranteeNotMet):
        holdfast.connect(harness.url, require=("RECORDS",))


@pytest.mark.parametrize(
    "url",
    ["memcached://a,b", "memcached://user:word@a", "memcached://a/1", "memcached://a?quarantine=2"],
)
def test_a_url_that_it_does_not_understand(installed: None, url: str) -> None:
    with pytest.raises(ValueError, match=r"memcached://|quarantine"):
        holdfast.connect(url)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("-F", "-o", "no_slab_reassign"), "-M"),
        (("-M", "-o", "no_slab_reassign"), "-F"),
        (("-M", "-F"), "no_slab_reassign"),
        ((*KEEPS, "-C"), "-C"),
    ],
)
def test_a_server_that_may_drop_a_hold_is_refused(
    peer: Peer, arguments: tuple[str, ...], why: str
) -> None:
    with (
        MemcachedServer(arguments=arguments) as server,
        pytest.raises(BackendUnavailable, match=why) as refused,
    ):
        attempt(peer(server.url), claim())
    assert refused.value.final


def test_another_kind_of_server_is_refused(peer: Peer, servers: Servers) -> None:
    server = servers.of(RedisServer)
    with pytest.raises(BackendUnavailable, match="not memcached"):
        attempt(peer(f"memcached://{server.host}:{server.port}"), claim())


def test_nothing_is_granted_until_the_holds_of_before_a_restart_are_over(peer: Peer) -> None:
    with MemcachedServer() as server:
        url = f"{server.url}?quarantine=7"
        ours, theirs = peer(url), peer(url)
        busy = attempt(ours, claim())
        assert isinstance(busy, Busy)
        assert "forgotten" in busy.reason
        before = _grant_later(ours, claim(ttl=3.0))
        server.kill()
        server.start()
        killed = now()
        wanted = claim()
        after = _grant_later(theirs, wanted)
        assert now() - killed >= 3.0, "the hold of before may not be over"
        assert after.token > before.token
        assert run_now(ours.release(before)) is False


def _grant_later(backend: Any, wanted: Claim) -> Grant:
    deadline = now() + 60
    while now() < deadline:
        with suppress(BackendUnavailable):
            answer = attempt(backend, wanted)
            if isinstance(answer, Grant):
                return answer
        time.sleep(0.05)
    raise AssertionError("it was never granted")


def test_a_restart_between_read_and_write_grants_nothing(
    peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with MemcachedServer() as server:
        backend = peer(f"{server.url}?quarantine=5")
        _grant_later(backend, claim("warm"))
        ask = backend._ask

        async def restart_first(request: bytes, until: float | None = None) -> Any:
            if request.startswith((b"add", b"cas")):
                server.kill()
                server.start()
                backend.pool.reset()
            return await ask(request, until)

        monkeypatch.setattr(backend, "_ask", restart_first)
        with pytest.raises(BackendUnavailable, match="restarted"):
            attempt(backend, claim())


def test_a_hold_stays_if_there_is_no_memory_for_a_waiter(peer: Peer) -> None:
    with MemcachedServer(arguments=(*KEEPS, "-m", "2")) as server:
        backend = peer(f"{server.url}?quarantine=0")
        grant = granted(backend, claim())
        _fill(server)
        joined = 0
        while (answer := _joined(backend)) is not None:
            assert isinstance(answer, Busy)
            joined += 1
        info = run_now(backend.look("name"))
        assert [holder.token for holder in info.holders] == [grant.token]
        assert len(info.waiters) == joined
        assert run_now(backend.release(grant)) is True


def _fill(server: MemcachedServer) -> None:
    """Takes all memory for entries of more than a few hundred bytes: memcached has pages of its own
    for each range of sizes."""
    size = 700
    while size < 1_000_000:
        value = b"x" * size
        entries = [
            b"set %d-%d 0 0 %d noreply\r\n%b\r\n" % (size, number, size, value)
            for number in range(2 * 2**20 // size + 2)
        ]
        server.ask(b"".join(entries) + b"version\r\n")
        size = size * 6 // 5


def _joined(backend: Any) -> Grant | Busy | None:
    """The answer to another waiter; ``None`` if there is no memory for it."""
    try:
        return attempt(backend, claim(note="n" * 1000))
    except BackendUnavailable as error:
        if "SERVER_ERROR" not in str(error):
            raise
        return None


def test_a_request_that_arrives_after_its_undoing_is_not_written(peer: Peer) -> None:
    with MemcachedServer() as server:
        backend = peer(f"{server.url}?quarantine=0")
        first, second = claim(), claim()
        late_first = _request_without_write(backend, first)
        run_now(backend.abandon(first))
        assert server.ask(late_first) == b"NOT_STORED\r\n"
        late_second = _request_without_write(backend, second)
        run_now(backend.abandon(second))
        assert server.ask(late_second) == b"EXISTS\r\n"
        assert run_now(backend.look("name")).holders == ()


def _request_without_write(backend: Any, wanted: Claim) -> bytes:
    """The request that an attempt would write, which does not arrive."""
    sent: list[bytes] = []
    ask = backend._ask

    async def keep(request: bytes, until: float | None = None) -> Any:
        if request.startswith((b"add", b"cas")):
            sent.append(request)
            raise BackendUnavailable("kept")
        return await ask(request, until)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "_ask", keep)
        with pytest.raises(BackendUnavailable, match="kept"):
            attempt(backend, wanted)
    return sent[0]


def test_an_end_is_not_counted_from_a_clock_that_stood_still(peer: Peer) -> None:
    """A server that was stopped answers by the clock of before. What it grants then ends no sooner
    in the store than for its holder."""
    with MemcachedServer() as server:
        backend = peer(f"{server.url}?quarantine=0", request_seconds=10.0)
        run_now(backend.release(granted(backend, claim("warm"))))
        server.pause()
        time.sleep(7)
        wanted = claim(ttl=30.0)
        with ThreadPoolExecutor(1) as pool:
            sent = now()
            answer = pool.submit(attempt, backend, wanted)
            time.sleep(0.3)
            server.resume()
        if answer.exception() is not None:  # it has answered by that clock
            sent = now()
            _grant_later(backend, wanted)
        (holder,) = run_now(backend.look("name")).holders
        assert holder.remaining + 4.0 >= 30.0 - (now() - sent)


def test_readings_of_a_clock(installed: None) -> None:
    from holdfast_memcached.connection import Reading

    first = Reading(100.0, 100.1, 5000, 60)
    assert Reading(110.0, 110.1, 5010, 70).agrees(first)
    assert Reading(110.0, 110.1, 5009, 69).agrees(first), "it counts whole seconds"
    assert Reading(110.0, 116.0, 5016, 76).agrees(first), "it may have answered late"
    assert not Reading(110.0, 110.1, 5005, 65).agrees(first), "it stood still"
    assert not Reading(110.0, 110.1, 5016, 76).agrees(first), "it stood still before"
    assert not Reading(110.0, 110.1, 5010, 4).agrees(first), "it is another process"


DAMAGED = [
    b"",
    b"{}",
    b"[]",
    b"[" * 100_000,
    b'[2,"name",1,[],[]]',
    b'[true,"name",1,[],[]]',
    b'[1,"name",-1,[],[]]',
    b'[1,"name",9223372036854775807,[],[]]',
    b'[1,"name",1.5,[],[]]',
    b'[1,"name",1,[[]],[]]',
    b'[1,"name",1,[["exclusive",1,0,"o","l",1,null,1,1]],[]]',
    b'[1,"name",1,[["exclusive",1,0,"o","l",1,["0"],1,1]],[]]',
    b'[1,"name",1,[["exclusively",1,0,"o","l",1,[],1,1]],[]]',
    b'[1,"name",1,[["exclusive",1,0,"o","l",1,[],1,1]],[["exclusive",1,0,"o","l",1,1,0,0]]]',
    b'[1,"name",1,[],[["exclusive",1,0,"o","l",1,1,0]]]',
    b'[1,"\xff",1,[],[]]',
]


@pytest.mark.parametrize("data", DAMAGED)
def test_a_damaged_item_is_told(installed: None, data: bytes) -> None:
    from holdfast_memcached.item import read_item

    with pytest.raises(Incompatible, match="damaged"):
        read_item(data, "memcached://host")


def test_replies_are_read_wherever_they_are_cut(installed: None) -> None:
    from holdfast_memcached.connection import MemcachedConnection

    stream = (
        b"VALUE key 0 6 17\r\nEND\r\nx\r\nEND\r\nSTORED\r\nSTAT time 5\r\nSTAT rusage 0.1 x\r\n"
        b"END\r\nkey=one exp=-1 la=1\nkey=two exp=-1\nEND\r\nSERVER_ERROR out of memory\r\nEND\r\n"
    )
    expected: list[Any] = [
        [(b"17", b"END\r\nx")],
        b"STORED",
        [(b"time", b"5"), (b"rusage", b"0.1")],
        [(b"one", b""), (b"two", b"")],
        b"SERVER_ERROR out of memory",
        [],
    ]
    for at in range(len(stream)):
        ours, theirs = socket.socketpair()
        connection = MemcachedConnection(ours)
        for part in filter(None, (stream[:at], stream[at:])):
            connection.feed(part)
        assert [connection.next() for _ in expected] == expected
        assert connection.next() is PENDING
        connection.close()
        theirs.close()


def test_a_dropped_connection_needs_no_garbage_collector(installed: None) -> None:
    """An interrupt may drop one in use: with it goes its place in the pool."""
    from holdfast_memcached.connection import MemcachedConnection

    ours, theirs = socket.socketpair()
    gc.disable()
    try:
        gone = weakref.ref(MemcachedConnection(ours))
        assert gone() is None
    finally:
        gc.enable()
        ours.close()
        theirs.close()


@pytest.mark.parametrize(
    "data", [b"x" * 5000, b"VALUE k 0 99999999999 1\r\n", b"VALUE k 0 x 1\r\n"]
)
def test_a_reply_that_is_none_breaks_the_connection(installed: None, data: bytes) -> None:
    from holdfast_memcached.connection import MemcachedConnection

    ours, theirs = socket.socketpair()
    connection = MemcachedConnection(ours)
    with pytest.raises(Broken):
        connection.feed(data)
    connection.close()
    theirs.close()
