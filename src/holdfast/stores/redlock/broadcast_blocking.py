"""The blocking Redlock wire: a bundle of connections, one per node, for each thread that asks.

A request is sent to all nodes, then all of their sockets are polled until the votes decide it.
"""

from __future__ import annotations

import contextlib
import select
import ssl
import threading
import time
from collections.abc import Sequence
from typing import Any

from holdfast.errors import BackendUnavailable, HoldfastError
from holdfast.io.clock import now
from holdfast.io.connection_limit import ConnectionLimit, Permit
from holdfast.stores.redis.blocking import BlockingLink
from holdfast.stores.redis.connection import INCOMPLETE, Access, LinkBroken, Refused, unreachable
from holdfast.stores.redlock.nodes import (
    CONNECT_SECONDS,
    HUNG_SECONDS,
    Fleet,
    Node,
    Request,
    Round,
)

__all__ = ["BlockingFan", "NodeLink"]

READ_SIZE = 65_536
MOST_OWED = 512
"""A connection that owes more replies is dropped: what it was sent might fill its buffers."""


class NodeLink(BlockingLink):
    """A connection that is read when it is readable, and may owe replies of earlier rounds."""

    __slots__ = ("owed", "since")

    def __init__(self, access: Access, node: Node, until: float | None = None) -> None:
        super().__init__(access, node.address, until)
        self.owed = 0
        self.since = 0.0

    def replies(self) -> list[Any]:
        """What one read brings, without what was owed."""
        found = []
        try:
            data = self._recv(READ_SIZE)
            if not data:
                raise EOFError("closed by the server")
            self._feed(data)
            while isinstance(self._sock, ssl.SSLSocket) and self._sock.pending():
                self._feed(self._recv(READ_SIZE))
            while (reply := self._gets()) is not INCOMPLETE:
                if self.owed:
                    self._settle(reply)
                else:
                    found.append(reply)
        except (OSError, EOFError) as error:
            raise unreachable(self.address, error, self._seconds) from error
        return found

    def _settle(self, reply: Any) -> None:
        """A reply that nobody waits for any more."""
        self.owed -= 1
        self.since = now()
        if type(reply) is Refused and reply.code == "NOSCRIPT":
            # A new connection teaches it the scripts again; here they would come out of order.
            raise LinkBroken(f"redis at {self.address} forgot its scripts", closed=True)


class Bundle:
    """One connection per node, for one thread at a time."""

    __slots__ = ("_place", "_poll", "indexes", "links")

    def __init__(self, total: int, permit: Permit | None) -> None:
        self._place = permit  # kept: it is taken for as long as this is there
        self.links: list[NodeLink | None] = [None] * total
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

    def readable(self, seconds: float) -> list[int]:
        events = self._poll.poll(max(0.0, seconds) * 1000)
        return [self.indexes[fileno] for fileno, _ in events]

    def close(self) -> None:
        for index in range(len(self.links)):
            self.drop(index)


