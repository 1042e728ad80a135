"""From the words of a job to a contender and its target."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from holdfast.bench.contender import Book, Contender, Target
from holdfast.bench.uncontended import uncontended

__all__ = ["find", "read_target", "uncontended_job"]


def find(book: Book, keys: Iterable[str]) -> list[Contender]:
    """The contenders of these keys."""
    known = {contender.key: contender for contender in book.contenders()}
    return [known[key] for key in keys]


def read_target(words: list[Any]) -> Target:
    """A target that has been through JSON."""
    url, pids, namespace = words
    return Target(url, tuple(pids), namespace)


def uncontended_job(
    book: Book, contenders: list[str], target: list[Any], rounds: int, slice_seconds: float
) -> Any:
    return uncontended(
        find(book, contenders), read_target(target), rounds=rounds, slice_seconds=slice_seconds
    )
