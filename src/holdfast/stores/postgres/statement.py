"""A request to PostgreSQL, without what sends it: the schema is printed where no client is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["Parameters", "Request", "Statement"]


class Statement(NamedTuple):
    """A request whose parameters come with each use. Hot ones are prepared by name."""

    name: bytes
    sql: bytes


Parameters = Sequence[bytes | None]
Request = tuple[Statement, Parameters]
