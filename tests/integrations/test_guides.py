"""The programs of the guides run as they are printed, on several workers."""

from __future__ import annotations

import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

import holdfast
from integrations.web import serving
from servers.process import wait_until
from servers.redis import RedisServer

GUIDES = Path(__file__).parents[2] / "docs" / "guides"
PRINTED_URL = "redis://localhost:6379/0"
SECONDS = 90.0


@pytest.fixture
def store() -> Iterator[str]:
    """A server for each program: they have no namespace of their own."""
    with RedisServer() as server:
        yield server.url


def written(page: str, folder: Path, store: str) -> None:
    """Writes the ``main.py`` of a page, with the URL of the test's server."""
    text = (GUIDES / page).read_text()
    found = re.search(r"^`main\.py`:\n\n```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert found is not None
    assert found[1].count(PRINTED_URL) == 1
    (folder / "main.py").write_text(found[1].replace(PRINTED_URL, store))


def printed(page: str, path: str) -> str:
    """The block of Python that a page prints for a file, whatever it says about its place."""
    text = (GUIDES / page).read_text()
    place = rf"^`{re.escape(path)}`[^\n]*:\n\n```python\n(.*?)^```"
    found = re.search(place, text, re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1]


def typed(folder: Path, line: str) -> str:
    """What a line of the shell prints, in the environment of the tests."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        ["bash", "-ec", line],
        cwd=folder,
        env={**os.environ, "PATH": path, "HOLDFAST_URL": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def reached(client: httpx.Client) -> bool:
    """Whether the application answers at all: these have no page at the root."""
    try:
        return client.get("/docs").is_success
    except httpx.TransportError:
        return False


def test_web_workers(store: str, tmp_path: Path) -> None:
    written("web-workers.md", tmp_path, store)
    with serving("main:app", store, tmp_path, wait=False) as running:
        wait_until("the application", lambda: reached(running.http), SECONDS)
        answer = running.http.post("/orders/7/pay").raise_for_status().json()
        assert answer["order"] == 7
        assert answer["token"] > 0
        wait_until("a sweep", lambda: " sweeps" in running.log.read_text(), SECONDS)
        assert running.log.read_text().count(" sweeps") == 1


def test_idempotency(store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written("idempotency.md", tmp_path, store)
    monkeypatch.chdir(tmp_path)
    headers = {"Authorization": "ann", "Idempotency-Key": "8e03978e"}
    with serving("main:app", store, tmp_path, wait=False) as running:
        wait_until("the application", lambda: reached(running.http), SECONDS)

        def pay(_: int) -> httpx.Response:
            return running.http.post("/payments", params={"amount": 10}, headers=headers)

        with ThreadPoolExecutor(8) as pool:
            answers = Counter(answer.text for answer in pool.map(pay, range(8)))
        assert '{"payment":1,"amount":10}' in answers
        replay = pay(0)
        assert replay.headers["idempotency-replayed"] == "true"
        assert replay.json() == {"payment": 1, "amount": 10}
        del headers["Idempotency-Key"]
        assert pay(0).status_code == 400
        headers = {"Idempotency-Key": "8e03978e"}
        assert pay(0).status_code == 401
        headers["Authorization"] = "ann"
        other = running.http.post("/payments", params={"amount": 11}, headers=headers)
        assert other.status_code == 422


def test_django(store: str, tmp_path: Path) -> None:
    typed(tmp_path, "django-admin startproject shop . && python manage.py startapp orders")
    settings = printed("django.md", "shop/settings.py")
    assert settings.count(PRINTED_URL) == 1
    with (tmp_path / "shop" / "settings.py").open("a") as file:
        file.write(settings.replace(PRINTED_URL, store))
    for path in ("orders/models.py", "orders/views.py", "shop/urls.py"):
        (tmp_path / path).write_text(printed("django.md", path))
    typed(tmp_path, "python manage.py makemigrations orders && python manage.py migrate")
    typed(
        tmp_path,
        'python manage.py shell -c "from orders.models import Order; Order.objects.create()"',
    )
    place = ("-b", "127.0.0.1:{port}", "--no-control-socket", "--chdir", str(tmp_path))
    command = ("gunicorn", "{app}", "-w", "{workers}", *place)
    with serving("shop.wsgi", store, tmp_path, command=command, wait=False) as running:
        wait_until("the application", lambda: answered(running.http), SECONDS)

        def pay(_: int) -> int:
            answer = running.http.post("/orders/1/pay").raise_for_status().json()
            return int(answer["payments"])

        with ThreadPoolExecutor(4) as pool:
            assert sorted(pool.map(pay, range(12))) == list(range(1, 13))
    assert typed(tmp_path, "python manage.py holdfast ls") == ""


def answered(client: httpx.Client) -> bool:
    """Whether the application answers, be it that there is no such page."""
    try:
        return client.get("/").status_code == 404
    except httpx.TransportError:
        return False


def test_migrations(store: str, tmp_path: Path) -> None:
    """Ten at once, as printed, on a file of SQLite."""
    page = (GUIDES / "migrations.md").read_text()
    for line in re.findall(r"^\$ ((?:alembic|sed) .*)$", page, re.MULTILINE):
        typed(tmp_path, line)
    environment = tmp_path / "migrations" / "env.py"
    text, rest = environment.read_text().split("def run_migrations_online")
    function = printed("migrations.md", "migrations/env.py")
    assert function.count(PRINTED_URL) == 1
    rest = "if context.is_offline_mode" + rest.split("if context.is_offline_mode")[1]
    environment.write_text(f"{text}{function.replace(PRINTED_URL, store)}\n\n{rest}")
    [script] = (tmp_path / "migrations" / "versions").glob("*.py")
    created = "op.execute('CREATE TABLE t (a)'); op.execute('INSERT INTO t VALUES (1)')"
    script.write_text(script.read_text().replace("    pass", f"    {created}", 1))
    [line] = re.findall(r"^\$ (for pod in .*)$", page, re.MULTILINE)
    typed(tmp_path, f"{line}; alembic current | grep head")
    connection = sqlite3.connect(tmp_path / "app.db")
    assert connection.execute("SELECT a FROM t").fetchall() == [(1,)]
    connection.close()


def test_apscheduler(store: str, tmp_path: Path) -> None:
    """Three processes, as printed; a job that is due each second, so that the test is short."""
    program = printed("apscheduler.md", "jobs.py")
    assert program.count(PRINTED_URL) == program.count("*/10") == 1
    (tmp_path / "jobs.py").write_text(program.replace(PRINTED_URL, store).replace("*/10", "*"))
    [line] = re.findall(
        r"^\$ (for process in .*)$", (GUIDES / "apscheduler.md").read_text(), re.MULTILINE
    )
    output = tmp_path / "output"
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    with output.open("w") as file:
        shell = subprocess.Popen(
            ["bash", "-ec", line],
            cwd=tmp_path,
            env={**os.environ, "PATH": path, "HOLDFAST_URL": ""},
            stdout=file,
            start_new_session=True,
        )
    try:
        wait_until("a run", lambda: "reports" in output.read_text(), SECONDS)
        began, before = time.time(), output.read_text().count("reports")
        wait_until("more", lambda: output.read_text().count("reports") > before + 8, SECONDS)
        due = time.time() - began + 1  # without the lock it would be three times as many
        assert output.read_text().count("reports") - before <= due + 1
    finally:
        os.killpg(shell.pid, signal.SIGKILL)
        shell.wait()


def test_dashboard(store: str, tmp_path: Path) -> None:
    written("dashboard.md", tmp_path, store)
    with serving("main:app", store, tmp_path, wait=False) as running:
        wait_until("the application", lambda: reached(running.http), SECONDS)
        ann, bob = {"x-forwarded-user": "ann"}, {"x-forwarded-user": "bob"}
        with holdfast.connect(store) as locks, locks.lock("order:42"):
            assert running.http.get("/locks/data").status_code == 403
            for user, can_break in ((ann, True), (bob, False)):
                shown = running.http.get("/locks/data", headers=user).json()
                assert [row["name"] for row in shown["rows"]] == ["order:42"]
                assert shown["can_break"] is can_break
        assert "page.js" in running.http.get("/locks/").text
        assert running.http.get("/locks", follow_redirects=True).url.path == "/locks/"
