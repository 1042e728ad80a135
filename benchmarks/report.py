"""The report in Markdown: what was measured, against the limits and against the others."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.aims import aims_table
from benchmarks.book import STORES
from benchmarks.compare import best_peer, least_of, library_of, limit_of, rate, ratio, rows_of
from benchmarks.plan import CASES
from benchmarks.results import Results, machine, versions

__all__ = ["number", "publish", "table", "write_report"]

Row = dict[str, Any]
TITLES = {
    "memory": "One process",
    "sqlite": "One machine: SQLite and lock files",
    "redis": "Redis",
    "redlock": "Redlock over five Redis servers",
    "etcd": "etcd",
    "consul": "Consul",
    "zookeeper": "ZooKeeper",
    "postgres": "PostgreSQL",
    "mysql": "MariaDB",
}


def number(value: Any) -> str:
    """As many digits as mean something.

    >>> [number(v) for v in (None, 12345.6, 3.14159, 0.0421, "text")]
    ['–', '12,346', '3.14', '0.042', 'text']
    """
    if value is None:
        return "–"
    if isinstance(value, str):
        return value
    if isinstance(value, int) or abs(value) >= 100:
        return f"{value:,.0f}"
    return (
        f"{value:.1f}" if abs(value) >= 10 else f"{value:.2g}" if abs(value) < 1 else f"{value:.2f}"
    )


def table(headings: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = ["| " + " | ".join(headings) + " |", "|" + "---|" * len(headings)]
    lines += ["| " + " | ".join(number(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def _name(row: Row) -> str:
    mark = {"ours": "**{}**", "limit": "{} *(limit)*", "least": "{} *(least)*"}
    return mark.get(row["role"], "{}").format(row["contender"])


def _sorted(rows: list[Row], key: Callable[[Row], float | None]) -> list[Row]:
    return sorted((row for row in rows if key(row)), key=lambda row: -(key(row) or 0.0))


def _uncontended(rows: list[Row]) -> str:
    lines = []
    for row in _sorted(rows, lambda row: rate(row, "pinned")):
        limit, library = limit_of(rows, row), library_of(rows, row)
        peer = best_peer(rows, row, "pinned")
        seen = row["pinned"]
        lines.append(
            [
                _name(row),
                row["flavour"],
                seen["holds_per_second"],
                ratio(rate(row, "pinned"), rate(limit, "pinned")),
                ratio(rate(row, "free"), rate(limit, "free")),
                ratio(rate(row, "pinned"), rate(least_of(rows, row), "pinned")),
                ratio(rate(row, "pinned"), rate(library, "pinned")),
                ratio(rate(row, "pinned"), rate(peer, "pinned")),
                rate(row, "free"),
                seen["p50_us"],
                seen["p99_us"],
                seen["client_cpu_us"],
                seen["server_cpu_us"],
                row.get("requests"),
            ]
        )
    headings = [
        "contender",
        "flavour",
        "holds/s",
        "÷ limit",
        "÷ limit, free",
        "÷ least",
        "÷ library",
    ]
    headings += ["÷ best peer", "holds/s, free", "p50 µs", "p99 µs", "client CPU µs"]
    return table([*headings, "server CPU µs", "requests"], lines)


def _contended(rows: list[Row]) -> str:
    lines = []
    for row in _sorted(rows, rate):
        limit, peer = limit_of(rows, row), best_peer(rows, row)
        lines.append(
            [
                _name(row),
                row["holds_per_second"],
                ratio(rate(row), rate(limit)),
                ratio(rate(row), rate(peer)),
                row["handover_p50_us"],
                row["handover_p99_us"],
                row["longest_wait_ms"],
                row["switch_percent"],
                row["fewest_to_most"],
                row["overlaps"],
                row["client_cpu_ms"],
                row.get("server_cpu_ms"),
                row["hung"] or "",
            ]
        )
    headings = ["contender", "holds/s", "÷ limit", "÷ best peer", "hand-over p50 µs", "p99 µs"]
    headings += ["longest wait ms", "switch %", "fewest ÷ most", "overlaps", "client CPU ms"]
    return table([*headings, "server CPU ms", "hung"], lines)


def _fields(headings: dict[str, str], key: str) -> Callable[[list[Row]], str]:
    def told(rows: list[Row]) -> str:
        shown = [row for row in rows if "error" not in row or row["error"] is None]
        shown.sort(key=lambda row: -(row.get(key) or 0.0))
        lines = [[_name(row), *(row.get(field) for field in headings.values())] for row in shown]
        return table(["contender", *headings], lines)

    return told


_drain = _fields(
    {
        "flavour": "flavour",
        "served": "served",
        "of": "waiters",
        "seconds": "seconds",
        "holds/s": "holds_per_second",
        "requests per hold": "requests_per_hold",
        "idle requests/s": "idle_requests_per_second",
        "connections": "connections",
        "threads": "threads",
        "client CPU µs": "client_cpu_us",
    },
    "holds_per_second",
)
_held = _fields(
    {
        "leases": "leases",
        "lost": "lost",
        "threads": "threads",
        "connections": "connections",
        "reads/s": "requests_per_second",
        "batches per interval": "batches_per_interval",
        "client CPU %": "client_cpu_percent",
        "server CPU %": "server_cpu_percent",
        "memory MB": "memory_mb",
    },
    "threads",
)


def _redlock(rows: list[Row]) -> str:
    lines = []
    for row in rows:
        same = [one for one in rows if one["state"] == row["state"]]
        limit = limit_of(same, row)
        base = None if limit is None else limit.get("acquire_p50_ms")
        spent = row.get("acquire_p50_ms")
        told = row.get("error") or row.get("hung") or ""
        lines.append(
            [
                _name(row),
                row["state"],
                spent,
                row.get("acquire_p99_ms"),
                row.get("longest_ms"),
                row.get("release_p50_ms"),
                ratio(spent, base),
                row.get("errors"),
                told[:80].replace("|", "/"),
            ]
        )
    headings = [
        "contender",
        "state",
        "acquire p50 ms",
        "p99 ms",
        "longest ms",
        "release p50 ms",
        "× limit",
    ]
    return table([*headings, "errors", "what happened"], lines)


def _growth(rows: list[Row]) -> str:
    fields = {
        "size": "size",
        "holds/s": "holds_per_second",
        "served": "served",
        "leases": "leases",
        "requests per hold": "requests_per_hold",
        "batches per interval": "batches_per_interval",
        "threads": "threads",
        "µs per hold": "hold_us",
        "client CPU µs": "client_cpu_us",
        "client CPU %": "client_cpu_percent",
        "lost": "lost",
        "memory MB": "memory_mb",
    }
    used = {head: field for head, field in fields.items() if any(field in row for row in rows)}
    lines = [[row.get(field) for field in used.values()] for row in rows]
    return table(list(used), lines)


_TELL: dict[str, Callable[[list[Row]], str]] = {
    "uncontended": _uncontended,
    "two": _contended,
    "sixteen": _contended,
    "sixteen-pause": _contended,
    "several": _contended,
    "drain": _drain,
    "held": _held,
    "redlock": _redlock,
    "growth-waiters": _growth,
    "growth-leases": _growth,
    "growth-names": _growth,
}


def _failures(results: Results) -> str:
    """Whoever failed, by name, with what it said; the same words of one contender once."""
    seen: dict[tuple[str, str, str], list[str]] = {}
    for name, step in results.items():
        case = max((case for case in CASES if name.startswith(f"{case}-")), key=len)
        for row in step["rows"]:
            told = row.get("errors")
            told = [row["error"]] if row.get("error") else told if isinstance(told, list) else []
            if row.get("state") and row.get("hung"):
                told = [f"{row['state']}: {row['hung']}", *told]
            if row.get("holds") == 0:
                told = ["not one hold", *told]
            if row.get("served") is not None and row["served"] < row["waiters"]:
                told = [f"served {row['served']} of {row['waiters']}", *told]
            for text in told:
                key = (row["contender"], row["store"], str(text))
                seen.setdefault(key, []).append(case)
    lines = [
        [who, store, ", ".join(dict.fromkeys(cases)), text.replace("|", "/").replace("\n", " ")]
        for (who, store, text), cases in sorted(seen.items())
    ]
    return table(["contender", "store", "case", "what happened"], lines) if lines else "Nobody."


def _costs(results: Results) -> str:
    lines = []
    for store in STORES:
        rows = rows_of(results, "uncontended", store)
        for row in rows:
            library = library_of(rows, row)
            if row["role"] == "ours" and "pinned" in row:
                seen = row["pinned"]
                bare = library and library["flavour"] == row["flavour"] and library["pinned"]
                cost = bare["client_cpu_us"] if bare else None
                client = seen["client_cpu_us"]
                own = client - cost if cost and client > cost else None
                told = "less than the bare library" if cost and own is None else own
                costs = [seen["server_cpu_us"], client, cost, told]
                lines.append([TITLES[store], row["contender"], *costs])
    headings = ["store", "flavour", "server µs", "client µs", "of it the library", "of it Holdfast"]
    return table(headings, lines)


def write_report(folder: Path, results: Results) -> str:
    """Writes ``report.md`` and the plots beside it; answers where."""
    from benchmarks.plots import draw

    quick = any(step["quick"] for step in results.values())
    days = sorted({step["at"][:10] for step in results.values()})
    parts = [f"Measured {' to '.join(dict.fromkeys([days[0], days[-1]]))} on {machine()}."]
    if quick:
        parts.append("**Quick run: rough figures.**")
    parts.append(", ".join(f"{name} {text}" for name, text in versions().items()) + ".")
    parts += ["## Aims", aims_table(results, table)]
    for case, title in CASES.items():
        shown = [store for store in STORES if rows_of(results, case, store)]
        if shown:
            parts.append(f"## {title[0].upper()}{title[1:]}")
        for store in shown:
            parts += [f"### {TITLES[store]}", _TELL[case](rows_of(results, case, store))]
    parts += ["## What an uncontended hold costs, and whom", _costs(results)]
    parts += ["## What failed", _failures(results)]
    file = folder / "report.md"
    file.write_text("\n\n".join(parts) + "\n")
    pictures = draw(folder, results)
    return f"{file} and {len(pictures)} plots in {folder}"


DOCS = Path(__file__).parents[1] / "docs"
BEGIN, END = "<!-- report: written by `make bench` -->", "<!-- end of report -->"


def publish(folder: Path) -> None:
    """Puts the report between the marks of ``docs/benchmarks.md``, and the plots beside it."""
    page = DOCS / "benchmarks.md"
    before, _, rest = page.read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    report = (folder / "report.md").read_text()
    page.write_text(f"{before}{BEGIN}\n\n{report}\n{END}{after}")
    pictures = DOCS / "pictures"
    pictures.mkdir(exist_ok=True)
    for ending in ("svg", "png"):
        for file in folder.glob(f"*.{ending}"):
            shutil.copy(file, pictures / f"benchmark-{file.name}")
