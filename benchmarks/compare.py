"""Who is compared with whom: each row with its limit, its bare library and the best peer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from benchmarks.results import Results

__all__ = ["best_peer", "find", "least_of", "library_of", "limit_of", "rate", "ratio", "rows_of"]

Row = dict[str, Any]


def rows_of(results: Results, case: str, store: str) -> list[Row]:
    """The rows of one step; none if it was not run."""
    return list(results.get(f"{case}-{store}", {}).get("rows", []))


def find(rows: Iterable[Row], contender: str, **more: Any) -> Row | None:
    """The row of this contender."""
    for row in rows:
        if row["contender"] == contender and all(row.get(k) == v for k, v in more.items()):
            return row
    return None


def rate(row: Row | None, state: str = "") -> float | None:
    """Holds per second, or nothing where it failed."""
    if row is None:
        return None
    found = row.get(state, {}) if state else row
    return found.get("holds_per_second") or None


def limit_of(rows: list[Row], row: Row) -> Row | None:
    """What sends the same requests bare, through the same client where there is such a thing."""
    return _match(rows, row, "limit") or _match(rows, row, "least")


def least_of(rows: list[Row], row: Row) -> Row | None:
    """A bare lock without fence, ttl or queue."""
    return _match(rows, row, "least")


def library_of(rows: list[Row], row: Row) -> Row | None:
    """The bare client library with the same requests."""
    return _match(rows, row, "library")


def _match(rows: list[Row], row: Row, role: str) -> Row | None:
    advisory = "advisory" in row["contender"].lower()
    found = [one for one in rows if one["role"] == role and not one.get("error")]
    found.sort(
        key=lambda one: (
            one["flavour"] != row["flavour"],
            ("(advisory)" in one["contender"]) != advisory,
        )
    )
    return found[0] if found else None


def best_peer(rows: list[Row], row: Row, state: str = "") -> Row | None:
    """The quickest of the others through the same client, else of all others."""
    peers = [one for one in rows if one["role"] == "peer" and rate(one, state)]
    peers = [one for one in peers if not one.get("errors")]
    same = [one for one in peers if one["flavour"] == row["flavour"]] or peers
    return max(same, key=lambda one: rate(one, state) or 0.0, default=None)


def ratio(value: float | None, base: float | None) -> float | None:
    return value / base if value and base else None
