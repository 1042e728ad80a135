"""One seeded schedule: nodes that acquire, hold, release, cancel, pause, crash and drift."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from weakref import ref

from holdfast.claim import Claim, Mode, write_label
from holdfast.core.acquire import acquire, attempt_once
from holdfast.core.engine import Engine
from holdfast.core.extend import extend
from holdfast.core.hold import AcquireOptions
from holdfast.core.hold import Hold as CoreHold
from holdfast.core.renewer import Renewer
from holdfast.core.watcher import EndWatcher
from holdfast.errors import BackendUnavailable, LockLost, LockTimeout
from holdfast.testing.history import RecordedHold, faults
from holdfast.testing.simulated_store import Network, SimStore
from holdfast.testing.simulator import Cancelled, Node, SimRuntime, SimTask, World

FAULTS_UNTIL = 60.0
END = 400.0
NAMES = ("a", "b")


@dataclass
class Report:
    """The result of a schedule."""

    holds: list[RecordedHold] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    cancelled: int = 0
    lost: int = 0
    given: int = 0
    """Holds from direct grants."""
    extended: int = 0
    unanswered: int = 0
    """Extends that the store has confirmed, and those of unknown outcome."""


class Client:
    """A node with a client and a few tasks that use it."""

    def __init__(self, world: World, store: SimStore, number: int, report: Report) -> None:
        draw = world.random
        self.node = Node(
            world, f"node{number}", drift=draw.uniform(-0.003, 0.003), skew=draw.uniform(-9, 9)
        )
        self.world, self.report = world, report
        runtime, beside = SimRuntime(self.node), SimRuntime(self.node)
        renewer = Renewer(beside, store.backend(beside), store.display)
        self._kept: SimTask | None = None
        renewer.start = self._start
        self.renewer = renewer
        self.watch = EndWatcher(SimRuntime(self.node))
        self.watch.start = self._start_watch
        self.watch.watch(renewer)
        self._watched: SimTask | None = None
        self.engine = Engine(store, runtime, renewer, patience=30, epoch=0)
        self.tasks: list[SimTask] = []
        self._attempts = 0

    def _start(self) -> None:
        if self._kept is None:
            self._kept = self.node.spawn(self.renewer.run(), "renewer")

    def _start_watch(self) -> None:
        if self._watched is None:
            self._watched = self.node.spawn(self.watch.run(), "watcher")

    def begin(self, tasks: int) -> None:
        self.tasks = [self.node.spawn(self._live(), f"task{n}") for n in range(tasks)]

    async def _live(self) -> None:
        draw, runtime = self.world.random, self.engine.runtime
        while self.world.time < FAULTS_UNTIL:
            await runtime.sleep(draw.expovariate(2.0))
            await self._hold_once(draw.choice((0.0, 0.5, 5.0, None)))
        # The faults are over: an acquire must succeed now.
        await self._hold_once(None)

    async def _hold_once(self, timeout: float | None) -> None:
        draw = self.world.random
        mode = draw.choice((Mode.EXCLUSIVE, Mode.EXCLUSIVE, Mode.SHARED))
        self._attempts += 1
        owner = f"{self.node.name}.{self._attempts}.{draw.random()}"
        ttl = draw.choice((1.0, 3.0, 10.0))
        name = draw.choice(NAMES)
        claim = Claim(name, mode, 1, 0, ttl, owner, write_label(self.node.name, 1, "t", ""))
        asked = self.world.time
        options = AcquireOptions(timeout, renew=draw.random() < 0.8, explain=False)
        try:
            hold = await (attempt_once if timeout == 0 else acquire)(self.engine, claim, options)
        except (LockTimeout, BackendUnavailable):
            return
        except Cancelled:
            self.report.cancelled += 1
            raise
        await self._work(hold, asked, draw.expovariate(1.0))

    async def _work(self, hold: CoreHold, asked: float, seconds: float) -> None:
        """Holds for a while; what the holder believed goes into the history."""
        claim, started = hold.grant.claim, self.world.time
        self.report.given += hold.grant.seconds is not None
        begun = RecordedHold(
            self.node.name, claim.name, claim.mode, asked, started, 0.0, hold.grant.token
        )
        believed = _Belief(self.report, begun, hold, self.node)
        handle = _Handle()
        hold.handles.append(ref(handle))
        try:
            await self._hold_on(hold, seconds)
        except GeneratorExit:  # a crash, or the end of the world
            raise
        except BaseException:
            believed.end()
            await self.engine.release(hold)
            raise
        believed.end()
        await self.engine.release(hold)

    async def _hold_on(self, hold: CoreHold, seconds: float) -> None:
        """Works, and sometimes extends to a longer or shorter ttl."""
        draw, runtime = self.world.random, self.engine.runtime
        await runtime.sleep(seconds)
        while draw.random() < 0.3:
            try:
                await extend(self.engine, hold, draw.choice((None, 1.0, 3.0, 10.0)))
                self.report.extended += 1
            except LockLost:
                return
            except BackendUnavailable:
                self.report.unanswered += 1
            await runtime.sleep(draw.expovariate(1.0))


class _Handle:
    """The handle of a user's lease."""

    _released = False


