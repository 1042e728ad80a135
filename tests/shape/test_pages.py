"""Every page is reachable from the index, and every link leads somewhere, its anchor included."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
INDEX = DOCS / "index.md"
TOP = [ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")]
PAGES = sorted(DOCS.rglob("*.md"))
LINK = re.compile(r"\]\(([^)\s]+)\)")
CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.MULTILINE | re.DOTALL)
ELSEWHERE = ("http://", "https://", "mailto:")


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def links(page: Path) -> list[tuple[Path, str]]:
    """The targets of a page's relative links: a path, and an anchor or ""."""
    found = []
    for target in LINK.findall(CODE.sub("", page.read_text())):
        if not target.startswith(ELSEWHERE):
            path, _, anchor = target.partition("#")
            found.append(((page.parent / path).resolve() if path else page, anchor))
    return found


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ +(.+?) *$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [*TOP, *PAGES], ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    for target, anchor in links(page):
        assert target.exists(), target
        assert not anchor or anchor in anchors(target), f"{target.name}#{anchor}"


def test_every_page_is_reachable_from_the_index() -> None:
    """A page that nothing links to is not read."""
    seen, left = {INDEX}, [INDEX]
    while left:
        for target, _ in links(left.pop()):
            if target.suffix == ".md" and target.is_relative_to(DOCS) and target not in seen:
                seen.add(target)
                left.append(target)
    assert [name_of(page) for page in PAGES if page not in seen] == []


def test_the_index_names_every_page_itself() -> None:
    assert set(PAGES) - {target for target, _ in links(INDEX)} - {INDEX} == set()


def test_the_index_names_no_page_twice() -> None:
    """A second row of a page is usually an older one that should have gone."""
    named = [target for target, _ in links(INDEX)]
    assert sorted(name_of(page) for page in set(named) if named.count(page) > 1) == []


@pytest.mark.parametrize("page", [ROOT / "README.md", DOCS / "reference" / "urls.md"], ids=name_of)
def test_the_tables_of_stores_link_their_pages(page: Path) -> None:
    linked = {target for target, _ in links(page)}
    assert {
        name_of(store) for store in (DOCS / "stores").glob("*.md") if store not in linked
    } == set()


def test_the_readme_says_where_to_go_on() -> None:
    text = (ROOT / "README.md").read_text()
    assert INDEX in {target for target, _ in links(ROOT / "README.md")}
    assert ROOT / "examples" / "README.md" in {target for target, _ in links(ROOT / "README.md")}
    assert "Python 3.11" in text
