"""The dashboard's page in a real browser: what a person sees and does."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from starlette.applications import Starlette

import holdfast
from holdfast import Locks, dashboard
from integrations.browser import Browser, browsing

TOKEN = "a token of many letters"
HOSTILE = "</script><img src=x onerror=\"document.title='pwned'\"><b>b</b>\u202e'`${1}"
HOLD = """
import sys, time, holdfast
locks = holdfast.connect(sys.argv[1], ttl=12)
with locks.lock(sys.argv[2], note="a worker"):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browsing(tmp_path_factory.mktemp("browser")) as found:
        yield found


@pytest.fixture
def page(browser: Browser) -> Iterator[Browser]:
    """The browser as it is at first: a wide, light window without cookies."""
    browser.open("about:blank")
    browser.devtools("Network.clearBrowserCookies")
    browser.scheme("light")
    browser.size(1280, 900)
    browser.errors()
    yield browser
    browser.open("about:blank")


@pytest.fixture
def locks() -> Iterator[Locks]:
    with holdfast.connect("memory://") as client:
        yield client


@contextmanager
def served(locks: Locks, **settings: Any) -> Iterator[str]:
    """The dashboard of a client, served by a thread; answers its address."""
    if "token" not in settings:
        settings["authorize"] = lambda request, action: True
    with serving(dashboard.app(locks, hosts=[], always=True, **settings)) as url:
        yield url


@contextmanager
def serving(app: Starlette) -> Iterator[str]:
    """An application, served by a thread."""
    config = uvicorn.Config(app, port=0, log_level="error", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.01)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/"
    finally:
        app.state.end_streams()
        server.should_exit = True
        thread.join(30)


@contextmanager
def waiter(locks: Locks, name: str) -> Iterator[threading.Thread]:
    """A thread that waits for a name, and releases it at once."""

    def wait() -> None:
        with locks.lock(name, timeout=60, note="in line"):
            pass

    thread = threading.Thread(target=wait, name="waiting-thread")
    thread.start()
    yield thread
    thread.join(60)


def names(page: Browser) -> list[str]:
    found = page.script(
        "return [...document.querySelectorAll('#names button.name')].map(e => e.innerText)"
    )
    return [str(text) for text in found]


def open_row(page: Browser, name: str) -> None:
    page.wait(name, lambda: name in names(page))
    number = names(page).index(name) + 1
    page.click(f"#names > li:nth-child({number}) button.name")
    page.wait("its holders", lambda: page.count("#names .detail li.holder"))


def test_acquire_wait_and_release_are_seen_as_they_happen(locks: Locks, page: Browser) -> None:
    with served(locks) as url:
        page.open(url)
        page.wait("an empty store", lambda: "nothing is held" in page.text("#empty"))
        with locks.lock("calm:1"):
            lease = locks.lock("order:42", note="charging card 7").acquire()
            assert lease is not None
            page.wait("both", lambda: names(page) == ["calm:1", "order:42"])
            with waiter(locks, "order:42"):
                page.wait("the waiter first", lambda: names(page) == ["order:42", "calm:1"])
                assert page.text("#total-waiting") == "1"
                open_row(page, "order:42")
                detail = page.text("#names .detail")
                assert "charging card 7" in detail
                assert "waiting-thread" in detail
                page.press("t")
                page.wait("the tree", lambda: page.count("#tree li") == 3)
                assert "waits" in page.text("#tree")
                page.press("t")
                page.wait("the list", lambda: names(page))
                lease.release()
        page.wait("that all is free", lambda: "nothing is held" in page.text("#empty"))
        assert page.errors() == []
        assert "live: " in page.text("#age")


def test_a_crashed_holder_is_seen_as_lost(tmp_path: Path, page: Browser) -> None:
    store = f"sqlite:///{tmp_path}/locks.db"
    with holdfast.connect(store) as client, served(client) as url:
        holder = subprocess.Popen(
            [sys.executable, "-c", HOLD, store, "job:7"], stdout=subprocess.PIPE, text=True
        )
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        page.open(url)
        page.wait("the hold", lambda: names(page) == ["job:7"])
        holder.send_signal(signal.SIGKILL)
        holder.communicate()
        page.wait("the loss", lambda: page.count("#changes li.lost") == 1)
        assert "job:7" in page.text("#changes")
        assert f"pid {holder.pid}" in page.text("#changes")
        assert page.text("#total-lost") == "1"


