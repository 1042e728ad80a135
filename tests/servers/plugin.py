"""What the servers add to pytest: a shared registry, skips for missing ones, logs for failures."""

from collections.abc import Generator, Iterator

import pytest

from servers.missing import ServerMissing, required
from servers.process import started
from servers.registry import Servers

_sizes = pytest.StashKey[dict[str, int]]()


@pytest.fixture(scope="session")
def servers() -> Iterator[Servers]:
    """Servers that many tests share; see `Servers.of`."""
    registry = Servers()
    yield registry
    registry.close()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, object, object]:
    item.stash[_sizes] = {str(s.log): s.log.stat().st_size for s in started() if s.log.exists()}
    return (yield from _skip_missing())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    return (yield from _skip_missing())


def _skip_missing() -> Generator[None, object, object]:
    try:
        return (yield)
    except ServerMissing as missing:
        if required():
            raise
        pytest.skip(str(missing))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        sizes = item.stash.get(_sizes, {})
        for server in started():
            # Only of servers that had something to say during this test.
            if server.log.exists() and server.log.stat().st_size > sizes.get(str(server.log), 0):
                title = f"log of {server.name} on port {server.port}"
                report.sections.append((title, server.log_tail()))
    return report
