"""Wake-ups of the embedded store: addressed, never lost for good, not blocked by dead clients."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import stat
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.claim import Busy, Claim, Grant
from holdfast.core.contract import GRACE_SECONDS, Waiting
from holdfast.core.drive import run_now
from holdfast.io.clock import now
from holdfast.io.runtime_aio import AsyncioRuntime
from holdfast.io.wakeups import BlockingWakeupHub
from holdfast.stores.sqlite import wakeups
from holdfast.stores.sqlite.backend import SqliteBackend
from holdfast.stores.sqlite.wakeups import Delivery, SocketFolder
from stores.sqlite.helpers import (
    Program,
    backend_of,
    claim,
    expire,
    store_of,
    take,
    try_to_take,
)

WAITER = """
with backend_of(path) as backend:
    asked = claim()
    busy = try_to_take(backend, asked); print("waits", flush=True)
    run_now(backend.wait(asked, busy, backend._runtime.now() + 60))
    print("woken", flush=True)
    take(backend, asked); print("holds", flush=True)
    input()
"""
HOLDER = """
with backend_of(path) as backend:
    take(backend); print("holds", flush=True)
    input()
"""
MANY_WAITERS = """
from contextlib import ExitStack
from holdfast.stores.sqlite import queue as sqlite_queue
sqlite_queue.STALE_SECONDS = 3600.0  # so many waiters are not refreshed while they join
with ExitStack() as stack:
    for _ in range(100):
        backend = stack.enter_context(backend_of(path))
        asked = claim()
        busy = try_to_take(backend, asked)
    print("wait", flush=True)
    input()