def _tell(callback: Callable[[str], object], reason: str) -> None:
    callback(reason)


class _Belief:
    """Follows the end of certain time as renewals move it, and closes the record."""

    def __init__(self, report: Report, begun: RecordedHold, hold: CoreHold, node: Node) -> None:
        self._report, self._begun, self._hold, self._node = report, begun, hold, node
        self._over = False
        hold.call_back = _tell
        hold.callbacks.append(self._told)
        self._look()

    def _told(self, reason: str) -> None:
        if not self._over:
            self.end()
            self._report.lost += 1

    def _look(self) -> None:
        """A paused or crashed holder believes in its hold until its certain time is over."""
        world, ends = self._node.world, self._node.true_time(self._hold.ends)
        if not self._over and world.time >= ends:
            self._told("")
        elif not self._over:
            world.at(ends, self._look)

    def end(self) -> None:
        if self._over:
            return
        self._over = True
        begun, world = self._begun, self._node.world
        ends = min(world.time, self._node.true_time(self._hold.ends))
        self._report.holds.append(
            RecordedHold(
                begun.process, begun.name, begun.mode, begun.asked, begun.held, ends, begun.token
            )
        )


def run_schedule(
    seed: int, prepare: Callable[[SimStore, list[Client]], None] | None = None
) -> Report:
    """Runs one seed and reports problems; ``prepare`` may break things on purpose."""
    world, report = World(seed), Report()
    draw = world.random
    server = Node(world, "server", drift=draw.uniform(-0.002, 0.002), skew=0.0)
    network = Network(world, delay=draw.uniform(0.005, 0.1), loss=draw.choice((0.0, 0.02, 0.1)))
    store = SimStore(server, network, giving=draw.random() < 0.5)
    clients = [Client(world, store, n, report) for n in range(draw.randint(2, 4))]
    if prepare is not None:
        prepare(store, clients)
    for client in clients:
        client.begin(draw.randint(1, 3))
    _trouble(world, clients)
    world.at(FAULTS_UNTIL, network.calm)
    world.run(END)
    _judge(store, clients, report, world)
    world.end()
    return report


def _trouble(world: World, clients: list[Client]) -> None:
    draw = world.random
    for client in clients:
        for _ in range(draw.randint(0, 4)):
            at, seconds = draw.uniform(0, FAULTS_UNTIL - 15), draw.choice((0.2, 1.5, 4.0, 12.0))
            world.at(at, lambda c=client, s=seconds: c.node.pause(s))  # type: ignore[misc]
        for _ in range(draw.randint(0, 6)):
            at = draw.uniform(0, FAULTS_UNTIL)
            world.at(at, lambda c=client: draw.choice(c.tasks).cancel())  # type: ignore[misc]
    if len(clients) > 2 and draw.random() < 0.5:
        world.at(draw.uniform(0, FAULTS_UNTIL), clients[-1].node.crash)


def _judge(store: SimStore, clients: list[Client], report: Report, world: World) -> None:
    report.problems += faults(report.holds)
    report.problems += [
        f"{name} raised {error!r}"
        for name, error in world.errors
        if not isinstance(error, Cancelled)
    ]
    for client in clients:
        if client.node.crashed:
            continue
        report.problems += [f"{task.name} never ended" for task in client.tasks if not task.done]
        kept = len(client.renewer.holds) + len(client.renewer.waits) + len(client.renewer.undoing)
        if kept:
            report.problems.append(f"{client.node.name} still keeps {kept} claims")
    now = store.ledger.micros()
    for name, stored in store.ledger.names.items():
        info = stored.state.info(now)
        if left := len(info.holders) + len(info.waiters):
            report.problems.append(f"{left} claims are left on {name!r}")
