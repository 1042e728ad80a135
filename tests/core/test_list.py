"""``list`` over a store whose pages may repeat a name."""

from __future__ import annotations

import holdfast
from holdfast.core.contract import Page


def test_a_name_on_two_pages_is_listed_once() -> None:
    """Redis repeats keys if its hash table is resized between two steps of SCAN."""
    with holdfast.connect("memory://list") as locks, locks.lock("a"), locks.lock("b"):
        backend = locks._engine.backend
        a, b = locks.list()
        pages = {None: Page([b], "1"), "1": Page([b, a], "2"), "2": Page([a], None)}

        async def survey(prefix: str, cursor: str | None, limit: int) -> Page:
            return pages[cursor]

        backend.survey = survey  # type: ignore[method-assign]
        assert locks.list() == [a, b]
        assert locks.list(limit=1) == [b]
