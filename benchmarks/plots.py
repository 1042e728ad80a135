"""Pictures of the results: SVG and PNG, in colours that everybody can tell apart."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from benchmarks.book import STORES
from benchmarks.compare import best_peer, find, library_of, limit_of, rate, ratio, rows_of
from benchmarks.report import TITLES
from benchmarks.results import Results

__all__ = ["draw"]

Row = dict[str, Any]

# Okabe and Ito's palette, which stays apart for the colour-blind.
BLUE, ORANGE, GREEN, SKY, GREY = "#0072B2", "#E69F00", "#009E73", "#56B4E9", "#8C8C8C"
PINK, RED, YELLOW = "#CC79A7", "#D55E00", "#F0E442"
WIDEST = 1.5
"""Bars are cut here, with an arrow: a lock file without fence or ttl is beyond all limits."""
MARKS = "osD^vPX*"
LINES = [BLUE, ORANGE, GREEN, PINK, RED, SKY, GREY, "#000000"]
SHORT = {"sqlite": "SQLite", "memory": "memory", "redlock": "Redlock"}
SERVED = [store for store in STORES if store not in ("memory", "redlock")]
GROWTH = {
    "growth-waiters": ("waiters in line", "requests per hold", "requests_per_hold"),
    "growth-leases": ("held leases", "client CPU %", "client_cpu_percent"),
    "growth-names": ("names used", "µs per hold", "hold_us"),
}


def _title(store: str) -> str:
    return SHORT.get(store, TITLES[store])


def _plot() -> Any:
    importlib.import_module("matplotlib").use("Agg")
    plt: Any = importlib.import_module("matplotlib.pyplot")
    plt.rcParams.update(
        {
            "font.size": 10,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": True,
            "grid.color": "#DDDDDD",
            "axes.axisbelow": True,
            "svg.hashsalt": "holdfast",
        }
    )
    return plt


def _save(plt: Any, figure: Any, folder: Path, name: str) -> list[Path]:
    figure.tight_layout()
    made = []
    for ending in ("svg", "png"):
        made.append(folder / f"{name}.{ending}")
        figure.savefig(made[-1], dpi=130, metadata={"Date": None} if ending == "svg" else None)
    plt.close(figure)
    return made


def draw(folder: Path, results: Results) -> list[Path]:
    """All pictures that the results allow."""
    try:
        plt = _plot()
    except ImportError:
        return []
    made: list[Path] = []
    for picture in (_uncontended, _sixteen, _costs, _growth, _redlock):
        made += picture(plt, folder, results)
    return made


def _groups(axes: Any, labels: list[str], bars: list[tuple[str, str, list[float]]]) -> None:
    """Horizontal bars in groups, the first group on top, each bar with its figure."""
    height = 0.8 / len(bars)
    for number, (name, colour, values) in enumerate(bars):
        places = [row + (number - (len(bars) - 1) / 2) * height for row in range(len(labels))]
        drawn = [min(value, WIDEST) for value in values]
        made = axes.barh(places, drawn, height * 0.92, color=colour, label=name)
        texts = [f"{value:.2f}{' →' * (value > WIDEST)}" if value else "" for value in values]
        axes.bar_label(made, texts, padding=3, fontsize=8)
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.grid(axis="y", visible=False)


def _legend(axes: Any, columns: int) -> None:
    """Below the axis, where no bar is."""
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.09), ncols=columns, frameon=False)


def _shares(rows: list[Row], name: str) -> tuple[float, float, str] | None:
    """Of the limit: ours, the best peer's, and who that is.

    No peer keeps lease rows in a database: theirs are advisory locks, and stand beside ours."""
    row = find(rows, name)
    if row is None or not rate(row, "pinned"):
        return None
    base = rate(limit_of(rows, row), "pinned")
    rowless = row["store"] in ("postgres", "mysql") and "advisory" not in name
    peer = None if rowless else best_peer(rows, row, "pinned")
    own, other = ratio(rate(row, "pinned"), base), ratio(rate(peer, "pinned"), base)
    return own or 0.0, other or 0.0, peer["contender"] if peer else ""


def _uncontended(plt: Any, folder: Path, results: Results) -> list[Path]:
    labels: list[str] = []
    ours: list[float] = []
    peers: list[float] = []
    for store in SERVED:
        rows = rows_of(results, "uncontended", store)
        for mode in ("", " advisory"):
            for flavour in ("", " asyncio"):
                found = _shares(rows, f"Holdfast{mode}{flavour}")
                if found is None:
                    continue
                own, other, who = found
                labels.append(f"{_title(store)}{mode}{flavour}" + f"\n({who})" * bool(who))
                ours.append(own)
                peers.append(other)
    if not labels:
        return []
    figure, axes = plt.subplots(figsize=(9, 0.55 * len(labels) + 1.8))
    named = "best peer through the same kind of client (named at the left)"
    _groups(axes, labels, [("Holdfast", BLUE, ours), (named, ORANGE, peers)])
    axes.axvline(1, color="black", linewidth=1)
    axes.set_xlim(0, max([1.1, *(min(value, WIDEST) + 0.12 for value in ours + peers)]))
    axes.set_xlabel("share of a raw client that sends Holdfast's own requests (1 = the limit)")
    axes.set_title("Taking and releasing a free lock, client and server on one core")
    axes.legend(loc="upper center", bbox_to_anchor=(0.4, -0.06), ncols=2, frameon=False)
    return _save(plt, figure, folder, "uncontended")


def _failed(row: Row) -> bool:
    return not rate(row) or bool(row.get("errors"))


def _sixteen(plt: Any, folder: Path, results: Results) -> list[Path]:
    shown = [store for store in SERVED if rows_of(results, "sixteen", store)]
    if not shown:
        return []
    figure, panels = plt.subplots(1, 2, figsize=(11, 5.2))
    kinds = {"ours": ("Holdfast", BLUE, "o"), "peer": ("peers", ORANGE, "s")}
    kinds |= {"limit": ("raw queue", "black", "|"), "least": ("unfenced, raw", GREY, "|")}
    named: set[str] = set()
    for place, store in enumerate(shown):
        for row in rows_of(results, "sixteen", store):
            if row["role"] not in kinds or row["flavour"] == "asyncio" or _failed(row):
                continue
            name, colour, mark = kinds[row["role"]]
            size = 150 if mark == "|" else 60
            style = {"color": colour, "marker": mark, "s": size, "zorder": 3, "alpha": 0.85}
            label = name if name not in named else None
            named.add(name)
            panels[0].scatter(row["holds_per_second"], place, label=label, **style)
            panels[1].scatter(max(1.0, row["longest_wait_ms"]), place, **style)
    for axes, text in zip(panels, ("holds per second (more is better)", ""), strict=True):
        axes.set_yticks(range(len(shown)), [_title(store) for store in shown])
        axes.set_ylim(len(shown) - 0.5, -0.5)
        axes.set_xlabel(text or "longest wait of any process, ms, log scale (less is better)")
    panels[0].set_xlim(0)
    panels[1].set_xscale("log")
    figure.suptitle("16 processes on one lock, 1 ms holds: how much gets done, and who starves")
    figure.legend(loc="lower center", ncols=4, frameon=False)
    figure.subplots_adjust(bottom=0.2)
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    return _save_as_is(plt, figure, folder, "sixteen")


def _save_as_is(plt: Any, figure: Any, folder: Path, name: str) -> list[Path]:
    made = []
    for ending in ("svg", "png"):
        made.append(folder / f"{name}.{ending}")
        figure.savefig(made[-1], dpi=130, metadata={"Date": None} if ending == "svg" else None)
    plt.close(figure)
    return made


def _costs(plt: Any, folder: Path, results: Results) -> list[Path]:
    labels: list[str] = []
    parts: dict[str, list[float]] = {"server": [], "client library": [], "Holdfast": []}
    for store in SERVED:
        rows = rows_of(results, "uncontended", store)
        row = find(rows, "Holdfast")
        if row is None or "pinned" not in row:
            continue
        library = library_of(rows, row)
        client = row["pinned"]["client_cpu_us"]
        bare = min(client, library["pinned"]["client_cpu_us"]) if library else 0.0
        labels.append(_title(store))
        parts["server"].append(row["pinned"]["server_cpu_us"] or 0.0)
        parts["client library"].append(bare)
        parts["Holdfast"].append(client - bare)
    if not labels:
        return []
    figure, axes = plt.subplots(figsize=(9, 0.45 * len(labels) + 1.6))
    left = [0.0] * len(labels)
    for (name, values), colour in zip(parts.items(), (GREY, SKY, BLUE), strict=True):
        axes.barh(labels, values, left=left, color=colour, label=name)
        left = [before + value for before, value in zip(left, values, strict=True)]
    for place, total in enumerate(left):
        axes.text(total, place, f" {total:,.0f}", va="center", fontsize=8)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("processor time of one uncontended hold, µs")
    axes.set_title("Where the processor time of a hold goes (blocking client)")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=3, frameon=False)
    return _save(plt, figure, folder, "costs")


def _growth(plt: Any, folder: Path, results: Results) -> list[Path]:
    cases = [case for case in GROWTH if any(rows_of(results, case, store) for store in STORES)]
    if not cases:
        return []
    figure, panels = plt.subplots(1, len(cases), figsize=(4.2 * len(cases), 4), squeeze=False)
    for axes, case in zip(panels[0], cases, strict=True):
        across, up, field = GROWTH[case]
        for number, store in enumerate(SERVED):
            rows = rows_of(results, case, store)
            points = [
                (row.get("leases", row["size"]), row[field])
                for row in rows
                if row.get(field) is not None
            ]
            if points:
                style = {"color": LINES[number], "marker": MARKS[number], "markersize": 5}
                axes.plot(*zip(*points, strict=True), label=_title(store), **style)
        axes.set_xscale("log")
        if case == "growth-leases":
            axes.set_yscale("log")
        else:
            axes.set_ylim(0)
        axes.set_xlabel(f"{across} (log scale)")
        axes.set_ylabel(up)
    handles = {text: line for axes in panels[0] for line, text in _lines(axes)}
    below = {"loc": "lower center", "ncols": len(handles), "frameon": False}
    figure.legend(list(handles.values()), list(handles), **below)
    figure.suptitle("How cost grows: with waiters, with held leases, with names")
    figure.tight_layout(rect=(0, 0.07, 1, 1))
    return _save_as_is(plt, figure, folder, "growth")


def _lines(axes: Any) -> list[tuple[Any, str]]:
    return list(zip(*axes.get_legend_handles_labels(), strict=True))


def _redlock(plt: Any, folder: Path, results: Results) -> list[Path]:
    rows = [row for row in rows_of(results, "redlock", "redlock") if row["role"] != "least"]
    names = list(dict.fromkeys(row["contender"] for row in rows))
    if not names:
        return []
    figure, axes = plt.subplots(figsize=(9, 0.55 * len(names) + 1.6))
    for number, (state, colour) in enumerate(
        (("all up", GREEN), ("one hung", ORANGE), ("one down", PINK))
    ):
        for place, name in enumerate(names):
            row = find(rows, name, state=state)
            spent = row.get("acquire_p50_ms") if row else None
            at = place + (number - 1) * 0.26
            label = state if place == 0 else None
            axes.barh(at, spent or 0.0, 0.24, color=colour, label=label)
            hung = row.get("hung") if row else None
            text = f" {spent:.2f}" if spent else " hangs or fails"
            text += f" ({hung})" if hung and spent else ""
            axes.text(spent or 0.02, at, text, va="center", fontsize=8)
    axes.set_yticks(range(len(names)), names)
    axes.set_xscale("log")
    axes.set_xlim(0.02)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("time to acquire, ms, median, log scale (less is better)")
    axes.set_title("Redlock over five servers: all up, one hung, one down")
    _legend(axes, 3)
    return _save(plt, figure, folder, "redlock")
