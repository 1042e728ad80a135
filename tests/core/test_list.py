"""``list`` over a store that walks its names and may meet one again."""

from __future__ import annotations

import holdfast
from holdfast.core.contract import Page


def test_a_name_met_twice_is_listed_once() -> None:
    """As Redis does when its table of keys grows or shrinks between two steps of SCAN."""
    with holdfast.connect("memory://list") as locks, locks.lock("a"), locks.lock("b"):
        backend = locks._engine.backend
        a, b = locks.list()
        pages = {None: Page([b], "1"), "1": Page([b, a], "2"), "2": Page([a], None)}

        async def survey(prefix: str, cursor: str | None, limit: int) -> Page:
            return pages[cursor]

        backend.survey = survey  # type: ignore[method-assign]
        assert locks.list() == [a, b]
        assert locks.list(limit=1) == [b]