class BlockingFan:
    """Asks all nodes at once. Used by many threads; each has a bundle to itself meanwhile."""

    def __init__(self, access: Access, fleet: Fleet, limit: int) -> None:
        self.access, self.fleet, self._limit = access, fleet, limit
        self._total = len(fleet.nodes)
        self._idle: list[Bundle] = []
        self._connection_limit = ConnectionLimit(limit)
        self._closed = False

    async def ask(self, request: Request, until: float | None = None) -> Round:
        """Sends it to all nodes; returns when their answers are enough, or no more will come."""
        bundle = self._take(until)
        try:
            return self._play(bundle, request, until)
        except BaseException:
            bundle.close()  # an interrupt may have come between a reply and its note
            raise
        finally:
            self._give(bundle)

    async def post(self, request: Request, until: float | None = None) -> None:
        """Sends it to all nodes that can be reached, and waits for no answer and no majority."""
        bundle = self._take(until)
        try:
            round_ = Round(request, self._total)
            deadline = now() + self.access.seconds_until(until)
            self._ready(bundle, round_, deadline, decides=False)
            for index in round_.waiting.copy():
                self._send(bundle, index, round_, request.packed, None)
            self._owe(bundle, round_)
        except BaseException:
            bundle.close()
            raise
        finally:
            self._give(bundle)

    def _play(self, bundle: Bundle, request: Request, until: float | None) -> Round:
        round_ = Round(request, self._total)
        deadline = now() + self.access.seconds_until(until)
        self._ready(bundle, round_, deadline)
        for index in round_.waiting.copy():
            self._send(bundle, index, round_, request.packed, until)
        ends = deadline
        answered = -1
        while not round_.decided():
            if answered != (answered := round_.answered()):
                ends = round_.until(deadline, self.fleet.quorum)
            ready = bundle.readable(ends - now())
            if not ready or now() > deadline:
                break
            for index in ready:
                self._read(bundle, index, round_, until)
        self._owe(bundle, round_, hung=now() >= deadline)
        follow = request.follow and request.follow(round_.answers)
        if follow:
            self._follow(bundle, *follow)
        return round_

    def _follow(self, bundle: Bundle, packed: bytes, only: Sequence[int]) -> None:
        for index in only:
            link = bundle.links[index]
            if link is not None:
                try:
                    link.send(packed)
                except LinkBroken:
                    bundle.drop(index)
                    continue
                link.since = link.since if link.owed else now()
                link.owed += 1

    def _ready(
        self, bundle: Bundle, round_: Round, until: float | None, *, decides: bool = True
    ) -> None:
        """Reads what was owed, drops what broke or hangs, and opens what is missing."""
        for index in bundle.readable(0):
            link = bundle.links[index]
            try:
                if link is not None and link.replies():
                    bundle.drop(index)  # a reply that nobody asked for
            except LinkBroken:
                bundle.drop(index)
        self._drop_hung(bundle)
        wanted = range(self._total) if round_.request.only is None else round_.request.only
        if decides and self.fleet.up() < self.fleet.quorum:
            self._wait_for_some(until)
        for index in wanted:
            link = bundle.links[index] or self._reach(bundle, index, round_, until)
            if link is not None:
                round_.waiting.add(index)
                if link.owed:
                    round_.slow.add(index)

    def _drop_hung(self, bundle: Bundle) -> None:
        for index, link in enumerate(bundle.links):
            if link is None or not link.owed:
                continue
            if link.owed > MOST_OWED or now() - link.since > HUNG_SECONDS:
                bundle.drop(index)
                node = self.fleet.nodes[index]
                node.failed(f"redis at {node.address} does not answer")

    def _reach(
        self, bundle: Bundle, index: int, round_: Round, until: float | None
    ) -> NodeLink | None:
        node = self.fleet.nodes[index]
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
        bundle.add(index, link)
        return link

    def _connect(self, node: Node, until: float | None) -> NodeLink:
        seconds = self.access.seconds_until(until)
        soon = now() + (min(seconds, CONNECT_SECONDS) if self.fleet.spare(node) else seconds)
        link = NodeLink(self.access, node, soon)
        try:
            link.limit(self.access.seconds_until(soon))
            link.send(b"".join(self.fleet.greeting))
            replies = [link.receive(soon) for _ in self.fleet.greeting]
            self.fleet.judge(node, replies[0])
            link.limit(self.access.request_seconds)
        except BaseException:
            link.close()
            raise
        return link

    def _revive(self, node: Node, *, now_: bool = False) -> None:
        """Tries in the background whether a node is back."""
        with self.fleet.mutex:
            if node.reviving or not node.down or (not now_ and now() < node.retry_at):
                return
            node.reviving = True
        thread = threading.Thread(
            target=self._try, args=(node,), name="holdfast-redlock-revive", daemon=True
        )
        try:
            thread.start()
        except RuntimeError:  # the interpreter is ending
            node.reviving = False
        except BaseException:  # an interrupt, perhaps before it was started
            node.reviving = False
            raise

    def _try(self, node: Node) -> None:
        try:
            self._connect(node, None).close()
            node.worked()
        except HoldfastError as error:
            node.failed(error)
        finally:
            node.reviving = False
            with self.fleet.mutex:
                self.fleet.tried.notify_all()

    def _wait_for_some(self, until: float | None) -> None:
        """Too few are left to decide anything: all that are down are tried now."""
        ends = time.monotonic() + self.access.seconds_until(until)
        for node in self.fleet.nodes:
            self._revive(node, now_=True)
        with self.fleet.mutex:
            while self.fleet.up() < self.fleet.quorum and any(
                node.reviving for node in self.fleet.nodes
            ):
                if not self.fleet.tried.wait(ends - time.monotonic()):
                    return

    def _send(
        self, bundle: Bundle, index: int, round_: Round, packed: bytes, until: float | None
    ) -> None:
        link = bundle.links[index]
        assert link is not None
        try:
            link.send(packed)
        except LinkBroken as error:
            self._broke(bundle, index, round_, error, until)

    def _read(self, bundle: Bundle, index: int, round_: Round, until: float | None) -> None:
        link = bundle.links[index]
        if link is None:
            return
        try:
            replies = link.replies()
            for reply in replies:
                if index not in round_.waiting:
                    raise LinkBroken(f"redis at {link.address} said more than asked", closed=False)
                more = round_.take(index, reply)
                if more is not None:
                    link.send(more)
        except LinkBroken as error:
            self._broke(bundle, index, round_, error, until)

    def _broke(
        self, bundle: Bundle, index: int, round_: Round, error: LinkBroken, until: float | None
    ) -> None:
        """A connection that the server closed is replaced once, and asked again."""
        bundle.drop(index)
        if index not in round_.waiting:
            return
        if error.closed and index not in round_.resent:
            round_.again(index)
            link = self._reach(bundle, index, round_, until)
            if link is None:
                round_.failed(index, error)
                return
            with contextlib.suppress(LinkBroken):
                link.send(round_.request.packed)
                return
            bundle.drop(index)
        round_.failed(index, error)
        self.fleet.nodes[index].failed(error)

    def _owe(self, bundle: Bundle, round_: Round, *, hung: bool = False) -> None:
        """What was not waited for is read, or dropped, by the next use of its connection."""
        for index in round_.waiting:
            link = bundle.links[index]
            if link is None:
                continue
            if hung:
                bundle.drop(index)
                node = self.fleet.nodes[index]
                node.failed(unreachable(node.address, TimeoutError(), self.access.request_seconds))
                continue
            if not link.owed:
                link.since = now()
            link.owed += round_.owed(index)

    def _take(self, until: float | None) -> Bundle:
        bundle = self._pop()
        if bundle is not None:
            return bundle
        deadline = time.monotonic() + self.access.seconds_until(until)
        connection_limit, permit = self._connection_limit, None
        with connection_limit.mutex:
            while not (bundle := self._pop()) and not (permit := connection_limit.take()):
                if not connection_limit.wait(deadline - time.monotonic()):
                    raise LinkBroken(
                        f"all {self._limit} connections to {self.fleet.display} are busy",
                        closed=False,
                    )
        return bundle or Bundle(self._total, permit)

    def _pop(self) -> Bundle | None:
        try:
            return self._idle.pop()
        except IndexError:
            return None

    def _give(self, bundle: Bundle) -> None:
        with self._connection_limit.mutex:
            if self._closed:
                bundle.close()
            self._idle.append(bundle)
            self._connection_limit.call()

    def forget(self) -> None:
        for bundle in self._idle:
            for index in range(self._total):
                link = bundle.remove(index)
                if link is not None:
                    link.forget()
        self._idle = []
        self._connection_limit = ConnectionLimit(self._limit)
        self.fleet.renew_locks()
        for node in self.fleet.nodes:
            node.reviving = False

    async def close(self) -> None:
        with self._connection_limit.mutex:
            self._closed = True
            for bundle in self._idle:
                bundle.close()
