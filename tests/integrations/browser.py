"""Headless Chromium, driven over ChromeDriver's HTTP protocol (W3C WebDriver)."""

from __future__ import annotations

import base64
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from servers.missing import program
from servers.ports import free_port, give_back
from servers.process import wait_until

FLAGS = (
    "--headless",
    "--no-sandbox",  # tests may run as root
    "--disable-gpu",
    "--hide-scrollbars",  # they are not part of a picture
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
START_SECONDS = 60.0
LATEST_SECONDS = 30.0
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
KEYS = {"ArrowDown": "\ue015", "Enter": "\ue007", "Escape": "\ue00c", "Tab": "\ue004"}


class Browser:
    """One window."""

    def __init__(self, driver: httpx.Client, session: str) -> None:
        self._driver, self._session = driver, session

    def _do(self, method: str, path: str, **body: Any) -> Any:
        content = None if method == "GET" else body
        answer = self._driver.request(method, f"/session/{self._session}/{path}", json=content)
        value = answer.json()["value"]
        assert answer.is_success, value
        return value

    def open(self, url: str) -> None:
        self._do("POST", "url", url=url)

    def script(self, code: str, *arguments: Any) -> Any:
        """Runs JavaScript in the page; returns what it returns."""
        return self._do("POST", "execute/sync", script=code, args=arguments)

    def devtools(self, command: str, **parameters: Any) -> Any:
        """A command of Chromium's own protocol, for what a person sets up: size, dark mode."""
        return self._do("POST", "goog/cdp/execute", cmd=command, params=parameters)

    def find(self, selector: str) -> str:
        found = self._do("POST", "element", using="css selector", value=selector)
        return str(found[ELEMENT])

    def click(self, selector: str) -> None:
        """A real click, at the middle of the element: fails if something covers it."""
        self._do("POST", f"element/{self.find(selector)}/click")

    def type(self, selector: str, text: str) -> None:
        self._do("POST", f"element/{self.find(selector)}/value", text=text)

    def press(self, *keys: str) -> None:
        """Keys, to the element that has the focus."""
        actions = [
            {"type": kind, "value": KEYS.get(key, key)}
            for key in keys
            for kind in ("keyDown", "keyUp")
        ]
        self._do("POST", "actions", actions=[{"type": "key", "id": "keys", "actions": actions}])

    def text(self, selector: str) -> str:
        """What a person reads there; empty if it is not there."""
        found = self.script(
            "const e = document.querySelector(arguments[0]); return e ? e.innerText : ''", selector
        )
        return str(found)

    def count(self, selector: str) -> int:
        return int(self.script("return document.querySelectorAll(arguments[0]).length", selector))

    def wait(self, what: str, condition: Callable[[], object]) -> None:
        """Returns when the page shows it."""
        deadline = time.monotonic() + LATEST_SECONDS
        while not condition():
            assert time.monotonic() < deadline, f"never shown: {what}; {self.text('body')[:3000]}"
            time.sleep(0.05)

    def size(self, width: int, height: int, *, phone: bool = False) -> None:
        self.devtools(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=phone,
        )

    def scheme(self, name: str) -> None:
        """``dark`` or ``light``."""
        features = [{"name": "prefers-color-scheme", "value": name}]
        self.devtools("Emulation.setEmulatedMedia", features=features)

    def screenshot(self, path: Path) -> None:
        """Saves what is shown as PNG."""
        path.write_bytes(base64.b64decode(self._do("GET", "screenshot")))

    def errors(self) -> list[str]:
        """What the console has as errors since the last call."""
        entries = self._do("POST", "se/log", type="browser")
        return [entry["message"] for entry in entries if entry["level"] == "SEVERE"]

    def close(self) -> None:
        self._driver.delete(f"/session/{self._session}")


@contextmanager
def browsing(folder: Path) -> Iterator[Browser]:
    """A browser that ends with the block."""
    driver = str(program("chromedriver", "chromium-driver"))
    chromium, port = str(program("chromium", "chromium")), free_port()
    with (folder / "chromedriver.log").open("w") as log:
        process = subprocess.Popen(
            [driver, f"--port={port}"],
            stdout=log,
            stderr=log,
            env={**os.environ, "HOME": str(folder), "XDG_CONFIG_HOME": str(folder)},
        )
    client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60, trust_env=False)
    try:
        wait_until("chromedriver", lambda: _is_ready(client), START_SECONDS)
        options = {
            "binary": chromium,
            "args": [*FLAGS, f"--user-data-dir={folder}/profile", "--window-size=1280,900"],
        }
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        answer = client.post("/session", json={"capabilities": {"alwaysMatch": wanted}})
        assert answer.is_success, answer.text
        browser = Browser(client, answer.json()["value"]["sessionId"])
        try:
            yield browser
        finally:
            browser.close()
    finally:
        client.close()
        process.terminate()
        process.wait(30)
        give_back(port)


def _is_ready(client: httpx.Client) -> bool:
    try:
        return bool(client.get("/status").json()["value"]["ready"])
    except httpx.TransportError:
        return False
