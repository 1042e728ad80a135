"""The dashboard over HTTP, and its defences.

| path | |
|---|---|
| ``GET /`` and its files | the page: the same for everybody, without data and without secrets |
| ``GET /events`` | what is shown, as server-sent events: one after each reading of the store |
| ``GET /data`` | the same once, for scripts |
| ``POST /login``, ``/logout`` | a token in the body becomes a cookie: no secrets in URLs |
| ``POST /break`` | ends a hold: name, the tokens that the viewer has seen, and a reason |

Defences: a request for a foreign host name is refused (DNS rebinding). A request that changes
something must come from the page itself (its ``Origin`` and ``Sec-Fetch-Site``), or carry the token
in its ``Authorization`` header, which no browser adds by itself. The content security policy allows
the page's own files and nothing else; no other page may frame it.
"""

from __future__ import annotations

import asyncio
import hmac
import inspect
import ipaddress
import json
import signal
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import aclosing, asynccontextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from holdfast import AsyncLocks, HoldfastError, InvalidName, Locks
from holdfast.dashboard.reader import HoldersChanged, Reader
from holdfast.dashboard.rows import store_of
from holdfast.dashboard.view import Query, View
from holdfast.dashboard.watch import INTERVAL_SECONDS

__all__ = ["Token", "make_app"]

Authorize = Callable[[Request, str], bool | Awaitable[bool]]

