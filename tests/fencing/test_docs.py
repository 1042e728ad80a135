"""What the guides and docstrings show runs as it stands. Blocks marked ``py`` need a server."""

from __future__ import annotations

import doctest
import importlib
import re
from pathlib import Path
from typing import Any

import pytest

import holdfast

DOCS = Path(__file__).parents[2] / "docs"
MODULES = ("sql", "http", "gate", "rule", "redis", "file")
PAGES = (
    "guides/use-the-fence.md",
    "guides/run-a-job-once.md",
    "guides/elect-a-leader.md",
    "guides/migrate.md",
    "guides/logging.md",
    "guides/monitor.md",
    "guides/choose-a-ttl.md",
    "guides/questions.md",
    "reference/api.md",
)


@pytest.mark.parametrize("name", MODULES)
def test_docstrings(name: str) -> None:
    module = importlib.import_module(f"holdfast.fencing.{name}")
    assert doctest.testmod(module).failed == 0


@pytest.mark.parametrize("page", PAGES)
def test_pages(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    blocks = re.findall(
        r"^```python\n(.*?)^```", (DOCS / page).read_text(), re.MULTILINE | re.DOTALL
    )
    assert blocks
    names: dict[str, Any] = {"__name__": page}
    exec("\n".join(blocks), names)
    names["locks"].close()
    if "conn" in names:
        names["conn"].close()


@pytest.mark.parametrize("page", sorted((DOCS / "stores").glob("*.md")), ids=lambda page: page.stem)
def test_the_urls_of_a_store_s_page_are_taken(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With all of their options. A client contacts nothing before it is used."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    urls = re.findall(r'holdfast\.connect\("([^"]+)"', page.read_text())
    assert urls, "no example"
    for url in urls:
        holdfast.connect(url).close()


def test_the_next_order_fits_the_first_example(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resource belongs to one lock: one that all orders share lets in the first only."""
    monkeypatch.chdir(tmp_path)
    text = (DOCS / "guides/use-the-fence.md").read_text()
    block = text.partition("```python\n")[2].partition("```")[0]
    assert "42" in block
    for number in ("42", "43"):
        names: dict[str, Any] = {"__name__": "example"}
        exec(block.replace("42", number), names)
        names["locks"].close()
        names["conn"].close()


def test_the_next_migration_fits_the_example(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has a lock of its own: a resource "schema" would let in the first migration only."""
    monkeypatch.chdir(tmp_path)
    text = (DOCS / "guides/run-a-job-once.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    (block,) = (block for block in blocks if "migration:0007" in block)
    with holdfast.connect("memory://next-migration") as locks:
        for number in ("0007", "0008"):
            exec(block.replace("0007", number), {"__name__": "example", "locks": locks})


@pytest.mark.parametrize("page", [*PAGES, "explain/fencing.md", "explain/trust.md"])
def test_links(page: str) -> None:
    path = DOCS / page
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", path.read_text()):
        assert (path.parent / target).exists(), target


@pytest.mark.parametrize("name", ["sql", "redis", "file", "http", "etcd", "consul", "zookeeper"])
def test_every_word_is_in_the_reference(name: str) -> None:
    text = (DOCS / "reference" / "api.md").read_text()
    assert f"`fencing.{name}." in text
    words = set(importlib.import_module(f"holdfast.fencing.{name}").__all__)
    for word in words - {"File", "TABLE", "HEADER"}:
        assert word.endswith("Guard") or f".{word}(" in text or f"`{word}`" in text, word
