"""The JSON that the page gets: one page of names, the tree, leaders, changes, what ``check`` found.

Every text that another program wrote is escaped here, as on a terminal: the page then shows it as
text, never as markup. ``name`` alone is as it is stored, to be sent back. Times are durations, so
that the clock of the browser does not matter. Tokens are texts: they have more digits than a number
in JavaScript can hold.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from holdfast import Holder, LockInfo, Waiter
from holdfast.claim import escaped
from holdfast.dashboard.rows import SORTS, Branch, Row, matching, tree
from holdfast.dashboard.watch import MOST_NAMES, STALE_SECONDS, Change, Watch

__all__ = ["PAGE_ROWS", "Query", "View"]

PAGE_ROWS = 50
FEW, MANY = 3, 200
"""Holders and waiters that a row has, and an opened one."""
LONGEST_SHOWN_NOTE = 120
"""Characters of a note in a row that is not opened."""
MOST_LEADERS = 20
SHOWN_CHANGES = 50
LONGEST_FILTER = 200
MOST_ORDERS = 32
"""Sorted and filtered lists that are kept for other viewers until the next reading."""


class Query(NamedTuple):
    """What a viewer asks for."""

    sort: str = "wait"
    filter: str = ""
    page: int = 1
    open: str = ""
    """The name whose holders and waiters are all shown."""
    tree: bool = False

    @classmethod
    def of(cls, words: Mapping[str, str]) -> Query:
        """Reads the query of a URL; what makes no sense there has its default."""
        sort, page = words.get("sort", ""), words.get("page", "")
        number = int(page) if page.isascii() and page.isdecimal() and len(page) < 7 else 1
        return cls(
            sort if sort in SORTS else "wait",
            words.get("filter", "")[:LONGEST_FILTER],
            max(1, number),
            words.get("open", ""),
            words.get("tree", "") == "1",
        )


class View:
    """Makes the JSON of one watch for any number of viewers: each order is sorted once for each
    reading."""

    def __init__(self, watch: Watch, store: str) -> None:
        self._watch, self._store = watch, store
        self._sorted: dict[tuple[str, str], list[Row]] = {}
        self._tree: list[Branch] | None = None
        self._totals: dict[str, Any] = {}
        self._elections: list[Row] = []
        self._readings = -1

    def data(self, query: Query, can_break: bool) -> dict[str, Any]:
        """What the page shows."""
        self._refresh()
        watch, rows = self._watch, self._rows(query)
        longest = _finite(watch.longest_wait_seconds)
        pages = max(1, math.ceil(len(rows) / PAGE_ROWS))
        page = min(query.page, pages)
        shown = rows[(page - 1) * PAGE_ROWS : page * PAGE_ROWS]
        return {
            **self._banner(),
            "totals": self._totals | {"matching": len(rows), "longest_wait": longest},
            "page": page,
            "pages": pages,
            "sort": query.sort,
            "rows": [] if query.tree else [self._row(row, query.open) for row in shown],
            "tree": self._branches(query.filter) if query.tree else [],
            "leaders": self._leaders(),
            "changes": [_change(change, watch.now()) for change in self._newest()],
            "counts": dict(watch.counts),
            "check": self._check(),
            "can_break": can_break,
        }

    def _refresh(self) -> None:
        watch = self._watch
        if watch.readings != self._readings:
            self._readings = watch.readings
            self._sorted, self._tree = {}, None
            self._totals = _totals(watch.rows)
            self._elections = _elections(watch.rows)

    def _rows(self, query: Query) -> list[Row]:
        key = query.sort, query.filter
        if key not in self._sorted:
            if len(self._sorted) >= MOST_ORDERS:
                self._sorted.clear()
            found = matching(self._watch.rows, query.filter)
            self._sorted[key] = sorted(found, key=SORTS[query.sort])
        return self._sorted[key]

    def _row(self, row: Row, opened: str) -> dict[str, Any]:
        return _row(self._watch.aged(row), opened, self._watch.now())

    def _banner(self) -> dict[str, Any]:
        watch = self._watch
        return {
            "store": escaped(self._store),
            "age": watch.age_seconds,
            "stale_after": STALE_SECONDS,
            "error": escaped(watch.error),
            "watched": max(0.0, watch.now() - watch.began),
            "most_names": MOST_NAMES if watch.truncated else None,
        }

    def _branches(self, text: str) -> list[dict[str, Any]]:
        if self._tree is None:
            self._tree = tree(sorted(self._watch.rows, key=SORTS["wait"]))
        now = self._watch.now()
        kept = self._tree
        if text.strip():
            names = {row.name for row in self._rows(Query(filter=text))}
            kept = [branch for branch in kept if branch.name in names]
        return [_branch(branch, now) for branch in kept]

    def _newest(self) -> list[Change]:
        return list(self._watch.changes)[: -SHOWN_CHANGES - 1 : -1]

    def _leaders(self) -> list[dict[str, Any]]:
        now = self._watch.now()
        return [
            {
                "name": row.name,
                "shown": escaped(row.name),
                "leader": _holder(row.info.holders[0], now) if row.info.holders else None,
                "standby": row.waiting,
            }
            for row in map(self._watch.aged, self._elections)
        ]

    def _check(self) -> dict[str, Any]:
        watch = self._watch
        return {
            "error": escaped(watch.check_error),
            "findings": [
                {"level": f.level, "subject": escaped(f.subject), "detail": escaped(f.detail)}
                for f in watch.findings
            ],
        }


def _totals(rows: tuple[Row, ...]) -> dict[str, Any]:
    return {
        "names": len(rows),
        "held": sum(len(row.info.holders) for row in rows),
        "waiting": sum(row.waiting for row in rows),
    }


def _elections(rows: tuple[Row, ...]) -> list[Row]:
    """The first elections; those without a leader come first."""
    found = [row for row in rows if row.is_election]
    return sorted(found, key=lambda row: (bool(row.info.holders), row.name))[:MOST_LEADERS]


def _row(row: Row, opened: str, now: float) -> dict[str, Any]:
    info = row.info
    is_open = info.name == opened
    most = MANY if is_open else FEW
    return {
        "name": info.name,
        "shown": escaped(info.name),
        "kind": escaped(row.kind),
        "limit": info.limit,
        "waiting": row.waiting,
        "wait": _finite(row.wait_seconds) if row.wait_seconds else None,
        "held": _finite(row.hold_seconds) if info.holders else None,
        "left": _finite(row.left_seconds),
        "notice": escaped(info.notice),
        "holders": [_holder(holder, now, is_open) for holder in info.holders[:most]],
        "waiters": [_waiter(waiter, now, is_open) for waiter in info.waiters[:most]],
        "more_holders": max(0, len(info.holders) - most),
        "more_waiters": max(0, len(info.waiters) - most),
        "tokens": _tokens(info),
        "open": is_open,
    }


def _tokens(info: LockInfo) -> list[str]:
    """What a break must name: the tokens of all holders."""
    return sorted({str(holder.token) for holder in info.holders})


def _who(who: Holder | Waiter, now: float, whole: bool) -> dict[str, Any]:
    note = who.note if whole or len(who.note) <= LONGEST_SHOWN_NOTE else _cut(who.note)
    return {
        "host": escaped(who.host),
        "pid": str(who.pid),
        "thread": escaped(who.thread),
        "note": escaped(note),
        "mode": str(who.mode),
        "since": _finite(max(0.0, now - who.since)),
    }


def _cut(note: str) -> str:
    return f"{note[:LONGEST_SHOWN_NOTE]}…"


def _holder(holder: Holder, now: float, whole: bool = False) -> dict[str, Any]:
    slots = list(holder.slots[:MANY])
    left = _finite(holder.remaining)
    return {**_who(holder, now, whole), "token": str(holder.token), "slots": slots, "left": left}


def _waiter(waiter: Waiter, now: float, whole: bool = False) -> dict[str, Any]:
    return {**_who(waiter, now, whole), "behind": waiter.behind}


def _branch(branch: Branch, now: float) -> dict[str, Any]:
    who = branch.who
    return {
        "depth": branch.depth,
        "shown": escaped(branch.name),
        "what": branch.what,
        "who": None if who is None else _who(who, now, whole=False),
        "circular": branch.circular,
    }


def _change(change: Change, now: float) -> dict[str, Any]:
    shown, detail = escaped(change.name), escaped(change.detail)
    ago = _finite(max(0.0, now - change.at))
    return {"ago": ago, "what": change.what, "shown": shown, "detail": detail}


def _finite(seconds: float) -> float | None:
    """What JSON can hold; ``None`` for what is no duration."""
    return round(seconds, 3) if math.isfinite(seconds) else None
