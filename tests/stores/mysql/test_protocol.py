"""The parser of MySQL's protocol, and the literals in requests."""

from __future__ import annotations

import contextlib
import random
import time

import pytest

from holdfast.stores.mysql.protocol import (
    LONGEST_PACKET,
    MOST_REPLY_BYTES,
    Failure,
    MySqlReply,
    ReplyParser,
    packed,
    quoted,
)


def packet(payload: bytes, number: int = 1) -> bytes:
    return len(payload).to_bytes(3, "little") + bytes([number]) + payload


def text(value: bytes | None) -> bytes:
    if value is None:
        return b"\xfb"
    if len(value) < 251:
        return bytes([len(value)]) + value
    return b"\xfc" + len(value).to_bytes(2, "little") + value


def ok(affected: bytes, insert_id: bytes, status: int) -> bytes:
    return packet(b"\0" + affected + insert_id + status.to_bytes(2, "little") + b"\0\0")


def eof(status: int = 2) -> bytes:
    return packet(b"\xfe\0\0" + status.to_bytes(2, "little"))


TOKEN = 1794787688867537
INSERTED = ok(b"\x02", b"\xfe" + TOKEN.to_bytes(8, "little"), 2)
TABLE = (
    packet(b"\x02")
    + packet(b"\x03def column")
    + packet(b"\xfedef column that begins like an end")
    + eof()
    + packet(text(b"a" * 300) + text(None))
    + packet(text(b"") + text(b"x"))
)


def fed(data: bytes, step: int) -> MySqlReply:
    parser = ReplyParser()
    for start in range(0, len(data), step):
        reply = parser.feed(data[start : start + step])
        if reply is not None:
            assert start + step >= len(data)
            return reply
    raise AssertionError("the reply is not complete")


@pytest.mark.parametrize("step", [1, 3, 7, 100_000])
def test_replies_may_arrive_in_any_pieces(step: int) -> None:
    """Several statements, rows with NULL and long values, in one reply."""
    started = ok(b"\0", b"\0", 0x08 | 0x01)
    reply = fed(started + TABLE + eof(0x08) + INSERTED, step)
    assert reply.failure is None
    assert reply.results[1].rows == [(b"a" * 300, None), (b"", b"x")]
    assert (reply.results[2].affected, reply.results[2].insert_id) == (2, TOKEN)
    assert not reply.in_transaction


@pytest.mark.parametrize("step", [1, 100_000])
def test_an_error_ends_a_reply(step: int) -> None:
    """The reply has the results before the error, and whether a transaction is open."""
    error = packet(b"\xff" + (1213).to_bytes(2, "little") + b"#40001Deadlock found")
    reply = fed(ok(b"\0", b"\0", 0x08 | 0x01) + error, step)
    assert len(reply.results) == 1
    assert reply.failure == Failure(1213, "Deadlock found")
    assert reply.in_transaction
    assert fed(TABLE + error, step).failure == Failure(1213, "Deadlock found")


def test_a_parser_reads_one_reply_after_the_other() -> None:
    """No state of a reply is left for the next one."""
    parser = ReplyParser()
    assert parser.feed(TABLE) is None
    first = parser.feed(eof())
    assert first is not None
    assert len(first.results[0].rows) == 2
    second = parser.feed(INSERTED)
    assert second is not None
    assert second.results[0].insert_id == TOKEN


def test_a_reply_longer_than_a_packet() -> None:
    """A value of 16 MB has two packets."""
    value = b"v" * LONGEST_PACKET
    payload = b"\xfd" + len(value).to_bytes(3, "little") + value
    parts = packet(payload[:LONGEST_PACKET]) + packet(payload[LONGEST_PACKET:])
    reply = fed(packet(b"\x01") + packet(b"\x03def") + eof() + parts + eof(), 1 << 20)
    assert reply.results[0].rows == [(value,)]


def test_what_is_not_the_protocol_is_refused() -> None:
    """A request for a local file, and an empty packet."""
    for wrong in (packet(b"\xfb/etc/passwd"), packet(b"")):
        with pytest.raises(ValueError, match=r"a reply of kind|an empty packet"):
            ReplyParser().feed(wrong)


