"""The asyncio broadcast: one pipelined connection per node for all tasks.

Replies are matched to requests in order. So a reply that is no longer needed costs nothing, and a
later request to the same node is executed after the earlier one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from holdfast.errors import BackendUnavailable, HoldfastError
from holdfast.io.aio import Channel
from holdfast.io.clock import now
from holdfast.stores.redis.connection import Connector, RedisEndpoint
from holdfast.stores.redis.replies import RedisConnectionBroken
from holdfast.stores.redis.url import Access
from holdfast.stores.redlock.nodes import (
    CONNECT_SECONDS,
    UNRESPONSIVE_SECONDS,
    Nodes,
    Round,
    RoundRequest,
)

__all__ = ["AsyncBroadcast"]


class _NodeConnection:
    """The connection to one node."""

    __slots__ = ("connecting", "link", "unread")

    def __init__(self) -> None:
        self.link: Channel | None = None
        self.connecting: asyncio.Task[None] | None = None
        self.unread: dict[Round, float] = {}
        """The rounds whose replies are pending on ``link`` and that no call waits for, in their
        order, and since when."""

    @property
    def unread_since(self) -> float | None:
        """Since when a reply is pending that no call waits for; ``None`` if there is none."""
        return next(iter(self.unread.values()), None)

    def take_link(self) -> Channel | None:
        """Give up the connection, which the caller closes."""
        link, self.link = self.link, None
        self.unread.clear()
        return link


class _Pending:
    """A round in progress, and the future that its call waits for."""

    __slots__ = ("done", "round")

    def __init__(self, round_: Round) -> None:
        self.round = round_
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def check(self) -> None:
        if not self.done.done() and self.round.decided():
            self.done.set_result(None)

    def stop(self) -> None:
        if not self.done.done():
            self.done.set_result(None)


class AsyncBroadcast:
    """Sends requests to all nodes at once."""

    def __init__(self, access: Access, nodes: Nodes, limit: int) -> None:
        self.access, self.nodes = access, nodes
        self._connector = Connector(access, limit, blocking=False)
        self._connections = [_NodeConnection() for _ in nodes.members]
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    async def call(self, request: RoundRequest, until: float | None = None) -> Round:
        """Send a request to all nodes. Returns when their answers are enough, when every node has
        answered or failed, or at the deadline."""
        round_ = Round(request, len(self._connections))
        deadline = now() + self.access.seconds_until(until)
        await self._prepare(round_, deadline)
        pending = _Pending(round_)
        for index in round_.waiting.copy():
            self._send(index, pending, request.commands)
        pending.check()
        answered = -1
        ends = deadline
        while not pending.done.done():
            if answered != (answered := round_.answered_count()):
                ends = round_.until(deadline, self.nodes.quorum)
            if ends <= now():
                break
            await self._step(pending, ends)
        self._leave_unread(round_, timed_out=now() >= deadline)
        self.nodes.missed_by(round_)
        follow = request.follow and request.follow(round_.answers)
        if follow:
            self._follow(*follow)
        return round_

    def _follow(self, packed: bytes, only: Sequence[int]) -> None:
        for index in only:
            link = self._connections[index].link
            if link is not None and link.broken is None:
                link.request(packed).add_done_callback(_read_exception)

    async def _step(self, pending: _Pending, ends: float) -> None:
        """Wait until the round is decided, a quorum has answered, or the time is over."""
        quorum = self.nodes.quorum
        timer = asyncio.get_running_loop().call_later(ends - now(), pending.stop)
        try:
            await pending.done
        finally:
            timer.cancel()
        round_ = pending.round
        if not round_.decided() and round_.answered_count() >= quorum and ends > now():
            pending.done = asyncio.get_running_loop().create_future()

    async def post(self, request: RoundRequest, until: float | None = None) -> None:
        """Send a request to all reachable nodes. Waits for no answer."""
        round_ = Round(request, len(self._connections))
        await self._prepare(round_, now() + self.access.seconds_until(until))
        pending = _Pending(round_)
        pending.stop()
        for index in round_.waiting.copy():
            self._send(index, pending, request.commands)
        self._leave_unread(round_, timed_out=False)

    # ---- one node

    def _send(self, index: int, pending: _Pending, commands: Any) -> None:
        connection = self._connections[index]
        link = connection.link
        assert link is not None

        def arrived(future: asyncio.Future[Any]) -> None:
            error = None if future.cancelled() else future.exception()
            if error is not None:
                self.nodes.missed(pending.round.request, index)
                self._link_broke(index, pending, link, error)
            elif not future.cancelled() and index in pending.round.waiting:
                more = pending.round.take(index, future.result())
                if more is not None and pending.round.over:
                    pending.round.waiting.discard(index)
                    self._load_scripts(link)
                elif more is not None:
                    self._send_more(index, pending, arrived)
            self._reply_read(index, pending)

        try:
            for command in commands:
                link.request(command).add_done_callback(arrived)
        except RedisConnectionBroken as error:
            self._link_broke(index, pending, link, error)

    def _send_more(self, index: int, pending: _Pending, arrived: Any) -> None:
        """Send the commands again, with the text of the scripts that the node did not know."""
        link, round_ = self._connections[index].link, pending.round
        try:
            if link is None:
                raise RedisConnectionBroken("it was closed", closed=True)
            for at in round_.amended[index]:
                link.request(round_.request.in_full(at)).add_done_callback(arrived)
        except RedisConnectionBroken as error:
            round_.failed(index, error)

    def _load_scripts(self, link: Channel) -> None:
        """Load the scripts on a node that forgot them, after the other nodes have decided the
        round. The old command is not sent again: it would come out of order, after later requests.
        The next request finds the scripts loaded."""
        if link.broken is None:
            for command in self.nodes.greeting[1:]:
                link.request(command).add_done_callback(_read_exception)

    def _reply_read(self, index: int, pending: _Pending) -> None:
        round_ = pending.round
        if index not in round_.waiting:
            self._connections[index].unread.pop(round_, None)
        if round_.decided():
            pending.stop()
        elif round_.answered_count() == self.nodes.quorum and index not in round_.waiting:
            pending.stop()  # from here on the other nodes have STRAGGLER_SECONDS

    def _link_broke(
        self, index: int, pending: _Pending, link: Channel, error: BaseException
    ) -> None:
        connection, round_ = self._connections[index], pending.round
        if connection.link is link:
            connection.take_link()
            link.close()
        if index not in round_.waiting:
            return
        closed = isinstance(error, RedisConnectionBroken) and error.closed
        if closed and index not in round_.resent and not pending.done.done():
            round_.restart(index)
            self._background(self._resend(index, pending, error))
            return
        cause = (
            error
            if isinstance(error, Exception)
            else RedisConnectionBroken(str(error), closed=False)
        )
        round_.failed(index, cause)
        self.nodes.members[index].failed(error)

    async def _resend(self, index: int, pending: _Pending, error: BaseException) -> None:
        """Replace a connection that the server closed and send the request again, once."""
        await self._connect(index)
        if self._connections[index].link is not None:
            self._send(index, pending, pending.round.request.commands)
        else:
            pending.round.failed(index, RedisConnectionBroken(str(error), closed=True))
        pending.check()

    # ---- connections

    async def _prepare(self, round_: Round, deadline: float) -> None:
        """Close unresponsive connections and open missing ones. Nodes that are known to be down
        are tried in the background."""
        wanted = (
            range(len(self._connections)) if round_.request.only is None else round_.request.only
        )
        missing = [index for index in wanted if not self._usable(index)]
        if missing:
            await self._open_missing(missing, deadline)
        for index in wanted:
            connection = self._connections[index]
            if connection.link is not None and connection.link.broken is None:
                round_.waiting.add(index)
                if connection.unread_since is not None:
                    round_.slow.add(index)

    def _usable(self, index: int) -> bool:
        connection, node = self._connections[index], self.nodes.members[index]
        link = connection.link
        if link is None or link.broken is not None:
            connection.take_link()
            if link is not None:
                link.close()
            return False
        since = connection.unread_since
        if since is not None and now() - since > UNRESPONSIVE_SECONDS:
            connection.take_link()
            node.failed(f"redis at {node.address} does not answer")
            link.close()
            return False
        return True

    async def _open_missing(self, missing: list[int], deadline: float) -> None:
        nodes = self.nodes.members
        short = self.nodes.up() < self.nodes.quorum
        needed: dict[asyncio.Task[None], int] = {}
        for index in missing:
            if short or not nodes[index].down:
                needed[self._connecting(index)] = index
            elif now() >= nodes[index].retry_at:
                self._connecting(index)
        soon = now() + min(CONNECT_SECONDS, (deadline - now()) / 2)  # the round needs time, too
        while needed and now() < (ends := min(deadline, soon) if self._enough() else deadline):
            done, _ = await asyncio.wait(
                needed, timeout=ends - now(), return_when=asyncio.FIRST_COMPLETED
            )
            for task in done:
                del needed[task]
                task.result()  # raises what another try can't mend
            if short and self._enough():
                return
        for index in needed.values():  # from now on they are tried in the background
            nodes[index].failed(f"redis at {nodes[index].address} does not answer")

    def _enough(self) -> bool:
        """Whether a quorum of connections is open."""
        open_ = sum(
            connection.link is not None and connection.link.broken is None
            for connection in self._connections
        )
        return open_ >= self.nodes.quorum

    def _connecting(self, index: int) -> asyncio.Task[None]:
        connection = self._connections[index]
        if connection.connecting is None or connection.connecting.done():
            connection.connecting = self._background(self._connect(index))
        return connection.connecting

    async def _connect(self, index: int) -> None:
        connection, node = self._connections[index], self.nodes.members[index]
        if connection.link is not None and connection.link.broken is None:
            return
        link: Channel | None = None
        try:
            missed = list(node.missed)
            commands = (*self.nodes.greeting, *missed)
            opened, replies = await self._connector.begin(self.access, node.address, commands, None)
            link = Channel(opened, RedisEndpoint(self.access, node.address))
            self.nodes.check_info(node, replies[0])
            node.caught_up(missed)
        except HoldfastError as error:
            if not (node.fit or node.down or isinstance(error, BackendUnavailable)):
                raise
            node.failed(error)
        else:
            node.worked()
            # Otherwise another task was faster, or the broadcast is closed: close ours below.
            if not self._closed and (connection.link is None or connection.link.broken is not None):
                connection.link, link = link, connection.link
        finally:
            if link is not None:
                link.close()

    def _background(self, work: Any) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)
        return task

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # marked as retrieved; the node's cause has it

    def _leave_unread(self, round_: Round, *, timed_out: bool) -> None:
        round_.over = True
        for index in round_.waiting:
            connection, node = self._connections[index], self.nodes.members[index]
            if timed_out:
                link = connection.take_link()
                node.failed(f"redis at {node.address} does not answer")
                if link is not None:
                    link.close()
            elif connection.link is not None:
                connection.unread[round_] = now()

    def forget(self) -> None:
        for connection in self._connections:
            if connection.link is not None:
                connection.link.forget()
            connection.take_link()
            connection.connecting = None
        self._tasks.clear()

    async def close(self) -> None:
        self._closed = True
        loop = asyncio.get_running_loop()
        tasks = [task for task in self._tasks if task.get_loop() is loop]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)  # they close their own connections
        for connection in self._connections:
            if connection.link is not None:
                connection.link.close()
            connection.link = None


def _read_exception(future: asyncio.Future[Any]) -> None:
    if not future.cancelled():
        future.exception()  # marked as retrieved; no call waits for it