FILES = {
    "/": ("page.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
STREAM_SECONDS = 30.0
"""A stream of events ends after this time, and the browser opens another: so rights are asked for
again, and a server that shuts down does not wait for its viewers for longer."""
MOST_VIEWERS = 200
SLOW_SECONDS = 20.0
"""How long a viewer may take to take in an event. A viewer that reads nothing would keep its place
among the viewers for as long as its connection lasts."""
LONGEST_BODY = 16_384
LONGEST_BREAK = 2_000_000
"""Bytes that ask for a break: a semaphore has up to 65,536 holders, each with its token."""
LONGEST_REASON = 200
"""Characters of a reason: a holder is not told more."""
SHORTEST_TOKEN = 16
SESSION_SECONDS = 12 * 3600
COOKIE = "holdfast_dashboard"


class Token:
    """The text that viewers log in with. Their cookie is a signed time, not the token."""

    def __init__(self, text: str) -> None:
        """Raises ``ValueError`` for a text of fewer than 16 characters."""
        if len(text) < SHORTEST_TOKEN:
            raise ValueError(f"a dashboard's token has at least {SHORTEST_TOKEN} characters")
        self._text = text.encode()
        self._key = sha256(b"holdfast dashboard session\0" + self._text).digest()

    def matches(self, text: str) -> bool:
        return hmac.compare_digest(self._text, text.encode(errors="replace"))

    def session(self, now: float) -> str:
        """The value of a cookie that is good for twelve hours."""
        end = str(int(now + SESSION_SECONDS))
        return f"{end}.{self._sign(end)}"

    def knows(self, session: str, now: float) -> bool:
        """Whether the cookie's value is one of ours, and not too old."""
        end, _, signature = session.partition(".")
        if not (end.isascii() and end.isdecimal() and len(end) < 15 and signature.isascii()):
            return False
        return hmac.compare_digest(self._sign(end), signature) and now < int(end)

    def _sign(self, end: str) -> str:
        return hmac.new(self._key, end.encode(), sha256).hexdigest()

    def in_header(self, request: Request) -> bool:
        """Whether the request carries the token itself, as programs send it."""
        scheme, _, text = request.headers.get("authorization", "").partition(" ")
        return scheme.lower() == "bearer" and self.matches(text.strip())

    def authorize(self, request: Request, action: str) -> bool:
        """The ``authorize`` of a dashboard with a token: who has it may view and break."""
        session = request.cookies.get(COOKIE, "")
        return self.in_header(request) or self.knows(session, time.time())


def make_app(
    locks: Locks | AsyncLocks,
    authorize: Authorize | None,
    token: str | None,
    allow_break: bool,
    hosts: Iterable[str] | None,
    always: bool,
) -> Starlette:
    """See ``holdfast.dashboard.app``."""
    if (authorize is None) == (token is None):
        raise ValueError(
            "dashboard.app() needs either authorize=, a function (request, action) that tells who "
            "may look, or token=, a text to log in with: names and notes are not for everybody"
        )
    if isinstance(hosts, str):
        raise TypeError("hosts is a list of host names, not text")
    known = None if token is None else Token(token)
    dashboard = _Dashboard(locks, authorize, known, allow_break, always)
    allowed = None if hosts is None else frozenset(host.lower() for host in hosts)
    application = Starlette(
        routes=dashboard.routes(),
        middleware=[Middleware(_Defences, hosts=allowed)],
        lifespan=dashboard.lifespan,
    )
    application.state.end_streams = dashboard.end
    return application


class _Refused(Exception):
    """A request that is answered with a status and a sentence."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class _Dashboard:
    """The routes, over one reader."""

    def __init__(
        self,
        locks: Locks | AsyncLocks,
        authorize: Authorize | None,
        token: Token | None,
        allow_break: bool,
        always: bool,
    ) -> None:
        self._token, self._allow_break, self._always = token, allow_break, always
        self._authorize: Authorize | None = authorize if token is None else token.authorize
        self._reader = Reader(locks, always)
        self._view = View(self._reader.watch, store_of(locks))

    def routes(self) -> list[Route]:
        folder = Path(__file__).parent / "page"
        files = [
            Route(path, _file((folder / name).read_bytes(), kind))
            for path, (name, kind) in FILES.items()
        ]
        return [
            *files,
            Route("/events", _answered(self.events)),
            Route("/data", _answered(self.data)),
            Route("/login", _answered(self.login), methods=["POST"]),
            Route("/logout", _answered(self.logout), methods=["POST"]),
            Route("/break", _answered(self.break_lock), methods=["POST"]),
        ]

    @asynccontextmanager
    async def lifespan(self, _: Starlette) -> AsyncIterator[None]:
        """Of an application that is served by itself; a mounted one has none."""
        if self._always:
            self._reader.start()
        try:
            yield
        finally:
            await self._reader.stop()

    def end(self) -> None:
        """Ends the streams of all viewers: a server that shuts down would wait for them."""
        self._reader.end()

    async def events(self, request: Request) -> Response:
        await self._need_view(request)
        if self._reader.ended or self._reader.viewers >= MOST_VIEWERS:
            raise _Refused(503, f"it shuts down, or has more than {MOST_VIEWERS} viewers")
        can_break = await self._may(request, "break")
        return _Events(self._stream(Query.of(request.query_params), can_break))

    async def _stream(self, query: Query, can_break: bool) -> AsyncGenerator[str]:
        reader, clock = self._reader, self._reader.watch.time
        end = clock() + STREAM_SECONDS
        reader.viewers += 1
        try:
            reader.start()
            yield "retry: 1000\n\n"
            await self._wait_for_rows()
            while clock() < end and not (reader.ended or _server_ends()):
                yield f"data: {self._shown(query, can_break)}\n\n"
                # Also without news: a store that hangs is told by the age of the data.
                await reader.news(INTERVAL_SECONDS + 1)
        finally:
            reader.viewers -= 1
            reader.viewed()

    async def data(self, request: Request) -> Response:
        await self._need_view(request)
        self._reader.start()
        await self._wait_for_rows()
        can_break = await self._may(request, "break")
        shown = self._shown(Query.of(request.query_params), can_break)
        return Response(shown, media_type="application/json")

    async def _wait_for_rows(self) -> None:
        """Lets a reading come in that has just begun: before it there are no rows, or old ones if
        nobody has looked for a while."""
        watch = self._reader.watch
        if not watch.readings or watch.is_stale:
            await self._reader.news(INTERVAL_SECONDS)

    def _shown(self, query: Query, can_break: bool) -> str:
        """One line of ASCII: a name can't end an event."""
        data = self._view.data(query, can_break) | {"can_log_out": self._token is not None}
        return json.dumps(data, allow_nan=False, separators=(",", ":"))

    async def login(self, request: Request) -> Response:
        if self._token is None:
            raise _Refused(404, "there is no token to log in with")
        self._need_same_origin(request)
        if not self._token.matches(_text(await _body(request), "token")):
            raise _Refused(403, "this is not the token")
        response = JSONResponse({})
        self._set_cookie(request, response, self._token.session(time.time()), SESSION_SECONDS)
        return response

    async def logout(self, request: Request) -> Response:
        self._need_same_origin(request)
        response = JSONResponse({})
        self._set_cookie(request, response, "", 0)
        return response

    def _set_cookie(self, request: Request, response: Response, value: str, age: int) -> None:
        response.set_cookie(
            COOKIE,
            value,
            max_age=age,
            path=request.scope.get("root_path") or "/",
            secure=request.url.scheme == "https",
            httponly=True,
            samesite="strict",
        )

    async def break_lock(self, request: Request) -> Response:
        await self._need(request, "view")
        self._need_same_origin(request)
        if not self._allow_break:
            raise _Refused(403, "breaking is off here: it needs --allow-break (or allow_break=)")
        await self._need(request, "break")
        body = await _body(request, LONGEST_BREAK)
        name, reason, tokens = _text(body, "name"), _text(body, "reason").strip(), _tokens(body)
        if not reason:
            raise _Refused(422, "a break needs a reason: the holder is told it")
        if len(reason) > LONGEST_REASON:
            raise _Refused(422, f"a reason has at most {LONGEST_REASON} characters")
        try:
            token = await self._reader.break_lock(name, tokens, reason)
        except (HoldersChanged, InvalidName) as error:
            raise _Refused(409, str(error)) from None
        except HoldfastError as error:
            raise _Refused(503, str(error)) from None
        if token is None:
            raise _Refused(409, f"nobody holds {name!r} any more: nothing was broken")
        return JSONResponse({"token": str(token)})

    async def _may(self, request: Request, action: str) -> bool:
        if action == "break" and not self._allow_break:
            return False
        assert self._authorize is not None
        allowed = self._authorize(request, action)
        return bool(await allowed if inspect.isawaitable(allowed) else allowed)

    async def _need(self, request: Request, action: str) -> None:
        if not await self._may(request, action):
            if self._token is not None:
                raise _Refused(401, "log in with the dashboard's token")
            raise _Refused(403, f"you may not {action} here")

    async def _need_view(self, request: Request) -> None:
        """Refuses also a request that a page of another site makes in the viewer's browser: that
        page could not read the answer, but each one costs work."""
        if request.headers.get("sec-fetch-site") == "cross-site":
            raise _Refused(403, "this request came from a page of another site")
        await self._need(request, "view")

    def _need_same_origin(self, request: Request) -> None:
        """Refuses what another page sent (CSRF). A program sends the token in a header."""
        if self._token is not None and self._token.in_header(request):
            return
        if request.headers.get("content-type", "").partition(";")[0] != "application/json":
            raise _Refused(415, "the body is JSON")
        site = request.headers.get("sec-fetch-site", "same-origin")
        own = (request.url.scheme, request.headers.get("host", ""))
        behind_tls = ("https", own[1])  # of a proxy that ends TLS and does not say so
        if _origin(request) not in (own, behind_tls) or site != "same-origin":
            raise _Refused(403, "this request did not come from the dashboard's own page")


class _Events(StreamingResponse):
    """A stream of events, which ends if its viewer takes no event in for too long."""

    def __init__(self, events: AsyncGenerator[str]) -> None:
        # Without X-Accel-Buffering: no, nginx keeps events back.
        headers = {"X-Accel-Buffering": "no"}
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self._events = events

    async def stream_response(self, send: Send) -> None:
        async def send_in_time(message: Message) -> None:
            async with asyncio.timeout(SLOW_SECONDS):
                await send(message)

        # The end of a cancelled stream is not left to the garbage collector: it frees the place.
        async with aclosing(self._events):
            with suppress(TimeoutError):
                await super().stream_response(send_in_time)


def _server_ends() -> bool:
    """Whether the uvicorn that serves this shuts down: it waits for its streams, and does not tell
    them. Its signal handler is a method of the server."""
    server = getattr(signal.getsignal(signal.SIGTERM), "__self__", None)
    return getattr(server, "should_exit", False) is True


def _origin(request: Request) -> tuple[str, str] | None:
    """Scheme and host of the page that sent the request; None for a text that is no origin."""
    try:
        origin = urlsplit(request.headers.get("origin", ""))
    except ValueError:
        return None
    return origin.scheme, origin.netloc


class _Defences:
    """Checks the host name, and adds the headers that keep the page to itself."""

    def __init__(self, app: ASGIApp, hosts: frozenset[str] | None) -> None:
        self._app, self._hosts = app, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
            await send(message)

        if self._serves(Request(scope).headers.get("host", "")):
            await self._app(scope, receive, send_with_headers)
        else:
            words = "this host name is not served here: see `holdfast dashboard --host`\n"
            await Response(words, 421, media_type="text/plain")(scope, receive, send_with_headers)

    def _serves(self, host: str) -> bool:
        """An IP address is never the name of an attacker's page; a host name may be."""
        if self._hosts is None:
            return True
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        return name in self._hosts or name == "localhost" or _is_address(name)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


Endpoint = Callable[[Request], Awaitable[Response]]


def _file(content: bytes, kind: str) -> Endpoint:
    async def answer(_: Request) -> Response:
        return Response(content, media_type=kind)

    return answer


def _answered(endpoint: Endpoint) -> Endpoint:
    """The endpoint with its refusals as answers."""

    async def answer(request: Request) -> Response:
        try:
            return await endpoint(request)
        except _Refused as refused:
            return JSONResponse({"error": str(refused)}, refused.status)

    return answer


async def _body(request: Request, most: int = LONGEST_BODY) -> Mapping[str, Any]:
    """The JSON object of a request; refuses anything else, and what is too long."""
    content = b""
    async for chunk in request.stream():
        content += chunk
        if len(content) > most:
            raise _Refused(413, f"a body has at most {most} bytes")
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise _Refused(422, "the body is a JSON object")
    return found


def _text(body: Mapping[str, Any], word: str) -> str:
    found = body.get(word)
    if not isinstance(found, str) or not found:
        raise _Refused(422, f"{word} is missing, or is not text")
    return found


def _tokens(body: Mapping[str, Any]) -> frozenset[int]:
    """The tokens of the holds that the viewer means to end."""
    found = body.get("tokens")
    if not isinstance(found, list) or not all(_is_number(text) for text in found):
        raise _Refused(422, "tokens is a list of the holders' tokens, as texts of digits")
    return frozenset(map(int, found))


def _is_number(text: object) -> bool:
    return isinstance(text, str) and text.isascii() and text.isdecimal() and len(text) < 20
