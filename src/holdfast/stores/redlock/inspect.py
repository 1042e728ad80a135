"""Reading what the nodes of a Redlock store hold: one name, all of them, and the nodes' state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from holdfast.claim import Holder, LockInfo, Mode, read_label
from holdfast.core.contract import Finding, Page
from holdfast.errors import BackendUnavailable, Incompatible
from holdfast.stores.redis.connection import Refused, bulk, pack
from holdfast.stores.redis.inspect import read_scan
from holdfast.stores.redis.replies import damage, refusal
from holdfast.stores.redlock.nodes import Fleet, Request, Round, heard
from holdfast.stores.redlock.probe import findings
from holdfast.stores.redlock.replies import check_round
from holdfast.stores.redlock.scripts import RedlockKeys, RedlockScripts
from holdfast.stores.redlock.votes import wait_for_all

__all__ = ["Looking"]

_MODES = {b"x": Mode.EXCLUSIVE, b"s": Mode.SHARED, b"n": Mode.SLOTS}
LOOK_CAP = 1000
"""How many holders of one name are shown."""
SCAN_ROUNDS = 16
"""A page is given up after so many steps of SCAN, however little they found."""


class Looking:
    """What the backend tells about names."""

    display: str
    store: Any
    _keys: RedlockKeys
    _scripts: RedlockScripts
    _fleet: Fleet
    _fan: Any
    _quorum: int

    async def look(self, name: str) -> LockInfo:
        (replies,) = await self._replies([name])
        return self._standing(name, replies)

    async def _standings(self, names: Sequence[str], node: int) -> list[LockInfo]:
        """What a majority holds of each name of which a node is the first to have anything. One
        that can't be read says so, and the others are told as always."""
        standings = []
        for name, replies in zip(names, await self._replies(names), strict=True):
            if next((i for i, r in replies.items() if _has_something(r)), None) != node:
                continue
            try:
                standing = self._standing(name, replies)
            except Incompatible as error:
                why = f"what is stored under this name can't be read: {error}"
                standing = LockInfo(name, 0, (), (), why)
            if standing.holders or standing.notice:
                standings.append(standing)
        return standings

    async def _replies(self, names: Sequence[str]) -> list[dict[int, Any]]:
        """What each node tells about each name."""
        if not names:
            return []
        script = self._scripts.look
        commands = []
        for name in names:
            start, _ = self._keys.start(script, name)
            commands.append(f"{start}{bulk(str(LOOK_CAP))}".encode())
        request = Request(commands, lambda at: script.in_full(commands[at]), wait_for_all)
        asked: Round = await self._fan.ask(request)
        if sum(type(answer) is list for answer in asked.answers) < self._quorum:
            raise self._fleet.unavailable(asked.answers)
        return [
            {
                index: answer[at]
                for index, answer in enumerate(asked.answers)
                if type(answer) is list
            }
            for at in range(len(names))
        ]

    def _standing(self, name: str, replies: dict[int, Any]) -> LockInfo:
        """What a majority holds. A node that has something unreadable counts as one that is down,
        as long as enough are left."""
        answers = [[reply] for reply in replies.values()]
        check_round(answers, self._quorum, self.display, name)
        for reply in replies.values():
            if isinstance(reply, Refused) and not damage(reply):
                raise refusal(reply, self.display, name)
        try:
            return self._agreed(name, [r for r in replies.values() if type(r) is list])
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            why = f"a node of {self.display} gave an answer that is not understood"
            raise BackendUnavailable(why) from error

    def _agreed(self, name: str, replies: Sequence[Any]) -> LockInfo:
        seen: dict[bytes, list[tuple[Any, int]]] = {}
        limits: Counter[int] = Counter()
        for limit, now, rows in replies:
            limits[int(limit)] += bool(rows)
            for row in rows:
                seen.setdefault(row[0], []).append((row, now))
        unseen = len(self._fleet.nodes) - len(replies)
        found = [rows for rows in seen.values() if len(rows) + unseen >= self._quorum]
        holders = sorted((self._holder(rows) for rows in found), key=lambda h: h.token)
        limit = max(limits, key=lambda each: limits[each], default=0) if holders else 0
        return LockInfo(name, limit, tuple(holders), ())

    def _holder(self, rows: list[tuple[Any, int]]) -> Holder:
        """One holder as several nodes tell of it: they may differ in what they missed."""
        tokens = Counter(row[2] for row, _ in rows)
        token = max(tokens, key=lambda each: (tokens[each], each))
        ends = sorted(((row[3] - now) / 1000 for row, now in rows), reverse=True)
        remaining = ends[min(self._quorum, len(ends)) - 1]
        (_, mode, _, _, slots, label), now = rows[0]
        numbers = () if slots == b"-" else tuple(int(slot) for slot in slots.split(b","))
        since = min(token / 1_000_000, now / 1000)
        parts = read_label(label.decode(errors="replace"))
        return Holder(*parts, _MODES[mode], token, numbers, since, max(0.0, remaining))

    async def survey(self, prefix: str, cursor: str | None, limit: int) -> Page:
        """A cursor is ``node.scan.name``: the name up to which that step was already given. A name
        that several nodes have is given where the first of them is walked."""
        node, scan, after = _read_cursor(cursor)
        total = len(self._fleet.nodes)
        for _ in range(SCAN_ROUNDS):
            if node >= total:
                return Page([], None)
            following, names = await self._step(node, prefix, scan, limit)
            fresh = [name for name in sorted(set(names)) if name > after]
            used = await self._standings(fresh, node)
            if len(used) > limit:
                return Page(used[:limit], f"{node}.{scan}.{used[limit - 1].name}")
            after, scan = "", following
            if scan == "0":
                node += 1
            if used:
                return Page(used, None if node >= total else f"{node}.{scan}.")
        return Page([], f"{node}.{scan}.")

    async def _step(self, node: int, prefix: str, scan: str, limit: int) -> tuple[str, list[str]]:
        amount = max(10, min(limit, 1000))
        command = pack("SCAN", scan, "MATCH", self._keys.pattern(prefix), "COUNT", amount)
        request = Request([command], lambda at: command, wait_for_all, [node])
        asked: Round = await self._fan.ask(request)
        answer = asked.answers[node]
        if type(answer) is not list:
            return "0", []  # it is down: what a majority holds is on another one too
        if isinstance(answer[0], Refused):
            raise refusal(answer[0], str(self._fleet.nodes[node].address), prefix)
        return read_scan(answer[0], self._keys, str(self._fleet.nodes[node].address))

    async def revoke(self, name: str) -> list[int]:
        script = self._scripts.revoke
        start, _ = self._keys.start(script, name)
        packed = f"{start}{bulk(self.channel(name))}".encode()
        request = Request([packed], lambda at: script.in_full(packed), wait_for_all)
        asked: Round = await self._fan.ask(request)
        check_round(asked.answers, self._quorum, self.display, name)
        if heard(asked.answers) < self._quorum:
            raise self._fleet.unavailable(asked.answers)
        tokens: dict[bytes, list[int]] = {}
        answers = [a[0] for a in asked.answers if type(a) is list and type(a[0]) is list]
        for rows in answers:
            for row in rows:
                if type(row) is list and [type(word) for word in row] == [bytes, int]:
                    tokens.setdefault(row[0], []).append(row[1])
        unseen = len(self._fleet.nodes) - len(answers)
        held = [told for told in tokens.values() if len(told) + unseen >= self._quorum]
        return sorted(max(told, key=lambda t: (told.count(t), t)) for told in held)

    def channel(self, name: str) -> str:
        raise NotImplementedError

    async def probe(self) -> list[Finding]:
        return await findings(self._fleet, self._fan, self.store.options)


def _has_something(reply: Any) -> bool:
    """Whether a node has holders of a name, or something that can't be read."""
    if type(reply) is not list or reply[:1] == [b"incompatible"]:
        return True
    return len(reply) == 3 and bool(reply[2])


def _read_cursor(cursor: str | None) -> tuple[int, str, str]:
    if cursor is None:
        return 0, "0", ""
    node, scan, after = cursor.split(".", 2)
    return int(node), scan, after
