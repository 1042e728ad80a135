"""pytest: locks for tests, lost on purpose, in virtual time; and locks between test processes.

pytest loads this module by itself wherever Holdfast is installed (``-p no:holdfast`` keeps it
from that). It imports nothing more until a test uses it. The guide is "Test with pytest".
"""

from __future__ import annotations

import hashlib
import inspect
import re
import time
import uuid
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from holdfast.integrations import missing_extra

try:
    import pytest
except ModuleNotFoundError as error:
    raise missing_extra(error, "pytest") from None

if TYPE_CHECKING:
    from holdfast import AsyncLocks, Locks
    from holdfast.integrations.pytest_sharing import Sharing
    from holdfast.testing.virtual import FaultStore, LockFaults, VirtualClock

__all__ = ["shared_fixture"]

MARK = 'lock(name, limit=None, timeout=None): holds the lock "name" while the test runs, or one of'
MARK_REST = " `limit` slots: across xdist workers, and across all test runs of this user here"
OWN = "A mark of your own with this name is left alone if `markers` in pytest.ini has it"
HELP = "store of @pytest.mark.lock; the default is a file that the runs of this user share"
TTL_HELP = "for how many seconds a killed test process keeps its locks from others"
NOTE_LENGTH = 200
RELEASE_SECONDS = 1.0
"""How long a dropped lease, or a cancelled acquire, may take to be undone by its client."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("holdfast").addoption("--holdfast-url", metavar="URL", help=HELP)
    parser.addini("holdfast_url", HELP, default="local")
    parser.addini("holdfast_ttl", TTL_HELP, default="30")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", MARK + MARK_REST)


# Fixtures: a store of its own for each test.


@pytest.fixture
def lock_time() -> VirtualClock:
    """A virtual clock for ``locks`` and ``async_locks``: ``lock_time.advance(31)`` renews and
    expires what is due, without sleeping."""
    from holdfast.testing.virtual import VirtualClock

    return VirtualClock()


@pytest.fixture
def _lock_store(request: pytest.FixtureRequest) -> FaultStore:
    from holdfast.testing.virtual import FaultStore

    virtual = {"lock_time", "lock_faults"} & set(request.fixturenames)
    return FaultStore(request.getfixturevalue("lock_time") if virtual else None)


@pytest.fixture
def locks(_lock_store: FaultStore) -> Iterator[Locks]:
    """A blocking client of a memory store of this test. A hold that is left fails the test."""
    client = _lock_store.connect()
    yield client
    with _closing(client.close):
        _fail_if_held(_lock_store)


@pytest.fixture
def async_locks(_lock_store: FaultStore) -> Iterator[AsyncLocks]:
    """An asyncio client of the same store; the test's own event loop uses it."""
    import asyncio

    client = _lock_store.connect_async()
    yield client
    with _closing(lambda: asyncio.run(client.close())):
        _fail_if_held(_lock_store)


@pytest.fixture
def lock_faults(_lock_store: FaultStore, lock_time: VirtualClock) -> Iterator[LockFaults]:
    """What happens to locks in production: ``lose``, ``expire``, ``pause``, ``outage``, ``busy``.
    The test's clients are in virtual time then (``lock_time``)."""
    from holdfast.testing.virtual import LockFaults

    faults = LockFaults(_lock_store, lock_time)
    yield faults
    faults.close()


@contextmanager
def _closing(close: Callable[[], None]) -> Iterator[None]:
    """Closes a client after its test was told what it still holds."""
    try:
        yield
    finally:
        with warnings.catch_warnings(action="ignore", category=ResourceWarning):
            close()


def _fail_if_held(store: FaultStore) -> None:
    """Fails the test if something is held at its end, and says where it was acquired."""
    deadline = time.monotonic() + RELEASE_SECONDS
    with store.connect() as client:
        while held := [info.name for info in client.list() if info.holders]:
            if time.monotonic() > deadline or store.clock is not None:
                places = ", ".join(f"{name!r} (acquired at {store.places[name]})" for name in held)
                pytest.fail(f"still held at the end of the test: {places}", pytrace=False)
            time.sleep(RELEASE_SECONDS / 50)


# @pytest.mark.lock: one test at a time, or ``limit`` of them, in all test processes.


class _Wanted(NamedTuple):
    """What a mark asks for."""

    name: str
    limit: int | None = None
    timeout: float | None = None


_leases = pytest.StashKey[ExitStack]()
_client = pytest.StashKey["Locks"]()


def _wanted(item: pytest.Item) -> list[_Wanted]:
    """The locks of a test in the order of their names, so that no two tests wait for each other."""
    found: dict[str, _Wanted] = {}
    for mark in item.iter_markers("lock"):
        wanted = _read(mark)
        if wanted is None:
            if _has_own_mark(item.config):
                continue
            pytest.fail(f"@pytest.mark.lock takes {MARK.partition(':')[0]}. {OWN}", pytrace=False)
        first = found.setdefault(wanted.name, wanted)
        if first.limit != wanted.limit:
            pytest.fail(f"two marks for {wanted.name!r} differ in their limit", pytrace=False)
    return sorted(found.values(), key=lambda wanted: wanted.name)


