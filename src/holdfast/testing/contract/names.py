"""Names and notes that break stores which are careless with text."""

from __future__ import annotations

__all__ = ["DISTINCT_NAMES", "HOSTILE_NOTES"]

DISTINCT_NAMES = (
    "a",
    "A",
    "a ",
    " a",
    "ä",
    "a\u0308",  # the same letter, decomposed
    "ß",
    "ss",
    "İ",
    "i",
    "名前:42",
    "🔒",
    "🔓",
    "a/b",
    "/a/b",
    "a/b/",
    "a//b",
    ".",
    "..",
    "../a",
    "a/../b",
    "{a}",
    "{a}b",
    "{}",
    "a*",
    "a?",
    "[a]",
    "a%",
    "a%20",
    "a_",
    "a+b",
    "a%2Fb",
    "a;b",
    "a:b",
    "a\\b",
    "a'b",
    'a"b',
    "a`b",
    "$(a)",
    "a&b=c",
    "a#b",
    "a|b",
    "null",
    "0",
    "-1",
    "a" * 511 + "x",
    "a" * 511 + "y",
    "é" * 256,
)
"""Each is a lock of its own on every store."""

HOSTILE_NOTES = (
    "",
    "it's \"quoted\" \\ and 'again'",
    "'; DROP TABLE holdfast; --",
    "<script>alert(1)</script>",
    "\x1b[31mred\x1b[0m",
    "tab\tnew line\nnul\x00bell\x07",
    "{json: [1, 2}",
    "%s %d {0} ${HOME}",
    "名前 🔒 \u202eright to left",
    "n" * 1000,
)
"""Each comes back as it was."""
