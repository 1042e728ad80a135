"""The setting ``HOLDFAST`` of a project: the arguments of ``holdfast.connect`` in capitals."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured

import holdfast
from holdfast import Locks

__all__ = ["KEYS", "arguments", "client", "unknown_keys"]

KEYS = tuple(word.upper() for word in inspect.signature(holdfast.connect).parameters)


def given() -> Mapping[str, Any]:
    """``settings.HOLDFAST``, or nothing. Raises ``ImproperlyConfigured`` if it is no dict."""
    found = getattr(settings, "HOLDFAST", {})
    if not isinstance(found, Mapping):
        raise ImproperlyConfigured(f"HOLDFAST is a dict, not {type(found).__name__}")
    return found


def unknown_keys() -> list[str]:
    """A line for each key of ``HOLDFAST`` that does not exist, with what was probably meant."""
    lines = []
    for key in given():
        if key not in KEYS:
            near = get_close_matches(str(key).upper(), KEYS, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(KEYS)}"
            lines.append(f"HOLDFAST has an unknown key {key!r}: {hint}")
    return lines


def arguments() -> dict[str, Any]:
    """The arguments of ``holdfast.connect``. Raises ``ImproperlyConfigured``."""
    for line in unknown_keys():
        raise ImproperlyConfigured(line)
    found = {key.lower(): value for key, value in given().items()}
    return {**found, "url": found.get("url") or None}  # then that of the environment


def client(**other: Any) -> Locks:
    """A new client with the settings. Raises ``ImproperlyConfigured`` if they can't be used; does
    not contact the store."""
    try:
        return holdfast.connect(**{**arguments(), **other})
    except (ValueError, TypeError, ImportError) as error:
        raise ImproperlyConfigured(f"the setting HOLDFAST can't be used: {error}") from error
