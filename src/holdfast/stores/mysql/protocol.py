"""MySQL's answers, read from bytes: no socket and no clock in here.

A request is one ``COM_QUERY`` packet; it may hold several statements, each answered in turn.
Answers come as text, and columns are asked for by place, so their descriptions are skipped.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Failure", "Parser", "Reply", "Result", "Row", "packed", "quoted"]

Row = tuple[bytes | None, ...]

LONGEST_PACKET = 0xFFFFFF
MOST_REPLY_BYTES = 1 << 26
"""More than any answer to a request of ours has: a page of names, each with a long line."""
MOST_COLUMNS = 4096
LARGEST_NUMBER = 2**63 - 1
LONGEST_TEXT = 2000
"""Characters that are kept of an error's text."""
IN_TRANSACTION = 0x01
MORE_RESULTS = 0x08
_QUERY = b"\x03"
_OK, _NULL, _EOF, _ERROR = 0x00, 0xFB, 0xFE, 0xFF
_START, _COLUMNS, _ROWS = range(3)


class Result(NamedTuple):
    """What one statement answered."""

    affected: int
    insert_id: int
    rows: list[Row]


class Failure(NamedTuple):
    """The error that ended a request."""

    code: int
    text: str


class Reply(NamedTuple):
    """The results of the statements that ran, and what ended the rest."""

    results: list[Result]
    failure: Failure | None
    in_transaction: bool
    """Whether a transaction was open when it ended."""


def quoted(value: bytes) -> bytes:
    """Any bytes as a literal that needs no escaping in any SQL mode.

    >>> quoted(b"a'b")
    b"X'612762'"
    """
    return b"X'%s'" % value.hex().encode()


def packed(sql: bytes) -> bytes:
    """A request as it goes over the wire."""
    payload = _QUERY + sql
    if len(payload) < LONGEST_PACKET:
        return len(payload).to_bytes(3, "little") + b"\0" + payload
    parts: list[bytes] = []
    for number, start in enumerate(range(0, len(payload) + 1, LONGEST_PACKET)):
        part = payload[start : start + LONGEST_PACKET]
        parts += [len(part).to_bytes(3, "little"), bytes([number & 0xFF]), part]
    return b"".join(parts)


class Parser:
    """Collects one reply at a time. Raises ``ValueError`` for what is not MySQL's protocol."""

    def __init__(self) -> None:
        self._rest = bytearray()
        """The begin of a packet that has not come to its end."""
        self._needed = 0
        """How long the rest must be at least, before it is looked at again."""
        self._part = b""
        self._begin()

    def _begin(self) -> None:
        self._results: list[Result] = []
        self._rows: list[Row] = []
        self._state = _START
        self._columns = 0
        self._status = 0
        self._taken = 0
        """How many bytes there are of the answer by now."""

    @property
    def begun(self) -> list[Result]:
        """What the first statements of a reply that is not complete answered."""
        return self._results

    def feed(self, data: bytes) -> Reply | None:
        """The reply, once it is complete."""
        self._taken += len(data)
        if self._taken > MOST_REPLY_BYTES:
            raise ValueError(f"an answer of more than {MOST_REPLY_BYTES} bytes")
        if self._rest:
            self._rest += data
            if len(self._rest) < self._needed:
                return None
            data, self._rest = bytes(self._rest), bytearray()
        at, reply = self._read(data)
        if at < len(data):
            self._rest += data[at:]
        return reply

    def _read(self, data: bytes) -> tuple[int, Reply | None]:
        """Reads whole packets, to the end of a reply; where it stopped, and the reply."""
        at, reply, self._needed = 0, None, 4
        while reply is None and len(data) - at >= 4:
            start = at + 4
            end = start + (data[at] | data[at + 1] << 8 | data[at + 2] << 16)
            if end > len(data):
                self._needed = end - at
                break
            at = end
            if self._state == _COLUMNS and start < end and data[start] < _EOF:
                continue  # the description of a column
            payload = self._part + data[start:end]
            self._part = payload if end - start == LONGEST_PACKET else b""
            if end - start < LONGEST_PACKET:
                reply = self._checked_packet(payload)
        return at, reply

    def _checked_packet(self, payload: bytes) -> Reply | None:
        try:
            return self._packet(payload)
        except IndexError:
            raise ValueError("a packet that ends too soon") from None

    def _packet(self, payload: bytes) -> Reply | None:
        if not payload:
            raise ValueError("an empty packet")
        kind = payload[0]
        if kind == _ERROR:
            return self._end(_failure(payload))
        if self._state == _START:
            return self._first(kind, payload)
        if kind == _EOF and len(payload) < 9:
            return self._end_of_part(payload)
        if self._state == _ROWS:
            self._rows.append(_row(payload, self._columns))
        return None

    def _first(self, kind: int, payload: bytes) -> Reply | None:
        if kind == _OK:
            affected, at = _number(payload, 1)
            insert_id, at = _number(payload, at)
            status = payload[at] | payload[at + 1] << 8
            if max(affected or 0, insert_id or 0) > LARGEST_NUMBER:
                raise ValueError("a number over 63 bits")
            return self._end_of_statement(Result(affected or 0, insert_id or 0, []), status)
        if kind in (_NULL, _EOF):
            raise ValueError(f"an answer of kind {kind}")
        self._columns = _number(payload, 0)[0] or 0
        if self._columns > MOST_COLUMNS:
            raise ValueError(f"an answer of {self._columns} columns")
        self._state = _COLUMNS
        return None

    def _end_of_part(self, payload: bytes) -> Reply | None:
        if self._state == _COLUMNS:
            self._state = _ROWS
            return None
        rows, self._rows = self._rows, []
        status = int.from_bytes(payload[3:5], "little")
        return self._end_of_statement(Result(len(rows), 0, rows), status)

    def _end_of_statement(self, result: Result, status: int) -> Reply | None:
        self._results.append(result)
        self._state, self._status = _START, status
        return None if status & MORE_RESULTS else self._end(None)

    def _end(self, failure: Failure | None) -> Reply:
        reply = Reply(self._results, failure, bool(self._status & IN_TRANSACTION))
        self._begin()
        return reply


def _failure(payload: bytes) -> Failure:
    code = int.from_bytes(payload[1:3], "little")
    text = payload[9:] if payload[3:4] == b"#" else payload[3:]
    shown = text[:LONGEST_TEXT].decode(errors="replace")
    if not shown.isprintable():  # it may quote what others wrote
        shown = "".join(c if c.isprintable() else repr(c)[1:-1] for c in shown)
    return Failure(code, shown)


def _row(payload: bytes, columns: int) -> Row:
    values: list[bytes | None] = []
    at = 0
    for _ in range(columns):
        size: int | None = payload[at]  # as most are: a number less than 251, in one byte
        at += 1
        if size is not None and size >= _NULL:
            size, at = _number(payload, at - 1)
        if size is None:
            values.append(None)
        else:
            values.append(payload[at : at + size])
            at += size
    if at != len(payload):
        raise ValueError("a row of another length than its values")
    return tuple(values)


def _number(payload: bytes, at: int) -> tuple[int | None, int]:
    """A length-encoded number and where it ends; none for a null."""
    first = payload[at]
    if first < _NULL:
        return first, at + 1
    if first == _NULL:
        return None, at + 1
    size = {0xFC: 2, 0xFD: 3, 0xFE: 8}.get(first, 0)
    if not size:
        raise ValueError(f"a length of kind {first}")
    end = at + 1 + size
    if end > len(payload):
        raise ValueError("a number that ends too soon")
    return int.from_bytes(payload[at + 1 : end], "little"), end
