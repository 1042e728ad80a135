"""Django: names, transactions, guards, commands and system checks, in one process."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import threading
import time
import uuid
import warnings
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import django
import pytest
from django.core import checks, management
from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import CommandError
from django.db import connection, connections, transaction
from django.db.transaction import TransactionManagementError
from django.http import HttpRequest, HttpResponse
from django.test import Client, TestCase, override_settings
from django.test.utils import CaptureQueriesContext
from django.urls import path
from django.utils.connection import ConnectionDoesNotExist

import holdfast
from holdfast import AlreadyHeld, LockLost, LockTimeout, StaleFence, Unsupported, observe
from holdfast.integrations.django import ReleasedBeforeCommit, guard, locks, name_of, settings
from servers.postgres import PostgresServer
from servers.process import wait_until
from servers.registry import Servers

SETTINGS_MODULE = ("DJANGO_SETTINGS_MODULE", "integrations.django_site.settings")
with pytest.MonkeyPatch.context() as patched:  # other tests of this process have other projects
    patched.setenv(*SETTINGS_MODULE)
    patched.setenv("TZ", "UTC")  # Django sets it, and the zone of the process
    django.setup()
time.tzset()

from integrations.django_site.settings import database  # noqa: E402
from integrations.django_site.shop.models import Order, Parcel, RushOrder  # noqa: E402

TESTS = Path(__file__).parents[1]
SETTINGS = {"URL": "memory://django", "TTL": 5, "TIMEOUT": 0}


@pytest.fixture(scope="module")
def migrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of SQLite with the tables."""
    file = tmp_path_factory.mktemp("django") / "migrated.db"
    done = manage("migrate", DATABASE=f"sqlite://{file}", HOLDFAST_URL="memory://")
    assert done.returncode == 0, done.stderr
    return file


@pytest.fixture(autouse=True)
def project(migrated: Path, tmp_path: Path) -> Iterator[None]:
    """Two databases of SQLite, and a store in memory."""
    for alias in ("default", "other"):
        file = shutil.copy(migrated, tmp_path / f"{alias}.db")
        connections.databases[alias] = connections.configure_settings(
            {"default": database(f"sqlite://{file}")}
        )["default"]
        with suppress(AttributeError):  # it was not opened
            del connections[alias]
    with override_settings(HOLDFAST=SETTINGS):
        yield
    connections.close_all()


def free(name: str) -> bool:
    return not locks.inspect(name).holders


@pytest.fixture
def order() -> Order:
    return Order.objects.create()


def test_an_instance_is_named_by_its_model_and_key(order: Order) -> None:
    assert name_of(order) == f"shop.order:{order.pk}" == name_of(Order, str(order.pk))
    assert name_of(RushOrder.objects.get(pk=order.pk)) == name_of(order)
    key = uuid.uuid4()
    assert name_of(Parcel, key.hex) == name_of(Parcel.objects.create(pk=key))
    assert name_of(Order.objects.using("default").get()) == name_of(order)


@pytest.mark.parametrize("made", [Order, Parcel, lambda: Order(pk=1)])
def test_an_instance_that_is_not_saved_is_refused(made: Any) -> None:
    with pytest.raises(ValueError, match="not saved"):
        locks.lock(made())


@pytest.mark.parametrize("what", [7, Order, None])
def test_what_names_nothing_is_refused(what: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=r"not|needs a primary key"):
        locks.lock(what)


def test_a_block_and_a_decorated_function_hold_the_lock(order: Order) -> None:
    with locks.lock(order) as lease:
        assert lease.held
        with pytest.raises(AlreadyHeld):
            locks.lock(order).__enter__()
    assert free(name_of(order))

    @locks.lock("nightly")
    def report(number: int) -> int:
        assert not free("nightly")
        return number

    assert [report(1), report(2)] == [1, 2]
    assert free("nightly")