def log_in(page: Browser, token: str) -> None:
    page.wait("the question for the token", lambda: page.count("#login[open]"))
    page.type("#token", token)
    page.click("#login button")


def test_a_break_asks_for_a_reason_and_reaches_the_holder(locks: Locks, page: Browser) -> None:
    lease = locks.lock("order:42").acquire()
    assert lease is not None
    with served(locks, token=TOKEN, allow_break=True) as url:
        page.open(url)
        log_in(page, "another token of many letters")
        page.wait("a refusal", lambda: "not the token" in page.text("#login-error"))
        log_in(page, TOKEN)
        open_row(page, "order:42")
        page.press("b")
        page.wait("the question", lambda: page.count("#break[open]"))
        assert "goes on working" in page.text("#break")
        assert str(lease.token) in page.text("#break-holders")
        page.click("#break-go")  # without a reason the browser itself refuses
        assert page.count("#break[open]") == 1
        page.type("#reason", "host is gone <b>")
        page.press("Enter")
        page.wait("the end", lambda: not page.count("#break[open]"))
        page.wait("the change", lambda: "host is gone <b>" in page.text("#changes li.broken"))
        page.wait("a free name", lambda: "nothing is held" in page.text("#empty"))
        assert "host is gone" in (lease.reason or "")
        assert TOKEN not in page.script("return document.documentElement.outerHTML")
        assert TOKEN not in page.script(
            "return JSON.stringify([document.cookie, {...localStorage}, {...sessionStorage}, "
            "performance.getEntries().map(e => e.name)])"
        )
        page.click("#logout")
        page.wait("the question for the token", lambda: page.count("#login[open]"))
    lease.release()


def test_a_holder_that_changed_meanwhile_is_not_broken(locks: Locks, page: Browser) -> None:
    first = locks.lock("order:42").acquire()
    assert first is not None
    with served(locks, allow_break=True) as url:
        page.open(url)
        open_row(page, "order:42")
        page.press("b")
        page.wait("the question", lambda: page.count("#break[open]"))
        first.release()
        with locks.lock("order:42") as second:
            page.type("#reason", "too late")
            page.press("Enter")
            page.wait("a refusal", lambda: "another holder now" in page.text("#break-error"))
            assert second.held


def test_without_the_right_there_is_no_break(locks: Locks, page: Browser) -> None:
    with locks.lock("order:42") as lease, served(locks) as url:
        page.open(url)
        open_row(page, "order:42")
        assert page.script("return document.querySelector('.detail button').hidden") is True
        page.press("b")
        answer = page.script(
            "return fetch('break', {method: 'POST', headers: {'Content-Type': 'application/json'},"
            "body: JSON.stringify({name: 'order:42', tokens: [arguments[0]], reason: 'x'})})"
            ".then(answer => answer.status)",
            str(lease.token),
        )
        assert answer == 403
        assert page.count("#break[open]") == 0
        assert lease.held


def test_ten_thousand_names_stay_quick(locks: Locks, page: Browser) -> None:
    with ExitStack() as held:
        for number in range(10_000):
            held.enter_context(locks.lock(f"bulk:{number:05}", ttl=600))
        url = held.enter_context(served(locks))
        page.open(url)
        page.wait("the first page", lambda: page.text("#pages") == "page 1 of 200 · 10,000 names")
        assert page.count("#names > li") == 50
        assert page.count("*") < 2000
        page.press("n")
        page.wait("the second page", lambda: page.text("#pages").startswith("page 2 of 200"))
        page.press("/")
        page.press(*"09999")
        page.wait("one name", lambda: names(page) == ["bulk:09999"])
        milliseconds = page.script(
            "const began = performance.now(); show(latest); return performance.now() - began"
        )
        assert milliseconds < 1000


