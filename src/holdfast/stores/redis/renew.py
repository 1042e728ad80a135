"""Renewing what is held and refreshing who waits, in one batch."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.claim import Claim, Grant
from holdfast.core.contract import Renewal, Waiting
from holdfast.stores.redis.connection import bulk
from holdfast.stores.redis.replies import Keys, refusal
from holdfast.stores.redis.requests import Command, Requests
from holdfast.stores.redis.scripts import Scripts

__all__ = ["Keeping"]


class Keeping:
    """The renewer's part of the backend."""

    display: str
    _keys: Keys
    _scripts: Scripts
    _requests: Requests

    async def renew(
        self,
        grants: Sequence[Grant],
        waits: Sequence[Waiting],
        *,
        until: float,
        shorten: bool = False,
    ) -> Renewal:
        batch = [self._renewal(grant.claim, shorten) for grant in grants]
        batch += [self._refreshing(claim, behind) for claim, behind in waits]
        replies = await self._requests.many(batch, until, again=not shorten)
        lost: dict[str, str] = {}
        unknown: dict[str, str] = {}
        for grant, reply in zip(grants, replies, strict=False):
            if type(reply) is not int:
                unknown[grant.claim.owner] = str(refusal(reply, self.display, grant.claim.name))
            elif reply == 0:
                lost[grant.claim.owner] = "it ran out or was broken, and is no longer stored"
        answers = zip(waits, replies[len(grants) :], strict=True)
        forgotten = frozenset(waiting.claim.owner for waiting, reply in answers if reply == 0)
        return Renewal(lost, unknown, forgotten)

    def _renewal(self, claim: Claim, shorten: bool) -> Command:
        script = self._scripts.renew
        start, key = self._keys.start(script, claim.name)
        words = f"{bulk(claim.owner)}{bulk(str(int(claim.ttl * 1000)))}{bulk(str(int(shorten)))}"
        return Command(script, f"{start}{words}".encode(), key)

    def _refreshing(self, claim: Claim, behind: int) -> Command:
        script = self._scripts.refresh
        start, key = self._keys.start(script, claim.name)
        words = f"{bulk(claim.owner)}{bulk(str(behind))}"
        return Command(script, f"{start}{words}".encode(), key)
