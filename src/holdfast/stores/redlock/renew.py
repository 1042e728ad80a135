"""Renewing on all nodes at once; and marking them as new."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from holdfast.claim import Claim, Grant, Mode
from holdfast.core.contract import Renewal, Waiting
from holdfast.errors import BackendUnavailable
from holdfast.stores.redis.connection import bulk
from holdfast.stores.redlock.nodes import Fleet, Request, Round
from holdfast.stores.redlock.scripts import RedlockKeys, RedlockScripts
from holdfast.stores.redlock.votes import wait_for_all

__all__ = ["Keeping"]

BATCH = 256
_MODES = {Mode.EXCLUSIVE: "x", Mode.SHARED: "s", Mode.SLOTS: "n"}


class Keeping:
    """The renewer's part of the backend."""

    display: str
    _keys: RedlockKeys
    _scripts: RedlockScripts
    _fleet: Fleet
    _fan: Any
    _quorum: int

    async def renew(
        self,
        grants: Sequence[Grant],
        waits: Sequence[Waiting],
        *,
        until: float,
        shorten: bool = False,
    ) -> Renewal:
        # The end is never shortened: when a quorum has answered, some nodes have yet to hear of it,
        # and what reaches them late would undo an extend that came after it.
        lost: dict[str, str] = {}
        unknown: dict[str, str] = {}
        for at in range(0, len(grants), BATCH):
            batch = grants[at : at + BATCH]
            await self._renew(batch, until, lost, unknown)
        writers = [waiting.claim for waiting in waits if waiting.claim.mode is Mode.EXCLUSIVE]
        if writers:
            await self._intend(writers, until)
        return Renewal(lost, unknown)

    async def _renew(
        self,
        grants: Sequence[Grant],
        until: float,
        lost: dict[str, str],
        unknown: dict[str, str],
    ) -> None:
        script = self._scripts.renew
        commands = [self._renewal(grant) for grant in grants]
        request = Request(commands, lambda at: script.in_full(commands[at]), self._all_renewed)
        asked: Round = await self._fan.ask(request, until)
        answers = [answer for answer in asked.answers if type(answer) is list]
        most_lost = len(self._fleet.nodes) - self._quorum
        for at, grant in enumerate(grants):
            replies = [answer[at] for answer in answers]
            owner = grant.claim.owner
            if replies.count(1) >= self._quorum:
                continue
            if replies.count(0) > most_lost:
                lost[owner] = "it ran out or was broken, and most nodes no longer have it"
            else:
                held = replies.count(1)
                cause = self._fleet.unavailable(asked.answers)
                unknown[owner] = f"{held} nodes renewed it; {cause}"

    def _all_renewed(self, answers: list[Any]) -> bool:
        whole = [answer for answer in answers if type(answer) is list]
        if len(whole) < self._quorum:
            return False
        return all(votes.count(1) >= self._quorum for votes in zip(*whole, strict=True))

    def _renewal(self, grant: Grant) -> bytes:
        claim, script = grant.claim, self._scripts.renew
        slots = ",".join(map(str, grant.slots)) or "-"
        shape = f"{_MODES[claim.mode]} {claim.limit} {slots}"
        start, _ = self._keys.start(script, claim.name)
        # The whole milliseconds of the ttl: never longer than its holder believes.
        ttl = str(max(1, int(claim.ttl * 1000)))
        words = (claim.owner, claim.label, ttl, str(grant.token), shape)
        return f"{start}{''.join(map(bulk, words))}".encode()

    async def _intend(self, claims: Sequence[Claim], until: float) -> None:
        """Waiting writers keep new readers out; nobody needs the answers."""
        script = self._scripts.intend
        for at in range(0, len(claims), BATCH):
            commands = []
            for claim in claims[at : at + BATCH]:
                start, _ = self._keys.start(script, claim.name)
                commands.append(f"{start}{bulk(claim.owner)}".encode())
            in_full = [script.in_full(command) for command in commands]
            await self._fan.post(Request(commands, in_full.__getitem__, wait_for_all), until)

    async def initialise(self) -> str:
        """Marks the nodes' data as whole, so that loss protection does not wait."""
        script = self._scripts.begin
        start, _ = self._keys.start(script, "")
        packed = start.encode()
        request = Request([packed], lambda at: script.in_full(packed), wait_for_all)
        asked: Round = await self._fan.ask(request)
        marked = [
            node.address
            for node, answer in zip(self._fleet.nodes, asked.answers, strict=True)
            if type(answer) is list and type(answer[0]) is bytes
        ]
        if len(marked) < len(self._fleet.nodes):
            done = ", ".join(map(str, marked)) or "none"
            raise BackendUnavailable(
                f"marked as new: {done}; {self._fleet.unavailable(asked.answers)}"
            )
        return f"{self.display}: {len(marked)} nodes are marked as new"
