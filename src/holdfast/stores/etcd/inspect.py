"""The pure parts of ``survey`` and ``probe`` on ``etcd://``: pages, and sound versions."""

from __future__ import annotations

import re
from itertools import groupby, islice

from holdfast.core.contract import Finding
from holdfast.core.ordered import escape
from holdfast.stores.etcd import requests
from holdfast.stores.etcd.messages import KeyValue, RangeReply, integer
from holdfast.stores.etcd.requests import Names

__all__ = ["groups_of", "survey_range", "version_finding"]

ENTRIES_PER_PAGE = 1000
SOUND_PATCH = {(3, 4): 31, (3, 5): 13}
"""First patch releases in which a replaced leader that was stuck cannot revoke leases that the new
leader keeps alive."""


def survey_range(names: Names, prefix: str, cursor: str | None) -> bytes:
    """The request for the entries of one page. ``cursor`` is the last name of the page before it,
    as it is stored."""
    low = names.root + escape(prefix)
    high = low + "\U0010ffff"
    if cursor is not None:
        low = f"{names.root}{cursor}0"  # "0" follows the slash that ends a name
    return requests.between(low, high) + integer(3, ENTRIES_PER_PAGE)


def groups_of(
    found: RangeReply, names: Names, limit: int
) -> tuple[list[tuple[str, list[KeyValue] | None]], str | None]:
    """Returns the stored names of a page, each with its entries, or with None if the page does not
    have all of them; and the cursor of the next page, None at the end."""
    by_name = groupby(found.kvs, lambda kv: names.segment_of(kv.key))
    groups = [(segment, list(some)) for segment, some in by_name]
    if found.more and len(groups) > 1:
        groups.pop()  # the next page may have more of its entries
    known = not found.more or len(groups) > 1
    shown = [(segment, some if known else None) for segment, some in islice(groups, limit)]
    more = found.more or len(groups) > limit
    return shown, groups[:limit][-1][0] if more and groups else None


def version_finding(text: str) -> Finding:
    """What ``check()`` says about the version of an etcd, as the server says it."""
    match = re.match(r"(\d+)\.(\d+)\.(\d+)", text)
    if match is None:
        return Finding("version", "the server does not say its version", "warning")
    major, minor, patch = map(int, match.groups())
    if (major, minor) < (3, 4):
        return Finding("version", f"etcd {text} is too old: 3.4 or newer is needed", "broken")
    sound = SOUND_PATCH.get((major, minor), 0)
    if patch < sound:
        detail = f"etcd {text}: a leader that was stuck may end leases that are alive; "
        return Finding("version", f"{detail}{major}.{minor}.{sound} fixes it", "warning")
    return Finding("version", f"etcd {text}")
