"""The asyncio Redlock wire: one pipelined connection per node for all tasks.

Replies are matched to requests in order, so a reply that nobody waits for any more costs nothing
and what is sent next is ordered behind it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from holdfast.errors import BackendUnavailable, HoldfastError
from holdfast.io.clock import now
from holdfast.stores.redis.aio import AsyncLink
from holdfast.stores.redis.connection import Access, LinkBroken
from holdfast.stores.redlock.nodes import CONNECT_SECONDS, HUNG_SECONDS, Fleet, Request, Round

__all__ = ["AsyncFan"]


class _Lane:
    """The connection to one node."""

    __slots__ = ("link", "opening", "owing")

    def __init__(self) -> None:
        self.link: AsyncLink | None = None
        self.opening: asyncio.Task[None] | None = None
        self.owing: float | None = None
        """Since when it owes an answer that nobody waited for."""


class _Pending:
    """A round on its way, and who waits for it."""

    __slots__ = ("done", "round")

    def __init__(self, round_: Round) -> None:
        self.round = round_
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def look(self) -> None:
        if not self.done.done() and self.round.decided():
            self.done.set_result(None)

    def stop(self) -> None:
        if not self.done.done():
            self.done.set_result(None)


class AsyncFan:
    """Asks all nodes at once."""

    def __init__(self, access: Access, fleet: Fleet, limit: int) -> None:
        self.access, self.fleet = access, fleet
        self._lanes = [_Lane() for _ in fleet.nodes]
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    async def ask(self, request: Request, until: float | None = None) -> Round:
        """Sends it to all nodes; returns when their answers are enough, or no more will come."""
        round_ = Round(request, len(self._lanes))
        deadline = now() + self.access.seconds_until(until)
        await self._ready(round_, deadline)
        pending = _Pending(round_)
        for index in round_.waiting.copy():
            self._send(index, pending, request.commands)
        pending.look()
        answered = -1
        ends = deadline
        while not pending.done.done():
            if answered != (answered := round_.answered()):
                ends = round_.until(deadline, self.fleet.quorum)
            if ends <= now():
                break
            await self._step(pending, ends)
        self._leave(round_, hung=now() >= deadline)
        follow = request.follow and request.follow(round_.answers)
        if follow:
            self._follow(*follow)
        return round_

    def _follow(self, packed: bytes, only: Sequence[int]) -> None:
        for index in only:
            link = self._lanes[index].link
            if link is not None and link.broken is None:
                link.request(packed).add_done_callback(_heard)

    async def _step(self, pending: _Pending, ends: float) -> None:
        """Returns when it is decided, when a quorum has answered, or when the time is over."""
        quorum = self.fleet.quorum
        timer = asyncio.get_running_loop().call_later(ends - now(), pending.stop)
        try:
            await pending.done
        finally:
            timer.cancel()
        round_ = pending.round
        if not round_.decided() and round_.answered() >= quorum and ends > now():
            pending.done = asyncio.get_running_loop().create_future()

    async def post(self, request: Request, until: float | None = None) -> None:
        """Sends it to all nodes that can be reached, and waits for no answer."""
        round_ = Round(request, len(self._lanes))
        await self._ready(round_, now() + self.access.seconds_until(until))
        pending = _Pending(round_)
        pending.stop()
        for index in round_.waiting.copy():
            self._send(index, pending, request.commands)
        self._leave(round_, hung=False)

    # ---- one node

    def _send(self, index: int, pending: _Pending, commands: Any) -> None:
        lane = self._lanes[index]
        link = lane.link
        assert link is not None

        def arrived(future: asyncio.Future[Any]) -> None:
            error = None if future.cancelled() else future.exception()
            if error is not None:
                self._broke(index, pending, link, error)
            elif not future.cancelled() and index in pending.round.waiting:
                more = pending.round.take(index, future.result())
                if more is not None and pending.round.over:
                    pending.round.waiting.discard(index)
                    self._teach(link)
                elif more is not None:
                    self._send_more(index, pending, arrived)
            self._answered(index, pending)

        try:
            for command in commands:
                link.request(command).add_done_callback(arrived)
        except LinkBroken as error:
            self._broke(index, pending, link, error)

    def _send_more(self, index: int, pending: _Pending, arrived: Any) -> None:
        """What the node did not know, with the scripts' text."""
        link, round_ = self._lanes[index].link, pending.round
        try:
            if link is None:
                raise LinkBroken("it was closed", closed=True)
            for at in round_.amended[index]:
                link.request(round_.request.in_full(at)).add_done_callback(arrived)
        except LinkBroken as error:
            round_.failed(index, error)

    def _teach(self, link: AsyncLink) -> None:
        """The others have decided without a node that forgot its scripts: what it was asked would
        come out of order now, behind what was asked since. The next request finds it ready."""
        if link.broken is None:
            for command in self.fleet.greeting[1:]:
                link.request(command).add_done_callback(_heard)

    def _answered(self, index: int, pending: _Pending) -> None:
        if index not in pending.round.waiting:
            self._lanes[index].owing = None
        round_ = pending.round
        if round_.decided():
            pending.stop()
        elif round_.answered() == self.fleet.quorum and index not in round_.waiting:
            pending.stop()  # from here on the others have little time

    def _broke(self, index: int, pending: _Pending, link: AsyncLink, error: BaseException) -> None:
        lane, round_ = self._lanes[index], pending.round
        if lane.link is link:
            lane.link = lane.owing = None
            link.close()
        if index not in round_.waiting:
            return
        closed = isinstance(error, LinkBroken) and error.closed
        if closed and index not in round_.resent and not pending.done.done():
            round_.again(index)
            self._background(self._again(index, pending, error))
            return
        cause = error if isinstance(error, Exception) else LinkBroken(str(error), closed=False)
        round_.failed(index, cause)
        self.fleet.nodes[index].failed(error)

    async def _again(self, index: int, pending: _Pending, error: BaseException) -> None:
        """A connection that the server closed is replaced once, and asked again."""
        await self._reach(index)
        if self._lanes[index].link is not None:
            self._send(index, pending, pending.round.request.commands)
        else:
            pending.round.failed(index, LinkBroken(str(error), closed=True))
        pending.look()

    # ---- who is there

    async def _ready(self, round_: Round, deadline: float) -> None:
        """Drops what hangs and opens what is missing; whoever is known to be down is tried in
        the background."""
        wanted = range(len(self._lanes)) if round_.request.only is None else round_.request.only
        missing = [index for index in wanted if not self._usable(index)]
        if missing:
            await self._open_missing(missing, deadline)
        for index in wanted:
            lane = self._lanes[index]
            if lane.link is not None and lane.link.broken is None:
                round_.waiting.add(index)
                if lane.owing is not None:
                    round_.slow.add(index)

    def _usable(self, index: int) -> bool:
        lane, node = self._lanes[index], self.fleet.nodes[index]
        link = lane.link
        if link is None or link.broken is not None:
            lane.link = lane.owing = None
            if link is not None:
                link.close()
            return False
        if lane.owing is not None and now() - lane.owing > HUNG_SECONDS:
            lane.link = lane.owing = None
            node.failed(f"redis at {node.address} does not answer")
            link.close()
            return False
        return True

    async def _open_missing(self, missing: list[int], deadline: float) -> None:
        nodes = self.fleet.nodes
        short = self.fleet.up() < self.fleet.quorum
        needed: dict[asyncio.Task[None], int] = {}
        for index in missing:
            if short or not nodes[index].down:
                needed[self._opening(index)] = index
            elif now() >= nodes[index].retry_at:
                self._opening(index)
        soon = now() + CONNECT_SECONDS
        while needed and now() < (ends := min(deadline, soon) if self._enough() else deadline):
            done, _ = await asyncio.wait(
                needed, timeout=ends - now(), return_when=asyncio.FIRST_COMPLETED
            )
            for task in done:
                del needed[task]
                task.result()  # what can't be mended by another try
            if short and self._enough():
                return
        for index in needed.values():  # from now on they are opened in the background
            nodes[index].failed(f"redis at {nodes[index].address} does not answer")

    def _enough(self) -> bool:
        """Whether there is a majority of connections."""
        open_ = sum(lane.link is not None and lane.link.broken is None for lane in self._lanes)
        return open_ >= self.fleet.quorum

    def _opening(self, index: int) -> asyncio.Task[None]:
        lane = self._lanes[index]
        if lane.opening is None or lane.opening.done():
            lane.opening = self._background(self._reach(index))
        return lane.opening

    async def _reach(self, index: int) -> None:
        lane, node = self._lanes[index], self.fleet.nodes[index]
        if lane.link is not None and lane.link.broken is None:
            return
        link: AsyncLink | None = None
        try:
            async with asyncio.timeout(self.access.request_seconds):
                link = await AsyncLink.open(self.access, node.address)
                replies = [link.request(command) for command in self.fleet.greeting]
                self.fleet.judge(node, (await asyncio.gather(*replies))[0])
        except (HoldfastError, TimeoutError) as error:
            known = node.fit or node.down
            if not (known or isinstance(error, BackendUnavailable | TimeoutError)):
                raise
            node.failed(error if str(error) else f"redis at {node.address} does not answer")
        else:
            node.worked()
            # Else another task was faster, or it comes after the end.
            if not self._closed and (lane.link is None or lane.link.broken is not None):
                lane.link, link = link, lane.link
        finally:
            if link is not None:
                link.close()

    def _background(self, work: Any) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # it stands in the node's cause

    def _leave(self, round_: Round, *, hung: bool) -> None:
        round_.over = True
        for index in round_.waiting:
            lane, node = self._lanes[index], self.fleet.nodes[index]
            if hung:
                link, lane.link, lane.owing = lane.link, None, None
                node.failed(f"redis at {node.address} does not answer")
                if link is not None:
                    link.close()
            elif lane.owing is None:
                lane.owing = now()

    def forget(self) -> None:
        for lane in self._lanes:
            if lane.link is not None:
                lane.link.forget()
            lane.link = lane.owing = lane.opening = None
        self._tasks.clear()

    async def close(self) -> None:
        self._closed = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)  # they close what they opened
        for lane in self._lanes:
            if lane.link is not None:
                lane.link.close()
            lane.link = None


def _heard(future: asyncio.Future[Any]) -> None:
    if not future.cancelled():
        future.exception()  # nobody waits for it
