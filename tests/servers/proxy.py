"""A TCP proxy between a client and a server, to break what lies between them on purpose."""

import threading
from typing import Any, Self

from servers.ports import free_port, give_back
from servers.process import Server
from servers.pump import Counts, Pump


class Proxy:
    """Listens on a port of its own; every method takes effect before it returns."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.port = free_port()
        self._pump = Pump(self.port, (server.host, server.port))

    @property
    def url(self) -> str:
        """The server's URL, through this proxy."""
        return self.server.url_at(self.port)

    @property
    def counts(self) -> Counts:
        return self._pump.counts

    @property
    def open_connections(self) -> int:
        return len(self._pump.relays)

    def cut(self) -> None:
        """Resets every connection; new ones go through."""
        self._pump.do(self._pump.cut_all)

    def refuse(self) -> None:
        """Resets every connection and refuses new ones until `accept`."""
        self._pump.do(self._pump.close_client)

    def accept(self) -> None:
        self._pump.do(self._pump.open_client)

    def stall(self) -> None:
        """Nothing moves in either direction, and nobody is told: a network that went dark."""
        self._set(stalled=True)

    def resume(self) -> None:
        """Ends `stall`: what was sent meanwhile arrives late, in order."""
        self._set(stalled=False)

    def hold_replies(self) -> None:
        """Requests reach the server; its replies wait here until `let_replies`."""
        self._set(holding=True)

    def let_replies(self) -> None:
        self._set(holding=False)

    def drop_next_reply(self, matching: bytes = b"") -> threading.Event:
        """Lets the server handle the next request (that contains `matching`), swallows its reply
        and resets that connection. The event is set when it has happened."""
        event = threading.Event()
        self._pump.do(lambda: self._pump.drop_next((matching, event)))
        return event

    def delay(self, seconds: float) -> None:
        """Everything takes this much longer, in each direction; 0 ends it for new bytes."""
        self._set(added_delay=seconds)

    def reset_counts(self) -> None:
        self._set(counts=Counts())

    def heal(self) -> None:
        """Ends everything above; open connections stay."""
        self._set(stalled=False, holding=False, added_delay=0.0)
        self._pump.do(lambda: self._pump.drop_next(None))
        self.accept()

    def close(self) -> None:
        if not self._pump.ending:
            self._set(ending=True)
            self._pump.join()
            give_back(self.port)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _set(self, **settings: Any) -> None:
        self._pump.do(lambda: vars(self._pump).update(settings))