DAMAGED = {
    "a short OK": packet(b"\0"),
    "an OK without its status": packet(b"\0\0\0"),
    "half a status": packet(b"\0\0\0\2"),
    "a number cut short": packet(b"\0\xfe\1\2"),
    "a number over 63 bits": packet(b"\0\0\xfe" + b"\xff" * 8 + b"\2\0\0\0"),
    "a number of no kind": packet(b"\0\xff\0\0\2\0"),
    "columns without end": packet(b"\xfe" + b"\x7f" * 8 + b"\0"),
    "a great many columns": packet(b"\xfd\xff\xff\xff"),
    "a row without values": packet(b"\2") + packet(b"\3def") * 2 + eof() + packet(b"\1a"),
    "a value cut short": packet(b"\1") + packet(b"\3def") + eof() + packet(b"\x05ab"),
    "a long value cut short": packet(b"\1") + packet(b"\3def") + eof() + packet(b"\xfc\1"),
    "more than its values": packet(b"\1") + packet(b"\3def") + eof() + packet(b"\1ab"),
}


@pytest.mark.parametrize("how", DAMAGED)
@pytest.mark.parametrize("step", [1, 100_000])
def test_damaged_packets_are_refused(how: str, step: int) -> None:
    """``ValueError`` is raised, for which the connection is closed."""
    with pytest.raises(ValueError, match=r"a |an "):
        fed(DAMAGED[how], step)


def test_random_bytes_raise_no_other_error() -> None:
    """3000 replies with a few bytes changed, or cut short."""
    chance = random.Random(7)
    whole = ok(b"\0", b"\0", 0x08) + TABLE + eof(0x08) + INSERTED
    for _ in range(3000):
        data = bytearray(whole)
        for _ in range(chance.randrange(1, 4)):
            data[chance.randrange(len(data))] = chance.choice([0, 1, 250, 251, 252, 253, 254, 255])
        parser = ReplyParser()
        with contextlib.suppress(ValueError):
            parser.feed(bytes(data[: chance.randrange(1, len(data))]))


def test_a_reply_has_an_end() -> None:
    """A server that sends without end is refused."""
    full = b"\xff\xff\xff\x00" + b"\x01" * LONGEST_PACKET
    with pytest.raises(ValueError, match="more than"):
        fed(full * (MOST_REPLY_BYTES // len(full) + 2), len(full))


def test_a_reply_in_small_pieces_is_read_in_linear_time() -> None:
    """The bytes so far are not copied with every piece."""
    size = LONGEST_PACKET - 1
    packets = size.to_bytes(3, "little") + b"\0" + b"\xff" * size
    parser, reply = ReplyParser(), None
    begun = time.process_time()
    for start in range(0, len(packets), 4096):
        reply = parser.feed(packets[start : start + 4096])
    assert reply is not None
    assert time.process_time() - begun < 3.0  # with copies it takes three times as long


def test_the_text_of_an_error_is_harmless() -> None:
    text = b"Duplicate entry '\x1b[2J\n\xff'" + b"x" * 100_000
    reply = ReplyParser().feed(packet(b"\xff" + (1062).to_bytes(2, "little") + b"#23000" + text))
    assert reply is not None
    assert reply.failure is not None
    assert reply.failure.text.isprintable()
    assert reply.failure.text.startswith("Duplicate entry '\\x1b[2J\\n")
    assert len(reply.failure.text) < 3000


def test_requests_are_packed() -> None:
    """Also a request that is longer than a packet may be."""
    assert packed(b"DO 0") == b"\x05\0\0\0\x03DO 0"
    long = packed(b"x" * LONGEST_PACKET)
    assert long[:5] == b"\xff\xff\xff\0\x03"
    assert long[4 + LONGEST_PACKET :] == b"\1\0\0\1x"
    exact = packed(b"x" * (LONGEST_PACKET - 1))
    assert exact[-4:] == b"\0\0\0\1"


def test_literals_need_no_escaping() -> None:
    """Any text becomes hexadecimal digits."""
    assert quoted(b"'; DROP TABLE x --\\") == b"X'273b2044524f50205441424c452078202d2d5c'"
    assert quoted(b"") == b"X''"
