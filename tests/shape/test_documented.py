"""Every public name, scheme and store is in the docs; every store has a harness."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import holdfast
from harnesses import harness_classes
from holdfast.core.contract import Guarantee
from holdfast.errors import HoldfastError
from holdfast.locks import Locks
from holdfast.primitives.lock import Lock
from holdfast.primitives.options import Options
from holdfast.url import BACKENDS

DOCS = Path(__file__).parents[2] / "docs"
SOURCE = Path(holdfast.__file__).parent
API = (DOCS / "reference" / "api.md").read_text()
ERRORS = (DOCS / "reference" / "errors.md").read_text()
URLS = (DOCS / "reference" / "urls.md").read_text()


@pytest.mark.parametrize("name", holdfast.__all__)
def test_public_names_are_documented(name: str) -> None:
    """Whoever reads the reference finds it."""
    value = getattr(holdfast, name)
    is_error = isinstance(value, type) and issubclass(value, HoldfastError)
    assert f"`{name}" in (ERRORS if is_error else API)


@pytest.mark.parametrize("kind", [Locks, Lock, holdfast.Lease], ids=lambda kind: kind.__name__)
def test_public_words_are_documented(kind: type) -> None:
    """Methods and properties too."""
    for name in dir(kind):
        if not name.startswith("_") and name not in ("forked", "exit"):
            assert f"`{name}" in API or f".{name}" in API, name


@pytest.mark.parametrize("word", [*Options.__annotations__, *Guarantee])
def test_options_and_guarantees_are_documented(word: str) -> None:
    """What a lock takes, and what a store promises."""
    assert f"`{word}`" in API


@pytest.mark.parametrize("word", Options.__annotations__)
def test_options_are_in_the_docstring(word: str) -> None:
    """An editor shows it: the signature has only ``**options``."""
    assert f"- ``{word}``: " in (Locks.lock.__doc__ or "")


@pytest.mark.parametrize("word", ["rwlock", "semaphore", "multi", "election", "once", "every"])
def test_other_primitives_name_the_options(word: str) -> None:
    assert "options of ``lock``" in (getattr(Locks, word).__doc__ or "")


@pytest.mark.parametrize("scheme", BACKENDS)
def test_schemes_are_documented(scheme: str) -> None:
    """Each has a line among the URLs, and its store a page."""
    assert f"`{scheme}" in URLS


@pytest.mark.parametrize("module", sorted({module for module, _ in BACKENDS.values()}))
def test_stores_have_a_page_and_a_harness(module: str) -> None:
    """A store without a page or without the suite is not there."""
    store = module.rsplit(".", 1)[1]
    assert (DOCS / "stores" / f"{store}.md").exists()
    assert any(name.split("-")[0] == store for name in harness_classes())


@pytest.mark.parametrize("page", ["explain/architecture.md", "guides/write-a-store.md"])
def test_files_that_pages_name_exist(page: str) -> None:
    """A page that sends its reader to a file that has moved is worse than none."""
    roots = (SOURCE, SOURCE / "stores" / "redis", DOCS.parent)
    for path in re.findall(r"`([\w/.]+/[\w.]*\.(?:py|lua)|[a-z]+/)`", (DOCS / page).read_text()):
        assert any((root / path).exists() for root in roots), path
