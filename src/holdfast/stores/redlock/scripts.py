"""The keys and the Lua scripts of a Redlock store, assembled from ``lua/``.

The spelling of keys, hash fields and script replies is the stored format and the protocol: it
stays as it is, whatever the names in the code are.
"""

from __future__ import annotations

from pathlib import Path

from holdfast.core.contract import IDLE_COUNTER_SECONDS, STALE_SECONDS
from holdfast.io.resp import pack
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

__all__ = ["RUN_KEY", "RedlockKeys", "RedlockScripts"]

PROTOCOL = "redlock 1"
"""The version of the stored format. A client refuses data of another version."""
RUN_KEY = "holdfast:redlock:run"
"""The key where a node notes for which run of the server its data is complete. One key for all
namespaces: a server loses the data of all of them together."""
RELEASED_BYTES = 2000
"""The memory for the owners of released readers: about sixty, the newest. A renewal that arrives
after its reader was dropped from this list restores the reader for at most its ttl."""

_OWNER = "ARGV[1]"
_READER = "string.sub(ARGV[%d], 1, 1) == 's' and ARGV[1] or nil"
"""Lua for the owner whose entry is the only one that a script needs; ``nil`` if it needs all."""

_FOLDER = Path(__file__).with_name("lua")


class RedlockKeys(Keys):
    """The key of a name, ``namespace:redlock:{name}``, and ``RUN_KEY``, which all names share."""

    def __init__(self, namespace: str) -> None:
        super().__init__(f"{namespace}:redlock", cluster=False)

    def _key(self, kind: str, name: str) -> str:
        return RUN_KEY if kind == "run" else super()._key(kind, name)


class _Script(Script):
    """A script that keeps its text, so that it can be loaded before its first use."""

    def __init__(self, text: str, keys: tuple[str, ...], arguments: int) -> None:
        super().__init__(text, keys, arguments)
        self.text = text


class RedlockScripts:
    """All scripts of one store."""

    def __init__(self, *, loss_protection: bool) -> None:
        self._head = f"local LOSS = {str(loss_protection).lower()}\n{_CONSTANTS}"
        self.grant = self._make("grant", ("state", "run"), 6, _READER % 6)
        self.raises = self._make("raise", ("state",), 2, _OWNER)
        self.renew = self._make("renew", ("state",), 5, _READER % 5)
        self.release = self._make("release", ("state",), 4, _READER % 4)
        self.undo = self._make("undo", ("state",), 3, _OWNER)
        self.abandon = self._make("abandon", ("state",), 3, _OWNER)
        self.take_over = self._make("take_over", ("state",), 7)
        self.intend = self._make("intend", ("state",), 1, _OWNER)
        self.revoke = self._make("revoke", ("state",), 1)
        self.look = self._make("look", ("state",), 1)
        self.begin = Script(read_lua("mark") + _text("begin"), ("run",), 0)

        votes = (self.grant, self.raises, self.renew, self.release, self.undo, self.abandon)
        prepared = (*votes, self.take_over, self.intend)
        self.prepare = tuple(pack("SCRIPT", "LOAD", script.text) for script in prepared)
        """Commands for every new connection. A round may end before a slow node has answered. If
        that node did not know the script, it would get no second request, and have no vote."""

    def _make(
        self, name: str, keys: tuple[str, ...], arguments: int, owner: str = "nil"
    ) -> _Script:
        shared = f"local OWNER = {owner}\n" + "".join(map(read_lua, ("reading", "mark")))
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
