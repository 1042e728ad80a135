"""``locks``: the client of the project, opened at its first use."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from django.core.signals import setting_changed
from django.db.models import Model
from django.utils.asyncio import async_unsafe

import holdfast
from holdfast import Lease, Lock, Locks
from holdfast.integrations.django import settings, transactions
from holdfast.integrations.django.names import name_of

if TYPE_CHECKING:
    Client = Locks
else:
    Client = object

__all__ = ["Held", "ProjectLocks", "locks"]

F = TypeVar("F", bound=Callable[..., Any])
Block = AbstractContextManager[Lease]


class Held(AbstractContextManager[Lease, None]):
    """A block or a function that holds a lock. The block gives the lease; many threads may be in
    it, one after the other."""

    def __init__(self, what: str | Model, block: Callable[[str], Block]) -> None:
        self._name, self._block = name_of(what), block
        self._is_template = isinstance(what, str)
        self._entered = threading.local()

    def __enter__(self) -> Lease:
        block = self._block(self._name)
        lease = block.__enter__()
        self._entered.__dict__.setdefault("blocks", []).append(block)
        return lease

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._entered.blocks.pop().__exit__(kind, error, trace)

    def __call__(self, function: F) -> F:
        """Decorates a function; fields of a name that is text come from its arguments. Raises
        ``TypeError`` for an ``async def`` and for a generator: calling it runs nothing of its
        body. Raises ``ValueError`` for a field that is no argument."""
        template = self._name if self._is_template else "any"
        with holdfast.connect("memory://") as client:  # the project's own is not opened yet
            client.lock(template)(function)
        signature = inspect.signature(function)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            name = self._name
            if self._is_template:
                bound = signature.bind(*args, **kwargs)
                bound.apply_defaults()
                name = name.format_map(bound.arguments)
            with self._block(name):
                return function(*args, **kwargs)

        return call  # type: ignore[return-value]


class ProjectLocks(Client):
    """The client that the setting ``HOLDFAST`` describes: all that ``holdfast.Locks`` has, and
    ``lock`` for model instances and transactions.

    It is opened at its first use, once per process. ``client`` is the ``Locks`` behind it.
    """

    _clients: dict[str, Locks]

    if not TYPE_CHECKING:

        def __init__(self) -> None:
            self._clients: dict[str, Locks] = {}

        def __getattr__(self, word: str) -> Any:
            if word.startswith("_"):  # nobody's business: a look must not open a client
                raise AttributeError(word)
            return getattr(self.client, word)

    def __repr__(self) -> str:
        return f"<ProjectLocks {self._clients.get('default', 'not open')!r}>"

    @property
    def client(self) -> Locks:
        """The client of this process. Raises ``ImproperlyConfigured`` for wrong settings."""
        found: Locks | None = self._clients.get("default")
        if found is None:
            made = settings.client()
            found = self._clients.setdefault("default", made)
            if found is not made:  # another thread was faster
                made.close()
        return found

    def lock(  # type: ignore[override]
        self,
        what: str | Model,
        *,
        until: Literal["block", "commit"] = "block",
        using: str | None = None,
        **options: Any,
    ) -> Held:
        """An exclusive lock of a name or of a model instance, for a ``with`` block or as a
        decorator (``@locks.lock("report:{day}")``). Takes the options of ``holdfast.Locks.lock``
        (``ttl``, ``timeout``, …).

        ``until="commit"``: where the block ends inside ``atomic()``, the lock is released when the
        outermost transaction has been committed or rolled back: of the database ``using``, by
        default of all databases with one. It may be taken again in the same transaction
        (``reentrant``). Without it such a block ends with the warning ``ReleasedBeforeCommit``.

        Raises ``ValueError`` for an instance that is not saved, and what ``holdfast.Lock`` raises;
        with ``until="commit"`` ``TransactionManagementError`` where autocommit is off.
        """
        if until not in ("block", "commit"):
            raise ValueError(f'until is "block" or "commit", not {until!r:.40}')
        if until == "commit":  # the next function of this transaction may need it, too
            options.setdefault("reentrant", True)
        hold = functools.partial(
            self._held, until_commit=until == "commit", using=using, options=options
        )
        return Held(what, hold)

    @contextmanager
    def _held(
        self, name: str, until_commit: bool, using: str | None, options: dict[str, Any]
    ) -> Iterator[Lease]:
        if until_commit:
            transactions.refuse_manual(using)
        with ExitStack() as stack:
            lease = stack.enter_context(self._lock_of(name, options))
            clean = False
            try:
                yield lease
                clean = True
            finally:
                if until_commit and transactions.is_open(using):
                    stack.pop_all()
                    transactions.release_after(lease, using)
                elif transactions.is_uncommitted(using):
                    transactions.warn(name)
            if clean and until_commit and lease.lost:
                lease.check()  # raises: a transaction that is still open is rolled back

    @async_unsafe("a lock blocks the event loop: take it in a function under sync_to_async()")
    def _lock_of(self, name: str, options: dict[str, Any]) -> Lock:
        return self.client.lock(name, **options)

    def close(self) -> None:
        """Closes the client, if it is open; the next use opens a new one."""
        client = self._clients.pop("default", None)
        if client is not None:
            client.close()


locks = ProjectLocks()  # type: ignore[call-arg]
"""The client of this project."""


def _settings_changed(*, setting: str, **_: Any) -> None:
    if setting == "HOLDFAST":  # override_settings in a test
        locks.close()


setting_changed.connect(_settings_changed, dispatch_uid="holdfast")
