"""Ten processes that migrate one database at once: Django's migrate, and Alembic."""

from __future__ import annotations

import os
import secrets
import signal
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import psycopg
import pytest

import holdfast
from integrations.journal import Journal
from integrations.processes import HERE, Fleet, fleet
from servers.postgres import PgBouncer, PostgresServer
from servers.process import wait_until
from servers.redis import RedisServer
from servers.registry import Servers

PROCESSES = 10
SECONDS = 120.0
DJANGO = ("-m", "django", "migrate", "--skip-checks")
ALEMBIC = ("-m", "alembic", "-c", str(HERE / "alembic_site" / "alembic.ini"), "upgrade", "head")
NOTHING_TO_DO = (("alembic", ()), ("django", ("--lock",)))
TABLE = {"django": "shop_seed", "alembic": "seed"}


class Database:
    """A new database, and the processes that migrate it."""

    def __init__(self, server: PostgresServer, bouncer: PgBouncer, processes: Fleet) -> None:
        self.name = f"d{secrets.token_hex(6)}"
        with psycopg.connect(server.url, autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {self.name}")
        self.url = server.url.replace("/postgres", f"/{self.name}")
        self.pooled = bouncer.url.replace("/postgres", f"/{self.name}")
        self.processes = processes
        self.journal = Journal(str(processes.journal.path))

    def count(self, query: str) -> int:
        with psycopg.connect(self.url) as connection:
            row = connection.execute(query).fetchone()
        assert row is not None
        return int(row[0])

    def migrate(self, tool: str, *more: str, **environment: str) -> int:
        """Starts a process that migrates, through the pooler; returns its number."""
        words = DJANGO if tool == "django" else ALEMBIC
        address = urlsplit(self.pooled)
        scheme = "postgresql" if tool == "django" else "postgresql+psycopg"
        variables = {"DATABASE": address._replace(scheme=scheme).geturl(), **environment}
        if tool == "django":
            variables |= {"DJANGO_SETTINGS_MODULE": "integrations.django_site.settings"}
        self.processes.start([*words, *more], **variables)
        return len(self.processes.processes) - 1

    def client(self, tool: str) -> holdfast.Locks:
        """A client beside those of the processes."""
        url = self.processes.environment["HOLDFAST_URL"]
        return holdfast.connect(url, namespace=self.namespace(tool))

    def namespace(self, tool: str) -> str:
        return self.processes.environment["NAMESPACE"] if tool == "django" else "holdfast"

    def lock_name(self, tool: str) -> str:
        return "migrate:default" if tool == "django" else f"alembic:{self.name}:alembic_version"

    def lose(self, tool: str, number: int) -> None:
        """Ends the lock of a process, and returns when that knows it."""
        with self.client(tool) as other:
            assert other.break_lock(self.lock_name(tool), reason="a test") is not None
            wait_until("the loss", lambda: "lost" in self.log(number), SECONDS)

    def seeding(self) -> bool:
        """Whether a process is in the migration that waits."""
        return bool(self.journal.read("seeds"))

    def codes(self, numbers: list[int]) -> list[int]:
        return [self.processes.processes[number].wait(SECONDS) for number in numbers]

    def log(self, number: int) -> str:
        return (self.processes.folder / f"log-{number}").read_text()

    def seeds(self, tool: str) -> int:
        return self.count(f"SELECT count(*) FROM {TABLE[tool]}")

    def is_valid(self, index: str) -> bool:
        query = "SELECT count(*) FROM pg_index WHERE indisvalid AND indexrelid = '{}'::regclass"
        return self.count(query.format(index)) == 1


@pytest.fixture(scope="module")
def bouncer(servers: Servers) -> Iterator[PgBouncer]:
    with PgBouncer(servers.of(PostgresServer)) as pooler:
        yield pooler


@pytest.fixture
def database(servers: Servers, bouncer: PgBouncer, tmp_path: Path) -> Iterator[Database]:
    store = servers.of(RedisServer).url
    with fleet(tmp_path, HOLDFAST_URL=store, NAMESPACE=f"t{secrets.token_hex(6)}") as processes:
        yield Database(servers.of(PostgresServer), bouncer, processes)


def options(tool: str, *, locked: bool) -> tuple[list[str], dict[str, str]]:
    """The words and variables of a process that migrates."""
    if tool == "django":
        return ["--lock"] if locked else [], {}
    return [], {} if locked else {"UNLOCKED": "1"}


@pytest.mark.parametrize("tool", ["django", "alembic"])
def test_without_a_lock_ten_processes_do_it_twice_or_fail(database: Database, tool: str) -> None:
    """The failure that people report."""
    words, variables = options(tool, locked=False)
    variables |= {"SLOW_SECONDS": "2"}
    started = [database.migrate(tool, *words, **variables) for _ in range(PROCESSES)]
    failures = sum(code != 0 for code in database.codes(started))
    assert failures + database.seeds(tool) > 1


@pytest.mark.parametrize("tool", ["django", "alembic"])
def test_with_the_lock_one_does_it_and_the_others_find_nothing(
    database: Database, tool: str
) -> None:
    """Through a pooler, with the locks in the database itself, and an index that is made
    concurrently: it would wait for ever for a process that waits inside a transaction."""
    words, variables = options(tool, locked=True)
    variables |= {"SLOW_SECONDS": "1", "HOLDFAST_URL": database.pooled}
    variables |= {"ISOLATION": "REPEATABLE READ"}
    started = [database.migrate(tool, *words, **variables) for _ in range(PROCESSES)]
    assert database.codes(started) == [0] * PROCESSES
    assert database.seeds(tool) == 1
    assert database.is_valid("by_total" if tool == "django" else "by_id")


def test_a_database_at_its_head_needs_no_lock(database: Database) -> None:
    """Also while the lock is held, and while the store is away: a pod must start."""
    first = [database.migrate("alembic"), database.migrate("django", "--lock")]
    assert database.codes(first) == [0, 0]
    away = {"HOLDFAST_URL": "redis://127.0.0.1:1"}
    started = [database.migrate(tool, *words, **away) for tool, words in NOTHING_TO_DO]
    assert database.codes(started) == [0] * len(started)
    with database.client("django") as other, other.lock(database.lock_name("django")):
        started = [database.migrate("django", "--lock"), database.migrate("django", "--plan")]
        assert database.codes(started) == [0, 0]
    assert "post_migrate is not sent" in database.log(started[0])


def test_django_does_not_wait_longer_than_it_is_told(database: Database) -> None:
    with (
        database.client("django") as other,
        other.lock(database.lock_name("django"), note="another pod"),
    ):
        busy = database.migrate("django", "--lock", "--lock-timeout=1")
        assert database.codes([busy]) == [75]
    assert "another pod" in database.log(busy)


@pytest.mark.parametrize("tool", ["django", "alembic"])
def test_a_process_that_is_killed_is_followed_by_another(database: Database, tool: str) -> None:
    """Its transaction is rolled back, and its lock ends with the ttl."""
    words, _ = options(tool, locked=True)
    first = database.migrate(tool, *words, HOLD="1")
    wait_until("the migration", database.seeding, SECONDS)
    others = [database.migrate(tool, *words) for _ in range(2)]
    os.kill(database.processes.processes[first].pid, signal.SIGKILL)
    assert database.codes(others) == [0, 0]
    assert database.seeds(tool) == 1


@pytest.mark.parametrize("tool", ["django", "alembic"])
def test_a_process_that_is_paused_past_its_ttl_writes_nothing(
    database: Database, tool: str
) -> None:
    """Another one migrates meanwhile; the paused one is rolled back when it continues."""
    words, _ = options(tool, locked=True)
    first = database.migrate(tool, *words, HOLD="1")
    wait_until("the migration", database.seeding, SECONDS)
    pid = database.processes.processes[first].pid
    os.kill(pid, signal.SIGSTOP)
    second = database.migrate(tool, *words, HOLD="1")
    wait_until("the second one", lambda: len(database.journal.read("seeds")) == 2, SECONDS)
    database.journal.write("finish")
    wait_until("its row", lambda: database.seeds(tool) == 1, SECONDS)
    os.kill(pid, signal.SIGCONT)
    assert database.codes([second]) == [0]
    assert database.codes([first]) == [76 if tool == "django" else 255]
    assert database.seeds(tool) == 1


@pytest.mark.parametrize("tool", ["django", "alembic"])
def test_a_store_that_is_restarted_meanwhile_costs_nothing(database: Database, tool: str) -> None:
    """The process that migrates keeps its lock, and those that wait go on waiting."""
    words, variables = options(tool, locked=True)
    with RedisServer(persist=True) as store:
        variables |= {"HOLDFAST_URL": store.url, "HOLD": "1"}
        started = [database.migrate(tool, *words, **variables)]
        wait_until("the migration", database.seeding, SECONDS)
        started += [database.migrate(tool, *words, **variables) for _ in range(3)]
        with holdfast.connect(store.url, namespace=database.namespace(tool)) as other:
            name = database.lock_name(tool)
            wait_until("the others", lambda: len(other.inspect(name).waiters) == 3, SECONDS)
        store.restart()
        database.journal.write("finish")
        assert database.codes(started) == [0] * len(started)
    assert database.seeds(tool) == 1


def test_alembic_rolls_a_migration_back_whose_lock_is_lost(database: Database) -> None:
    first = database.migrate("alembic", HOLD="1")
    wait_until("the migration", database.seeding, SECONDS)
    database.lose("alembic", first)
    database.journal.write("finish")
    assert database.codes([first]) != [0]
    assert "LockLost" in database.log(first)
    assert database.seeds("alembic") == 0


@pytest.mark.parametrize(("without", "seeds"), [({}, 0), ({"WITHOUT_TRANSACTION": "1"}, 1)])
def test_django_begins_no_migration_once_its_lock_is_lost(
    database: Database, without: dict[str, str], seeds: int
) -> None:
    """And the one that is under way is rolled back, if it has a transaction."""
    first = database.migrate("django", "--lock", HOLD="1", **without)
    wait_until("the migration", database.seeding, SECONDS)
    database.lose("django", first)
    database.journal.write("finish")
    assert database.codes([first]) == [76]
    indexes = "SELECT count(*) FROM pg_class WHERE relname = 'by_total'"
    recorded = "SELECT count(*) FROM django_migrations WHERE name = '0002_seed'"
    found = [database.seeds("django"), database.count(recorded), database.count(indexes)]
    assert found == [seeds, seeds, 0]


def test_alembic_locks_only_what_changes_the_database(database: Database) -> None:
    """And one lock inside another one of the same name is one lock."""
    with database.client("alembic") as other, other.lock(database.lock_name("alembic")):
        database.processes.start([*ALEMBIC[:4], "current"], DATABASE=sqlalchemy_url(database))
        database.processes.start([*ALEMBIC, "--sql"], DATABASE=sqlalchemy_url(database))
        assert database.codes([0, 1]) == [0, 0]
    database.processes.start(["-c", BOTH], DATABASE=sqlalchemy_url(database), NAME=database.name)
    assert database.codes([2]) == [0]
    assert database.seeds("alembic") == 1


def sqlalchemy_url(database: Database) -> str:
    return urlsplit(database.url)._replace(scheme="postgresql+psycopg").geturl()


BOTH = f"""
import os
from alembic import command, config
from holdfast.integrations.alembic import locked

with locked(name="alembic:" + os.environ["NAME"] + ":alembic_version", timeout=0):
    command.upgrade(config.Config({ALEMBIC[3]!r}), "head")
try:
    with locked():
        pass
except RuntimeError as error:
    assert "needs a name=" in str(error)
else:
    raise SystemExit("it was not refused")
"""
