"""Redis without a client: what was recorded, sent again; a queue of the fewest requests; SET NX."""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
from collections.abc import Callable
from typing import Any

from benchmarks.contenders.common import ALONE, split
from benchmarks.tape import dial, record, replayer
from holdfast.bench.contender import (
    CONTENDED,
    DRAIN,
    HELD,
    UNCONTENDED,
    Client,
    Contender,
    Pair,
    Target,
)

__all__ = ["LIMITS", "pack"]


def pack(*words: str | int) -> bytes:
    """A command as it goes over the wire."""
    texts = [str(word).encode() for word in words]
    body = b"".join(b"$%d\r\n%s\r\n" % (len(text), text) for text in texts)
    return b"*%d\r\n%s" % (len(texts), body)


def complete(reply: bytes) -> bool:
    """Whether a reply is whole; the scripts' replies are short and flat."""
    return reply.endswith(b"\r\n")


def _replay(target: Target) -> Client:
    tape = record(target.url, target.namespace)
    sock = dial(target.url)
    steps = [replayer(sock, [exchange], complete) for exchange in tape.hold]
    return split(steps, tape.recorded.close)


async def _replay_async(target: Target) -> Client:
    """The same over an event loop's own protocol class: the least that asyncio can do."""
    tape = await asyncio.to_thread(record, target.url, target.namespace)
    sock = dial(target.url)
    sock.setblocking(False)
    loop = asyncio.get_running_loop()

    class Wire(asyncio.Protocol):
        waiter: asyncio.Future[bytes]

        def data_received(self, data: bytes) -> None:
            self.waiter.set_result(data)

    transport, wire = await loop.create_connection(Wire, sock=sock)

    def step(request: bytes) -> Callable[[], Any]:
        async def run() -> None:
            wire.waiter = loop.create_future()
            transport.write(request)
            await wire.waiter

        return run

    first, second = (step(request) for request, _ in tape.hold)

    async def close() -> None:
        transport.close()
        await asyncio.to_thread(tape.recorded.close)

    return Client(lambda _: Pair(first, second), close)


def _library(target: Target) -> Client:
    """redis-py's own connection, dedicated, with the recorded commands packed ahead."""
    import redis

    tape = record(target.url, target.namespace)
    connection: Any = redis.from_url(target.url).connection_pool.make_connection()
    connection.connect()

    def step(request: bytes) -> Callable[[], Any]:
        words = [request]

        def run() -> None:
            connection.send_packed_command(words)
            connection.read_response(disable_decoding=True)

        return run

    return split([step(request) for request, _ in tape.hold], tape.recorded.close)


_DELETE = "return redis.call('GET',KEYS[1])==ARGV[1] and redis.call('DEL',KEYS[1])"


def _load(sock: Any, script: str) -> str:
    sock.sendall(pack("SCRIPT", "LOAD", script))
    return str(sock.recv(4096).split(b"\r\n")[1].decode())


def _set_nx(target: Target) -> Client:
    """The least of all: no fence, no line, no waiting."""
    sock = dial(target.url)
    name = f"{target.namespace}:least"
    take = pack("SET", name, "owner", "NX", "PX", 30000)
    free = pack("EVALSHA", _load(sock, _DELETE), 1, name, "owner")
    return split(
        [replayer(sock, [(request, b"")], complete) for request in (take, free)], sock.close
    )


# A hold is given to the next in line by the release itself, through a list of the waiter's own:
# no grace, no skipping of the dead, nobody renews. It is what a queue can't do with less.
_TAKE = """
local token = redis.call('INCR', KEYS[3])
if redis.call('LLEN', KEYS[2]) == 0 and redis.call('SET', KEYS[1], ARGV[1], 'NX', 'PX', 30000) then
  return token
end
redis.call('RPUSH', KEYS[2], ARGV[1])
return 0
"""
_GIVE = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
local next = redis.call('LPOP', KEYS[2])
if not next then return redis.call('DEL', KEYS[1]) end
redis.call('SET', KEYS[1], next, 'PX', 30000)
redis.call('RPUSH', 'bell:' .. next, redis.call('INCR', KEYS[3]))
return 1
"""
_numbers = itertools.count()


class _Queue:
    """One waiter's requests, packed, and its own list to wait at."""

    def __init__(self, target: Target, name: str, take: str, give: str) -> None:
        me = f"{os.getpid()}-{next(_numbers)}"
        tag = f"{{{target.namespace}:{name}}}"
        keys = (f"{tag}:held", f"{tag}:line", f"{tag}:token")
        self.me = me
        self.take = pack("EVALSHA", take, 3, *keys, me)
        self.give = pack("EVALSHA", give, 3, *keys, me)
        self.wait = pack("BLPOP", f"bell:{me}", 0)


