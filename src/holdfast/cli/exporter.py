"""``holdfast exporter``: what a store holds, for Prometheus, read at each scrape."""

from __future__ import annotations

import signal
import threading
from types import FrameType

from holdfast.cli.exits import BadSetting
from holdfast.cli.output.text import say
from holdfast.cli.parsing.options import Parser, bind_address, connect, store_options
from holdfast.dashboard.rows import store_of

__all__ = ["main"]

ADDRESS = "127.0.0.1:9464"


def main(argv: list[str]) -> int:
    parser = Parser("exporter", "Serves what a store holds to Prometheus, by kind of lock.")
    parser.add_argument(
        "--bind",
        metavar="HOST:PORT",
        type=bind_address,
        default=bind_address(ADDRESS),
        help=f"where to listen ({ADDRESS})",
    )
    store_options(parser)
    options = parser.parse_args(argv)
    with connect(options.url, options.namespace) as locks:
        try:
            from holdfast.observe.prometheus import FleetCollector
        except ModuleNotFoundError as error:
            raise BadSetting(str(error)) from None
        from prometheus_client import CollectorRegistry, start_http_server

        registry = CollectorRegistry()
        registry.register(FleetCollector(locks))
        host, port = options.bind
        try:
            server, thread = start_http_server(port, host, registry)
        except OSError as error:
            raise BadSetting(f"--bind {host}:{port}: {error.strerror or error}") from None
        where = f"[{host}]" if ":" in host else host
        say(f"metrics of {store_of(locks)}: http://{where}:{server.server_port}/metrics")
        try:
            _wait_for_the_end()
        finally:
            server.shutdown()
            server.server_close()
            thread.join()
    return 0


def _wait_for_the_end() -> None:
    """Returns after SIGTERM, as a service is stopped; Ctrl-C raises ``KeyboardInterrupt``."""
    end = threading.Event()

    def stop(_: int, __: FrameType | None) -> None:
        end.set()

    signal.signal(signal.SIGTERM, stop)
    while not end.wait(1):  # a signal handler runs between two waits on every system
        pass
