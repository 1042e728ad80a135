"""The proxy breaks what it is asked to break, and nothing else."""

import socket
import time
from collections.abc import Iterator

import pytest

from servers.process import wait_until
from servers.proxy import Proxy
from servers.redis import RedisServer
from servers.registry import Servers

PING = b"*1\r\n$4\r\nPING\r\n"
PONG = b"+PONG\r\n"
SOON = 20.0
COUNT = b"*2\r\n$4\r\nINCR\r\n$7\r\ncounter\r\n"


@pytest.fixture
def server(servers: Servers) -> RedisServer:
    shared = servers.of(RedisServer)
    shared.ask("FLUSHALL")
    return shared


@pytest.fixture
def proxy(server: RedisServer) -> Iterator[Proxy]:
    with Proxy(server) as proxy:
        yield proxy


def connect(proxy: Proxy) -> socket.socket:
    return socket.create_connection(("127.0.0.1", proxy.port), timeout=SOON)


def exchange(wire: socket.socket, words: bytes = PING) -> bytes:
    wire.sendall(words)
    return wire.recv(100)


def silent(wire: socket.socket, seconds: float = 0.2) -> bool:
    wire.settimeout(seconds)
    try:
        return wire.recv(100) is None
    except TimeoutError:
        return True
    finally:
        wire.settimeout(SOON)


def test_counts_connections_and_requests(proxy: Proxy) -> None:
    with connect(proxy) as one, connect(proxy) as other:
        assert [exchange(one), exchange(other), exchange(one)] == [PONG] * 3
        assert proxy.open_connections == 2
    counts = proxy.counts
    assert (counts.connections, counts.requests) == (2, 3)
    assert (counts.bytes_to_server, counts.bytes_to_client) == (3 * len(PING), 3 * len(PONG))
    proxy.reset_counts()
    assert proxy.counts.requests == 0


def test_the_end_of_a_stream_passes(proxy: Proxy, server: RedisServer) -> None:
    with connect(proxy) as wire:
        wire.sendall(PING)
        wire.shutdown(socket.SHUT_WR)
        assert wire.recv(100) == PONG
        assert wire.recv(100) == b""


def test_cut_resets(proxy: Proxy) -> None:
    with connect(proxy) as wire:
        exchange(wire)
        proxy.cut()
        with pytest.raises(ConnectionResetError):
            wire.recv(1)
    with connect(proxy) as wire:
        assert exchange(wire) == PONG


def test_refuse_and_accept(proxy: Proxy) -> None:
    proxy.refuse()
    with pytest.raises(ConnectionRefusedError):
        connect(proxy)
    proxy.accept()
    with connect(proxy) as wire:
        assert exchange(wire) == PONG


def test_stall_moves_nothing(proxy: Proxy, server: RedisServer) -> None:
    with connect(proxy) as wire:
        exchange(wire)
        proxy.stall()
        wire.sendall(COUNT)
        assert silent(wire)
        assert server.ask("GET", "counter") is None
        with connect(proxy) as late:
            late.sendall(PING)
            assert silent(late)
            proxy.resume()
            assert late.recv(100) == PONG
        assert wire.recv(100) == b":1\r\n"


def test_held_replies_belong_to_handled_requests(proxy: Proxy, server: RedisServer) -> None:
    with connect(proxy) as wire:
        proxy.hold_replies()
        wire.sendall(COUNT)
        assert silent(wire)
        assert server.ask("GET", "counter") == "1"
        proxy.let_replies()
        assert wire.recv(100) == b":1\r\n"


def test_a_dropped_reply_was_handled(proxy: Proxy, server: RedisServer) -> None:
    with connect(proxy) as wire, connect(proxy) as other:
        dropped = proxy.drop_next_reply(matching=b"INCR")
        assert exchange(other) == PONG
        with pytest.raises(ConnectionResetError):
            exchange(wire, COUNT)
        assert dropped.wait(SOON)
        assert server.ask("GET", "counter") == "1"
        assert exchange(other, COUNT) == b":2\r\n"


def test_a_reply_that_was_to_be_dropped_arrives_if_it_heals_before(
    proxy: Proxy, server: RedisServer
) -> None:
    with connect(proxy) as wire:
        exchange(wire)
        proxy.drop_next_reply()
        server.pause()
        wire.sendall(COUNT)
        wait_until("the request", lambda: proxy.counts.requests == 2)
        proxy.heal()
        server.resume()
        assert wire.recv(100) == b":1\r\n"
        proxy.drop_next_reply(matching=b"INCR")
        assert exchange(wire) == PONG


def test_delay_in_each_direction(proxy: Proxy) -> None:
    with connect(proxy) as wire:
        proxy.delay(0.1)
        began = time.monotonic()
        assert exchange(wire) == PONG
        assert time.monotonic() - began >= 0.2
        proxy.heal()
        assert exchange(wire) == PONG


def test_a_server_that_is_down_resets_its_clients(proxy: Proxy, server: RedisServer) -> None:
    server.kill()
    with pytest.raises(ConnectionError), connect(proxy) as wire:  # perhaps while it connects
        exchange(wire)