def _queue(target: Target) -> Client:
    """One socket for each lock object, as each may wait on its own."""
    first = dial(target.url)
    take, give = _load(first, _TAKE), _load(first, _GIVE)
    local = threading.local()

    def lock(name: str) -> Pair:
        queue = _Queue(target, name, take, give)

        def sock() -> Any:
            if not hasattr(local, "sock"):
                local.sock = dial(target.url)
            return local.sock

        def acquire() -> int:
            wire = sock()
            wire.sendall(queue.take)
            reply = wire.recv(4096)
            if reply == b":0\r\n":
                wire.sendall(queue.wait)
                reply = wire.recv(4096)
                return int(reply.split(b"\r\n")[-2])
            return int(reply[1:-2])

        def release() -> None:
            wire = sock()
            wire.sendall(queue.give)
            wire.recv(4096)

        return Pair(acquire, release)

    return Client(lock, first.close)


class _Wire(asyncio.Protocol):
    """Replies in the order of the requests; hiredis cuts them apart."""

    def __init__(self) -> None:
        import hiredis

        self._reader = hiredis.Reader()
        self.waiting: list[asyncio.Future[Any]] = []

    def data_received(self, data: bytes) -> None:
        self._reader.feed(data)
        while (reply := self._reader.gets()) is not False:
            self.waiting.pop(0).set_result(reply)


class _Bell(asyncio.Protocol):
    """One connection at which all tasks of a process wait: a stream of who was given the lock."""

    def __init__(self, given: dict[bytes, asyncio.Future[int]]) -> None:
        import hiredis

        self._reader = hiredis.Reader()
        self._given = given

    def data_received(self, data: bytes) -> None:
        self._reader.feed(data)
        while (reply := self._reader.gets()) is not False:
            if reply[0] == b"message":
                me, _, token = reply[2].partition(b" ")
                self._given.pop(me).set_result(int(token))


_GIVE_ASYNC = _GIVE.replace(
    "redis.call('RPUSH', 'bell:' .. next, redis.call('INCR', KEYS[3]))",
    "redis.call('PUBLISH', 'bell:' .. string.match(next, '^%d+'), next .. ' ' .. "
    "redis.call('INCR', KEYS[3]))",
)


async def _queue_async(target: Target) -> Client:
    """Two connections for any number of tasks: one for requests, one for who is given the lock."""
    loop = asyncio.get_running_loop()
    sock = dial(target.url)
    take, give = _load(sock, _TAKE), _load(sock, _GIVE_ASYNC)
    given: dict[bytes, asyncio.Future[int]] = {}
    sock.setblocking(False)
    transport, wire = await loop.create_connection(_Wire, sock=sock)
    other = dial(target.url)
    other.sendall(pack("SUBSCRIBE", f"bell:{os.getpid()}"))
    other.recv(4096)
    other.setblocking(False)
    bell, _ = await loop.create_connection(lambda: _Bell(given), sock=other)

    def ask(request: bytes) -> asyncio.Future[Any]:
        waiter = loop.create_future()
        wire.waiting.append(waiter)
        transport.write(request)
        return waiter

    def lock(name: str) -> Pair:
        queue = _Queue(target, name, take, give)
        me = queue.me.encode()

        async def acquire() -> int:
            given[me] = waiter = loop.create_future()
            token = await ask(queue.take)
            if token:
                del given[me]
                return int(token)
            return int(await waiter)

        async def release() -> None:
            await ask(queue.give)

        return Pair(acquire, release)

    async def close() -> None:
        transport.close()
        bell.close()

    return Client(lock, close)


def _held(target: Target) -> Client:
    """A thousand keys, extended in one pipelined batch by one thread."""
    sock = dial(target.url)
    names: list[str] = []
    over = threading.Event()

    def renew() -> None:
        wire = dial(target.url)
        while not over.wait(10 / 3):
            wire.sendall(b"".join(pack("PEXPIRE", name, 10000) for name in names))
            left = len(names)
            while left:
                left -= wire.recv(65536).count(b"\r\n")

    threading.Thread(target=renew, daemon=True).start()

    def lock(name: str) -> Pair:
        key = f"{target.namespace}:limit:{name}"

        def acquire() -> None:
            sock.sendall(pack("SET", key, "owner", "NX", "PX", 10000))
            sock.recv(4096)
            names.append(key)

        def release() -> None:
            names.clear()
            sock.sendall(pack("DEL", key))
            sock.recv(4096)

        return Pair(acquire, release)

    return Client(lock, over.set)


LIMITS = [
    Contender("raw socket, same requests", "redis", "limit", "blocking", _replay, ALONE),
    Contender("raw asyncio, same requests", "redis", "limit", "asyncio", _replay_async, ALONE),
    Contender("raw socket, SET NX", "redis", "least", "blocking", _set_nx, ALONE),
    Contender("redis-py wire, same requests", "redis", "library", "blocking", _library, ALONE),
    Contender(
        "raw socket, FIFO queue",
        "redis",
        "limit",
        "blocking",
        _queue,
        frozenset({CONTENDED, DRAIN}),
    ),
    Contender(
        "raw asyncio, FIFO queue",
        "redis",
        "limit",
        "asyncio",
        _queue_async,
        frozenset({CONTENDED, DRAIN, UNCONTENDED}),
    ),
    Contender(
        "raw socket, one batch", "redis", "limit", "blocking", _held, frozenset({HELD}), _held
    ),
]