def _read(mark: pytest.Mark) -> _Wanted | None:
    """What a mark asks for; ``None`` if it has other arguments."""
    try:
        wanted = _Wanted(*mark.args, **mark.kwargs)
    except TypeError:
        return None
    return wanted if isinstance(wanted.name, str) else None


def _has_own_mark(config: pytest.Config) -> bool:
    """Whether the project has registered a mark of that name, too."""
    lines = [line for line in config.getini("markers") if line != MARK + MARK_REST]
    return any(re.match(r"\s*lock\s*(\(|:|$)", line) for line in lines)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Acquires the locks of a test that is not skipped, before its fixtures are set up."""
    leases = item.stash[_leases] = ExitStack()
    for name, limit, timeout in _wanted(item):
        client, note = _session_client(item.config), item.nodeid[-NOTE_LENGTH:]
        if limit is None:
            leases.enter_context(client.lock(name, timeout=timeout, note=note))
        else:
            leases.enter_context(client.semaphore(name, limit, timeout=timeout, note=note))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """Releases when the fixtures of the test are torn down. Raises ``LockLost`` if the test did not
    have its lock to the end: it was not alone."""
    with item.stash.get(_leases, ExitStack()):
        return (yield)


def _session_client(config: pytest.Config) -> Locks:
    if _client not in config.stash:
        import holdfast

        url = config.getoption("--holdfast-url") or config.getini("holdfast_url")
        ttl = float(config.getini("holdfast_ttl"))
        config.stash[_client] = holdfast.connect(url, ttl=ttl, namespace="pytest")
    return config.stash[_client]


def pytest_unconfigure(config: pytest.Config) -> None:
    if _client in config.stash:
        config.stash[_client].close()


# shared_fixture: one set-up for all xdist workers.

_teardowns: dict[str, Callable[[Any], object]] = {}
"""By key: the teardown of every shared fixture in the modules that this worker has imported, which
is all of them: each worker collects all tests."""


_failures = pytest.StashKey[list[str]]()
_sharing = pytest.StashKey["Sharing"]()


def shared_fixture(*, teardown: Callable[[Any], object]) -> Callable[[Callable[..., Any]], Any]:
    """A session fixture that is set up once for all xdist workers of a run, by the first worker
    that needs it; the last worker to leave calls ``teardown`` with its value.

    The value must be JSON: it goes to other processes. If a worker is killed while it sets up or
    tears down, another worker does that again."""

    def decorate(setup: Callable[..., Any]) -> Any:
        place = f"{inspect.getsourcefile(setup)}:{setup.__qualname__}"
        key = f"{setup.__name__}-{hashlib.sha256(place.encode()).hexdigest()[:16]}"
        _teardowns[key] = teardown

        def fixture(request: pytest.FixtureRequest) -> Any:
            names = inspect.signature(setup).parameters
            arguments = {name: request.getfixturevalue(name) for name in names}
            return _join(request.config).value(key, lambda: setup(**arguments))

        fixture.__doc__ = setup.__doc__
        return pytest.fixture(scope="session", name=setup.__name__)(fixture)

    return decorate


def _join(config: pytest.Config) -> Sharing:
    """The part of this worker in them; it joins at the first call."""
    if _sharing not in config.stash:
        from holdfast.integrations.pytest_sharing import Sharing

        worker = getattr(config, "workerinput", None)  # of pytest-xdist
        run = f"run-{uuid.uuid4().hex if worker is None else worker['testrunuid']}"
        config.stash[_sharing] = Sharing(_session_client(config), run, _teardowns)
    return config.stash[_sharing]


@pytest.hookimpl(tryfirst=True)  # before this worker is known to be ready
def pytest_collection_finish(session: pytest.Session) -> None:
    """Each worker joins before the first test of any worker starts: else one that is done early
    would be the last to leave, and another one would set up again."""
    if _teardowns and not session.config.getoption("collectonly"):
        _join(session.config)


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    stash = session.config.stash
    failures = stash.setdefault(_failures, [])
    if _sharing in stash:
        from holdfast.integrations.pytest_sharing import noting

        with noting(failures):
            stash[_sharing].leave(failures)
    output = getattr(session.config, "workeroutput", None)  # of pytest-xdist
    if output is not None:
        output["holdfast_failures"] = failures
    elif failures and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """In the process that xdist's workers report to: takes over what failed in one."""
    output = getattr(node, "workeroutput", None) or {}
    node.config.stash.setdefault(_failures, []).extend(output.get("holdfast_failures", ()))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for text in terminalreporter.config.stash.get(_failures, ()):
        terminalreporter.section("the teardown of a shared fixture failed")
        terminalreporter.line(text)