def test_a_decorated_function_has_a_name_for_each_call(order: Order) -> None:
    @locks.lock("report:{day}")
    def report(day: str, *, again: bool = False) -> list[bool]:
        return [free(f"report:{other}") for other in ("monday", "tuesday")]

    assert report("monday") == [False, True]
    assert report(day="tuesday") == [True, False]

    @locks.lock(order)
    def pay(day: str) -> bool:
        return free(name_of(order))

    assert not pay("{day}")
    with pytest.raises(ValueError, match="has no argument 'dya'"):
        locks.lock("report:{dya}")(report)


def test_functions_whose_body_runs_later_are_refused() -> None:
    """They would run when the lock is free again."""

    async def view() -> None: ...

    def pages() -> Iterator[int]:
        yield 1

    with pytest.raises(TypeError, match="plain async def"):
        locks.lock("a")(view)
    with pytest.raises(TypeError, match="generator function"):
        locks.lock("a")(pages)


def test_a_lock_is_for_many_blocks_and_threads(order: Order) -> None:
    """One object of a module, as with ``holdfast.Lock``."""
    lock = locks.lock(order, timeout=30)
    tokens: list[int] = []

    def enter() -> None:
        with lock as lease:
            time.sleep(0.05)
            tokens.append(lease.token)

    threads = [threading.Thread(target=enter) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with lock, pytest.raises(AlreadyHeld):
        lock.__enter__()
    assert tokens == sorted(set(tokens))
    assert (len(tokens), free(name_of(order))) == (4, True)


def test_a_block_ends_its_own_lease_only(order: Order) -> None:
    """One that was lost ends while another thread is in the same lock."""
    lock = locks.lock(order, timeout=30)
    entered, leave = threading.Event(), threading.Event()
    refused: list[LockLost] = []

    def enter() -> None:
        try:
            with lock:
                entered.set()
                leave.wait(30)
        except LockLost as error:
            refused.append(error)

    thread = threading.Thread(target=enter)
    thread.start()
    assert entered.wait(30)
    locks.break_lock(name_of(order), reason="a test")
    with lock as lease:
        leave.set()
        thread.join()
        assert lease.held
    assert len(refused) == 1


def test_all_of_the_client_is_there() -> None:
    with locks.semaphore("slots", 2) as lease:
        assert lease.slots == (0,)
    assert locks.once("job", keep=5).run(lambda: 7).value == 7


def test_a_lock_that_is_released_before_its_commit_is_warned_of(order: Order) -> None:
    """The warning names the line of the block."""
    with transaction.atomic():
        lock = locks.lock(order)
        with pytest.warns(ReleasedBeforeCommit, match=r"'shop\.order'") as told, lock:
            pass
        assert free(name_of(order))
    assert Path(told[0].filename) == Path(__file__)


def test_a_lock_around_a_transaction_is_not_warned_of(order: Order) -> None:
    for until in ("block", "commit"):
        with locks.lock(order, until=until), transaction.atomic():
            order.save()
        assert free(name_of(order))


def test_until_commit_holds_until_the_outermost_commit(order: Order) -> None:
    name = name_of(order)
    seen = []
    with transaction.atomic():
        with transaction.atomic(), locks.lock(order, until="commit"):
            transaction.on_commit(lambda: seen.append(free(name)))
        assert not free(name)
    assert free(name)
    assert seen == [True], "it is released before the functions that wait for the commit"


def test_until_commit_can_be_taken_again_in_its_transaction(order: Order) -> None:
    with transaction.atomic():
        with locks.lock(order, until="commit") as first:
            pass
        with locks.lock(order, until="commit") as second:
            assert second.token == first.token
    assert free(name_of(order))


def test_until_commit_holds_until_the_rollback(order: Order) -> None:
    def body() -> None:
        with transaction.atomic():
            with locks.lock(order, until="commit"):
                order.save()
            assert not free(name_of(order))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        body()
    assert free(name_of(order))


def test_an_error_of_the_block_also_waits_for_the_end(order: Order) -> None:
    """It may be caught inside the transaction, which then commits."""
    with transaction.atomic():
        with pytest.raises(ZeroDivisionError), locks.lock(order, until="commit"):
            raise ZeroDivisionError
        assert not free(name_of(order))
    assert free(name_of(order))


def test_a_rollback_to_a_savepoint_does_not_release(order: Order) -> None:
    with transaction.atomic():
        for _ in range(2):
            with pytest.raises(ZeroDivisionError), transaction.atomic(), transaction.atomic():
                lock_and_fail(order)
            assert not free(name_of(order))
    assert free(name_of(order))


def lock_and_fail(order: Order) -> None:
    with locks.lock(order, until="commit"):
        pass
    raise ZeroDivisionError


def test_until_commit_waits_for_all_databases_or_for_one(order: Order) -> None:
    for using, held in ((None, True), ("default", False)):
        with transaction.atomic("other"):
            with transaction.atomic(), locks.lock(order, until="commit", using=using):
                pass
            assert free(name_of(order)) is not held
        assert free(name_of(order))


@pytest.mark.parametrize("way", ["returns", "fails", "refuses"])
def test_with_atomic_requests_a_view_holds_until_its_end(order: Order, way: str) -> None:
    """Django commits, or rolls back, behind the view; the middleware answers after that."""

    @locks.lock("decorated", until="commit")
    def view(request: HttpRequest) -> HttpResponse:
        with locks.lock(order, until="commit") as lease:
            guard(lease)
            Order.objects.filter(pk=order.pk).update(total=7)
        assert not free(name_of(order))
        if way == "fails":
            raise ZeroDivisionError
        if way == "refuses":
            raise LockTimeout("busy")
        return HttpResponse("done")

    urls = type("Urls", (), {"urlpatterns": [path("pay", view)]})
    connections.databases["default"]["ATOMIC_REQUESTS"] = True
    with override_settings(ROOT_URLCONF=urls):
        answer = Client(raise_request_exception=False).post("/pay")
    assert answer.status_code == {"returns": 200, "fails": 500, "refuses": 423}[way]
    assert free(name_of(order))
    assert free("decorated")
    order.refresh_from_db()
    assert order.total == (7 if way == "returns" else 0)


def test_a_connection_that_is_closed_in_its_transaction_releases(order: Order) -> None:
    def body() -> None:
        with transaction.atomic():
            with locks.lock(order, until="commit"):
                pass
            connection.close()
            assert free(name_of(order))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        body()
    assert Order.objects.count() == 1


def test_a_function_that_fails_after_the_commit_does_not_keep_the_lock(order: Order) -> None:
    """Also while somebody keeps the exception, as error pages and task runners do. Django does not
    call the functions behind the one that fails; its traceback has them."""

    def body() -> None:
        with transaction.atomic():
            transaction.on_commit(lambda: 1 / 0)
            with locks.lock(order, until="commit"), locks.lock("second", until="commit"):
                pass

    with pytest.raises(ZeroDivisionError) as kept:
        body()
    assert free(name_of(order))
    assert free("second")
    assert kept.value.__traceback__ is not None


def test_until_commit_is_refused_where_autocommit_is_off(order: Order) -> None:
    """Django calls nobody after such a commit, also where ``atomic()`` is inside."""
    transaction.set_autocommit(False)
    for using in (None, "default"):
        with pytest.raises(TransactionManagementError, match=r"'default'.* autocommit off"):
            locks.lock(order, until="commit", using=using).__enter__()
        with transaction.atomic(), pytest.raises(TransactionManagementError):
            locks.lock(order, until="commit", using=using).__enter__()
    assert free(name_of(order))
    with transaction.atomic("other"):
        with locks.lock(order, until="commit", using="other"):
            pass
        assert not free(name_of(order))
    assert free(name_of(order))
    with pytest.raises(ConnectionDoesNotExist):
        locks.lock(order, until="commit", using="nosuch").__enter__()


def test_the_settings_of_a_database_that_is_not_connected_count() -> None:
    connections.databases["other"]["AUTOCOMMIT"] = False
    for makes in (lambda: None, lambda: connections["other"]):  # it has no object, then has one
        makes()
        with pytest.raises(TransactionManagementError, match="'other'"):
            locks.lock("a", until="commit").__enter__()
    assert connections["other"].connection is None
    with locks.lock("a", until="commit", using="default"):
        pass


def test_a_lock_that_is_released_before_a_manual_commit_is_warned_of(order: Order) -> None:
    transaction.set_autocommit(False)
    with pytest.warns(ReleasedBeforeCommit, match="commit inside the block"), locks.lock(order):
        order.save()
    transaction.commit()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with locks.lock(order):
            order.save()
            transaction.commit()
    transaction.set_autocommit(True)
    lock = locks.lock(order, until="commit")
    with pytest.warns(ReleasedBeforeCommit), lock:  # noqa: PT031 - it is the end that warns
        transaction.set_autocommit(False)
        order.save()


def test_a_manual_commit_on_postgresql_is_seen(servers: Servers) -> None:
    settings_of = {"default": database(servers.of(PostgresServer).url)}
    connections.databases["other"] = connections.configure_settings(settings_of)["default"]
    transaction.set_autocommit(False, "other")
    with pytest.warns(ReleasedBeforeCommit), locks.lock("a"):
        connections["other"].cursor().execute("SELECT 1")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with locks.lock("a"):
            transaction.commit("other")


def test_a_connection_that_is_closed_with_autocommit_off_is_not_asked(order: Order) -> None:
    transaction.set_autocommit(False)
    with locks.lock(order), pytest.raises(ZeroDivisionError), transaction.atomic():
        close_inside(order)
    assert free(name_of(order))


def close_inside(order: Order) -> None:
    with locks.lock("second"):
        order.save()
        connection.close()
        raise ZeroDivisionError


def test_a_lock_that_is_lost_rolls_its_transaction_back(order: Order) -> None:
    def body() -> None:
        with transaction.atomic(), locks.lock(order, until="commit") as lease:
            Order.objects.filter(pk=order.pk).update(total=7)
            lost = threading.Event()
            lease.on_lost(lambda _: lost.set())
            locks.break_lock(name_of(order), reason="a test")
            assert lost.wait(30)

    with pytest.raises(LockLost):
        body()
    order.refresh_from_db()
    assert order.total == 0


# Either the renewer finds the thread gone, or the lease is dropped with the thread's connections
# and warns of it: both release.
@pytest.mark.filterwarnings("ignore:a lease on .* was dropped without release:ResourceWarning")
def test_a_thread_that_ends_in_its_transaction_leaves_no_lock(order: Order) -> None:
    def body() -> None:
        connections["other"].set_autocommit(True)
        transaction.atomic("other").__enter__()
        with locks.lock(order, until="commit"):
            pass

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    wait_until("the release", lambda: free(name_of(order)), 60)


def test_a_guard_refuses_a_stale_holder_in_its_transaction(order: Order) -> None:
    with locks.lock(order) as stale:
        old = stale.fence
    with locks.lock(order) as lease, transaction.atomic():
        guard(lease)
    with pytest.raises(StaleFence), transaction.atomic():
        guard(old)
    with pytest.raises(ValueError, match="resource="), transaction.atomic():
        guard(str(old))
    with pytest.raises(StaleFence), transaction.atomic():
        guard(str(old), resource=old.name)


def test_a_guard_runs_on_the_connection_of_the_block(order: Order) -> None:
    with locks.lock(order) as lease, transaction.atomic("other"):
        guard(lease, using="other")
        with pytest.raises(TransactionManagementError, match="atomic"):
            guard(lease)
    with connections["other"].cursor() as cursor:
        cursor.execute("SELECT count(*) FROM holdfast_fence")
        assert cursor.fetchone() == (1,)
    assert "holdfast_fence" not in connection.introspection.table_names()


def test_a_guard_in_an_inner_block_is_refused(order: Order) -> None:
    with locks.lock(order) as lease, transaction.atomic():
        with transaction.atomic(savepoint=False):
            guard(lease)
        with transaction.atomic():
            with pytest.raises(Unsupported, match="inner atomic"):
                guard(lease)
            guard(lease, savepoint=True)


def test_locks_need_no_connection_of_django(order: Order) -> None:
    with CaptureQueriesContext(connection) as queries, locks.lock(order):
        pass
    assert len(queries) == 0


class InsideTestCase(TestCase):
    """Django's own TestCase opens transactions, which are not the program's."""

    __test__ = False  # it is run by a test, below
    databases = frozenset({"default"})  # type: ignore[assignment]

    def runTest(self) -> None:  # noqa: N802
        order = Order.objects.create()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with locks.lock(order), transaction.atomic():
                pass
            with locks.lock(order):
                pass
            with locks.lock(order, until="commit"):
                pass
        assert free(name_of(order))
        with locks.lock(order) as lease, transaction.atomic():
            guard(lease)
        with self.captureOnCommitCallbacks(execute=True), transaction.atomic():
            with locks.lock(order, until="commit"):
                pass
            assert not free(name_of(order))
        run_now = self.captureOnCommitCallbacks(execute=True)
        with transaction.atomic(), run_now, locks.lock(order, until="commit"):
            pass
        assert free(name_of(order))
        seen: list[int] = []
        with transaction.atomic():
            transaction.on_commit(lambda: seen.append(1))
            with self.captureOnCommitCallbacks(execute=True), locks.lock(order, until="commit"):
                pass
            assert free(name_of(order))
            assert not seen, "it was there before those that are captured"
        with transaction.atomic(), locks.lock("kept", until="commit"):
            pass


def test_inside_a_test_case() -> None:
    result = InsideTestCase().defaultTestResult()
    suite = InsideTestCase()
    type(suite).setUpClass()
    try:
        suite(result)
        assert result.wasSuccessful(), result.errors + result.failures
        assert free("kept"), "the rollback of the test releases it"
    finally:
        type(suite).doClassCleanups()


def told(**settings: Any) -> list[str | None]:
    with override_settings(DEBUG=settings.pop("DEBUG", True), HOLDFAST=settings):
        return [message.id for message in checks.run_checks(tags=["holdfast"])]


def test_checks_of_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["manage.py", "migrate"])
    monkeypatch.delenv("HOLDFAST_URL", raising=False)
    assert told() == ["holdfast.E001"]
    assert told(URL="memory://", Url="x", TIMEOT=1) == ["holdfast.E002", "holdfast.E002"]
    assert told(URL="redis+nosuch://host") == ["holdfast.E003"]
    assert told(URL="memory://", TTL=-1) == ["holdfast.E003"]
    assert told(URL="memory://", REQUIRE=["CROSS_HOST"]) == ["holdfast.E003"]
    assert told(URL="memory://") == []
    assert told(URL="memory://", DEBUG=False) == ["holdfast.W001"]
    assert told(URL="local", DEBUG=False) == ["holdfast.W001"]
    assert told(URL="redis://127.0.0.1:1", DEBUG=False) == []
    monkeypatch.setenv("HOLDFAST_URL", "memory://")
    assert told() == []
    with override_settings(HOLDFAST="memory://"):
        assert [m.id for m in checks.run_checks(tags=["holdfast"])] == ["holdfast.E002"]
    monkeypatch.setattr(sys, "argv", ["manage.py", "test"])
    assert told(URL="memory://", DEBUG=False) == []


