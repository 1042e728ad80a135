"""ZooKeeper's packets as bytes: cut anywhere, oversized, damaged; and compared with a server's."""

from __future__ import annotations

import socket
import struct
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kazoo.protocol import serialization

from holdfast.io.connection import PENDING, Broken
from holdfast.stores.zookeeper.client.greeting import (
    NO_SESSION,
    SessionId,
    pack_auth,
    pack_connect,
    pack_sasl,
    read_greeting,
    read_sasl,
)
from holdfast.stores.zookeeper.client.packets import (
    ANYBODY,
    BadVersion,
    Check,
    Checks,
    Close,
    Create,
    Delete,
    Ephemeral,
    Exists,
    Frames,
    Listing,
    Multi,
    NoNode,
    Persistent,
    Plain,
    Read,
    Request,
    Stat,
    Sync,
    Write,
    ZooKeeperError,
    pack_acl,
    pack_text,
    read_event,
    read_header,
)
from servers.registry import Servers
from stores.zookeeper.helpers import QuickServer

MOST = 1000
STAT = struct.pack("!qqqqiiiqiiq", *range(11))
ACL = pack_acl([ANYBODY])


def _frame(body: bytes) -> bytes:
    return struct.pack("!i", len(body)) + body


@given(
    bodies=st.lists(st.binary(max_size=60), max_size=12),
    cuts=st.lists(st.integers(0, 800), max_size=20),
)
def test_frames_are_cut_anywhere(bodies: list[bytes], cuts: list[int]) -> None:
    """Whatever the pieces are in which they arrive."""
    sent = b"".join(map(_frame, bodies))
    frames, found = Frames(MOST), list[bytes]()
    places = [0, *sorted(min(cut, len(sent)) for cut in cuts), len(sent)]
    for start, end in pairwise(places):
        frames.feed(sent[start:end])
        while (frame := frames.next()) is not PENDING:
            found.append(frame)
    assert found == bodies


@given(data=st.binary(max_size=200), cut=st.integers(0, 200))
def test_any_bytes_give_frames_or_an_error(data: bytes, cut: int) -> None:
    frames, size = Frames(MOST), 0
    try:
        for piece in (data[:cut], data[cut:]):
            frames.feed(piece)
            while (frame := frames.next()) is not PENDING:
                size += 4 + len(frame)
    except Broken:
        return
    assert size <= len(data)


@pytest.mark.parametrize("length", [-1, MOST + 1, 2**31 - 1])
@pytest.mark.parametrize("pieces", [1, 2])
def test_a_frame_of_a_wrong_length(length: int, pieces: int) -> None:
    """It is refused before its bytes are read into memory."""
    frames = Frames(MOST)
    packed = struct.pack("!i", length)
    for end in range(1, 4 if pieces == 2 else 1):
        frames.feed(packed[end - 1 : end])
        assert frames.next() is PENDING
    with pytest.raises(Broken, match=str(length)):
        _next(frames, packed[3 if pieces == 2 else 0 :])


def _next(frames: Frames, data: bytes) -> object:
    frames.feed(data)
    return frames.next()


REPLIES: list[tuple[Request, bytes]] = [
    (Create("/a", b"", ACL), pack_text("/a0000000001") + STAT),
    (Persistent("/a", b"", ACL), pack_text("/a") + STAT),
    (Delete("/a"), b""),
    (Exists("/a"), STAT),
    (Read("/a"), _frame(b"data") + STAT),
    (Write("/a", b""), STAT),
    (Listing("/a"), struct.pack("!i", 2) + pack_text("one") + pack_text("twö")),
    (Listing("/a"), struct.pack("!i", 2) + pack_text("one") + pack_text("two")),
    (Sync("/a"), pack_text("/a")),
    (
        Multi([Check("/a"), Plain("/b", b"", ACL), Write("/c", b""), Delete("/d")]),
        struct.pack("!iBi", 13, 0, 0)
        + struct.pack("!iBi", 1, 0, 0)
        + pack_text("/b")
        + struct.pack("!iBi", 5, 0, 0)
        + STAT
        + struct.pack("!iBi", 2, 0, 0)
        + struct.pack("!iBi", -1, 1, -1),
    ),
    (Checks(["/a"]), struct.pack("!iBi", 13, 0, 0) + struct.pack("!iBi", -1, 1, -1)),
    (Close(), b""),
]
by_kind = pytest.mark.parametrize(
    ("request_", "body"), REPLIES, ids=[type(request).__name__ for request, _ in REPLIES]
)


