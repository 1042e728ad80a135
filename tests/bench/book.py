"""Contenders for the tests: Holdfast, and some that go wrong in ways that must be noticed."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable

from holdfast.bench.contender import Client, Contender, Pair, Target, ours

__all__ = ["contenders", "request_counter"]


def _no_lock(_: Target) -> Client:
    return Client(lambda _: Pair(lambda: 0, lambda: None), lambda: None)


def _missing(_: Target) -> Client:
    importlib.import_module("a_peer_that_is_not_installed")
    raise AssertionError("it is installed")


def _hangs(_: Target) -> Client:
    return Client(lambda _: Pair(lambda: time.sleep(600), lambda: None), lambda: None)


def contenders() -> list[Contender]:
    return [
        *ours("sqlite"),
        Contender("no lock at all", "sqlite", "peer", "blocking", _no_lock),
        Contender("not installed", "sqlite", "peer", "blocking", _missing),
        Contender("hangs", "sqlite", "peer", "blocking", _hangs, open_held=_hangs),
    ]


def request_counter(*_: str) -> Callable[[], float] | None:
    return None