"""


def busy(backend: SqliteBackend, asked: Claim) -> Busy:
    answer = try_to_take(backend, asked)
    assert isinstance(answer, Busy), answer
    return answer


def sockets_of(path: Path) -> list[str]:
    return sorted(found.name for found in Path(f"{path}-wake").iterdir())


def dead_socket(path: Path) -> None:
    """Binds a socket without a reader; its path may be longer than an address."""
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as dead:
            dead.bind(f"/proc/self/fd/{folder}/{path.name}")
    finally:
        os.close(folder)


def test_a_release_wakes_only_the_first_waiter(tmp_path: Path) -> None:
    path = tmp_path / "locks.db"
    with backend_of(path) as backend, Program(path, WAITER) as first:
        held = take(backend)
        second = claim()
        # The program has joined before us: it printed so.
        assert first.says() == "waits"
        reply = busy(backend, second)
        assert reply.place == 1
        assert run_now(backend.release(held))
        assert [first.says(), first.says()] == ["woken", "holds"]
        run_now(backend.wait(second, reply, now() + 0.2))
        assert isinstance(try_to_take(backend, second), Busy)


@pytest.mark.parametrize("hundreds", [1, pytest.param(5, marks=pytest.mark.faults)])
def test_killed_waiters_do_not_stall_the_next(tmp_path: Path, hundreds: int) -> None:
    """Hundreds of killed waiters in front of a live one: it holds at once, without any grace."""
    path = tmp_path / "locks.db"
    with backend_of(path) as backend:
        held = take(backend, claim(ttl=3600.0))  # on a loaded machine they join for minutes
        programs = [Program(path, MANY_WAITERS) for _ in range(hundreds)]
        for program in programs:
            assert program.says() == "wait"
        last = claim()
        assert busy(backend, last).place == 100 * hundreds
        for program in programs:
            program.kill()
        assert len(sockets_of(path)) == 100 * hundreds + 1
        assert run_now(backend.release(held))
        assert isinstance(try_to_take(backend, last), Grant)
        assert len(sockets_of(path)) == 1


def test_an_expired_hold_in_front_of_a_dead_waiter_does_not_stall_the_next(tmp_path: Path) -> None:
    path = tmp_path / "locks.db"
    with backend_of(path) as backend:
        with Program(path, HOLDER) as holder:
            assert holder.says() == "holds"
            with Program(path, WAITER) as waiter:
                assert waiter.says() == "waits"
                last = claim()
                assert busy(backend, last).place == 1
        expire(backend)
        assert isinstance(try_to_take(backend, last), Grant)


def test_a_stopped_waiter_is_skipped_after_its_grace(tmp_path: Path) -> None:
    path = tmp_path / "locks.db"
    with backend_of(path) as backend, Program(path, WAITER) as waiter:
        held = take(backend)
        assert waiter.says() == "waits"
        last = claim()
        busy(backend, last)
        waiter.process.send_signal(signal.SIGSTOP)
        started = now()
        assert run_now(backend.release(held))
        answer = try_to_take(backend, last)
        assert isinstance(answer, Busy)
        assert answer.retry_seconds is not None
        assert 0 < answer.retry_seconds <= GRACE_SECONDS
        while isinstance(answer := try_to_take(backend, last), Busy):
            assert now() < started + 60
            run_now(backend.wait(last, answer, now() + 0.05))
        assert now() - started >= GRACE_SECONDS


def test_a_full_socket_is_not_a_dead_one(tmp_path: Path) -> None:
    folder = SocketFolder(str(tmp_path), lambda path: None, 0o600)
    subscription = folder.bind()
    try:
        deliveries = [folder.send(subscription.address, f"key {number}") for number in range(2000)]
        assert deliveries[0] is Delivery.SENT
        assert deliveries[-1] is Delivery.FULL
        assert Delivery.DEAD not in deliveries
        assert Path(subscription.path).exists()
        keys = subscription.read()
        assert keys[0] == "key 0"
        assert keys[-1] == ""  # wakes all: some datagrams were refused
        assert folder.send(subscription.address, "again") is Delivery.SENT
    finally:
        subscription.close()
        folder.close()
    assert folder.send(subscription.address, "gone") is Delivery.DEAD
    folder.close()


def test_a_waiter_whose_datagram_may_have_been_refused_is_woken(tmp_path: Path) -> None:
    """After more datagrams than the socket queues, all waiters are woken."""
    folder = SocketFolder(str(tmp_path), lambda path: None, 0o600)
    subscription, hub = folder.bind(), BlockingWakeupHub()
    hub.attach(subscription)
    while folder.send(subscription.address, "another") is not Delivery.FULL:
        pass
    try:
        assert hub.wait("refused", now() + 60)
        assert hub.wait("another", now() + 60)  # its own wake-up was kept
    finally:
        hub.close()
        folder.close()
    assert hub.wait("anybody", now() + 60)  # a closed hub ends every wait


def test_closing_a_hub_ends_all_waits() -> None:
    hub = BlockingWakeupHub()
    woken: list[bool] = []
    threads = [
        threading.Thread(target=lambda key=key: woken.append(hub.wait(key, now() + 60)))
        for key in ("one", "two", "three")
    ]
    for thread in threads:
        thread.start()
    while len(hub._waiting) < 3:
        pass
    hub.close()
    for thread in threads:
        thread.join(30)
    assert woken == [True, True, True]


def test_sockets_of_dead_clients_are_removed(tmp_path: Path) -> None:
    path = tmp_path / "locks.db"
    with backend_of(path) as backend:
        take(backend)
        with Program(path, WAITER) as waiter:
            assert waiter.says() == "waits"
            assert len(sockets_of(path)) == 1
        old = Path(f"{path}-wake") / "1-0123456789abcdef.sock.new"
        dead_socket(old)
        os.utime(old, (0, 0))
        busy(backend, claim())
        assert len(sockets_of(path)) == 1
        assert sockets_of(path)[0].startswith(f"{os.getpid()}-")
    assert sockets_of(path) == []


def test_a_program_leaves_no_socket_at_its_end(tmp_path: Path) -> None:
    path = tmp_path / "locks.db"
    lines = "b = store_of(path).backend(BlockingRuntime()); take(b); try_to_take(b, claim())"
    program = Program(path, "from holdfast.io.runtime_blocking import BlockingRuntime\n" + lines)
    assert program.end() == 0
    assert sockets_of(path) == []


def test_a_long_path_works(tmp_path: Path) -> None:
    folder = tmp_path
    while len(str(folder)) < 180:
        folder = folder / "a-folder-with-a-long-name"
    path = folder / "locks.db"
    with backend_of(path) as backend, Program(path, WAITER) as waiter:
        held = take(backend)
        assert waiter.says() == "waits"
        assert run_now(backend.release(held))
        assert [waiter.says(), waiter.says()] == ["woken", "holds"]


def test_without_sockets_waiters_poll(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wakeups, "supported", lambda: False)
    with backend_of(tmp_path / "locks.db") as backend:
        held = take(backend)
        asked = claim()
        reply = busy(backend, asked)
        assert run_now(backend.release(held))
        run_now(backend.wait(asked, reply, now() + 60))  # returns soon, without a wake-up
        assert isinstance(try_to_take(backend, asked), Grant)
        assert not Path(f"{tmp_path}/locks.db-wake").exists()


def test_a_socket_that_cannot_be_bound_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "locks.db"
    with backend_of(path) as backend:
        held = take(backend)
        with monkeypatch.context() as elsewhere:  # a long path on a system without /proc
            elsewhere.setattr(wakeups, "LONGEST_ADDRESS_BYTES", 0)
            elsewhere.setattr(wakeups, "_has_descriptor_paths", lambda: False)
            asked, other = claim(), claim()
            reply = busy(backend, asked)
            busy(backend, other)
        assert caplog.text.count("waiting by polling") == 1
        assert run_now(backend.release(held))
        run_now(backend.wait(asked, reply, now() + 60))
        assert isinstance(try_to_take(backend, asked), Grant)


def test_a_socket_that_was_removed_is_bound_again(tmp_path: Path) -> None:
    path = tmp_path / "locks.db"
    with backend_of(path) as backend, backend_of(path) as other:
        held = take(other)
        asked = claim()
        reply = busy(backend, asked)
        for name in sockets_of(path):
            (Path(f"{path}-wake") / name).unlink()
        run_now(backend.wait(asked, reply, now() + 60))  # notices, and returns at once
        reply = busy(backend, asked)
        assert reply.place == 0
        threading.Timer(0.1, lambda: run_now(other.release(held))).start()
        run_now(backend.wait(asked, reply, now() + 60))
        assert isinstance(try_to_take(backend, asked), Grant)


def test_a_lost_wake_up_is_sent_again_by_the_renewer(tmp_path: Path) -> None:
    """The releaser dies between its commit and its datagram."""
    path = tmp_path / "locks.db"
    with backend_of(path) as backend, backend_of(path) as renewer:
        held = take(renewer)
        asked = claim()
        reply = busy(backend, asked)
        renewer._wakeups.deliver = _nothing  # type: ignore[method-assign]
        assert run_now(renewer.release(held))
        del renewer._wakeups.deliver
        renewal = run_now(renewer.renew([], [Waiting(asked, 3)], until=now() + 5))
        assert not renewal.forgotten
        started = now()
        run_now(backend.wait(asked, reply, now() + 60))
        assert now() - started < 30
        assert isinstance(try_to_take(backend, asked), Grant)


async def _nothing(wakeups: object) -> set[str]:
    return set()


def test_asyncio_waiters_are_woken_through_their_loop(tmp_path: Path) -> None:
    path = tmp_path / "locks.db"

    async def waits(held: Grant, other: SqliteBackend) -> Grant | Busy:
        backend = store_of(path).backend(AsyncioRuntime())
        try:
            asked = claim()
            reply = await backend.attempt(asked, join=True)
            assert isinstance(reply, Busy)
            asyncio.get_running_loop().call_later(0.05, run_now, other.release(held))
            await backend.wait(asked, reply, now() + 60)
            return await backend.attempt(asked, join=True)
        finally:
            await backend.close()

    with backend_of(path) as other:
        assert isinstance(asyncio.run(waits(take(other), other)), Grant)
    assert sockets_of(path) == []


@pytest.mark.parametrize("name", ["stranger.sock", "1-0123456789abcdef.sock"])
def test_a_socket_of_another_kind_in_the_folder_does_no_harm(tmp_path: Path, name: str) -> None:
    path = tmp_path / "locks.db"
    with backend_of(path) as backend:
        take(backend)
        Path(f"{path}-wake").mkdir(0o700)
        folder = os.open(f"{path}-wake", os.O_RDONLY)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:
            stranger.bind(f"/proc/self/fd/{folder}/{name}")
            os.close(folder)
            busy(backend, claim())
            assert name in sockets_of(path)


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A folder in which the address of a socket fits; a longer path is reached in another way."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


def test_threads_that_send_at_once_share_a_socket(
    short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[socket.socket] = []
    start, late = threading.Barrier(8), threading.Event()

    def make() -> socket.socket:
        late.wait(0.2)  # a second thread that finds none gets here in between
        made.append(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
        return made[-1]

    monkeypatch.setattr(wakeups, "_datagram_socket", make)
    folder = SocketFolder(str(short_path), os.mkdir, 0o600)

    def send() -> None:
        start.wait()
        assert folder.send("1-0123456789abcdef.sock", "key") is Delivery.DEAD

    threads = [threading.Thread(target=send) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    folder.close()
    for extra in made:
        extra.close()
    assert len(made) == 1


def join_with_address(backend: SqliteBackend, address: str) -> None:
    """Adds a waiter with an address of our choice, as any user with write access could."""
    connection = backend._connection._database
    assert connection is not None
    ((key,),) = connection.execute("SELECT name FROM name").fetchall()
    row = (key, 1, "x", "exclusive", 1, 0, 0, "", "", 0.0, now() + 60, 0, address, 0)
    connection.execute("INSERT INTO claim VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?,?)", row)
    connection.execute("UPDATE name SET crowd = 1")


@pytest.mark.parametrize(
    "address",
    [
        "../dead",
        "../precious",
        "{folder}/dead",
        "precious",
        "link/dead",
        "../1-0123456789abcdef.sock",
    ],
)
def test_an_invalid_address_is_not_used(tmp_path: Path, address: str) -> None:
    path = tmp_path / "locks.db"
    wake = Path(f"{path}-wake")
    wake.mkdir(0o700)
    (wake / "link").symlink_to(tmp_path)
    names = ("precious", "1-0123456789abcdef.sock")
    files = [folder / name for folder in (tmp_path, wake) for name in names]
    for file in files:
        file.write_text("not a socket")
    dead_socket(tmp_path / "dead")
    with backend_of(path) as backend:
        held = take(backend)
        join_with_address(backend, address.format(folder=tmp_path))
        assert run_now(backend.release(held))
        assert [file.read_text() for file in files] == ["not a socket"] * 4
        assert (tmp_path / "dead").is_socket()
        take(backend)  # no waiter is in front of us any more


def test_only_sockets_are_removed(tmp_path: Path) -> None:
    """A plain file, or a link to a socket, at a valid address stays."""
    folder = SocketFolder(str(tmp_path / "wake"), lambda path: None, 0o600)
    (tmp_path / "wake").mkdir()
    file, link = (tmp_path / "wake" / f"{n}-0123456789abcdef.sock" for n in (1, 2))
    file.write_text("not a socket")
    dead_socket(tmp_path / "dead")
    link.symlink_to(tmp_path / "dead")
    assert folder.send(file.name, "key") is Delivery.DEAD
    assert folder.send(link.name, "key") is Delivery.DEAD
    folder.close()
    assert file.read_text() == "not a socket"
    assert (tmp_path / "dead").is_socket()


linux_only = pytest.mark.skipif(sys.platform != "linux", reason="needs handles of sockets")


@linux_only
def test_a_link_in_a_shared_folder_leads_to_no_other_socket(tmp_path: Path) -> None:
    """A member of the group could make root send a text to a service that trusts root."""
    folder = SocketFolder(str(tmp_path / "wake"), lambda path: None, 0o660)
    (tmp_path / "wake").mkdir()
    (tmp_path / "elsewhere").mkdir()
    service = SocketFolder(str(tmp_path / "elsewhere"), lambda path: None, 0o600)
    subscription, own = service.bind(), folder.bind()
    try:
        link = tmp_path / "wake" / "1-0123456789abcdef.sock"
        link.symlink_to(tmp_path / "elsewhere" / subscription.address)
        assert folder.send(link.name, "STOPPING=1") is Delivery.DEAD
        assert not folder.alive(link.name)
        assert subscription.read() == []
        assert folder.send(own.address, "key") is Delivery.SENT
        assert own.read() == ["key"]
    finally:
        subscription.close()
        own.close()
        folder.close()
        service.close()


@linux_only
def test_a_shared_folder_that_became_a_link_gets_no_socket(tmp_path: Path) -> None:
    """Between the check of the folder and binding the socket."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    folder = SocketFolder(
        str(tmp_path / "wake"), lambda path: Path(path).symlink_to(elsewhere), 0o660
    )
    with pytest.raises(OSError, match="wake"):
        folder.bind()
    assert list(elsewhere.iterdir()) == []