def _answer(request: Request, body: bytes) -> Request:
    request.value = request.error = None
    request.answer(0, body)
    return request


@by_kind
def test_a_reply_is_read(request_: Request, body: bytes) -> None:
    assert _answer(request_, body).error is None
    assert request_.value is not None


@by_kind
def test_a_damaged_reply_fails_only_its_request(
    request_: Request, body: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """Cut anywhere, or with a byte too many."""
    damaged = [body[:end] for end in range(len(body))] + [body + b"x"]
    for each in damaged:
        assert _answer(request_, each).error is not None, each
    assert len(caplog.records) == len(damaged)


@given(kind=st.sampled_from([request for request, _ in REPLIES]), body=st.binary(max_size=120))
def test_any_bytes_give_a_value_or_an_error(kind: Request, body: bytes) -> None:
    answered = _answer(kind, body)
    assert (answered.error is None) != (answered.value is None)


@pytest.mark.parametrize(
    ("sent", "body"),
    [
        (Listing("/"), struct.pack("!i", 2**31 - 1)),
        (Listing("/"), struct.pack("!i", -1)),
        (Listing("/"), struct.pack("!ii", 1, -5)),
        (Read("/"), struct.pack("!i", 2**31 - 1)),
        (Create("/", b"", b""), struct.pack("!i", -1)),
        (Multi([]), struct.pack("!iBi", 99, 0, 0) + struct.pack("!iBi", -1, 1, -1)),
        (Checks(["/"]), struct.pack("!iBi", -1, 0, -9999) + struct.pack("!i", -9999)),
    ],
)
def test_a_length_that_is_not_zookeeper_s(sent: Request, body: bytes) -> None:
    assert _answer(sent, body).error is not None


END = struct.pack("!iBi", -1, 1, -1)
CHECKED, DELETED = struct.pack("!iBi", 13, 0, 0), struct.pack("!iBi", 2, 0, 0)
REJECTED = struct.pack("!iBii", -1, 0, -101, -101)


WRONG_RESULTS = {
    "none": b"",
    "too few": CHECKED,
    "too many": CHECKED * 3,
    "of another kind": CHECKED + DELETED,
    "rejected in part": CHECKED + REJECTED,
    "too few rejected": REJECTED,
    "too many rejected": REJECTED * 3,
}


@pytest.mark.parametrize("sent", [Checks(["/a", "/b"]), Multi([Check("/a"), Check("/b")])])
@pytest.mark.parametrize("body", WRONG_RESULTS.values(), ids=WRONG_RESULTS)
def test_results_of_another_transaction(sent: Request, body: bytes) -> None:
    """They would count as the proof that all the nodes exist."""
    assert _answer(sent, body + END).error is not None
    assert _answer(sent, CHECKED * 2 + END).error is None
    assert _answer(sent, REJECTED * 2 + END).error is None


@pytest.mark.parametrize(
    "path",
    ["", "nopath", "/b0000000001", "/a", "/a1", "/a00000000011", "/ax000000001", "/a/0000000001"],
)
def test_the_path_of_another_node(path: str) -> None:
    assert _answer(Create("/a", b"", ACL), pack_text(path) + STAT).error is not None
    if path != "/a":
        assert _answer(Persistent("/a", b"", ACL), pack_text(path) + STAT).error is not None


@pytest.mark.parametrize("number", ["0000000000", "2147483647", "-000000001", "-2147483648"])
def test_the_path_of_a_sequential_node(number: str) -> None:
    """After the largest sequence number come the negative ones."""
    assert _answer(Create("/a.", b"", ACL), pack_text(f"/a.{number}") + STAT).error is None


def test_errors() -> None:
    """A missing node is no error for ``Exists``; an unknown code is a general error."""
    read, exists, other = Read("/"), Exists("/"), Delete("/")
    read.answer(NoNode.code, b"")
    exists.answer(NoNode.code, b"")
    other.answer(-9999, b"")
    assert isinstance(read.error, NoNode)
    assert (exists.value, exists.error) == (None, None)
    assert type(other.error) is ZooKeeperError
    multi = Multi([Check("/"), Delete("/")])
    failed = struct.pack("!iBii", -1, 0, -103, -103) + struct.pack("!iBii", -1, 0, -2, -2)
    multi.answer(0, failed + struct.pack("!iBi", -1, 1, -1))
    assert multi.failed
    assert list(map(type, multi.value)) == [BadVersion, ZooKeeperError]


@pytest.mark.parametrize(
    "body",
    [b"", b"\xff", struct.pack("!iii", 1, 3, 5) + b"/a", struct.pack("!iii", 1, 3, 1) + b"/a"],
)
def test_a_damaged_event(body: bytes) -> None:
    with pytest.raises((ValueError, struct.error)):
        read_event(body)


def test_an_event() -> None:
    assert read_event(struct.pack("!ii", 1, 3) + pack_text("/ä")) == "/ä"


def test_a_greeting() -> None:
    """With and without its last byte, which old servers don't send."""
    body = struct.pack("!iiqi16s", 0, 4000, 7, 16, b"p" * 16)
    for packed, read_only in ((body, False), (body + b"\0", False), (body + b"\1", True)):
        greeting = read_greeting(packed)
        assert greeting == (4000, SessionId(7, b"p" * 16), read_only)
    wrong = [struct.pack("!iiqi16s", 0, -1, 7, 16, b""), struct.pack("!iiqi16s", 9, 1, 7, 16, b"")]
    for each in [*(body[:end] for end in range(len(body))), body + b"\0\0", *wrong]:
        with pytest.raises(Broken):
            read_greeting(each)


def test_a_challenge() -> None:
    assert read_sasl(_frame(b"nonce")) == b"nonce"
    assert read_sasl(struct.pack("!i", -1)) == b""
    for wrong in (b"", b"\0\0", struct.pack("!i", 2**31 - 1), _frame(b"nonce") + b"x"):
        with pytest.raises(Broken):
            read_sasl(wrong)


def test_kazoo_packs_the_same() -> None:
    """What we send is what another client sends."""
    connect = serialization.Connect(0, 5, 4000, 7, b"p" * 16, False)
    assert pack_connect(5, 4000, SessionId(7, b"p" * 16))[4:] == bytes(connect.serialize())
    auth = serialization.Auth(0, "digest", "us:s3cret")
    assert pack_auth("digest", b"us:s3cret")[12:] == bytes(auth.serialize())
    assert pack_sasl(1, b"token")[12:] == bytes(serialization.SASL(b"token").serialize())
    assert Read("/a", watch=True).body == bytes(
        serialization.GetData("/a", lambda: None).serialize()
    )
    assert Listing("/a").body == bytes(serialization.GetChildren("/a", None).serialize())
    assert Delete("/a", 3).body == bytes(serialization.Delete("/a", 3).serialize())
    assert Write("/a", b"x", 3).body == bytes(serialization.SetData("/a", b"x", 3).serialize())


def test_a_server_answers_every_request(servers: Servers, namespace: str) -> None:
    """All replies of a real server are read, with nothing left over, and are what was asked."""
    server = servers.of(QuickServer)
    root, container = f"/{namespace}", f"/{namespace}/names"
    ephemeral = Ephemeral(f"{root}/e", b"", ACL)
    requests: list[Request] = [
        Persistent(root, b"data", ACL),
        Create(f"{root}/n", b"own", ACL),
        Read(root),
        Listing(root),
        Exists(root),
        Exists(container),
        Sync(root),
        Write(root, b"more"),
        Multi([Check(root), ephemeral, Write(root, b"", 1), Delete(f"{root}/e")]),
        Multi([Check(container), Write(root, b"")]),
        Checks([root, root]),
        Delete(f"{root}/none"),
        Close(),
    ]
    with socket.create_connection((server.host, server.port)) as sock:
        frames = Frames(MOST)

        def next_frame() -> bytes:
            while (frame := frames.next()) is PENDING:
                frames.feed(sock.recv(16) or _closed())
            return bytes(frame)

        sock.sendall(pack_connect(0, 4000, NO_SESSION))
        assert read_greeting(next_frame()).timeout_ms == 4000
        sock.sendall(b"".join(request.pack(xid) for xid, request in enumerate(requests, 1)))
        for xid, request in enumerate(requests, 1):
            header, body = read_header(next_frame())
            assert header.xid == xid
            request.answer(header.code, body)
        assert sock.recv(1) == b""
    _, own, read, listing, exists, missing, _, write, multi, failed, checks, deleted, _ = requests
    path, stat = own.value
    assert path.startswith(f"{root}/n")
    assert stat.ephemeral_owner != 0
    assert read.value[0] == b"data"
    assert listing.value == [path.rpartition("/")[2]]
    assert isinstance(exists.value, Stat)
    assert (missing.value, missing.error) == (None, None)
    assert write.value.version == 1
    assert list(map(type, multi.value)) == [bool, str, Stat, bool]
    assert isinstance(failed.value[0], NoNode)
    assert checks.value == []
    assert isinstance(deleted.error, NoNode)


def _closed() -> bytes:
    raise AssertionError("the server closed the connection")
