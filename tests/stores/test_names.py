"""One deadline for connecting to a store: the look-up of the host name, and all its addresses."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from holdfast.core.drive import run_now
from holdfast.errors import BackendUnavailable
from holdfast.io.clock import now
from holdfast.io.connection import open_socket, world_of
from holdfast.io.sockets import MOST_THREADS, Found, Lookup, look_up, resolver
from holdfast.locks_async import AsyncLocks
from holdfast.stores._consensus.hosts import HostEndpoint, Hosts
from holdfast.testing import Flavour
from holdfast.testing.clients import open_client, run_here

SECONDS = 2.0
"""The timeout of a request; it must end within one second more."""
NAME = "store.test"

flavours = pytest.mark.parametrize("flavour", list(Flavour))


class Names:
    """Replaces the system's look-up of host names that end in ``.test``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.addresses: list[str] = ["127.0.0.1"]
        self.hanging = ""
        """The only name whose look-up blocks; empty if all block."""
        self.asked: list[str] = []
        self.answer = threading.Event()
        self.answer.set()
        self._real = socket.getaddrinfo
        monkeypatch.setattr(socket, "getaddrinfo", self._look_up)

    def _look_up(self, name: str | bytes, port: int, *how: Any, **more: Any) -> Any:
        host = name if isinstance(name, str) else name.decode("idna")
        if not host.endswith(".test"):
            return self._real(host, port, *how, **more)
        self.asked.append(host)
        assert self.hanging not in ("", host) or self.answer.wait(60)
        kind = socket.SOCK_STREAM
        return [(socket.AF_INET, kind, 6, "", (address, port)) for address in self.addresses]


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Iterator[Names]:
    names = Names(monkeypatch)
    yield names
    names.answer.set()


@pytest.fixture
def port() -> Iterator[int]:
    """A port on which 127.0.0.1 accepts connections, and 127.0.0.11 to 127.0.0.16 do not answer."""
    sockets: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        number = server.getsockname()[1]
        for last in range(11, 17):
            silent = socket.socket()
            sockets.append(silent)
            silent.bind((f"127.0.0.{last}", number))
            silent.listen(0)
            for _ in range(4):
                filler = socket.socket()
                sockets.append(filler)
                filler.setblocking(False)
                filler.connect_ex((f"127.0.0.{last}", number))
        yield number
    for one in sockets:
        one.close()


def _connect(
    flavour: Flavour,
    port: int,
    seconds: float = SECONDS,
    hosts: tuple[tuple[str, int], ...] = (),
) -> str:
    """Connect; return the address that was reached."""
    hosts = hosts or ((NAME, port),)
    known = Hosts("etcd://store.test", hosts, tls=None, request_seconds=seconds)
    endpoint: HostEndpoint[Any] = HostEndpoint(known)

    async def connect() -> str:
        world = world_of(blocking=flavour is Flavour.BLOCKING)
        sock, _ = await endpoint.connect(world, now() + seconds)
        with sock:
            reached: str = sock.getpeername()[0]
            return reached

    return run_now(connect()) if flavour is Flavour.BLOCKING else asyncio.run(connect())


def _wait_for(condition: Callable[[], object]) -> None:
    ends = now() + 30
    while not condition():
        assert now() < ends
        time.sleep(0.01)


def _given_up(work: Callable[[], object]) -> str:
    began = now()
    with pytest.raises(BackendUnavailable) as raised:
        work()
    assert now() - began < SECONDS + 1
    return str(raised.value)


@flavours
def test_a_look_up_that_hangs_is_given_up_in_time(
    names: Names, port: int, flavour: Flavour
) -> None:
    names.answer.clear()
    message = _given_up(lambda: _connect(flavour, port))
    assert f"looking up {NAME} took too long" in message
    names.answer.set()
    assert _connect(flavour, port, 30) == "127.0.0.1"


@flavours
def test_all_addresses_of_a_name_share_one_deadline(
    names: Names, port: int, flavour: Flavour
) -> None:
    names.addresses = [f"127.0.0.{last}" for last in range(11, 17)]
    assert "no answer in time" in _given_up(lambda: _connect(flavour, port))


@flavours
def test_an_address_behind_silent_ones_is_reached(
    names: Names, port: int, flavour: Flavour
) -> None:
    names.addresses = ["127.0.0.11", "127.0.0.12", "127.0.0.1"]
    assert _connect(flavour, port, 6) == "127.0.0.1"


@flavours
def test_an_unknown_name_fails_at_once(port: int, flavour: Flavour) -> None:
    began = now()
    with pytest.raises(BackendUnavailable, match=r"name\.invalid"):
        _connect(flavour, port, 60, (("name.invalid", port),))
    assert now() - began < 30


