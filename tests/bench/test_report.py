"""The report compares like with like, and hides nobody."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder is no part of the package."""
    monkeypatch.syspath_prepend(str(ROOT))


def row(contender: str, role: str, flavour: str, rate: float, **more: Any) -> dict[str, Any]:
    state = {"holds_per_second": rate, "p50_us": 1.0, "p99_us": 2.0}
    state |= {"client_cpu_us": 30.0, "server_cpu_us": 10.0}
    head = {"contender": contender, "store": "redis", "role": role, "flavour": flavour}
    return {**head, "pinned": state, "free": state, **more}


def results(*rows: dict[str, Any], case: str = "uncontended") -> dict[str, dict[str, Any]]:
    return {f"{case}-redis": {"at": "2026-01-01 00:00", "quick": False, "rows": list(rows)}}


def test_each_client_has_its_own_limit_and_its_own_best_peer() -> None:
    """A blocking peer is no measure for an asyncio client while there is an asyncio one."""
    from benchmarks.compare import best_peer, limit_of

    rows = [
        row("raw", "limit", "blocking", 100.0),
        row("raw asyncio", "limit", "asyncio", 50.0),
        row("slow", "peer", "asyncio", 10.0),
        row("quick", "peer", "blocking", 20.0),
        row("mine", "ours", "asyncio", 25.0),
    ]
    limit, peer = limit_of(rows, rows[-1]), best_peer(rows, rows[-1], "pinned")
    assert limit is not None
    assert peer is not None
    assert (limit["contender"], peer["contender"]) == ("raw asyncio", "slow")


def test_an_advisory_mode_is_measured_by_its_own_limit() -> None:
    """Two modes of one store send different requests."""
    from benchmarks.compare import library_of

    rows = [
        row("bare", "library", "blocking", 100.0),
        row("bare (advisory)", "library", "blocking", 50.0),
    ]
    for name, limit in (("Holdfast", "bare"), ("Holdfast advisory", "bare (advisory)")):
        found = library_of(rows, row(name, "ours", "blocking", 1.0))
        assert found is not None
        assert found["contender"] == limit


def test_aims_are_met_or_not() -> None:
    """By the ratio to the limit; what was not run is neither."""
    from benchmarks.aims import aims

    def first(rate: float) -> bool | None:
        rows = [row("raw", "limit", "blocking", 100.0), row("Holdfast", "ours", "blocking", rate)]
        return next(aims(results(*rows))).met

    assert (first(46.0), first(44.0)) == (True, False)
    assert next(aims({})).met is None


def test_what_was_not_run_is_told() -> None:
    """A line that is missing would look like one that nobody asked for."""
    from benchmarks.aims import aims, aims_table
    from benchmarks.report import table

    lines = aims_table({}, table).splitlines()[2:]
    assert len(lines) == len(list(aims({})))
    assert all(line.endswith("| – | not run |") for line in lines)


def test_the_longest_wait_is_bounded_in_a_round_and_in_all() -> None:
    """One stall of the machine hits one round: the middle of them says so, and hides nothing."""
    from benchmarks.aims import aims

    waits = {"usual_longest_wait_ms": 20.0, "longest_wait_ms": 90.0}
    limit = row("raw", "limit", "blocking", 1.0, usual_longest_wait_ms=10.0, longest_wait_ms=20.0)
    seen = results(limit, row("Holdfast", "ours", "blocking", 1.0, **waits), case="sixteen")
    found = [
        aim.met for aim in aims(seen) if aim.what.startswith("redis: Holdfast, 16 processes, l")
    ]
    assert found == [True, False]


def test_whoever_failed_is_in_the_report(tmp_path: Path) -> None:
    """By name and with its own words, beside those who did not."""
    from benchmarks.report import write_report

    failed = row("a peer", "peer", "blocking", 1.0)
    for state in ("pinned", "free"):
        del failed[state]
    failed["error"] = "ImportError: no such thing"
    write_report(tmp_path, results(row("Holdfast", "ours", "blocking", 5.0), failed))
    text = (tmp_path / "report.md").read_text()
    assert "| a peer | redis | uncontended | ImportError: no such thing |" in text
    assert "**Holdfast**" in text


def test_every_contender_has_a_key_of_its_own() -> None:
    """All adapters can be imported without any peer installed."""
    from benchmarks.book import contenders

    keys = [one.key for one in contenders()]
    assert len(set(keys)) == len(keys)
    assert {one.role for one in contenders()} == {"ours", "peer", "library", "limit", "least"}
    assert not {"tooz", "filelock", "pottery"} & set(sys.modules)


def test_a_whole_run_of_the_smallest_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the command line to the report, without a server."""
    from benchmarks.__main__ import main

    monkeypatch.chdir(ROOT)
    main(["--quick", "--only", "memory", "--case", "uncontended", "--out", str(tmp_path)])
    text = (tmp_path / "report.md").read_text()
    assert "threading.Lock" in text
    assert "**Holdfast asyncio**" in text
    assert (tmp_path / "results.json").exists()


def test_a_recording_is_what_was_sent() -> None:
    """Requests and replies are told apart, and a batch that is answered at once is one."""
    from benchmarks.tape import Line

    line = Line()
    line.sent(b"a")
    line.sent(b"b")
    line.received(b"1")
    line.received(b"2")
    line.sent(b"c")
    line.received(b"3")
    assert [(bytes(sent), bytes(got)) for sent, got in line.exchanges] == [
        (b"ab", b"12"),
        (b"c", b"3"),
    ]


def test_the_middle_of_the_rounds_is_reported_and_the_worst_wait() -> None:
    """One stall of the machine hits one round: it is shown, and decides nothing."""
    from benchmarks.run import _merged

    def one(rate: float, wait: float, counts: list[int]) -> dict[str, Any]:
        return {"holds_per_second": rate, "longest_wait_ms": wait, "counts": counts, "overlaps": 0}

    merged = _merged([one(90, 20, [5, 4]), one(10, 900, [1, 1]), one(100, 30, [4, 5])])
    assert merged["holds_per_second"] == 90
    assert merged["longest_wait_ms"] == 900
    assert merged["usual_longest_wait_ms"] == 30
    assert merged["fewest_to_most"] == 1.0


def test_rounds_of_redlock_are_one_row() -> None:
    """Errors and hangs of any round stay in it; one without a figure has no say in the middle."""
    from benchmarks.run import _merged

    def one(spent: float | None, errors: int, hung: str = "") -> dict[str, Any]:
        return {"acquire_p50_ms": spent, "errors": errors, "hung": hung, "error": None}

    merged = _merged([one(1.0, 0), one(None, 2, "hung in acquire"), one(3.0, 1)])
    assert merged == {"acquire_p50_ms": 2.0, "errors": 3, "hung": "hung in acquire", "error": None}
    failed = {"error": "ImportError", "errors": 1}
    assert _merged([failed]) == failed
