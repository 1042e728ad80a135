"""etcd's messages as bytes: what is written, and what is read of whole, cut and damaged replies."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from holdfast.stores._consensus.strict import DamagedAnswer
from holdfast.stores.etcd import messages, requests
from holdfast.stores.etcd.messages import Damaged, KeyValue, data, integer

HEADER = data(1, integer(1, 2**64 - 1) + integer(2, 2**63) + integer(3, 7) + integer(4, 3))
STORED = b"".join(
    (data(1, b"key"), integer(2, 5), integer(3, 6), integer(4, 2), data(5, b"v"), integer(6, 2**60))
)
KEY_VALUE = KeyValue("key", b"v", 5, 6, 2, str(2**60))
RANGE = HEADER + data(2, STORED) + data(2, STORED) + integer(3, 1) + integer(4, 9)
NESTED = integer(2, 1) + data(3, data(2, data(1, integer(3, 7))))
TXN = HEADER + integer(2, 1) + data(3, data(1, data(2, STORED)))
TXN += (
    data(3, data(3, integer(2, 1))) + data(3, data(4, NESTED)) + data(3, data(2, data(2, STORED)))
)
LEASE = HEADER + integer(2, 2**62) + integer(3, 30) + data(5, b"a") + data(5, b"b")
STATUS = HEADER + data(2, b"3.5.1") + integer(4, 2**64 - 1) + data(8, b"NOSPACE")
EVENTS = data(11, data(2, STORED)) + data(
    11, integer(1, 1) + data(2, data(1, b"k") + integer(3, 8))
)
WATCH = HEADER + integer(2, 4) + EVENTS
READERS: dict[str, tuple[Callable[[bytes], Any], bytes]] = {
    "range": (messages.range_reply, RANGE),
    "delete": (messages.delete_reply, HEADER + integer(2, 1)),
    "txn": (messages.txn_reply, TXN),
    "lease": (messages.lease_reply, LEASE),
    "grant": (messages.grant_reply, LEASE),
    "header": (messages.empty_reply, HEADER),
    "token": (messages.token_reply, HEADER + data(2, b"token.1")),
    "status": (messages.status_reply, STATUS),
    "watch": (messages.watch_reply, WATCH),
}
every_reader = pytest.mark.parametrize(("read", "whole"), READERS.values(), ids=READERS)


def test_what_is_written() -> None:
    """As protoc writes it."""
    assert integer(1, 150) == b"\x08\x96\x01"
    assert data(2, b"testing") == b"\x12\x07testing"
    assert integer(64, 0) == b"\x80\x04\x00"
    assert messages.sign_in("u", "pä") == b"\x0a\x01u\x12\x03p\xc3\xa4"
    assert messages.lease_and_keys("300") == b"\x08\xac\x02\x10\x01"
    assert messages.create_watch(requests.only(b"k"), 9, ends_only=True) == (
        b"\x0a\x08\x0a\x01k\x2a\x01\x00\x38\x09"
    )
    assert messages.cancel_watch(9) == b"\x12\x02\x08\x09"


def test_what_is_read() -> None:
    found = messages.range_reply(RANGE)
    assert found.kvs == [KEY_VALUE, KEY_VALUE]
    assert (found.header, found.more, found.total) == ((7, 3), True, 9)
    answer = messages.txn_reply(TXN)
    assert (answer.revision, answer.succeeded, len(answer.parts)) == (7, True, 4)
    assert answer.range(0).kvs == [KEY_VALUE]
    assert answer.deleted(1)
    assert answer.nested(2).succeeded
    assert answer.put(3).before == KEY_VALUE
    lease = messages.lease_reply(LEASE)
    assert (lease.id, lease.ttl, lease.keys) == (str(2**62), 30, frozenset("ab"))
    assert messages.status_reply(STATUS) == ("3.5.1", 2**64 - 1, ["NOSPACE"])
    watch = messages.watch_reply(WATCH)
    assert (watch.revision, watch.watch_id, watch.created, watch.canceled) == (7, 4, False, False)
    assert [event.deleted for event in watch.events] == [False, True]
    assert messages.token_reply(HEADER + data(2, b"token.1")) == "token.1"


def test_a_lease_that_has_ended() -> None:
    """etcd says -1, which has ten bytes."""
    ended = HEADER + integer(2, 5) + integer(3, 2**64 - 1)
    assert messages.lease_reply(ended).ttl == -1
    with pytest.raises(Damaged):
        messages.grant_reply(ended)


@every_reader
def test_fields_that_are_not_known_are_skipped(read: Callable[[bytes], Any], whole: bytes) -> None:
    more = integer(90, 2**40) + data(91, b"x") + messages.varint(92 << 3 | 1) + b"12345678"
    more += messages.varint(93 << 3 | 5) + b"1234"
    before, after = read(whole), read(more + whole)
    assert vars_of(before) == vars_of(after)


def vars_of(reply: Any) -> Any:
    if isinstance(reply, messages.TxnReply):
        return reply.revision, reply.succeeded, list(map(vars_of, reply.parts))
    return reply


@pytest.mark.parametrize("name", sorted(set(READERS) - {"token"}))  # which counts by itself
def test_a_reply_without_a_header_is_not_etcds(name: str) -> None:
    read, whole = READERS[name]
    for other in (b"", whole[len(HEADER) :]):
        with pytest.raises(Damaged):
            read(other)


@every_reader
def test_a_reply_that_is_cut_off_is_damaged_or_shorter(
    read: Callable[[bytes], Any], whole: bytes
) -> None:
    """Never another error: fields at the end may be missing."""
    for end in range(len(whole)):
        try:
            read(whole[:end])
        except Damaged:
            continue


@every_reader
def test_damaged_bytes_are_damaged_or_read(read: Callable[[bytes], Any], whole: bytes) -> None:
    chance = random.Random(3)
    for _ in range(3000):
        other = bytearray(whole)
        for _ in range(chance.randrange(1, 4)):
            other[chance.randrange(len(other))] = chance.randrange(256)
        try:
            read(bytes(other))
        except Damaged:
            continue


@pytest.mark.parametrize(
    "body",
    [
        b"\xff",
        b"\x80" * 11 + b"\x01",
        integer(3, 2**64),
        integer(0, 1),
        b"\x0b",  # a group, which protocol buffers no longer have
        HEADER[:2] + b"\x19",
        integer(1, 5),  # the header as a number
        data(1, integer(3, 2**63)),  # a negative revision
        HEADER + data(2, b""),
        HEADER + data(2, data(1, b"key")),  # without revisions
        HEADER + data(2, integer(1, 5)),  # the key as a number
        HEADER + data(2, STORED + integer(6, 2**63)),
        HEADER + b"\x12\xff\xff\xff\xff\x0f",  # far too long
        HEADER + b"\x12" + messages.varint(len(STORED) + 1) + STORED,  # by one byte
    ],
)
def test_a_range_that_is_not_etcds(body: bytes) -> None:
    with pytest.raises(Damaged):
        messages.range_reply(body)


def test_transactions_are_not_nested_without_end() -> None:
    body = b""
    for _ in range(5000):
        body = data(3, data(4, body))
    with pytest.raises(Damaged, match="too deep"):
        messages.txn_reply(HEADER + body)


@pytest.mark.parametrize("token", [b"", b"a\r\nb", b"\xff", "ä".encode()])
def test_a_token_that_is_no_header(token: bytes) -> None:
    with pytest.raises(Damaged):
        messages.token_reply(HEADER + data(2, token))


def test_a_part_that_is_missing_or_of_another_kind() -> None:
    answer = messages.txn_reply(TXN)
    answer.where = "etcd://somewhere"
    for step in (
        lambda: answer.range(1),
        lambda: answer.deleted(0),
        lambda: answer.nested(3),
        lambda: answer.put(4),
        lambda: answer.exactly(3),
    ):
        with pytest.raises(DamagedAnswer, match="etcd://somewhere"):
            step()
    answer.exactly(4)


@pytest.mark.parametrize("key", [b"a", b"\xff\xfe", "ä/ö".encode(), b"a\x00b"])
def test_every_key_is_written_as_it_was_read(key: bytes) -> None:
    found = messages.range_reply(HEADER + data(2, data(1, key) + STORED[5:]))
    assert requests.encoded(found.kvs[0].key) == key