def test_the_store_is_contacted_for_a_deployment_or_with_databases_only() -> None:
    with override_settings(HOLDFAST={"URL": "redis://:hunter2@127.0.0.1:1"}):
        assert checks.run_checks(tags=["holdfast"]) == []
        deployed = checks.run_checks(tags=["holdfast"], include_deployment_checks=True)
        with_database = checks.run_checks(tags=["database"], databases=["default"])
    for found in (deployed, with_database):
        assert [m.id for m in found] == ["holdfast.W002"]
        assert "hunter2" not in str(found)


def test_all_arguments_of_a_client_are_settings_and_in_the_guide() -> None:
    guide = (TESTS.parent / "docs" / "guides" / "django.md").read_text()
    listed = re.search(r"in capitals: (.*?)\. ", guide)
    assert listed is not None
    assert re.findall(r"`(\w+)`", listed[1]) == list(settings.KEYS)


def test_observers_of_the_settings_are_told() -> None:
    told: list[str] = []

    class Told(observe.Observer):
        def acquired(self, event: observe.Acquired) -> None:
            told.append(event.name)

    with (
        override_settings(HOLDFAST={"URL": "memory://", "OBSERVERS": [Told()]}),
        locks.lock("a"),
    ):
        assert told == ["a"]


def test_wrong_settings_are_told_at_first_use() -> None:
    with (
        override_settings(HOLDFAST={"URL": "memory://", "TIMEOT": 1}),
        pytest.raises(ImproperlyConfigured, match="did you mean 'TIMEOUT'"),
    ):
        locks.lock("a").__enter__()


