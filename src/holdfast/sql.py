"""Locks that live in the caller's own SQL transaction, and what the SQL stores share."""

from __future__ import annotations

import re

__all__ = ["check_identifier"]

_IDENTIFIER = re.compile(r"[a-z_][a-z0-9_]{0,39}")


def check_identifier(text: str, what: str) -> str:
    """Returns the text if it can name a schema or a table anywhere; else ``ValueError``.

    >>> check_identifier("locks_2", "schema")
    'locks_2'
    """
    if _IDENTIFIER.fullmatch(text) is None:
        raise ValueError(
            f"{what}={text!r}: a name of up to 40 lower-case letters, digits and underscores"
        )
    return text
