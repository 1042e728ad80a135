"""The programs of the guides run as they are printed, on several workers."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

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
        assert running.http.post("/payments", params={"amount": 10}).status_code == 400
        other = running.http.post("/payments", params={"amount": 11}, headers=headers)
        assert other.status_code == 422
