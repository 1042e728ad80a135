# ruff: noqa: ASYNC110 - tests wait for conditions that have no event
"""The dashboard over HTTP: who may look, who may break, and what others may not do."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.routing import Mount

import holdfast
from holdfast import AsyncLease, AsyncLocks, dashboard
from holdfast.dashboard import web
from holdfast.dashboard.reader import Reader
from holdfast.dashboard.view import PAGE_ROWS
from holdfast.dashboard.watch import INTERVAL_SECONDS
from servers.ports import free_port, give_back
from servers.process import wait_until

TOKEN = "a token of many letters"
HOST = "dash.test"
ORIGIN = {"Origin": f"http://{HOST}", "Sec-Fetch-Site": "same-origin"}
HOSTILE = "</script><img src=x onerror=alert(1)>\u202e\u2028'\"&"


def allow(request: Request, action: str) -> bool:
    return True


def run(test: Callable[[AsyncLocks], Awaitable[None]]) -> None:
    """Runs a test with a client to a store of its own."""

    async def main() -> None:
        async with holdfast.connect_async("memory://") as locks:
            await test(locks)

    asyncio.run(main())


@asynccontextmanager
async def browser(app: Any, host: str = HOST) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url=f"http://{host}") as client:
        yield client


async def data_of(client: httpx.AsyncClient, path: str = "", **query: Any) -> Any:
    answer = await client.get(f"{path}/data", params=query)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def shown(client: httpx.AsyncClient, condition: Callable[[Any], object], **query: Any) -> Any:
    """What is shown as soon as the condition holds for it."""
    async with asyncio.timeout(30):
        while not condition(data := await data_of(client, **query)):
            await asyncio.sleep(0.05)
    return data


async def sent(client: httpx.AsyncClient, path: str, body: Any, **headers: str) -> httpx.Response:
    """A request as the page itself sends it, but for these headers."""
    found = {**ORIGIN, "Content-Type": "application/json", **headers}
    return await client.post(
        path, content=json.dumps(body), headers={k: v for k, v in found.items() if v}
    )


def test_holders_and_lines_are_shown() -> None:
    async def test(locks: AsyncLocks) -> None:
        async with locks.lock("order:42", note="charging") as lease:
            waiting = asyncio.create_task(locks.lock("order:42", timeout=60).acquire())
            async with browser(dashboard.app(locks, authorize=allow)) as client:
                data = await shown(client, lambda data: data["totals"]["waiting"] == 1)
                [row] = (await data_of(client, open="order:42"))["rows"]
                tree = (await data_of(client, tree="1"))["tree"]
            waiting.cancel()
        assert (data["totals"]["names"], data["totals"]["held"]) == (1, 1)
        assert row["holders"][0]["token"] == str(lease.token)
        assert row["holders"][0]["note"] == "charging"
        assert (row["open"], row["waiting"]) == (True, 1)
        assert [line["what"] for line in tree] == ["name", "holder", "waiter"]
        assert data["check"]["findings"]
        assert data["store"] == "memory://"

    run(test)


def test_a_blocking_client_is_read_too() -> None:
    async def main() -> None:
        with holdfast.connect("memory://") as locks, locks.lock("a"):
            async with browser(dashboard.app(locks, authorize=allow)) as client:
                assert (await data_of(client))["totals"]["names"] == 1

    asyncio.run(main())


def test_hostile_names_and_notes_are_escaped_and_end_no_event() -> None:
    async def test(locks: AsyncLocks) -> None:
        app = dashboard.app(locks, authorize=allow)
        async with locks.lock(HOSTILE, note=HOSTILE), browser(app) as client:
            text = (await client.get("/data", params={"open": HOSTILE})).text
        assert text.isascii()
        assert "\n" not in text
        [row] = json.loads(text)["rows"]
        assert row["name"] == HOSTILE
        for said in (row["shown"], row["holders"][0]["note"]):
            assert "\u202e" not in said
            assert r"\u202e" in said

    run(test)


def test_many_names_are_paged_sorted_and_filtered() -> None:
    async def test(locks: AsyncLocks) -> None:
        async with AsyncExitStack() as held:
            for n in range(120):
                await held.enter_async_context(locks.lock(f"bulk:{n:03}"))
            client = await held.enter_async_context(browser(dashboard.app(locks, authorize=allow)))
            data = await data_of(client, sort="name", page="3")
            assert [row["name"] for row in data["rows"]][:1] == ["bulk:100"]
            assert (data["page"], data["pages"], len(data["rows"])) == (3, 3, 120 - 2 * PAGE_ROWS)
            assert (await data_of(client, page="99"))["page"] == 3
            data = await data_of(client, filter="BULK:11", sort="nonsense", page="-1")
            assert (data["totals"]["matching"], data["sort"], data["page"]) == (10, "wait", 1)

    run(test)


def test_leaders_are_shown_with_their_standbys() -> None:
    async def test(locks: AsyncLocks) -> None:
        async with locks.election("leader:mail", note="v1").campaign():
            waiting = asyncio.create_task(locks.election("leader:mail").campaign().acquire())
            async with browser(dashboard.app(locks, authorize=allow)) as client:
                data = await shown(client, lambda data: data["totals"]["waiting"])
            waiting.cancel()
        [leader] = data["leaders"]
        assert (leader["shown"], leader["standby"]) == ("leader:mail", 1)
        assert leader["leader"]["note"] == "v1"
        assert data["rows"][0]["wait"] is None

    run(test)


def test_events_come_with_each_reading_and_all_viewers_share_it() -> None:
    async def test(locks: AsyncLocks) -> None:
        app = dashboard.app(locks, authorize=allow)
        async with (
            server(app) as url,
            httpx.AsyncClient(base_url=url) as client,
            client.stream("GET", "/events") as one,
            client.stream("GET", "/events") as two,
        ):
            first, second = events_of(one), events_of(two)
            assert (await anext(first))["totals"]["names"] == 0
            async with locks.lock("new"):
                while not (data := await anext(first))["rows"]:
                    pass
                while not (await anext(second))["rows"]:
                    pass
            assert data["rows"][0]["name"] == "new"
            assert data["age"] < 2 * INTERVAL_SECONDS
        assert one.headers["content-type"].startswith("text/event-stream")

    run(test)


async def events_of(answer: httpx.Response) -> AsyncIterator[Any]:
    async for line in answer.aiter_lines():
        if line.startswith("data: "):
            yield json.loads(line.removeprefix("data: "))


@asynccontextmanager
async def server(app: Any) -> AsyncIterator[str]:
    """A real server on the test's own loop: a stream can't be read from an answer in memory."""
    import uvicorn

    config = uvicorn.Config(app, port=0, log_level="error", timeout_graceful_shutdown=1)
    serving = uvicorn.Server(config)
    task = asyncio.create_task(serving.serve())
    async with asyncio.timeout(30):
        while not serving.started:
            await asyncio.sleep(0.01)
    port = serving.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        app.state.end_streams()
        serving.should_exit = True
        await task


def test_the_first_answer_after_a_pause_is_not_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.dashboard.watch.STALE_SECONDS", 0.01)

    async def test(locks: AsyncLocks) -> None:
        app = dashboard.app(locks, authorize=allow)
        async with browser(app) as client:
            async with app.router.lifespan_context(app):  # its end is the end of the reading
                assert (await data_of(client))["totals"]["names"] == 0
            await asyncio.sleep(0.02)
            async with locks.lock("new"):
                assert (await data_of(client))["totals"]["names"] == 1

    run(test)


def test_a_viewer_that_takes_nothing_in_gives_its_place_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(web, "SLOW_SECONDS", 0.05)
    monkeypatch.setattr(web, "MOST_VIEWERS", 1)
    statuses = []

    async def never() -> Any:
        await asyncio.Event().wait()

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])
        else:
            await never()

    async def test(locks: AsyncLocks) -> None:
        app = dashboard.app(locks, authorize=allow)
        scope = {"type": "http", "method": "GET", "path": "/events", "query_string": b""}
        for _ in range(2):
            async with asyncio.timeout(10):  # less than STREAM_SECONDS
                await app(scope | {"headers": [(b"host", HOST.encode())]}, never, send)
        assert statuses == [200, 200]

    run(test)


MOUNTED = """
import sys, uvicorn, holdfast
from holdfast import dashboard
from starlette.applications import Starlette
from starlette.routing import Mount

