"""MySQL's protocol as our parser reads it, byte by byte, and the literals we send."""

from __future__ import annotations

import pytest

from holdfast.wires.mysql_protocol import LONGEST_PACKET, Failure, Parser, Reply, packed, quoted


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


def fed(data: bytes, step: int) -> Reply:
    parser = Parser()
    for start in range(0, len(data), step):
        reply = parser.feed(data[start : start + step])
        if reply is not None:
            assert start + step >= len(data)
            return reply
    raise AssertionError("it is not complete")


@pytest.mark.parametrize("step", [1, 3, 7, 100_000])
def test_answers_may_come_in_any_pieces(step: int) -> None:
    """Several statements, rows with nulls and long values, in one answer."""
    started = ok(b"\0", b"\0", 0x08 | 0x01)
    reply = fed(started + TABLE + eof(0x08) + INSERTED, step)
    assert reply.failure is None
    assert reply.results[1].rows == [(b"a" * 300, None), (b"", b"x")]
    assert (reply.results[2].affected, reply.results[2].insert_id) == (2, TOKEN)
    assert not reply.in_transaction


@pytest.mark.parametrize("step", [1, 100_000])
def test_an_error_ends_an_answer(step: int) -> None:
    """What ran before it is told, and whether a transaction was left open."""
    error = packet(b"\xff" + (1213).to_bytes(2, "little") + b"#40001Deadlock found")
    reply = fed(ok(b"\0", b"\0", 0x08 | 0x01) + error, step)
    assert len(reply.results) == 1
    assert reply.failure == Failure(1213, "Deadlock found")
    assert reply.in_transaction
    assert fed(TABLE + error, step).failure == Failure(1213, "Deadlock found")


def test_a_parser_reads_one_answer_after_the_other() -> None:
    """Nothing of an answer is left for the next one."""
    parser = Parser()
    assert parser.feed(TABLE) is None
    first = parser.feed(eof())
    assert first is not None
    assert len(first.results[0].rows) == 2
    second = parser.feed(INSERTED)
    assert second is not None
    assert second.results[0].insert_id == TOKEN


def test_an_answer_longer_than_a_packet() -> None:
    """A value of 16 MB comes in two packets."""
    value = b"v" * LONGEST_PACKET
    payload = b"\xfd" + len(value).to_bytes(3, "little") + value
    parts = packet(payload[:LONGEST_PACKET]) + packet(payload[LONGEST_PACKET:])
    reply = fed(packet(b"\x01") + packet(b"\x03def") + eof() + parts + eof(), 1 << 20)
    assert reply.results[0].rows == [(value,)]


def test_what_is_not_the_protocol_is_refused() -> None:
    """A server that asks for a file of ours, or nonsense."""
    for wrong in (packet(b"\xfb/etc/passwd"), packet(b"")):
        with pytest.raises(ValueError, match="an"):
            Parser().feed(wrong)


def test_requests_are_packed() -> None:
    """Also one that is longer than a packet may be."""
    assert packed(b"DO 0") == b"\x05\0\0\0\x03DO 0"
    long = packed(b"x" * LONGEST_PACKET)
    assert long[:5] == b"\xff\xff\xff\0\x03"
    assert long[4 + LONGEST_PACKET :] == b"\1\0\0\1x"
    exact = packed(b"x" * (LONGEST_PACKET - 1))
    assert exact[-4:] == b"\0\0\0\1"


def test_literals_need_no_escaping() -> None:
    """Whatever the text, it is digits."""
    assert quoted(b"'; DROP TABLE x --\\") == b"X'273b2044524f50205441424c452078202d2d5c'"
    assert quoted(b"") == b"X''"
