"""Passwords in URLs: parsed correctly, refused if not escaped, and never shown."""

from __future__ import annotations

import asyncio
import threading
import traceback
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

import holdfast
from holdfast import BackendUnavailable, HoldfastError
from holdfast.url import BACKENDS, Url, parse_url

SECRET = "CaNaRy9f3kQ"
NETWORK = sorted(set(BACKENDS) - {"memory", "local", "sqlite"})


@pytest.mark.parametrize("scheme", NETWORK)
@pytest.mark.parametrize(
    "rest",
    [
        f"u:12/{SECRET}@host/0",
        f"u:12?{SECRET}@host/0",
        f"u:12?a={SECRET}@host/0",
        f"u:12/{SECRET}?x=1@host/0",
        f"u:a@b/{SECRET}@host/0",
        f"u:12,h:13/{SECRET}@host",
        f"/u:{SECRET}@host/0",
    ],
)
def test_a_password_that_was_not_escaped_is_refused(scheme: str, rest: str) -> None:
    """The part after its '/' or '?' would be parsed as a path or option, and shown."""
    if scheme == "unix" and rest.startswith("/"):
        return  # a path, where an '@' is as good as any letter
    with pytest.raises(ValueError, match="is written %2F, %3F or %40") as caught:
        holdfast.connect(f"{scheme}://{rest}")
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize("scheme", NETWORK)
@pytest.mark.parametrize(
    "rest",
    [f"u:\udc80{SECRET}@host/0", f"u:%F0{SECRET}@host/0", f"host/0?password=%F0{SECRET}"],
    ids=["environment", "escaped", "option"],
)
def test_a_password_that_is_not_utf8_is_refused(scheme: str, rest: str) -> None:
    """Errors of Python's codecs contain the whole text, and drivers raise them late."""
    with pytest.raises(ValueError, match="must be UTF-8") as caught:
        holdfast.connect(f"{scheme}://{rest}")
    assert SECRET not in repr(caught.value)
    assert caught.value.__context__ is None


@pytest.mark.parametrize(
    ("text", "password", "path"),
    [
        ("redis://u:12%2Fx%3Fy%40z@h:1/0", "12/x?y@z", "/0"),
        ("redis://u:a#b,c:d@h/0", "a#b,c:d", "/0"),
        ("redis://u:a@b@h/0", "a@b", "/0"),
        ("postgresql://u:p@h/name%40db", "p", "/name@db"),
        ("unix:///run/redis@1.sock", None, "/run/redis@1.sock"),
        ("sqlite:///var/a@b/locks.db", None, "/var/a@b/locks.db"),
        ("postgresql://h/d?listen_url=postgresql://u:p@h/d", None, "/d"),
        ("postgresql://h/d?application_name=a%40b", None, "/d"),
    ],
)
def test_urls_that_are_right(text: str, password: str | None, path: str) -> None:
    url = parse_url(text)
    assert (url.password, url.path) == (password, path)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (f"redis://{SECRET}@h/0", "redis://***@h/0"),
        (f"redis://:{SECRET}@h/0", "redis://h/0"),
        (f"redis://u:{SECRET}@h/0", "redis://u@h/0"),
        (f"etcd://{SECRET}@h", "etcd://***@h"),
        ("postgresql://u@h/d", "postgresql://u@h/d"),
        ("mysql://u@h/d", "mysql://u@h/d"),
        (f"consul://h?token={SECRET}", "consul://h?token=***"),
        (
            f"postgresql://h/d?listen_url=postgresql://u:{SECRET}@h/d",
            "postgresql://h/d?listen_url=***",
        ),
    ],
)
def test_what_is_shown_of_a_url(text: str, shown: str) -> None:
    """A user without a password may be a password in the wrong place, except for databases."""
    url = parse_url(text)
    assert str(url) == shown
    assert repr(url) == f"Url({shown!r})"


def test_a_consul_token_is_no_user_name() -> None:
    """The token is neither ignored nor shown."""
    with pytest.raises(ValueError, match="consul://:token@host") as caught:
        holdfast.connect(f"consul://{SECRET}@localhost")
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize("password", [SECRET, f"{SECRET}%zz", f"{SECRET}/ü"])
def test_a_driver_error_is_scrubbed(password: str) -> None:
    """Drivers repeat a text that they can't parse."""
    from urllib.parse import quote

    url = Url("postgresql", "u", password, (("h", None),), "/d", {"sslpassword": "other-secret"})
    for text in (password, quote(password), quote(password, safe=""), "other-secret"):
        shown = url.scrub(f"invalid token: {text!r} at u")
        assert SECRET not in shown
        assert "other-secret" not in shown
        assert shown.endswith("at u")
    assert Url("redis", None, None, (), "", {}).scrub("as it is") == "as it is"