def test_hostile_names_and_notes_are_only_text(locks: Locks, page: Browser) -> None:
    lease = locks.lock(HOSTILE, note=HOSTILE).acquire()
    assert lease is not None
    with served(locks, allow_break=True) as url:
        with waiter(locks, HOSTILE):
            page.open(url)
            shown = HOSTILE.replace("\u202e", "\\u202e")
            open_row(page, shown)
            page.press("b")
            page.wait("the question", lambda: page.count("#break[open]"))
            assert page.text("#break-name") == shown
            page.type("#reason", "x")
            page.press("Enter")
            page.wait("the change", lambda: shown in page.text("#changes"))
        for selector in ("#names img", "#names script", "#names b", "#changes b", "#break b"):
            assert page.count(selector) == 0
        assert page.script("return document.title") != "pwned"
        assert page.errors() == []
    lease.release()


def test_a_long_name_is_cut_until_it_is_opened(locks: Locks, page: Browser) -> None:
    with locks.lock("x" * 512, note="n" * 500), served(locks, allow_break=True) as url:
        page.open(url)
        page.wait("the name", lambda: len(names(page)) == 1)
        height = "return document.querySelector('#names .row').clientHeight"
        top = "return document.querySelector('.cell-held').getBoundingClientRect().top"
        first = page.script("return document.querySelector('#names').getBoundingClientRect().top")
        assert page.script(height) < 100
        assert page.script(top) - first < 30
        open_row(page, "x" * 512)
        assert page.script(height) > 200
        assert page.script(top) - first < 30
        page.size(390, 700, phone=True)
        page.press("b")
        page.wait("the question", lambda: page.count("#break[open]"))
        title = "return document.querySelector('#break-title').getBoundingClientRect().top"
        assert page.script(title) > 0
        page.press("Escape")


CONTRAST = """
const part = (value) => value <= .03928 ? value / 12.92 : ((value + .055) / 1.055) ** 2.4;
const light = (color) => {
  const [red, green, blue] = color.match(/[\\d.]+/g).map((text) => part(Number(text) / 255));
  return .2126 * red + .7152 * green + .0722 * blue;
};
const behind = (element) => {
  const color = getComputedStyle(element).backgroundColor;
  return color.startsWith("rgb(") ? color : behind(element.parentElement);
};
return arguments[0].map((selector) => {
  const element = document.querySelector(selector);
  const both = [light(getComputedStyle(element).color), light(behind(element))];
  return (Math.max(...both) + .05) / (Math.min(...both) + .05);
});
"""
"""The contrast of texts with what is behind them, as the accessibility guidelines count it."""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_dark_and_light_are_readable(locks: Locks, page: Browser, scheme: str) -> None:
    with locks.lock("order:42", note="a note"), served(locks) as url:
        page.scheme(scheme)
        page.open(url)
        page.wait("the hold", lambda: names(page) == ["order:42"])
        selectors = ["button.name", ".cell-held", ".note", ".store", "#age", ".hint", ".head span"]
        ratios = page.script(CONTRAST, selectors)
        assert [s for s, r in zip(selectors, ratios, strict=True) if r < 4.5] == []
        [red, green, blue] = page.script(
            "return getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)"
        )
        assert (red + green + blue < 200) == (scheme == "dark")


def test_a_phone_shows_all_of_it_without_scrolling_sideways(locks: Locks, page: Browser) -> None:
    long = "customer/" + "x" * 200
    lease = locks.lock(long, note="n" * 300).acquire()
    assert lease is not None
    page.size(390, 844, phone=True)
    with served(locks, allow_break=True) as url, waiter(locks, long):
        page.open(url)
        open_row(page, long)
        assert page.script("return document.documentElement.scrollWidth") == 390
        page.press("t")
        page.wait("the tree", lambda: page.count("#tree li"))
        assert page.script("return document.documentElement.scrollWidth") == 390
        page.press("t")
        page.wait("the button", lambda: page.count(".detail button.danger"))
        page.click(".detail button.danger")
        page.type("#reason", "x")
        page.click("#break-go")
        page.wait("the change", lambda: page.count("#changes li.broken"))
    lease.release()