def test_a_look_up_that_hangs_is_shared_and_never_repeated(names: Names, port: int) -> None:
    """All calls that need the same name wait for one look-up."""
    names.answer.clear()
    given_up: list[OSError] = []
    answered: list[object] = []

    def ask(seconds: float) -> None:
        try:
            answered.append(look_up(NAME, port, now() + seconds))
        except OSError as error:
            given_up.append(error)

    for _ in range(3):
        ask(0.01)
    threads = [threading.Thread(target=ask, args=(60,)) for _ in range(10)]
    for thread in threads:
        thread.start()
    _wait_for(lambda: _waiting(port) == 10)
    assert look_up("127.0.0.1", port, now())  # an address needs no look-up
    names.answer.set()
    for thread in threads:
        thread.join(30)
    assert (len(given_up), len(answered), names.asked) == (3, 10, [NAME])
    assert len(look_up(NAME, port, now() + 30)) == 1
    assert names.asked == [NAME, NAME]


def _waiting(port: int) -> int:
    asked = list(resolver._under_way.get((NAME, port), ()))
    return sum(not lookup.given_up for lookup in asked)


def test_names_whose_look_ups_hang_take_a_bounded_number_of_threads(
    names: Names, port: int
) -> None:
    """A look-up whose callers have all timed out is not started later."""
    names.answer.clear()
    hosts = [f"{number}.test" for number in range(2 * MOST_THREADS)]
    lookups = [Lookup(host, port, lambda: None) for host in hosts]
    for lookup in lookups:
        resolver.ask(lookup)
    _wait_for(lambda: len(names.asked) == MOST_THREADS)
    for lookup in lookups:
        lookup.given_up = True
    names.answer.set()
    assert look_up(NAME, port, now() + 30)
    assert sorted(names.asked) == [*hosts[:MOST_THREADS], NAME]


@flavours
def test_a_host_whose_look_up_hangs_leaves_the_others(
    names: Names, port: int, flavour: Flavour, monkeypatch: pytest.MonkeyPatch
) -> None:
    names.answer.clear()
    monkeypatch.setattr(names, "hanging", "slow.test")
    hosts = (("slow.test", port), (NAME, port))
    assert _connect(flavour, port, 4, hosts) == "127.0.0.1"


def test_two_names_that_are_asked_for_at_once_do_not_wait_for_each_other(
    names: Names, port: int
) -> None:
    """Also if the second is requested before the first has started."""
    names.answer.clear()
    names.hanging = "slow.test"
    answered = threading.Event()
    fresh = type(resolver)()
    for name, tell in (("slow.test", lambda: None), (NAME, answered.set)):
        fresh._asked.put(Lookup(name, port, tell))
    fresh._threads[0].start()
    assert answered.wait(30)


def test_an_address_of_a_family_that_the_system_does_not_have_is_passed_over(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def found(*_: object, **__: object) -> list[Found]:
        kind = socket.SOCK_STREAM
        families = (socket.AF_APPLETALK, socket.AF_INET)
        return [(family, kind, 6, "", ("127.0.0.1", port)) for family in families]

    monkeypatch.setattr(socket, "getaddrinfo", found)
    opening = open_socket(world_of(blocking=True), NAME, port, now() + 30)
    with run_now(opening) as connected:
        assert connected.getpeername() == ("127.0.0.1", port)


FORK = """
import os, socket, threading, time
from holdfast.io.clock import now
from holdfast.io.sockets import look_up
real, hangs = socket.getaddrinfo, True

def look(host, port, *rest, **more):
    while hangs:
        time.sleep(0.01)
    return real("127.0.0.1", port, *rest, **more)

socket.getaddrinfo = look
try:
    look_up("store.test", 80, now() + 0.1)
except OSError as error:
    print(error.strerror, flush=True)
pid = os.fork()
if pid == 0:
    hangs = False
    print(look_up("store.test", 80, now() + 30)[0][4][0], flush=True)
    os._exit(0)
print(os.waitpid(pid, 0)[1])
"""


def test_a_fork_looks_up_by_itself() -> None:
    program = [sys.executable, "-c", FORK]
    done = subprocess.run(program, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.split("\n") == ["looking up store.test took too long", "127.0.0.1", "0", ""]
    assert done.stderr == ""


@flavours
@pytest.mark.parametrize("scheme", ["postgresql", "mysql"])
def test_a_database_s_look_up_that_hangs_is_given_up(
    names: Names, scheme: str, flavour: Flavour
) -> None:
    """libpq and PyMySQL get addresses, which our own resolver has looked up."""
    names.answer.clear()
    url = f"{scheme}://user@{NAME}/db"

    async def ask(locks: AsyncLocks) -> None:
        await locks.lock("name", timeout=1).acquire()

    began = now()
    with pytest.raises(BackendUnavailable, match=f"looking up {NAME} took too long"):
        asyncio.run(ask(open_client(url, flavour, run_here)))
    assert now() - began < 3.0