locks = getattr(holdfast, sys.argv[1])("memory://")
page = dashboard.app(locks, authorize=lambda request, action: True)
uvicorn.run(Starlette(routes=[Mount("/locks", page)]), port=int(sys.argv[2]), log_level="error")
"""


@pytest.mark.parametrize("connect", ["connect", "connect_async"])
def test_uvicorn_ends_soon_with_a_mounted_dashboard_and_a_viewer(connect: str) -> None:
    """It waits for its streams, and has no limit for that unless it is given one."""
    port = free_port()
    process = subprocess.Popen([sys.executable, "-c", MOUNTED, connect, str(port)])
    try:
        with httpx.Client(timeout=60) as client:
            events = f"http://127.0.0.1:{port}/locks/events"
            wait_until("uvicorn", lambda: answers(client, events.replace("events", "data")), 60)
            with client.stream("GET", events) as stream:
                lines = stream.iter_lines()  # a generator that is dropped ends the stream
                next(lines)
                process.send_signal(signal.SIGINT)
                process.wait(web.STREAM_SECONDS - 10)
    finally:
        process.kill()
        process.wait()
        give_back(port)


def answers(client: httpx.Client, url: str) -> bool:
    try:
        return client.get(url).is_success
    except httpx.TransportError:
        return False


class CountingLocks(AsyncLocks):
    """Counts how often the store is read."""

    readings = 0

    async def list(self, prefix: str = "", *, limit: int = 100) -> Any:
        self.readings += 1
        return await super().list(prefix, limit=limit)


def test_the_store_is_read_once_for_all_viewers() -> None:
    async def main() -> None:
        async with (
            CountingLocks("memory://") as locks,
            browser(dashboard.app(locks, authorize=allow)) as client,
        ):
            began = asyncio.get_running_loop().time()
            await asyncio.gather(*(data_of(client, sort=sort) for sort in ["name", "wait"] * 20))
            took = asyncio.get_running_loop().time() - began
        assert locks.readings <= 1 + took / INTERVAL_SECONDS

    asyncio.run(main())


def test_reading_ends_after_the_last_viewer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.dashboard.reader.IDLE_SECONDS", 0.0)
    monkeypatch.setattr("holdfast.dashboard.watch.INTERVAL_SECONDS", 0.0)

    async def test(locks: AsyncLocks) -> None:
        def tasks() -> int:
            return sum(task.get_name() == "holdfast-dashboard" for task in asyncio.all_tasks())

        reader = Reader(locks, always=False)
        reader.viewers = 1
        reader.start()
        await reader.news(30)
        reader.start()
        assert tasks() == 1
        reader.viewers = 0
        async with asyncio.timeout(30):
            while tasks():
                await asyncio.sleep(0.01)

    run(test)


def test_a_store_that_fails_is_told_with_the_age_of_what_is_shown() -> None:
    class Failing(CountingLocks):
        async def list(self, prefix: str = "", *, limit: int = 100) -> Any:
            if self.readings:
                raise holdfast.BackendUnavailable("it is away")
            return await super().list(prefix, limit=limit)

    async def main() -> None:
        async with (
            Failing("memory://") as locks,
            locks.lock("a"),
            browser(dashboard.app(locks, authorize=allow)) as client,
        ):
            data = await shown(client, lambda data: data["error"])
        assert data["error"] == "it is away"
        assert data["totals"]["names"] == 1
        assert data["age"] >= 1
        assert [change["what"] for change in data["changes"]] == ["unreachable"]

    asyncio.run(main())


def test_without_authorize_or_token_there_is_no_dashboard() -> None:
    with holdfast.connect("memory://") as locks:
        settings: list[dict[str, Any]] = [{}, {"authorize": allow, "token": TOKEN}]
        for given in settings:
            with pytest.raises(ValueError, match=r"needs either authorize=, .* or token="):
                dashboard.app(locks, **given)
        with pytest.raises(ValueError, match="at least 16 characters"):
            dashboard.app(locks, token="short")
        with pytest.raises(TypeError, match="hosts is a list"):
            dashboard.app(locks, token=TOKEN, hosts="example.com")


def test_authorize_decides_for_each_action() -> None:
    asked = []

    async def authorize(request: Request, action: str) -> bool:
        asked.append((request.url.path, action))
        return action == "view" and request.headers.get("x-user") == "ann"

    async def test(locks: AsyncLocks) -> None:
        lease = await locks.lock("a").acquire()
        assert lease is not None
        app = dashboard.app(locks, authorize=authorize, allow_break=True)
        async with browser(app) as client:
            assert (await client.get("/data")).status_code == 403
            client.headers["x-user"] = "ann"
            assert (await data_of(client))["can_break"] is False
            body = {"name": "a", "tokens": [str(lease.token)], "reason": "x"}
            refused = await sent(client, "/break", body)
            assert refused.status_code == 403
            assert refused.json() == {"error": "you may not break here"}
        assert lease.held
        await lease.release()
        assert ("/break", "break") in asked

    run(test)


def test_a_token_becomes_a_cookie_that_is_not_the_token() -> None:
    async def test(locks: AsyncLocks) -> None:
        async with browser(dashboard.app(locks, token=TOKEN)) as client:
            for path in ("/data", "/events"):
                answer = await client.get(path)
                assert (answer.status_code, "token" in answer.text) == (401, True)
            wrong = await sent(client, "/login", {"token": TOKEN + "x"})
            assert wrong.status_code == 403
            assert "set-cookie" not in wrong.headers
            answer = await sent(client, "/login", {"token": TOKEN})
            cookie = answer.headers["set-cookie"]
            assert all(word in cookie for word in ("HttpOnly", "SameSite=strict", "Path=/"))
            assert TOKEN not in cookie
            assert (await data_of(client))["can_log_out"] is True
            await sent(client, "/logout", {})
            assert (await client.get("/data")).status_code == 401

    run(test)


def test_a_program_sends_the_token_in_a_header() -> None:
    async def test(locks: AsyncLocks) -> None:
        async with browser(dashboard.app(locks, token=TOKEN)) as client:
            for text, status in (
                (f"Bearer {TOKEN}", 200),
                ("Bearer x", 401),
                (f"Basic {TOKEN}", 401),
            ):
                answer = await client.get("/data", headers={"Authorization": text})
                assert answer.status_code == status

    run(test)


@pytest.mark.parametrize("session", ["", "x", "9999999999.", "9999999999.00", "٣.x", "1.é"])
def test_forged_sessions_are_not_known(session: str) -> None:
    assert not web.Token(TOKEN).knows(session, 1.0)


def test_sessions_end_and_belong_to_one_token() -> None:
    token = web.Token(TOKEN)
    session = token.session(1000.0)
    assert token.knows(session, 1000.0 + web.SESSION_SECONDS - 1)
    assert not token.knows(session, 1000.0 + web.SESSION_SECONDS)
    assert not web.Token(TOKEN + "!").knows(session, 1000.0)


async def break_with(
    locks: AsyncLocks, allow_break: bool = True, body: Any = None, **headers: Any
) -> tuple[int, str, bool]:
    """Tries to break a hold as the page does, but for these headers: the status, what is said, and
    whether the hold still is."""
    lease = await locks.lock("a").acquire()
    assert lease is not None
    app = dashboard.app(locks, authorize=allow, allow_break=allow_break)
    async with browser(app) as client:
        usual = {"name": "a", "tokens": [str(lease.token)], "reason": "host is gone"}
        answer = await sent(client, "/break", usual if body is None else body(usual), **headers)
        held = bool((await locks.inspect("a")).holders)
        if answer.is_success:
            data = await data_of(client)
            assert [change["what"] for change in data["changes"]] == ["broken"]
            assert "host is gone" in data["changes"][0]["detail"]
            assert data["counts"]["broken"] == 1
    said = answer.json().get("error", "")
    await lease.release()
    return answer.status_code, said, held


def test_a_break_ends_the_hold_and_is_told() -> None:
    async def test(locks: AsyncLocks) -> None:
        assert await break_with(locks) == (200, "", False)

    run(test)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Origin": "http://evil.test"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://["}, 403),
        ({"Origin": ""}, 403),
        ({"Origin": f"http://{HOST}:9000"}, 403),
        ({"Origin": f"http://{HOST}.evil.test"}, 403),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Sec-Fetch-Site": "same-site"}, 403),
        ({"Content-Type": "text/plain"}, 415),
        ({"Content-Type": "application/x-www-form-urlencoded"}, 415),
    ],
)
def test_a_break_from_another_page_is_refused(headers: dict[str, Any], status: int) -> None:
    async def test(locks: AsyncLocks) -> None:
        found, said, held = await break_with(locks, **headers)
        assert (found, held) == (status, True)
        assert said

    run(test)


@pytest.mark.parametrize(
    ("change", "status", "word"),
    [
        (lambda body: body | {"reason": "  "}, 422, "needs a reason"),
        (lambda body: body | {"reason": 7}, 422, "reason is missing"),
        (lambda body: {}, 422, "name is missing"),
        (lambda body: [], 422, "JSON object"),
        (lambda body: body | {"tokens": ["1"]}, 409, "another holder now"),
        (lambda body: body | {"tokens": [1]}, 422, "texts of digits"),
        (lambda body: body | {"tokens": []}, 409, "another holder now"),
        (lambda body: body | {"name": "free"}, 409, "nobody holds 'free' any more"),
        (lambda body: body | {"name": "\x00"}, 409, "control characters"),
        (lambda body: body | {"reason": "x" * 201}, 422, "at most 200 characters"),
        (lambda body: body | {"tokens": [str(10**18 + n) for n in range(5000)]}, 409, "another"),
        (lambda body: body | {"reason": "x" * web.LONGEST_BREAK}, 413, "at most"),
    ],
)
def test_a_break_that_is_not_meant_so_is_refused(change: Any, status: int, word: str) -> None:
    async def test(locks: AsyncLocks) -> None:
        found, said, held = await break_with(locks, body=change)
        assert (found, held) == (status, True)
        assert word in said

    run(test)


async def acquired(locks: AsyncLocks, name: str) -> AsyncLease:
    lease = await locks.lock(name, timeout=60).acquire()
    assert lease is not None
    return lease


class LateLocks(AsyncLocks):
    """The holder changes after it was looked at."""

    leases: list[AsyncLease]

    async def break_lock(self, name: str, *, reason: str) -> int | None:
        await self.leases[0].release()
        self.leases.append(await acquired(self, name))
        return await super().break_lock(name, reason=reason)


def test_a_break_that_came_too_late_says_whose_hold_was_ended() -> None:
    async def main() -> None:
        async with LateLocks("memory://") as locks:
            locks.leases = [await acquired(locks, "a")]
            app = dashboard.app(locks, authorize=allow, allow_break=True)
            async with browser(app) as client:
                body = {"name": "a", "tokens": [str(locks.leases[0].token)], "reason": "x"}
                answer = await sent(client, "/break", body)
                assert (await data_of(client))["counts"]["broken"] == 0
            assert answer.status_code == 409
            assert f"the hold with token {locks.leases[1].token} was ended" in answer.text
            await locks.leases[1].release()

    asyncio.run(main())


def test_nothing_is_broken_unless_that_is_allowed() -> None:
    async def test(locks: AsyncLocks) -> None:
        status, said, held = await break_with(locks, allow_break=False)
        assert (status, held) == (403, True)
        assert "--allow-break" in said

    run(test)


def test_a_program_breaks_with_the_token_in_a_header() -> None:
    async def test(locks: AsyncLocks) -> None:
        lease = await locks.lock("a").acquire()
        assert lease is not None
        async with browser(dashboard.app(locks, token=TOKEN, allow_break=True)) as client:
            body = {"name": "a", "tokens": [str(lease.token)], "reason": "x"}
            assert (await client.post("/break", json=body)).status_code == 401
            header = {"Authorization": f"Bearer {TOKEN}"}
            answer = await client.post("/break", json=body, headers=header)
        assert answer.json() == {"token": str(lease.token)}
        await lease.release()

    run(test)


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:8077", 200),
        ("[::1]:8077", 200),
        ("localhost:8077", 200),
        ("10.1.2.3", 200),
        ("ops.example.com", 200),
        ("OPS.example.com:443", 200),
        ("evil.test", 421),
        ("127.0.0.1.evil.test", 421),
        ("localhost.evil.test", 421),
        ("x:y:z", 421),
        ("", 421),
    ],
)
def test_foreign_host_names_are_refused(host: str, status: int) -> None:
    """A page of an attacker whose name leads to this machine reads nothing (DNS rebinding)."""

    async def test(locks: AsyncLocks) -> None:
        app = dashboard.app(locks, authorize=allow, hosts=["Ops.example.com"])
        async with browser(app) as client:
            for path in ("/", "/data"):
                answer = await client.get(path, headers={"Host": host})
                assert answer.status_code == status
                assert "Content-Security-Policy" in answer.headers

    run(test)


def test_a_login_with_an_origin_that_is_none_is_refused() -> None:
    async def test(locks: AsyncLocks) -> None:
        async with browser(dashboard.app(locks, token=TOKEN)) as client:
            answer = await sent(client, "/login", {"token": TOKEN}, Origin="http://[")
            assert answer.status_code == 403

    run(test)


@pytest.mark.parametrize("path", ["/data", "/events"])
@pytest.mark.parametrize(("site", "status"), [("cross-site", 403), ("none", 200)])
def test_pages_of_other_sites_can_not_ask_for_data(path: str, site: str, status: int) -> None:
    """``none``: the address was typed."""

    async def test(locks: AsyncLocks) -> None:
        async with (
            server(dashboard.app(locks, authorize=allow)) as url,
            httpx.AsyncClient() as client,
        ):
            headers = {"Sec-Fetch-Site": site}
            async with client.stream("GET", f"{url}{path}", headers=headers) as answer:
                assert answer.status_code == status

    run(test)


def test_every_answer_has_the_headers_that_keep_the_page_to_itself() -> None:
    async def test(locks: AsyncLocks) -> None:
        async with browser(dashboard.app(locks, token=TOKEN)) as client:
            for path in (*web.FILES, "/data", "/nothing"):
                headers = (await client.get(path)).headers
                policy = headers["Content-Security-Policy"]
                assert "default-src 'none'" in policy
                assert "unsafe" not in policy
                assert "frame-ancestors 'none'" in policy
                assert headers["Cache-Control"] == "no-store"
                assert headers["X-Content-Type-Options"] == "nosniff"

    run(test)


def test_the_page_needs_no_other_server_and_has_no_inline_code() -> None:
    folder = Path(web.__file__).parent / "page"
    page, code, style = ((folder / f"page.{kind}").read_text() for kind in ("html", "js", "css"))
    assert not re.search(r"\bon\w+=|<style|style=|<script>", page)
    assert not re.search(r"https?://", page + code + style)
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|Function\(", code
    )


def test_it_can_be_mounted_in_another_application() -> None:
    async def test(locks: AsyncLocks) -> None:
        inner = dashboard.app(locks, token=TOKEN)
        async with browser(Starlette(routes=[Mount("/locks", inner)])) as client:
            page = await client.get("/locks/")
            assert "page.js" in page.text
            assert (await client.get("/locks/page.js")).status_code == 200
            answer = await sent(client, "/locks/login", {"token": TOKEN})
            assert "Path=/locks" in answer.headers["set-cookie"]
            assert (await data_of(client, "/locks"))["totals"]["names"] == 0

    run(test)


def test_without_the_extra_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.delitem(sys.modules, "holdfast.dashboard.web")
    monkeypatch.setitem(sys.modules, "starlette.applications", None)
    with holdfast.connect("memory://") as locks, pytest.raises(ModuleNotFoundError) as missing:
        dashboard.app(locks, token=TOKEN)
    assert "pip install 'holdfast[dashboard]'" in str(missing.value)