def test_the_keyboard_is_enough(locks: Locks, page: Browser) -> None:
    with locks.lock("a"), locks.lock("b"), served(locks) as url:
        page.open(url)
        page.wait("both", lambda: len(names(page)) == 2)
        page.press("j", "j", "Enter")
        page.wait("the second", lambda: page.count("#names li.open") == 1)
        assert page.script("return document.activeElement.innerText") == names(page)[1]
        assert page.script("return document.querySelector('li.open button').ariaExpanded") == "true"
        page.wait("news", lambda: page.script("return latest.age < 1"))  # it keeps the focus
        assert page.script("return document.activeElement.innerText") == names(page)[1]
        page.press("Escape")
        page.wait("none", lambda: page.count("#names li.open") == 0)
        page.press("/", "a")
        page.wait("one", lambda: names(page) == ["a"])
        page.press("Escape")
        page.wait("both", lambda: len(names(page)) == 2)
        page.press("Escape", "t")  # out of the filter
        page.wait("the tree", lambda: page.script("return wants.tree && latest.rows.length === 0"))
        page.size(1280, 300)
        page.press("ArrowDown", "ArrowDown")  # there is nothing to move in but the page
        page.wait("what is below", lambda: page.script("return scrollY > 0"))


def test_without_the_token_it_asks_again(locks: Locks, page: Browser) -> None:
    with served(locks, token=TOKEN) as url:
        page.open(url)
        page.wait("the question for the token", lambda: page.count("#login[open]"))
        page.script("$('login').close()")  # as Chromium does at a second Escape
        page.wait("the question again", lambda: page.count("#login[open]"))
        log_in(page, TOKEN)
        page.wait("the store", lambda: "nothing is held" in page.text("#empty"))
        assert page.count("#login[open]") == 0


def test_one_viewer_too_many_sees_it_all_the_same(
    locks: Locks, page: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.dashboard.web.MOST_VIEWERS", 0)
    with served(locks) as url:
        page.open(url)
        page.wait("the store", lambda: "nothing is held" in page.text("#empty"))
        with locks.lock("order:42"):
            page.wait("the hold", lambda: names(page) == ["order:42"])
        assert page.text("#banner") == ""


def test_a_right_that_is_withdrawn_is_told(
    locks: Locks, page: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.dashboard.web.STREAM_SECONDS", 1.0)
    rights = ["view"]
    app = dashboard.app(locks, authorize=lambda request, action: action in rights, always=True)
    with serving(app) as url:
        page.open(url)
        page.wait("the store", lambda: "nothing is held" in page.text("#empty"))
        rights.clear()
        page.wait("why", lambda: "answers: you may not view here" in page.text("#banner"))
        rights.append("view")
        page.wait("no banner", lambda: page.text("#banner") == "")


def test_stale_data_is_told_in_red(
    locks: Locks, page: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.dashboard.view.STALE_SECONDS", 3.0)
    with locks.lock("a"):
        with served(locks) as url:
            page.open(url)
            page.wait("the hold", lambda: names(page) == ["a"])
            assert page.text("#banner") == ""
        # The server is gone now; the page goes on counting.
        page.wait("the banner", lambda: "server does not answer" in page.text("#banner"))
        assert page.text("#age").startswith("stale: ")
        assert page.script("return getComputedStyle(document.getElementById('age')).color") == (
            "rgb(179, 38, 30)"
        )
        assert names(page) == ["a"]
        page.size(1280, 300)
        page.script("scrollTo(0, 1000)")
        assert page.script("return $('banner').getBoundingClientRect().top") >= 0


def test_a_store_that_is_away_is_told(locks: Locks, page: Browser) -> None:
    with served(locks) as url:
        page.open(url)
        page.wait("the store", lambda: "nothing is held" in page.text("#empty"))
        locks.close()
        page.wait("the banner", lambda: "can't be read" in page.text("#banner"))
        assert page.count("#changes li.unreachable") == 1
