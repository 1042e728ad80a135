"""HTTP/1.1 by its bytes: cut anywhere, too long, damaged; and what makes a connection unusable."""

from __future__ import annotations

import gc
import random
import socket
import weakref
from collections.abc import Iterator

import pytest

from hazards.tearing import lines_of, torn_at
from holdfast.io import http
from holdfast.io.connection import PENDING, Broken
from holdfast.io.http import HttpStream, Reply, Responses, request_bytes

INDEX = b"x-index"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
INTERIM = b"HTTP/1.1 100 Continue\r\nX-Index: 3\r\n\r\nHTTP/1.1 103 Early\r\n\r\n"
REPLIES = {
    b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}": Reply(200, b"{}"),
    b"HTTP/1.1 404 Not Found\r\nX-Index: 17\r\nContent-Length: 0\r\n\r\n": Reply(404, b"", 17),
    CHUNKED + b"3\r\nabc\r\n2;x=y\r\nde\r\n0\r\n\r\n": Reply(200, b"abcde"),
    b"HTTP/1.1 204 No Content\r\nX-INDEX: 5\r\n\r\n": Reply(204, b"", 5),
    INTERIM + b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nx": Reply(200, b"x"),
}
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


def responses() -> Responses:
    made = Responses(INDEX)
    made.begin()
    return made


def test_the_bytes_of_a_request() -> None:
    sent = request_bytes(b"PUT /v1/txn?a=b", b"[::1]:8500", b"X-Token: t\r\n", b"[1]")
    head = b"PUT /v1/txn?a=b HTTP/1.1\r\nHost: [::1]:8500\r\nX-Token: t\r\nContent-Length: 3\r\n"
    assert sent == head + b"\r\n[1]"


@pytest.mark.parametrize("data", REPLIES, ids=["length", "index", "chunks", "empty", "interim"])
def test_a_response_is_the_same_cut_anywhere(data: bytes) -> None:
    for cut in range(1, len(data)):
        one = responses()
        assert one.feed(data[:cut]) is None
        assert one.feed(data[cut:]) == REPLIES[data]
        assert one.reusable
    one = responses()
    *before, last = [one.feed(data[at : at + 1]) for at in range(len(data))]
    assert before == [None] * len(before)
    assert last == REPLIES[data]
    one.begin()  # of what came before nothing is left
    assert one.feed(OK) == Reply(200, b"ok")


@pytest.mark.parametrize("index", [b"-1", b"x", b"", b"9" * 21, b"1 2", "²".encode()])
def test_an_index_that_is_no_number(index: bytes) -> None:
    one = responses()
    reply = one.feed(b"HTTP/1.1 200 OK\r\nX-Index: %b\r\nContent-Length: 0\r\n\r\n" % index)
    assert reply == Reply(200, b"", 0)


@pytest.mark.parametrize(
    "data",
    [
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"-ERR unknown command\r\n",
        b"\x15\x03\x01\x00\x02\x02\x46",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"HTTP/1.1 abc\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nx",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n",
        b"HTTP/1.1 101 Switching\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\nrest",
    ],
)
def test_what_is_not_http_is_an_error(data: bytes) -> None:
    with pytest.raises(Broken, match="not HTTP"):
        responses().feed(data)


def test_damaged_bytes_are_an_error_or_a_response() -> None:
    chance = random.Random(1)
    for data in REPLIES:
        for _ in range(2000):
            damaged = bytearray(data)
            for _ in range(chance.randint(1, 3)):
                damaged[chance.randrange(len(damaged))] = chance.randrange(256)
            one = responses()
            try:
                one.feed(bytes(damaged))
            except Broken:
                assert not one.reusable


def test_what_an_answer_may_have() -> None:
    """The limit is enough for a list of very many names; that of a header is much lower."""
    one = responses()
    assert one.feed(b"HTTP/1.1 200 OK\r\nContent-Length: 9999999999\r\n\r\n") is None
    piece = b"x" * 2**20
    for _ in range(63):
        assert one.feed(piece) is None
    with pytest.raises(Broken, match="response is too long"):
        one.feed(piece + piece)
    one = responses()
    one.feed(b"HTTP/1.1 200 OK\r\nX-Index: " + b"9" * 5000)
    with pytest.raises(Broken, match="response is too long"):
        one.feed(b"9" * http.MOST_HEAD_BYTES)