class Echo(BaseHTTPRequestHandler):
    """A server that repeats the request, as debugging proxies do."""

    def do_GET(self) -> None:
        body = f"I was asked:\n{self.headers}".encode()
        self.send_response(400)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_PUT = do_GET  # noqa: N815

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def echo() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Echo) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_a_server_that_repeats_the_token(echo: str) -> None:
    """Its text is part of the error, but its copy of our token is not."""

    async def body() -> None:
        async with holdfast.connect_async(f"consul://:{SECRET}@{echo}", timeout=1) as locks:
            with pytest.raises(BackendUnavailable, match="I was asked") as caught:
                await locks.list()
            assert SECRET not in str(caught.value)

    asyncio.run(body())
    with holdfast.connect(f"consul://:{SECRET}@{echo}", timeout=1) as locks:
        with pytest.raises(BackendUnavailable, match="I was asked") as caught:
            locks.list()
        assert SECRET not in str(caught.value)


@pytest.mark.parametrize("connect", [holdfast.connect, holdfast.connect_async])
def test_a_client_that_could_not_be_made_can_be_shown(connect: Callable[[str], object]) -> None:
    """Error reporters show the local variables of every frame."""
    with pytest.raises(ValueError, match="not a host") as caught:
        connect(f"redis://u:p@{SECRET}:x/0")
    frames = [frame.f_locals for frame, _ in traceback.walk_tb(caught.value.__traceback__)]
    shown = [repr(names["self"]) for names in frames if "self" in names]
    assert shown
    assert all("Locks, not open>" in text for text in shown)


def test_addresses_of_databases_show_no_password() -> None:
    """They are local variables of frames that error reporters print."""
    from holdfast.stores.mysql import connect as mysql_connect
    from holdfast.stores.postgres import connection as postgres

    for kind in (mysql_connect.MySqlAddress, postgres.PostgresAddress):
        address = kind((("h", 1),), {"password": SECRET}, "mysql://u@h/d")
        assert SECRET not in repr(address)
        assert "mysql://u@h/d" in repr(address)


def test_the_url_may_be_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Secrets are often mounted as files; environment variables are inherited by every child."""
    kept = tmp_path / "url"
    kept.write_text("memory://from-a-file\n")
    monkeypatch.delenv("HOLDFAST_URL", raising=False)
    monkeypatch.setenv("HOLDFAST_URL_FILE", str(kept))
    with holdfast.connect() as locks:
        assert "memory://from-a-file" in repr(locks)
    monkeypatch.setenv("HOLDFAST_URL", "memory://other")
    with pytest.raises(ValueError, match="both set"):
        holdfast.connect()
    with holdfast.connect("memory://given") as locks:
        assert "memory://given" in repr(locks)
    monkeypatch.delenv("HOLDFAST_URL")
    monkeypatch.setenv("HOLDFAST_URL_FILE", str(tmp_path / "missing"))
    with pytest.raises(ValueError, match="missing' can't be read: No such file"):
        holdfast.connect_async()
    kept.write_text("memory://marked\n", encoding="utf-8-sig")  # as some editors write it
    monkeypatch.setenv("HOLDFAST_URL_FILE", str(kept))
    with holdfast.connect() as locks:
        assert "memory://marked" in repr(locks)


@pytest.mark.parametrize("kind", [RuntimeError, ValueError])
def test_a_secret_in_a_driver_error_is_not_shown(
    monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    """The driver's own error may contain the password."""
    from holdfast.claim import Fence
    from holdfast.fencing import address

    def opener(url: object, where: str) -> object:
        raise kind(f"can't connect with password={SECRET!r} to {where}")

    monkeypatch.setitem(address._OPENERS, "postgresql", ("postgresql", opener))
    fence, nowhere = Fence.parse("1;exclusive;;0;1;x"), f"postgresql://u:{SECRET}@h/d#x"
    with pytest.raises((HoldfastError, ValueError)) as raised:
        address.enter_at(nowhere, fence, table="fences", open_client=object)
    assert "can't connect" in str(raised.value)
    assert SECRET not in str(raised.value)
    assert raised.value.__cause__ is None