def test_a_waiter_is_alive_after_its_folder_was_made_again(tmp_path: Path) -> None:
    """Also if the path is so long that the folder has to be opened."""
    path = tmp_path / ("a-long-name-" * 10) / "wake"
    path.parent.mkdir()
    folder = SocketFolder(str(path), lambda path: Path(path).mkdir(), 0o600)
    first = folder.bind()
    assert folder.send(first.address, "key") is Delivery.SENT
    first.close()
    path.rmdir()
    second = folder.bind()
    try:
        assert folder.send(second.address, "key") is Delivery.SENT
        assert second.read() == ["key"]
    finally:
        second.close()
        folder.close()


def test_a_folder_that_became_a_link_is_not_swept(short_path: Path) -> None:
    elsewhere = short_path / "elsewhere"
    elsewhere.mkdir()
    folder = SocketFolder(str(short_path / "wake"), lambda path: None, 0o600)
    (short_path / "wake").symlink_to(elsewhere)
    name = "1-0123456789abcdef.sock"
    dead_socket(elsewhere / name)
    assert folder.send(name, "key") is Delivery.DEAD
    folder.close()
    assert (elsewhere / name).is_socket()


def test_a_socket_that_was_replaced_by_a_link_changes_no_other_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By another user of the group, between binding the socket and setting its mode."""
    secret, wake = tmp_path / "secret", tmp_path / "wake"
    wake.mkdir()
    secret.touch(0o600)

    class Exchanged(socket.socket):
        def bind(self, address: object) -> None:
            assert isinstance(address, str)
            super().bind(address)
            Path(address).unlink()
            Path(address).symlink_to(secret)

    def make() -> socket.socket:
        return Exchanged(socket.AF_UNIX, socket.SOCK_DGRAM)

    monkeypatch.setattr(wakeups, "_datagram_socket", make)
    folder = SocketFolder(str(wake), lambda path: None, 0o660)
    with pytest.raises(OSError, match="replaced our socket"):
        folder.bind()
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
