"""Labels that other programs wrote: read without an error, and safe to show."""

from __future__ import annotations

import json
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

import holdfast
from holdfast.claim import Holder, Mode, Waiter, read_label, write_label

UNREADABLE = ("?", 0, "?", "", "", "")
HOSTILE = "web-1\nCRITICAL:root:forged\x1b[2J\x9b31m\u202e\u2066\u200b\x00\ud800"


@pytest.mark.parametrize(
    "label",
    [
        "",
        "[" * 100_000,
        "1" * 100_000,
        '["h",1,"t"]',
        '{"a":1,"b":2,"c":3,"d":4}',
        '"four"',
        "null",
        b"\xff\xfe",
        None,
        7,
    ],
    ids=lambda label: repr(label)[:20],
)
def test_a_damaged_label_gives_question_marks(label: str) -> None:
    """No stored text makes ``inspect`` fail."""
    assert read_label(label) == UNREADABLE


@pytest.mark.parametrize(
    "pid", ["Infinity", "-Infinity", "NaN", "1e400", str(2**63), str(-(2**63)), "true", '"1"', "[]"]
)
def test_a_process_id_that_is_not_valid(pid: str) -> None:
    """The rest of the label is still read."""
    assert read_label(f'["h",{pid},"t","n"]') == ("h", 0, "t", "n", "", "")


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), st.lists))
def test_any_json_is_read(value: object) -> None:
    """Types are those of the signature, sizes are bounded, nothing raises."""
    for label in (json.dumps(value), json.dumps([value] * 4), json.dumps([value] * 7)):
        host, pid, thread, note, kind, traceparent = read_label(label)
        assert abs(pid) < 2**63
        assert host.isprintable()
        assert thread.isprintable()
        assert kind.isprintable()
        assert len(traceparent) in (0, 55)
        assert max(len(host), len(thread)) <= 256
        assert len(note) <= 1024
        note.encode()


def test_fields_that_a_newer_version_adds_are_ignored() -> None:
    """Programs of both versions inspect each other's locks during an upgrade."""
    assert read_label('["h",1,"t","n","k","",{"more":"web"},[7]]') == ("h", 1, "t", "n", "k", "")


TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_a_kind_and_a_traceparent_are_added_at_the_end() -> None:
    """A version that does not know them reads the first four fields, and no others."""
    label = write_label("h", 1, "t", "n", "order", TRACEPARENT)
    assert read_label(label) == ("h", 1, "t", "n", "order", TRACEPARENT)
    assert json.loads(label)[:4] == ["h", 1, "t", "n"]
    assert json.loads(write_label("h", 1, "t", "n")) == ["h", 1, "t", "n"]


@pytest.mark.parametrize(
    "text", ["", "x" * 55, TRACEPARENT.upper(), TRACEPARENT[:-1], TRACEPARENT + "0", 7, None]
)
def test_what_is_no_traceparent_is_left_out(text: object) -> None:
    """It would become part of a trace as it is."""
    assert read_label(json.dumps(["h", 1, "t", "n", "k", text])).traceparent == ""


def test_long_texts_are_cut() -> None:
    """A stored megabyte does not make a log line of a megabyte."""
    host, _, thread, note, kind, _ = read_label(
        json.dumps(["h" * 10**6, 1, "\x00" * 10**6, "n" * 10**6, "k" * 10**6, "t" * 10**6])
    )
    assert (len(host), len(thread), len(note), len(kind)) == (256, 256, 1024, 64)


@pytest.mark.parametrize(
    "note", ["", "x" * 1024, "'; --", '"', "\\", "\n\r\t", "\x1b[31m", "\0", "é"]
)
def test_a_note_is_returned_as_it_was_written(note: str) -> None:
    """It belongs to the user, and may contain data."""
    assert read_label(write_label("h", 1, "t", note)) == ("h", 1, "t", note, "", "")


def test_host_and_thread_are_harmless_to_show() -> None:
    """In errors and log lines, which contain the text of a holder."""
    label = json.dumps([HOSTILE, 1, HOSTILE, HOSTILE])
    host, pid, thread, note, _, _ = read_label(label)
    assert host.startswith("web-1\\nCRITICAL")
    holder = Holder(host, pid, thread, note, "", "", Mode.EXCLUSIVE, 1, (), 0.0, 0.0)
    waiter = Waiter(host, pid, thread, note, "", "", Mode.EXCLUSIVE, 0.0, 0)
    raw = Holder(HOSTILE, 1, HOSTILE, HOSTILE, HOSTILE, HOSTILE, Mode.EXCLUSIVE, 1, (), 0.0, 0.0)
    for text in (str(holder), str(waiter), repr(holder), str(raw), repr(raw)):
        assert text.isprintable()


def test_a_thread_of_any_name_can_hold_a_lock() -> None:
    """Its name is cut, and characters that a store can't keep are escaped."""
    seen: list[str] = []

    def work() -> None:
        with holdfast.connect("memory://labels") as locks, locks.lock("a"):
            seen.append(locks.inspect("a").holders[0].thread)

    thread = threading.Thread(target=work, name="\ud800\n" + "x" * 1000)
    thread.start()
    thread.join()
    assert seen == ["\\ud800\\n" + "x" * 248]


def test_the_reason_of_a_broken_hold_is_harmless_to_log(caplog: pytest.LogCaptureFixture) -> None:
    """It is often what a person typed into a form."""
    with holdfast.connect("memory://reasons") as locks:
        lease = locks.lock("name").acquire()
        locks.break_lock("name", reason=HOSTILE)
        assert lease is not None
        lease.release()
    [line] = [text for text in caplog.messages if text.startswith("broke ")]
    assert line.isprintable()
