"""The scripts that every node of a Redlock store runs, put together from ``lua/``."""

from __future__ import annotations

from pathlib import Path

from holdfast.core.contract import IDLE_COUNTER_SECONDS, STALE_SECONDS
from holdfast.stores.redis.connection import pack
from holdfast.stores.redis.replies import Keys
from holdfast.stores.redis.scripts import (
    DAY_SECONDS,
    LABEL_BYTES,
    LARGEST_NUMBER,
    REMEMBER_BYTES,
    REMEMBER_SECONDS,
    Script,
    read_lua,
)

__all__ = ["RedlockKeys", "RedlockScripts"]

PROTOCOL = "redlock 1"
"""The version of what is stored; versions that differ refuse each other."""
RUN_KEY = "holdfast:redlock:run"
"""Where a node keeps which run of it holds whole data: one for all namespaces, as a server loses
all of them together."""
RELEASED_BYTES = 2000
"""How much is spent on readers that were released: some sixty owners, the newest. A renewal that
comes later than that brings one back for no longer than its ttl."""

_FOLDER = Path(__file__).with_name("lua")


class RedlockKeys(Keys):
    """The key of a name, ``namespace:redlock:{name}``, and the one beside all names."""

    def __init__(self, namespace: str) -> None:
        super().__init__(f"{namespace}:redlock", cluster=False)

    def _key(self, kind: str, name: str) -> str:
        return RUN_KEY if kind == "run" else super()._key(kind, name)


class _Script(Script):
    """A script that can be loaded ahead."""

    def __init__(self, text: str, keys: tuple[str, ...], arguments: int) -> None:
        super().__init__(text, keys, arguments)
        self.text = text


class RedlockScripts:
    """All scripts of one store."""

    def __init__(self, *, loss_protection: bool) -> None:
        self._head = f"local LOSS = {str(loss_protection).lower()}\n{_CONSTANTS}"
        self.grant = self._make("grant", ("state", "run"), 6)
        self.raises = self._make("raise", ("state",), 2)
        self.renew = self._make("renew", ("state",), 5)
        self.release = self._make("release", ("state",), 4)
        self.undo = self._make("undo", ("state",), 3)
        self.abandon = self._make("abandon", ("state",), 3)
        self.intend = self._make("intend", ("state",), 1)
        self.revoke = self._make("revoke", ("state",), 1)
        self.look = self._make("look", ("state",), 1)
        self.begin = Script(read_lua("mark") + _text("begin"), ("run",), 0)

        votes = (self.grant, self.raises, self.renew, self.release, self.undo, self.abandon)
        prepared = (*votes, self.intend)
        self.prepare = tuple(pack("SCRIPT", "LOAD", script.text) for script in prepared)
        """What every new connection is sent: a node that is not waited for, as the others have
        decided already, is not asked a second time. It must know the scripts, or has no vote."""

    def _make(self, name: str, keys: tuple[str, ...], arguments: int) -> _Script:
        shared = "".join(map(read_lua, ("reading", "mark")))
        return _Script(self._head + shared + _text("state") + _text(name), keys, arguments)


def _text(name: str) -> str:
    return (_FOLDER / f"{name}.lua").read_text()


def _milliseconds(seconds: float) -> str:
    return str(round(seconds * 1000))


_CONSTANTS = f"""\
local VERSION, INTENT = '{PROTOCOL}', {_milliseconds(STALE_SECONDS)}
local KEEP, DAY = {_milliseconds(IDLE_COUNTER_SECONDS)}, {_milliseconds(DAY_SECONDS)}
local REMEMBER, REMEMBER_BYTES = {_milliseconds(REMEMBER_SECONDS)}, {REMEMBER_BYTES}
local RELEASED_BYTES, LABEL_BYTES, MOST = {RELEASED_BYTES}, {LABEL_BYTES}, {LARGEST_NUMBER}
"""