def test_an_overridden_setting_has_a_client_of_its_own() -> None:
    before = locks.client
    with override_settings(HOLDFAST={"URL": "memory://another"}):
        assert locks.client is not before
    assert locks.client is not before


def test_a_locked_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from integrations.django_site.shop.management.commands import bill
    from integrations.journal import Journal

    monkeypatch.setattr(bill, "journal", Journal(str(tmp_path / "journal")))
    management.call_command("bill", "may")
    with holdfast.connect("memory://django") as other, other.lock("bill:may", note="on web-3"):
        with pytest.raises(CommandError, match="on web-3") as busy:
            management.call_command("bill", "may")
        assert busy.value.returncode == 75
        management.call_command("bill", "may", skip=True)
        management.call_command("bill", "june")
    assert len(bill.journal.read("bill")) == 2


def manage(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """``manage.py`` in a process of its own."""
    path = os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(TESTS)])
    variables = dict([*os.environ.items(), SETTINGS_MODULE, ("PYTHONPATH", path)], **environment)
    return subprocess.run(
        [sys.executable, "-m", "django", *words], env=variables, capture_output=True, text=True
    )


def test_the_command_line_on_the_store_of_the_project(tmp_path: Path) -> None:
    url = f"sqlite://{tmp_path}/locks.db"
    with holdfast.connect(url, namespace="shop") as other:
        lease = other.lock("shop.order:7", note="a test").acquire()
        assert lease is not None
        words = "--settings=integrations.django_site.settings"
        listed = manage("holdfast", "ls", words, HOLDFAST_URL=url, NAMESPACE="shop")
        assert "shop.order:7" in listed.stdout
        shown = manage("holdfast", "show", "shop.order:7", HOLDFAST_URL=url, NAMESPACE="shop")
        assert "a test" in shown.stdout
        why = manage("holdfast", "why", "shop.order:7", HOLDFAST_URL=url, NAMESPACE="shop")
        assert "'shop.order:7' is held by " in why.stdout
        broken = manage(
            *("holdfast", "break", "shop.order:7", "--reason", "stuck"),
            HOLDFAST_URL=url,
            NAMESPACE="shop",
        )
        assert "stuck" in broken.stdout, broken.stderr
        lease.release()
    missing = manage("holdfast", "show", "nothing", HOLDFAST_URL=url, NAMESPACE="shop")
    assert missing.returncode == 1
    no_store = manage("holdfast", "ls", HOLDFAST_URL="", HOLDFAST_URL_FILE="")
    assert no_store.returncode == 78, "never the store of this machine by accident"
    assert "no store" in no_store.stderr


def test_django_is_named_if_it_is_missing() -> None:
    code = "import sys; sys.modules['django'] = None; import holdfast.integrations.django"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "pip install 'holdfast[django]'" in done.stderr
