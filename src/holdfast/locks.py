"""``Locks``: the blocking client."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from holdfast.claim import Keys, LockInfo
from holdfast.core.contract import Finding, Guarantee
from holdfast.core.drive import run_now
from holdfast.durations import Duration
from holdfast.io.runtime_blocking import BlockingRuntime
from holdfast.io.threads import callbacks
from holdfast.locks_base import LONGEST_LIST, LocksBase, later
from holdfast.primitives.lock import Lock
from holdfast.url import environment_url

if TYPE_CHECKING:
    from holdfast.primitives.election import Election
    from holdfast.primitives.every import Every
    from holdfast.primitives.multi import MultiLock
    from holdfast.primitives.once import Once

    Primitives = LocksBase[Lock, MultiLock, Election, Once, Every]
else:
    Primitives = LocksBase

__all__ = ["Locks", "connect", "find_url"]


LATER = ("json", "logging", "holdfast.core.extend")
"""What a command that holds one lock for a moment never loads."""

Findings = list[Finding]
Standings = list[LockInfo]


def find_url(url: str | object | None) -> str | object:
    """The URL given, or the environment's; a fleet must never lock a local file by accident."""
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
    _every: type[Every] = later("holdfast.primitives.every", "Every")

    def __init__(self, url: str | object, **settings: Any) -> None:
        super().__init__(url, BlockingRuntime(), **settings)
        self._engine.tell, self._engine.before_tell = callbacks.call, callbacks.prepare

    def list(self, prefix: str = "", *, limit: int = LONGEST_LIST) -> Standings:
        """Names that are held or waited for, with their holders and waiters."""
        return run_now(self._list(prefix, limit))

    def inspect(self, name: str) -> LockInfo:
        """Holders and waiters of one name."""
        return run_now(self._inspect(name))

    def break_lock(self, name: str, *, reason: str) -> int | None:
        """Ends somebody's hold, which learns that it is lost; answers the token that was ended."""
        return run_now(self._break_lock(name, reason))

    def check(self) -> Findings:
        """Contacts the store now and verifies what its guarantees rest on."""
        return run_now(self._check())

    def close(self) -> None:
        """Releases what is still held, each with a warning; ends threads and connections."""
        if self._engine.closed:
            return
        held = self._still_held()
        self._engine.closed = True
        for turn in self._engine.lines.all():
            self._engine.nudge(turn.claim)
            if turn.signal is not None:
                turn.signal.set()
        self._renewer_thread.end(None)
        run_now(self._engine.backend.close())
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
) -> Locks:
    """Opens the blocking client to a store; nothing touches the network yet.

    ``ttl`` and ``timeout`` are the client's defaults. ``require`` names guarantees that the store
    must have. ``patience`` is how long an unreachable store is borne without a timeout. Fences are
    signed with the first of ``fence_keys``: guards that have the key refuse all others.

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
    )
    _load_the_rest(type(locks._engine.store).__module__)
    return locks


def _load_the_rest(backend: str) -> None:
    # An interrupt that tears an import apart may leave the interpreter's import lock taken: the
    # next import of any other thread hangs, be it the renewer's. So none is left for later.
    for module in (*LATER, *getattr(import_module(backend), "LATER", ())):
        import_module(module)
