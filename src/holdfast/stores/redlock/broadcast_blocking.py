"""The blocking broadcast: each calling thread has one connection per node to itself.

A request is sent to all nodes, then their sockets are polled until the votes decide it.
"""

from __future__ import annotations

import contextlib
import select
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from holdfast.core.drive import run_now
from holdfast.errors import BackendUnavailable, HoldfastError
from holdfast.io.blocking import wait_for
from holdfast.io.clock import now
from holdfast.io.connection import PENDING, WRITE
from holdfast.io.limits import ConnectionLimit, Permit
from holdfast.io.resp import RedisRefused, RespConnection
from holdfast.stores.redis.connection import Connector, RedisEndpoint
from holdfast.stores.redis.replies import RedisConnectionBroken, unreachable
from holdfast.stores.redis.url import Access
from holdfast.stores.redlock.nodes import (
    CONNECT_SECONDS,
    UNRESPONSIVE_SECONDS,
    Nodes,
    RedlockNode,
    Round,
    RoundRequest,
)

__all__ = ["BlockingBroadcast", "NodeLink"]

MOST_UNREAD = 512
"""A connection with more unread replies is closed: more requests might fill its buffers."""


class NodeLink:
    """A connection to one node. Replies to earlier rounds may be unread: they come first."""

    __slots__ = (
        "_connection",
        "_endpoint",
        "address",
        "close",
        "fileno",
        "forget",
        "unread",
        "unread_since",
    )

    def __init__(self, connection: RespConnection, endpoint: RedisEndpoint) -> None:
        self._connection, self._endpoint, self.address = connection, endpoint, endpoint.address
        self.unread: deque[bytes] = deque()
        """For every unread reply its command, if the node must run it, otherwise nothing."""
        self.unread_since = 0.0
        self.fileno, self.close = connection.fileno, connection.close
        self.forget = connection.forget

    def send(self, packed: bytes) -> None:
        """Send a command. Raises ``RedisConnectionBroken``."""
        connection, seconds = self._connection, self._endpoint.request_seconds
        try:
            connection.send(packed)
            if connection.unsent:
                by = now() + seconds
                while not connection.flush():
                    if not wait_for({connection.fd: WRITE}, by):
                        raise TimeoutError
        except OSError as error:
            raise self._endpoint.failure(error, seconds) from error

    def replies(self) -> list[Any]:
        """Read once from the socket. Returns the replies to the current round and discards those
        to earlier rounds."""
        found, following = [], self._connection.next
        try:
            self._connection.collect()
            while (reply := following()) is not PENDING:
                if self.unread:
                    self._discard(reply)
                else:
                    found.append(reply)
        except RedisConnectionBroken:
            raise
        except OSError as error:
            raise self._endpoint.failure(error, self._endpoint.request_seconds) from error
        return found

    def _discard(self, reply: Any) -> None:
        """Count a reply to an earlier round as read."""
        self.unread_since = now()
        if type(reply) is RedisRefused and reply.code == "NOSCRIPT":
            # A new connection loads the scripts first; sent here, the command would come out of
            # order, after later requests.
            raise RedisConnectionBroken(f"redis at {self.address} forgot its scripts", closed=True)
        self.unread.popleft()


class NodeConnections:
    """One connection per node, for one thread at a time."""

    __slots__ = ("_nodes", "_permit", "_poll", "indexes", "links")

    def __init__(self, nodes: Sequence[RedlockNode], permit: Permit | None) -> None:
        self._nodes = nodes
        self._permit = permit  # the permit is free again when this object is gone
        self.links: list[NodeLink | None] = [None] * len(nodes)
        self.indexes: dict[int, int] = {}
        self._poll = select.poll()

    def add(self, index: int, link: NodeLink) -> None:
        self.links[index] = link
        self.indexes[link.fileno()] = index
        self._poll.register(link.fileno(), select.POLLIN)

    def remove(self, index: int) -> NodeLink | None:
        link, self.links[index] = self.links[index], None
        if link is not None:
            del self.indexes[link.fileno()]
            self._poll.unregister(link.fileno())
        return link

    def drop(self, index: int) -> None:
        link = self.remove(index)
        if link is not None:
            link.close()
            for command in link.unread:
                if command:
                    self._nodes[index].miss(command)

    def readable(self, seconds: float) -> list[int]:
        events = self._poll.poll(max(0.0, seconds) * 1000)
        return [self.indexes[fileno] for fileno, _ in events]

    def close(self) -> None:
        for index in range(len(self.links)):
            self.drop(index)


