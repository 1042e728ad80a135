"""``Locks``: the blocking client."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, Unpack

from holdfast.claim import Keys, LockInfo
from holdfast.core.contract import Finding, Guarantee
from holdfast.core.drive import run_now
from holdfast.durations import Duration
from holdfast.io import lifetime
from holdfast.io.runtime_blocking import BlockingRuntime
from holdfast.io.threads import callbacks
from holdfast.lazy import later, load
from holdfast.lease import Lease
from holdfast.locks_base import LONGEST_LIST, LocksBase
from holdfast.primitives.lock import Lock
from holdfast.primitives.options import TakeOverOptions
from holdfast.url import environment_url

if TYPE_CHECKING:
    from holdfast.core.events import Observer
    from holdfast.primitives.election import Election
    from holdfast.primitives.multi import MultiLock
    from holdfast.primitives.once import Every, Once

    Primitives = LocksBase[Lock, MultiLock, Election, Once, Every]
else:
    Primitives = LocksBase

__all__ = ["Locks", "connect", "find_url"]


LATER = ("json", "logging", "base64", "holdfast.handed_over", "holdfast.explain")
"""Modules that ``connect`` imports at once: see ``holdfast.lazy``."""

Findings = list[Finding]
LockInfos = list[LockInfo]


def find_url(url: str | object | None) -> str | object:
    """The given URL, or that of the environment. Raises ``ValueError`` if there is neither: a
    program on many hosts must never lock a local file by accident."""
    found = environment_url() if url is None else url
    if not found:
        raise ValueError(
            "no store: give connect() a URL such as 'redis://host:6379/0', or 'local' for a file "
            "that only this machine sees, or set HOLDFAST_URL or HOLDFAST_URL_FILE"
        )
    return found


class Locks(Primitives):
    """A connection to one store. Any number of threads may share it."""

    _lock = Lock
    _multi: type[MultiLock] = later("holdfast.primitives.multi", "MultiLock")
    _election: type[Election] = later("holdfast.primitives.election", "Election")
    _once: type[Once] = later("holdfast.primitives.once", "Once")
    _every: type[Every] = later("holdfast.primitives.once", "Every")

    def __init__(self, url: str | object, **settings: Any) -> None:
        super().__init__(url, self._new_runtime(), **settings)
        self._engine.call_back = callbacks.call
        self._engine.prepare_callbacks = callbacks.prepare
        self._renewer_thread.backends.append(self._engine.backend)
        lifetime.close_at_exit(self._renewer_thread)

    def _new_runtime(self) -> BlockingRuntime:
        return BlockingRuntime()

    def list(self, prefix: str = "", *, limit: int = LONGEST_LIST) -> LockInfos:
        """Names that are held or waited for, with their holders and waiters."""
        return run_now(self._list(prefix, limit))

    def inspect(self, name: str) -> LockInfo:
        """Holders and waiters of one name."""
        return run_now(self._inspect(name))

    def break_lock(self, name: str, *, reason: str) -> int | None:
        """Ends the hold of another process, which is reported there as lost; returns its token."""
        return run_now(self._break_lock(name, reason))

    def take_over(self, text: str, **options: Unpack[TakeOverOptions]) -> Lease:
        """Goes on with a hold that another process has handed over: ``text`` is what its
        ``lease.hand_over()`` returned. Works once; the token of the new lease is higher.

        The options ``timeout`` (here: how long to try again if the store does not answer),
        ``renew``, ``max_hold`` and ``note`` are those of ``lock``. Raises ``LockLost`` if the hold
        is over or was taken over already, ``ValueError`` if ``text`` is no such text, or of another
        store or namespace, ``BackendUnavailable`` if the store did not answer.
        """
        return run_now(self._take_over(Lease, text, options))

    def check(self) -> Findings:
        """Contacts the store now and verifies what its guarantees rest on."""
        return run_now(self._check())

    def close(self) -> None:
        """Releases what is still held, each with a warning; ends threads and connections. A store
        that does not answer delays it by half a second, or longer if it was slow before."""
        if self._engine.closed:
            return
        held = self._still_held()
        self._engine.closed = True
        for waiter in self._engine.local_queues.all():
            self._engine.nudge(waiter.claim)
            if waiter.signal is not None:
                waiter.signal.set()
        self._renewer_thread.end(None)
        self._warn_held(held)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def connect(
    url: str | object | None = None,
    *,
    ttl: Duration = 30,
    timeout: Duration | None = None,
    namespace: str = "holdfast",
    require: Iterable[str | Guarantee] = (),
    patience: Duration = 30,
    connections: int = 4,
    epoch: int = 0,
    fence_keys: Keys = (),
    observers: Iterable[Observer] = (),
) -> Locks:
    """Opens the blocking client to a store; nothing touches the network yet.

    ``ttl`` and ``timeout`` are the client's defaults. ``require`` names guarantees that the store
    must have. ``patience`` is how long an acquire without a timeout retries a store that can't be
    reached. Fences are signed with the first of ``fence_keys``: guards with that key refuse fences
    that none of their keys has signed. ``observers`` are told what happens: see
    ``holdfast.observe``.

    >>> with connect("memory://example") as locks, locks.lock("order:42") as lease:
    ...     lease.held
    True
    """
    locks = Locks(
        find_url(url),
        ttl=ttl,
        timeout=timeout,
        namespace=namespace,
        require=require,
        patience=patience,
        connections=connections,
        epoch=epoch,
        fence_keys=fence_keys,
        observers=observers,
    )
    load(LATER, type(locks._engine.store).__module__)
    return locks
