"""MySQL's protocol as pure functions of bytes: no socket and no clock.

A request is one ``COM_QUERY`` packet. It may have several statements; the reply has one result for
each. Values are text, and columns are used by position, so column descriptions are skipped.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Failure", "MySqlReply", "ReplyParser", "Result", "Row", "packed", "quoted"]

Row = tuple[bytes | None, ...]

LONGEST_PACKET = 0xFFFFFF
MOST_REPLY_BYTES = 1 << 26
"""Limit of a reply. The largest legitimate one is a page of names with long queues."""
MOST_COLUMNS = 4096
LARGEST_NUMBER = 2**63 - 1
LONGEST_TEXT = 2000
"""Most characters kept of an error's text."""
IN_TRANSACTION = 0x01
MORE_RESULTS = 0x08
_QUERY = b"\x03"
_OK, _NULL, _EOF, _ERROR = 0x00, 0xFB, 0xFE, 0xFF
_START, _COLUMNS, _ROWS = range(3)


class Result(NamedTuple):
    """The result of one statement."""

    affected: int
    insert_id: int
    rows: list[Row]


class Failure(NamedTuple):
    """The error that ended a request."""

    code: int
    text: str


class MySqlReply(NamedTuple):
    """The results of the statements that ran, and the error that ended the request, if any."""

    results: list[Result]
    failure: Failure | None
    in_transaction: bool
    """True if a transaction was open at the end of the request."""


def quoted(value: bytes) -> bytes:
    """Returns bytes as a SQL literal that needs no escaping in any SQL mode.

    >>> quoted(b"a'b")
    b"X'612762'"
    """
    return b"X'%s'" % value.hex().encode()


def packed(sql: bytes) -> bytes:
    """Returns a request as packets."""
    payload = _QUERY + sql
    if len(payload) < LONGEST_PACKET:
        return len(payload).to_bytes(3, "little") + b"\0" + payload
    parts: list[bytes] = []
    for number, start in enumerate(range(0, len(payload) + 1, LONGEST_PACKET)):
        part = payload[start : start + LONGEST_PACKET]
        parts += [len(part).to_bytes(3, "little"), bytes([number & 0xFF]), part]
    return b"".join(parts)


class ReplyParser:
    """Parses one reply after the other. Raises ``ValueError`` for bytes that are not MySQL's
    protocol."""

    def __init__(self) -> None:
        self._rest = bytearray()
        """The first bytes of an incomplete packet."""
        self._needed = 0
        """Minimum size of ``_rest`` before it is worth parsing again."""
        self._part = b""
        self._begin()

    def _begin(self) -> None:
        self._results: list[Result] = []
        self._rows: list[Row] = []
        self._state = _START
        self._columns = 0
        self._status = 0
        self._taken = 0
        """Number of bytes of this reply so far."""

    @property
    def begun(self) -> list[Result]:
        """The results so far of an incomplete reply."""
        return self._results

    def feed(self, data: bytes) -> MySqlReply | None:
        """Takes the next bytes. Returns the reply when it is complete."""
        self._taken += len(data)
        if self._taken > MOST_REPLY_BYTES:
            raise ValueError(f"a reply of more than {MOST_REPLY_BYTES} bytes")
        if self._rest:
            self._rest += data
            if len(self._rest) < self._needed:
                return None
            data, self._rest = bytes(self._rest), bytearray()
        at, reply = self._read(data)
        if at < len(data):
            self._rest += data[at:]
        return reply

    def _read(self, data: bytes) -> tuple[int, MySqlReply | None]:
        """Reads complete packets up to the end of a reply. Returns the number of bytes read, and
        the reply if it is complete."""
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

    def _checked_packet(self, payload: bytes) -> MySqlReply | None:
        try:
            return self._packet(payload)
        except IndexError:
            raise ValueError("a packet that ends too soon") from None

    def _packet(self, payload: bytes) -> MySqlReply | None:
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

    def _first(self, kind: int, payload: bytes) -> MySqlReply | None:
        if kind == _OK:
            affected, at = _number(payload, 1)
            insert_id, at = _number(payload, at)
            status = payload[at] | payload[at + 1] << 8
            if max(affected or 0, insert_id or 0) > LARGEST_NUMBER:
                raise ValueError("a number over 63 bits")
            return self._end_of_statement(Result(affected or 0, insert_id or 0, []), status)
        if kind in (_NULL, _EOF):
            raise ValueError(f"a reply of kind {kind}")
        self._columns = _number(payload, 0)[0] or 0
        if self._columns > MOST_COLUMNS:
            raise ValueError(f"a reply of {self._columns} columns")
        self._state = _COLUMNS
        return None

    def _end_of_part(self, payload: bytes) -> MySqlReply | None:
        if self._state == _COLUMNS:
            self._state = _ROWS
            return None
        rows, self._rows = self._rows, []
        status = int.from_bytes(payload[3:5], "little")
        return self._end_of_statement(Result(len(rows), 0, rows), status)

    def _end_of_statement(self, result: Result, status: int) -> MySqlReply | None:
        self._results.append(result)
        self._state, self._status = _START, status
        return None if status & MORE_RESULTS else self._end(None)

    def _end(self, failure: Failure | None) -> MySqlReply:
        reply = MySqlReply(self._results, failure, bool(self._status & IN_TRANSACTION))
        self._begin()
        return reply


def _failure(payload: bytes) -> Failure:
    code = int.from_bytes(payload[1:3], "little")
    text = payload[9:] if payload[3:4] == b"#" else payload[3:]
    shown = text[:LONGEST_TEXT].decode(errors="replace")
    if not shown.isprintable():  # it may quote text that other users wrote
        shown = "".join(c if c.isprintable() else repr(c)[1:-1] for c in shown)
    return Failure(code, shown)


def _row(payload: bytes, columns: int) -> Row:
    values: list[bytes | None] = []
    at = 0
    for _ in range(columns):
        size: int | None = payload[at]  # most sizes are below 251 and have one byte
        at += 1
        if size is not None and size >= _NULL:
            size, at = _number(payload, at - 1)
        if size is None:
            values.append(None)
        else:
            values.append(payload[at : at + size])
            at += size
    if at != len(payload):
        raise ValueError("a row whose length differs from its values")
    return tuple(values)


def _number(payload: bytes, at: int) -> tuple[int | None, int]:
    """Decodes a length-encoded number. Returns the number (None for NULL) and its end."""
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