class BlockingBroadcast:
    """Sends requests to all nodes at once. Used by many threads: each call takes a set of
    connections for itself and gives it back."""

    def __init__(self, access: Access, nodes: Nodes, limit: int) -> None:
        self.access, self.nodes, self._limit = access, nodes, limit
        self._connector = Connector(access, limit, blocking=True)
        self._total = len(nodes.members)
        self._idle: list[NodeConnections] = []
        self._connection_limit = ConnectionLimit(limit)
        self._closed = False

    async def call(self, request: RoundRequest, until: float | None = None) -> Round:
        """Send a request to all nodes. Returns when their answers are enough, when every node has
        answered or failed, or at the deadline. Raises ``RedisConnectionBroken`` if no connection
        is free."""
        connections = self._take(until)
        try:
            return self._run_round(connections, request, until)
        except BaseException:
            connections.close()  # an interrupt may have lost a reply that was read
            raise
        finally:
            self._give(connections)

    async def post(self, request: RoundRequest, until: float | None = None) -> None:
        """Send a request to all reachable nodes. Waits neither for answers nor for a majority."""
        connections = self._take(until)
        try:
            round_ = Round(request, self._total)
            deadline = now() + self.access.seconds_until(until)
            self._prepare(connections, round_, deadline, decides=False)
            for index in round_.waiting.copy():
                self._send(connections, index, round_, request.packed, None)
            self._leave_unread(connections, round_)
        except BaseException:
            connections.close()
            raise
        finally:
            self._give(connections)

    def _run_round(
        self, connections: NodeConnections, request: RoundRequest, until: float | None
    ) -> Round:
        round_ = Round(request, self._total)
        deadline = now() + self.access.seconds_until(until)
        self._prepare(connections, round_, deadline)
        for index in round_.waiting.copy():
            self._send(connections, index, round_, request.packed, until)
        ends = deadline
        answered = -1
        while not round_.decided():
            if answered != (answered := round_.answered_count()):
                ends = round_.until(deadline, self.nodes.quorum)
            ready = connections.readable(ends - now())
            if not ready or now() > deadline:
                break
            for index in ready:
                self._read(connections, index, round_, until)
        self._leave_unread(connections, round_, timed_out=now() >= deadline)
        self.nodes.missed_by(round_)
        follow = request.follow and request.follow(round_.answers)
        if follow:
            self._follow(connections, *follow)
        return round_

    def _follow(self, connections: NodeConnections, packed: bytes, only: Sequence[int]) -> None:
        for index in only:
            link = connections.links[index]
            if link is not None:
                try:
                    link.send(packed)
                except RedisConnectionBroken:
                    connections.drop(index)
                    continue
                link.unread_since = link.unread_since if link.unread else now()
                link.unread.append(b"")

    def _prepare(
        self,
        connections: NodeConnections,
        round_: Round,
        until: float | None,
        *,
        decides: bool = True,
    ) -> None:
        """Read pending replies, close broken or unresponsive connections, open missing ones."""
        for index in connections.readable(0):
            link = connections.links[index]
            try:
                if link is not None and link.replies():
                    connections.drop(index)  # a reply without a request
            except RedisConnectionBroken:
                connections.drop(index)
        self._drop_unresponsive(connections)
        wanted = range(self._total) if round_.request.only is None else round_.request.only
        if decides and self.nodes.up() < self.nodes.quorum:
            self._wait_for_nodes(until)
        for index in wanted:
            link = connections.links[index]
            if link is None:
                link = self._connect_if_up(connections, index, round_, until)
            if link is not None:
                round_.waiting.add(index)
                if link.unread:
                    round_.slow.add(index)

    def _drop_unresponsive(self, connections: NodeConnections) -> None:
        for index, link in enumerate(connections.links):
            if link is None or not link.unread:
                continue
            if len(link.unread) > MOST_UNREAD or now() - link.unread_since > UNRESPONSIVE_SECONDS:
                connections.drop(index)
                node = self.nodes.members[index]
                node.failed(f"redis at {node.address} does not answer")

    def _connect_if_up(
        self, connections: NodeConnections, index: int, round_: Round, until: float | None
    ) -> NodeLink | None:
        """Connect to a node. Returns ``None`` if it is down or the connection fails."""
        node = self.nodes.members[index]
        if node.down:
            self._revive(node)
            return None
        try:
            link = self._connect(node, until)
        except HoldfastError as error:
            if not (node.fit or isinstance(error, BackendUnavailable)):
                raise
            node.failed(error)
            round_.answers[index] = error
            return None
        connections.add(index, link)
        return link

    def _connect(self, node: RedlockNode, until: float | None) -> NodeLink:
        seconds = self.access.seconds_until(until)
        # A node that hangs must leave time for the others: each gets half of what is left.
        soon = now() + (min(seconds / 2, CONNECT_SECONDS) if self.nodes.spare(node) else seconds)
        missed = list(node.missed)
        commands = (*self.nodes.greeting, *missed)
        begun = self._connector.begin(self.access, node.address, commands, soon)
        connection, replies = run_now(begun)
        try:
            self.nodes.check_info(node, replies[0])
            node.caught_up(missed)
        except BaseException:
            connection.close()
            raise
        return NodeLink(connection, RedisEndpoint(self.access, node.address))

    def _revive(self, node: RedlockNode, *, at_once: bool = False) -> None:
        """Try to connect to a node that is down, in a background thread."""
        with self.nodes.mutex:
            if node.reviving or not node.down or (not at_once and now() < node.retry_at):
                return
            node.reviving = True
        thread = threading.Thread(
            target=self._try_node, args=(node,), name="holdfast-redlock-revive", daemon=True
        )
        try:
            thread.start()
        except RuntimeError:  # the interpreter is ending
            node.reviving = False
        except BaseException:  # an interrupt, perhaps before the thread was started
            node.reviving = False
            raise

    def _try_node(self, node: RedlockNode) -> None:
        try:
            self._connect(node, None).close()
            node.worked()
        except HoldfastError as error:
            node.failed(error)
        finally:
            node.reviving = False
            with self.nodes.mutex:
                self.nodes.tried.notify_all()

    def _wait_for_nodes(self, until: float | None) -> None:
        """Fewer nodes than a quorum are up: try all others now, and wait for that."""
        ends = time.monotonic() + self.access.seconds_until(until)
        for node in self.nodes.members:
            self._revive(node, at_once=True)
        with self.nodes.mutex:
            while self.nodes.up() < self.nodes.quorum and any(
                node.reviving for node in self.nodes.members
            ):
                if not self.nodes.tried.wait(ends - time.monotonic()):
                    return

    def _send(
        self,
        connections: NodeConnections,
        index: int,
        round_: Round,
        packed: bytes,
        until: float | None,
    ) -> None:
        link = connections.links[index]
        assert link is not None
        try:
            link.send(packed)
        except RedisConnectionBroken as error:
            self._link_broke(connections, index, round_, error, until)

    def _read(
        self, connections: NodeConnections, index: int, round_: Round, until: float | None
    ) -> None:
        link = connections.links[index]
        if link is None:
            return
        try:
            replies = link.replies()
            for reply in replies:
                if index not in round_.waiting:
                    raise RedisConnectionBroken(
                        f"redis at {link.address} sent an extra reply", closed=False
                    )
                more = round_.take(index, reply)
                if more is not None:
                    link.send(more)
        except RedisConnectionBroken as error:
            self._link_broke(connections, index, round_, error, until)

    def _link_broke(
        self,
        connections: NodeConnections,
        index: int,
        round_: Round,
        error: RedisConnectionBroken,
        until: float | None,
    ) -> None:
        """Replace a connection that the server closed and send the request again, once."""
        connections.drop(index)
        if index not in round_.waiting:
            return
        if error.closed and index not in round_.resent:
            round_.restart(index)
            link = self._connect_if_up(connections, index, round_, until)
            if link is None:
                round_.failed(index, error)
                return
            with contextlib.suppress(RedisConnectionBroken):
                link.send(round_.request.packed)
                return
            connections.drop(index)
        round_.failed(index, error)
        self.nodes.members[index].failed(error)

    def _leave_unread(
        self, connections: NodeConnections, round_: Round, *, timed_out: bool = False
    ) -> None:
        """Leave pending replies to the next use of their connection; after a timeout, close it."""
        for index in round_.waiting:
            link = connections.links[index]
            if link is None:
                continue
            if timed_out:
                connections.drop(index)
                node = self.nodes.members[index]
                self.nodes.missed(round_.request, index)
                node.failed(unreachable(node.address, TimeoutError(), self.access.request_seconds))
                continue
            if not link.unread:
                link.unread_since = now()
            kept = round_.request.packed if index in round_.request.keep_for else b""
            link.unread.extend([kept] * round_.pending_replies(index))

    def _take(self, until: float | None) -> NodeConnections:
        connections = self._pop()
        if connections is not None:
            return connections
        by = now() + self.access.seconds_until(until)
        found = self._connection_limit.admit(self._pop, by)
        if found is None:
            raise RedisConnectionBroken(
                f"all {self._limit} connections to {self.nodes.display} are busy", closed=False
            )
        return NodeConnections(self.nodes.members, found) if isinstance(found, Permit) else found

    def _pop(self) -> NodeConnections | None:
        try:
            return self._idle.pop()
        except IndexError:
            return None

    def _give(self, connections: NodeConnections) -> None:
        with self._connection_limit.mutex:
            if self._closed:
                connections.close()
            self._idle.append(connections)
        self._connection_limit.call()

    def forget(self) -> None:
        for connections in self._idle:
            for index in range(self._total):
                link = connections.remove(index)
                if link is not None:
                    link.forget()
        self._idle = []
        self._connection_limit = ConnectionLimit(self._limit)
        self.nodes.renew_locks()
        for node in self.nodes.members:
            node.reviving = False

    async def close(self) -> None:
        with self._connection_limit.mutex:
            self._closed = True
            for connections in self._idle:
                connections.close()
