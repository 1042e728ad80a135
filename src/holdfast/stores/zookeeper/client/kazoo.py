"""kazoo, plugged into our hands: its log, its states, what it is asked and its end.

kazoo keeps the session: it connects, reconnects, authenticates and speaks the protocol on one
thread of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kazoo.client import KazooClient
from kazoo.exceptions import ConnectionClosedError
from kazoo.protocol.serialization import CloseInstance
from kazoo.protocol.states import KeeperState

from holdfast.stores.zookeeper.client.connection import Connection
from holdfast.stores.zookeeper.client.handler import Handler, Listener

__all__ = ["Client", "Quiet", "drop", "make_client", "say_goodbye", "submit"]

_ENDED = (KeeperState.AUTH_FAILED, KeeperState.CLOSED, KeeperState.EXPIRED_SESSION)


class Quiet:
    """kazoo's log. It would show credentials at its lowest level; we keep the last trouble."""

    def __init__(self) -> None:
        self.trouble = ""

    def debug(self, *_: Any) -> None:
        pass

    log = info = debug

    def warning(self, text: str, *values: Any) -> None:
        self.trouble = text % values if values else text

    warn = warning

    def exception(self, text: str, *values: Any) -> None:
        self.warning(text, *values)


class Client(KazooClient):  # type: ignore[misc]
    """kazoo's client, on our connection."""

    _connection: Connection

    def _session_callback(self, state: Any) -> None:
        if state != KeeperState.CONNECTED:
            self._connection.shut()
        super()._session_callback(state)


def make_client(listener: Listener, handler: Handler, log: Quiet, **options: Any) -> Client:
    """A client that has not connected yet."""
    sasl = options.pop("sasl_options", None)
    retry = {"max_tries": -1, "delay": 0.05, "max_delay": 1.0, "sleep_func": handler.sleep_func}
    client = Client(handler=handler, logger=log, connection_retry=retry, **options)
    handler.listener, handler.queue = listener, lambda: client._queue
    client._connection = Connection(client, listener, logger=log, sasl_options=sasl)
    client.add_listener(lambda state: _tell(listener, str(state)))
    return client


def _tell(listener: Listener, state: str) -> None:
    if state == "LOST":
        listener.disconnected(ended=True)
    elif state == "SUSPENDED":
        listener.disconnected(ended=False)


def submit(client: Client, asks: Sequence[Any]) -> None:
    """Sends requests, or hands them to kazoo's thread, which is woken once for all of them."""
    connection = client._connection
    if connection.send(asks):
        return
    wake = connection._write_sock
    if client._state in _ENDED or wake is None:
        for ask in asks:
            client._call(ask, ask)  # tells it why not
        return
    client._queue.extend([(ask, ask) for ask in asks])
    if connection.flush():
        return
    try:
        wake.send(b"\0")
    except BlockingIOError:
        pass  # it has been called often enough
    except OSError:
        for ask in asks:
            ask.set_exception(ConnectionClosedError("the connection was closed"))


def say_goodbye(client: Client, seconds: float) -> None:
    """Ends the session, and with it all its nodes; waits no longer than that.

    kazoo's own ``stop`` may wait for ten seconds and more while it is not connected.
    """
    if client._stopped.is_set():
        return
    connection = client._connection
    client._stopped.set()
    connection.reader.shared = False  # the last answer is kazoo's
    client._queue.append((CloseInstance, None))
    connection.wake()
    connection.connection_stopped.wait(seconds)


def drop(client: Client) -> None:
    """In a forked child: closes the handles that it inherited, which the parent keeps."""
    connection = client._connection
    for wire in (connection._socket, connection._read_sock, connection._write_sock):
        if wire is not None:
            wire.close()
    connection.reader.close()
