"""A broken or hostile server: it costs no more memory than the largest reply and no more time than
a request, and causes only the documented errors."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from holdfast.claim import Claim, Mode
from holdfast.core.contract import Settings
from holdfast.errors import HoldfastError
from holdfast.io.clock import now
from holdfast.io.connection import PENDING
from holdfast.io.resp import Bounds, RedisRefused, ReplyReader
from holdfast.stores.redis.replies import read_wakeup
from holdfast.stores.redlock.wakeups import Listeners
from holdfast.testing import Flavour
from holdfast.testing.contract import Peer
from holdfast.testing.workers import Workers
from holdfast.url import open_store
from stores.redis.helpers import blocking_and_asyncio

Answerer = Callable[[socket.socket], None]
CLAIM = Claim("name", Mode.EXCLUSIVE, 1, 0, 30.0, "owner", "[]")
REQUEST_SECONDS = 1.0
SPARE_SECONDS = 3.0

REPLIES = (
    b":1\r\n",
    b"+OK\r\n",
    b"-ERR no\r\n",
    b"$-1\r\n",
    b"*-1\r\n",
    b"*0\r\n",
    b"$0\r\n\r\n",
    b"$8\r\na\r\n*9999\r\n",  # a text that looks like the head of an array
    b"*3\r\n$7\r\nmessage\r\n$1\r\nc\r\n$1\r\nk\r\n",
    b"*2\r\n*2\r\n:1\r\n$1\r\nx\r\n*1\r\n-ERR\r\n",
)
VALUES: tuple[Any, ...] = (
    1,
    b"OK",
    RedisRefused("ERR no"),
    None,
    None,
    [],
    b"",
    b"a\r\n*9999",
    [b"message", b"c", b"k"],
)
TOO_MUCH = (
    b"*1000000001\r\n",
    b"*99999999999999999999\r\n",
    b"*1\r\n*1000000001\r\n",
    b"*2\r\n$1\r\n*\r\n*900000000\r\n",
    b"*50\r\n" + b"*2\r\n:1\r\n:1\r\n" * 30,
    b"$1001\r\n",
    b"*2\r\n$600\r\n" + b"x" * 600 + b"\r\n$600\r\n",
    b"*90\r\n" + (b"+" + b"x" * 50 + b"\r\n") * 20,
    b"*1\r\n" * 9,
    b"+" + b"x" * 70_000,
    b"%1\r\n:1\r\n:1\r\n",
    b"HTTP/1.1 400 Bad Request\r\n",
    b"$x\r\n",
    b"$1_0\r\n",
    b"\r\n",
)


@pytest.mark.parametrize("cut", [1, 2, 3, 7, 1000])
def test_replies_are_read_in_pieces_of_any_size(cut: int) -> None:
    stream, reader, found = b"".join(REPLIES), ReplyReader(Bounds()), []
    for at in range(0, len(stream), cut):
        reader.feed(stream[at : at + cut])
        while (reply := reader.gets()) is not PENDING:
            found.append(reply)
    assert len(found) == len(REPLIES)
    for reply, value in zip(found, VALUES, strict=False):
        assert str(reply) == str(value)


@pytest.mark.parametrize("cut", [3, 4096, 1_000_000])
@pytest.mark.parametrize("data", TOO_MUCH, ids=lambda data: str(data[:20]))
def test_too_much_is_refused_before_it_is_stored(data: bytes, cut: int) -> None:
    bounds = Bounds(1000, 100)

    def take_in() -> None:
        for at in range(0, len(data), cut):
            bounds.check(data[at : at + cut])

    with pytest.raises(ConnectionError, match="repl"):
        take_in()


@pytest.mark.parametrize("data", [b"*1\r\n" * 9, b"%1\r\n:1\r\n:1\r\n"])
def test_a_reader_keeps_to_the_bounds(data: bytes) -> None:
    with pytest.raises(ConnectionError):
        ReplyReader(Bounds()).feed(data)


def test_large_replies_in_a_row_are_each_within_the_bounds() -> None:
    bounds = Bounds(1000, 100)
    for _ in range(3):
        bounds.check(b"$600\r\n" + b"x" * 600 + b"\r\n")
        bounds.check(b"*60\r\n" + b":1\r\n" * 60)
    assert bounds.between_replies


@contextmanager
def serving(answer: Answerer) -> Iterator[int]:
    """The port of a server that runs ``answer`` on every connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve(connection: socket.socket) -> None:
            with contextlib.suppress(OSError), connection:
                answer(connection)

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    threading.Thread(target=serve, args=(connection,), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        yield listener.getsockname()[1]


def saying(reply: bytes) -> Answerer:
    """Answers every command with the same reply."""

    def answer(connection: socket.socket) -> None:
        while data := connection.recv(65_536):
            connection.sendall(reply * max(1, data.count(b"\r\n*") + 1))

    return answer


def dripping(letters: bytes) -> Answerer:
    """Answers with one byte at a time, slowly."""

    def answer(connection: socket.socket) -> None:
        connection.recv(65_536)
        for letter in letters:
            connection.sendall(bytes([letter]))
            time.sleep(0.2)

    return answer


def fails(url: str, flavour: Flavour) -> tuple[list[HoldfastError], float]:
    """What every method on that store raises, and the time of the slowest one."""

    async def run() -> tuple[list[HoldfastError], float]:
        workers, errors, slowest = Workers(), [], 0.0
        settings = Settings(request_seconds=REQUEST_SECONDS)
        peer = Peer(open_store(url, settings), flavour, workers)
        for word in (peer.attempt(CLAIM), peer.look("name"), peer.revoke("name"), peer.probe()):
            began = now()
            try:
                await word
            except HoldfastError as error:
                errors.append(error)
            slowest = max(slowest, now() - began)
            if slowest > 3 * REQUEST_SECONDS + SPARE_SECONDS:
                break
        await peer.close()
        workers.close()
        return errors, slowest

    return asyncio.run(run())


@pytest.mark.parametrize("login", ["", "user:secret@"])
@blocking_and_asyncio
def test_a_reply_that_drips_ends_with_its_request(flavour: Flavour, login: str) -> None:
    """As the reply to a login, or to a request."""
    with serving(dripping(b"+" + b"x" * 40)) as port:
        errors, slowest = fails(f"redis://{login}127.0.0.1:{port}", flavour)
    assert len(errors) == 4
    # Each request opens a connection, and another one if it was closed in between.
    assert slowest < 2 * REQUEST_SECONDS + SPARE_SECONDS


def after_the_login(answer: Answerer) -> Answerer:
    """Answers the login and the INFO about evictions as a real server does."""

    def answer_later(connection: socket.socket) -> None:
        while (data := connection.recv(65_536)) and b"EVAL" not in data:
            if b"INFO" in data:
                connection.sendall(
                    b"$24\r\nmaxmemory_policy:whatever\r\n"[:5] + b"x" * 24 + b"\r\n"
                )
            else:
                connection.sendall(b"+OK\r\n" * max(1, data.count(b"*")))
        answer(connection)

    return answer_later


@blocking_and_asyncio
def test_an_answer_that_drips_ends_with_its_request(flavour: Flavour) -> None:
    """On a connection that worked until then."""

    def drip(connection: socket.socket) -> None:
        for _ in range(160):
            connection.sendall(b"$")
            time.sleep(0.05)

    async def run() -> float:
        workers, settings = Workers(), Settings(request_seconds=REQUEST_SECONDS)
        peer = Peer(open_store(f"redis://127.0.0.1:{port}", settings), flavour, workers)
        began = now()
        with pytest.raises(HoldfastError):
            await peer.attempt(CLAIM)
        took = now() - began
        await peer.close()
        workers.close()
        return took

    with serving(after_the_login(drip)) as port:
        assert asyncio.run(run()) < 2 * REQUEST_SECONDS + SPARE_SECONDS


ODD = (
    b"$-1\r\n",
    b":-1\r\n",
    b"*0\r\n",
    b"*1\r\n*0\r\n",
    b"$3\r\n\xff\xfe\xfd\r\n",
    b"*2\r\n$5\r\nlimit\r\n$1\r\nx\r\n",
    b"*2\r\n$12\r\nincompatible\r\n:1\r\n",
    b"*2\r\n$5\r\nslots\r\n$1\r\nx\r\n",
    b"*6\r\n$4\r\nbusy\r\n:1\r\n:1\r\n:1\r\n:1\r\n$1\r\nx\r\n",
    b"*4\r\n$1\r\n0\r\n:1\r\n*1\r\n*0\r\n*0\r\n",
    b"*3\r\n:1\r\n:2\r\n:3\r\n",
    b"*1000000001\r\n",
    b"HTTP/1.1 400 Bad Request\r\n",
    b"-NOPERM no\r\n",
)


@pytest.mark.parametrize("reply", ODD, ids=repr)
@pytest.mark.parametrize("scheme", ["redis", "redis+cluster", "redis+sentinel", "redlock"])
@blocking_and_asyncio
def test_an_unexpected_reply_is_an_error(flavour: Flavour, scheme: str, reply: bytes) -> None:
    """With a documented error, or accepted; never with another exception."""
    with serving(saying(reply)) as port, serving(saying(reply)) as two, serving(saying(reply)) as x:
        hosts = f"127.0.0.1:{port}"
        if scheme == "redlock":
            hosts += f",127.0.0.1:{two},127.0.0.1:{x}"
        _, slowest = fails(
            f"{scheme}://{hosts}/main" if "sent" in scheme else f"{scheme}://{hosts}", flavour
        )
    assert slowest < 3 * REQUEST_SECONDS + SPARE_SECONDS


def test_unexpected_messages_are_no_wake_up() -> None:
    chance = random.Random(1)
    found: set[object] = set()
    words: tuple[Any, ...] = (
        1,
        None,
        b"message",
        b"\xff",
        b"k 12",
        b"k " + b"9" * 400,
        b"k x",
        [],
        RedisRefused("no"),
    )
    for _ in range(5000):
        message = [chance.choice(words) for _ in range(chance.choice((0, 1, 2, 3, 3, 3)))]
        found.update(token for _, token in read_wakeup(message))
        assert read_wakeup(chance.choice(words)) == ()
        Listeners().read_message(message)
    assert found == {12, None}