def test_interim_responses_have_an_end() -> None:
    one = responses()
    with pytest.raises(Broken, match="too long"):  # noqa: PT012 - at some point
        for _ in range(http.MOST_HEAD_BYTES):
            one.feed(b"HTTP/1.1 100 Continue\r\n\r\n")


@pytest.mark.parametrize(
    "after",
    [b"H", b"HTTP/1.1 200 O", OK, OK + OK, b"garbage", b"\r\nHTTP/1.1 100 Continue\r\n\r\n"],
)
def test_what_follows_a_response_makes_the_connection_unusable(after: bytes) -> None:
    """The response counts, since it is complete. The rest would be the next request's."""
    one = responses()
    assert one.feed(OK + after) == Reply(200, b"ok")
    assert not one.reusable


def test_a_server_that_closes_says_so() -> None:
    for head in (b"HTTP/1.1 200 OK\r\nConnection: close\r\n", b"HTTP/1.0 200 OK\r\n"):
        for after in (b"", OK):
            one = responses()
            assert one.feed(head + b"Content-Length: 1\r\n\r\nx" + after) == Reply(200, b"x")
            assert not one.reusable


def test_a_response_without_a_request_is_an_error() -> None:
    for one in (Responses(), responses()):
        if one.waiting:
            one.feed(OK)
        with pytest.raises(Broken, match="without a request"):
            one.feed(b"H")


@pytest.mark.parametrize(
    ("name", "line"),
    [
        *lines_of(Responses.on_body),
        *lines_of(Responses.on_headers_complete),
        *lines_of(Responses.on_message_complete),
    ],
)
def test_an_interrupt_in_the_parser_is_no_error_of_the_server(name: str, line: int) -> None:
    """The parser turns exceptions of the methods that it calls into its own."""
    one, interrupted = responses(), True

    def work() -> None:
        nonlocal interrupted
        one.feed(b"HTTP/1.1 100 Continue\r\n\r\n" + OK + OK)
        interrupted = False

    torn_at(getattr(Responses, name).__code__, line, work)
    assert interrupted


@pytest.fixture
def pair() -> Iterator[tuple[HttpStream, socket.socket]]:
    ours, theirs = socket.socketpair()
    stream = HttpStream(ours)
    with theirs:
        yield stream, theirs
        stream.close()


def test_a_reply_over_a_connection(pair: tuple[HttpStream, socket.socket]) -> None:
    stream, theirs = pair
    stream.send_all([b"request"])
    assert theirs.recv(100) == b"request"
    assert stream.next() is PENDING
    theirs.send(OK)
    stream.collect()
    assert stream.next() == Reply(200, b"ok")
    assert stream.next() is PENDING
    assert stream.usable
    theirs.send(b"x")
    with pytest.raises(Broken, match="without a request"):
        stream.collect()


def test_a_request_that_is_answered_early_leaves_no_usable_connection(
    pair: tuple[HttpStream, socket.socket],
) -> None:
    """The rest of it would be sent before the next request, or be a part of it."""
    stream, theirs = pair
    stream.send(b"x" * 10_000_000)
    assert stream.unsent
    theirs.send(OK)
    stream.collect()
    assert stream.next() == Reply(200, b"ok")
    assert not stream.usable


@pytest.mark.parametrize("answered", [True, False])
def test_a_connection_without_its_reply_is_closed_with_a_reset(answered: bool) -> None:
    """What was not sent yet never reaches the server."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        stream = HttpStream(socket.create_connection(server.getsockname()))
        theirs, _ = server.accept()
        with theirs:
            stream.send(b"request")
            assert theirs.recv(100) == b"request"
            if answered:
                theirs.send(OK)
                while stream.next() is PENDING:
                    stream.collect()
            stream.close()
            stream.close()
            theirs.settimeout(30)
            if answered:
                assert theirs.recv(100) == b""
            else:
                with pytest.raises(ConnectionResetError):
                    theirs.recv(100)


def test_a_dropped_connection_needs_no_garbage_collector() -> None:
    """With it goes its permit: a pool must not be full until a collection happens to run."""
    ours, theirs = socket.socketpair()
    gc.disable()
    try:
        stream: HttpStream | None = HttpStream(ours)
        gone = weakref.ref(stream)
        stream = None
        assert gone() is None
    finally:
        gc.enable()
        ours.close()
        theirs.close()
