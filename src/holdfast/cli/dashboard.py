"""``holdfast dashboard``: serves a page that shows a store live."""

from __future__ import annotations

import ipaddress
import logging
import os
import socket
from typing import TYPE_CHECKING, Any

from holdfast.cli.exits import BadSetting
from holdfast.cli.output.text import say
from holdfast.cli.parsing.options import Parser, bind_address, connect, store_options
from holdfast.dashboard.rows import store_of
from holdfast.url import read_secret

if TYPE_CHECKING:
    from types import FrameType, SimpleNamespace

__all__ = ["main"]

BIND = "127.0.0.1:8077"
TOKEN = "HOLDFAST_DASHBOARD_TOKEN"  # noqa: S105 - the name of a variable
TOKEN_FILE = "HOLDFAST_DASHBOARD_TOKEN_FILE"  # noqa: S105
BACKLOG = 128
END_SECONDS = 1
"""How long viewers may delay the end of the program."""


def main(argv: list[str]) -> int:
    parser = Parser(
        "dashboard",
        "Serves a page that shows a store live: what waits longest, holders and lines, leaders,\n"
        "losses. Needs the extra: pip install 'holdfast[dashboard]'.",
    )
    parser.add_argument(
        "--bind", metavar="HOST:PORT", type=bind_address, help=f"where to listen ({BIND})"
    )
    parser.add_argument(
        "--allow-break", action="store_true", help="let viewers end holds; needs a token"
    )
    parser.add_argument(
        "--host",
        metavar="NAME",
        help="also serve this host name, such as a proxy's (NAME,NAME for more)",
    )
    store_options(parser)
    parser.epilog = (
        f"The token that viewers log in with is ${TOKEN}, or in the file ${TOKEN_FILE}. "
        "Without one, only this machine is served, and nothing can be broken."
    )
    options = parser.parse_args(argv)
    address, token = options.bind or bind_address(BIND), _token()
    _check(address, token, options.allow_break)
    logging.getLogger("holdfast").addHandler(_Log(logging.WARNING))
    with connect(options.url, options.namespace) as locks:
        application = _application(locks, options, token)
        with _listen(address) as listener:
            _serve(application, listener, store_of(locks))
    return 0


class _Log(logging.Handler):
    """Writes log lines to standard error, also those of breaks, which no message here repeats."""

    def emit(self, record: logging.LogRecord) -> None:
        say(record.getMessage())


def _token() -> str | None:
    """The token, of the environment: every user of the machine can see a command line."""
    text, path = os.environ.get(TOKEN), os.environ.get(TOKEN_FILE)
    if text and path:
        raise BadSetting(f"{TOKEN} and {TOKEN_FILE} are both set: which token is meant?")
    try:
        return read_secret(path, TOKEN_FILE) if path else text or None
    except ValueError as error:
        raise BadSetting(str(error)) from None


def _check(address: tuple[str, int], token: str | None, allow_break: bool) -> None:
    """Refuses what would open the dashboard to others."""
    if token is not None:
        return
    how = f"set {TOKEN}, or {TOKEN_FILE}, to a secret of 16 characters or more"
    if allow_break:
        raise BadSetting(f"--allow-break needs a token: {how}")
    if not _is_loopback(address[0]):
        raise BadSetting(f"--bind {address[0]} needs a token, others can reach it: {how}")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _application(locks: Any, options: SimpleNamespace, token: str | None) -> Any:
    from holdfast import dashboard

    hosts = [name.strip() for name in (options.host or "").split(",") if name.strip()]
    if options.bind:
        hosts.append(options.bind[0])
    view_only = None if token else _may_view
    try:
        return dashboard.app(
            locks,
            authorize=view_only,
            token=token,
            allow_break=options.allow_break,
            hosts=hosts,
            always=True,
        )
    except (ModuleNotFoundError, ValueError) as error:
        raise BadSetting(str(error)) from None


def _may_view(_: object, action: str) -> bool:
    return action == "view"


def _listen(address: tuple[str, int]) -> socket.socket:
    """A listening socket; raises ``BadSetting`` if the address is taken, or is not ours."""
    host, port = address
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise BadSetting(f"--bind {host}:{port}: {error.strerror or error}") from None


def _serve(application: Any, listener: socket.socket, store: str) -> None:
    try:
        import uvicorn
    except ModuleNotFoundError as error:
        from holdfast.dashboard import missing_extra

        raise BadSetting(str(missing_extra(error, "dashboard"))) from None
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    say(f"the dashboard of {store} is on http://{shown}:{port}/ (Ctrl-C ends it)")
    config = uvicorn.Config(
        application,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=END_SECONDS,
        lifespan="on",
    )

    class Server(uvicorn.Server):
        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            application.state.end_streams()
            super().handle_exit(sig, frame)

    Server(config).run(sockets=[listener])
