"""Holdfast in the words of frameworks: one module each, over the public API only.

``import holdfast`` imports none of them. A module whose framework is not installed raises a
``ModuleNotFoundError`` that names the extra to install.
"""

from __future__ import annotations

__all__ = ["missing_extra"]


def missing_extra(error: ModuleNotFoundError, extra: str) -> ModuleNotFoundError:
    """The error to raise for a framework that is not installed: it says what to install.

    >>> str(missing_extra(ModuleNotFoundError("No module named 'celery'", name="celery"), "celery"))
    "holdfast.integrations needs 'celery': pip install 'holdfast[celery]'"
    """
    words = f"holdfast.integrations needs {error.name!r}: pip install 'holdfast[{extra}]'"
    return ModuleNotFoundError(words, name=error.name)
