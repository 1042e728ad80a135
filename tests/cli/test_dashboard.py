"""``holdfast dashboard``: where it listens, who may look, and how it ends."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from cli.processes import HANG_SECONDS, Cli

TOKEN = "a token of many letters"


def serve(cli: Cli, *options: str, **environment: str) -> tuple[subprocess.Popen[str], str]:
    """Starts it on a free port; answers its process and its address."""
    process = cli.start("dashboard", "--bind", "127.0.0.1:0", *options, env=environment)
    assert process.stderr is not None
    line = process.stderr.readline()
    assert "is on http://127.0.0.1:" in line, line
    return process, line.split(" is on ")[1].split()[0].rstrip("/")


def test_it_serves_the_page_and_ends_at_once(cli: Cli) -> None:
    cli.hold("nightly", "--note", "weekly")
    process, url = serve(cli)
    with httpx.Client(base_url=url, timeout=HANG_SECONDS) as client:
        assert "<title>Holdfast" in client.get("/").text
        for name in ("page.js", "page.css", "icon.svg"):
            assert client.get(f"/{name}").is_success
        shown = client.get("/data").json()
        assert [row["name"] for row in shown["rows"]] == ["nightly"]
        assert (shown["can_break"], shown["can_log_out"]) == (False, False)
        assert client.get("/", headers={"Host": "evil.test"}).status_code == 421
        with client.stream("GET", "/events") as events:
            lines = events.iter_lines()  # a generator that is dropped ends the stream
            next(lines)
            process.send_signal(signal.SIGINT)  # also while there is a viewer
            assert process.wait(HANG_SECONDS) == 130
    assert process.stderr is not None
    assert process.stderr.read() == ""


def test_a_break_is_logged_and_reaches_the_holder(cli: Cli) -> None:
    holder = cli.hold("nightly")
    token = str(cli.show("nightly")["holders"][0]["token"])
    process, url = serve(cli, "--allow-break", HOLDFAST_DASHBOARD_TOKEN=TOKEN)
    answer = httpx.post(
        f"{url}/break",
        json={"name": "nightly", "tokens": [token], "reason": "host is gone\x1b[2J"},
        headers={"Authorization": f"Bearer {TOKEN}"},
        timeout=HANG_SECONDS,
    )
    assert answer.json() == {"token": token}
    assert holder.wait(HANG_SECONDS) == 76
    process.send_signal(signal.SIGINT)
    told = process.communicate(timeout=HANG_SECONDS)[1]
    assert "holdfast: broke 'nightly' on " in told
    assert r"host is gone\x1b[2J" in told


def test_it_ends_on_sigterm(cli: Cli) -> None:
    process, _ = serve(cli)
    process.terminate()
    assert process.wait(HANG_SECONDS) in (143, -signal.SIGTERM)


def test_without_a_token_nothing_is_broken(cli: Cli) -> None:
    refused = cli("dashboard", "--allow-break")
    assert refused.returncode == 78
    assert "--allow-break needs a token: set HOLDFAST_DASHBOARD_TOKEN" in refused.stderr


@pytest.mark.parametrize("address", ["0.0.0.0:0", "[::]:0", "192.0.2.1:0", "example.com:80"])
def test_without_a_token_only_this_machine_is_served(cli: Cli, address: str) -> None:
    refused = cli("dashboard", "--bind", address)
    assert refused.returncode == 78
    assert "needs a token, others can reach it" in refused.stderr


def test_a_token_of_the_environment_or_of_a_file(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    file = str(tmp_path / "token")
    for environment in (
        {"HOLDFAST_DASHBOARD_TOKEN": TOKEN},
        {"HOLDFAST_DASHBOARD_TOKEN_FILE": file},
    ):
        process, url = serve(cli, "--allow-break", **environment)
        assert httpx.get(f"{url}/data", timeout=HANG_SECONDS).status_code == 401
        header = {"Authorization": f"Bearer {TOKEN}"}
        answer = httpx.get(f"{url}/data", headers=header, timeout=HANG_SECONDS)
        assert answer.json()["can_break"] is True
        process.send_signal(signal.SIGINT)
        told = process.communicate(timeout=HANG_SECONDS)
        assert TOKEN not in "".join(told)
    both = cli("dashboard", env={**environment, "HOLDFAST_DASHBOARD_TOKEN": TOKEN})
    assert (both.returncode, "are both set" in both.stderr) == (78, True)


@pytest.mark.parametrize("token", ["short", "x" * 15])
def test_a_short_token_is_refused_and_not_shown(cli: Cli, token: str) -> None:
    refused = cli("dashboard", env={"HOLDFAST_DASHBOARD_TOKEN": token})
    assert (refused.returncode, "at least 16 characters" in refused.stderr) == (78, True)
    assert token not in refused.stderr


def test_host_names_of_a_proxy(cli: Cli) -> None:
    process, url = serve(cli, "--host", "ops.example.com, other.example.com")
    for host, status in (("other.example.com", 200), ("evil.test", 421)):
        answer = httpx.get(url, headers={"Host": host}, timeout=HANG_SECONDS)
        assert answer.status_code == status
    process.terminate()


def test_an_address_that_is_taken_is_named(cli: Cli) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        refused = cli("dashboard", "--bind", f"127.0.0.1:{port}")
    assert refused.returncode == 78
    assert f"--bind 127.0.0.1:{port}: Address already in use" in refused.stderr


@pytest.mark.parametrize("package", ["starlette.applications", "uvicorn"])
def test_without_the_extra_it_says_what_to_install(cli: Cli, package: str) -> None:
    program = (
        f"import sys; sys.modules['{package}'] = None; "
        "from holdfast.cli import main; sys.exit(main(['dashboard', '--bind', '127.0.0.1:0']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=cli.environment,
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
    )
    assert done.returncode == 78
    assert "pip install 'holdfast[dashboard]'" in done.stderr
