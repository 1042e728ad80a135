"""What every server of the tests has in common: start, pause, kill, restart, wipe, stop.

A server listens on loopback only, keeps everything in a temporary folder, and is signalled by its
own pid and those of its children, never by name.
"""

import atexit
import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar, Self

from servers.account import account, give_to
from servers.guardian import watch
from servers.ports import LOOPBACK, free_port, give_back
from servers.tree import descendants, signal_all, wait_gone

READY_SECONDS = 40.0
STOP_SECONDS = 10.0
_POLL_SECONDS = 0.01

_started: set["Server"] = set()
_owner = os.getpid()


class ServerFailed(AssertionError):
    """A server did not come up; the message ends with the tail of its log."""


class Server(ABC):
    """One private server process."""

    name: ClassVar[str]
    stop_signal: ClassVar[signal.Signals] = signal.SIGTERM
    # The user that runs it when the tests run as root and the server refuses to.
    user: ClassVar[str | None] = None

    def __init__(self) -> None:
        self.host = LOOPBACK
        self.port = free_port()
        self._ports = [self.port]
        self.folder = Path(tempfile.mkdtemp(prefix=f"holdfast-{self.name}-"))
        watch("folder", self.folder)
        self.data = self.folder / "data"
        self.log = self.folder / "log"
        self.process: subprocess.Popen[bytes] | None = None
        self.paused = False

    # What each server says of itself.

    @abstractmethod
    def command(self) -> Sequence[str | Path]:
        """The program and its arguments; raises ServerMissing."""

    @abstractmethod
    def answers(self) -> bool:
        """Whether it serves requests now; an OSError counts as no."""

    @abstractmethod
    def url_at(self, port: int) -> str:
        """The URL of this server behind another port, such as a proxy's."""

    def prepare(self) -> None:  # noqa: B027, most need nothing
        """Writes what must exist before a first start: called with an empty data folder."""

    # What all of them can do.

    @property
    def url(self) -> str:
        return self.url_at(self.port)

    @property
    def pid(self) -> int:
        if self.process is None:
            raise RuntimeError(f"{self.name} was not started")
        return self.process.pid

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def another_port(self) -> int:
        """One more port that belongs to this server."""
        port = free_port()
        self._ports.append(port)
        return port

    def start(self) -> Self:
        self.launch()
        self.wait_ready()
        return self

    def launch(self) -> None:
        """Starts the process without waiting for it."""
        if self.alive:
            raise RuntimeError(f"{self.name} runs already")
        command = [str(part) for part in self.command()]
        if not self.data.exists():
            self.data.mkdir(mode=0o700)
            self.prepare()
        user = account(self.user)
        give_to(self.folder, user)
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                user=user,
                group=user,
                extra_groups=None if user is None else [],
            )
        watch("group", self.process.pid)
        self.paused = False
        _started.add(self)

    def wait_ready(self, seconds: float = READY_SECONDS) -> None:
        """Returns when the server answers; raises with its log when it ended or took too long."""
        wait_until(self.name, self._came_up, seconds, on_failure=self.log_tail)

    def _came_up(self) -> bool:
        if not self.alive:
            raise ServerFailed(f"{self.name} ended at start\n{self.log_tail()}")
        return self.answers()

    def pause(self) -> None:
        """Stops it in its tracks (SIGSTOP): connections stay open, nothing is answered."""
        signal_all(self.pid, signal.SIGSTOP)
        self.paused = True

    def resume(self) -> None:
        signal_all(self.pid, signal.SIGCONT)
        self.paused = False

    def kill(self) -> None:
        """kill -9, with its children: nothing is flushed, nobody is told."""
        if self.alive:
            # Stopped first, so that no child is born between the look and the signal.
            signal_all(self.pid, signal.SIGSTOP)
            children = descendants(self.pid)
            signal_all(self.pid, signal.SIGKILL)
            self._gone()
            wait_gone(children)

    def stop(self) -> None:
        """Ends it in order, by force if it takes too long; the data stays until close()."""
        if not self.alive:
            return
        if self.paused:
            self.resume()
        assert self.process is not None
        self.process.send_signal(self.stop_signal)
        try:
            self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
        self._gone()

    def restart(self) -> None:
        """Ends it, if it runs, and starts it again with its data and on its port."""
        self.stop()
        self.start()

    def wipe(self) -> None:
        """Loses all data; a server that runs comes back empty."""
        runs = self.alive
        self.kill()
        shutil.rmtree(self.data, ignore_errors=True)
        if runs:
            self.start()

    def close(self) -> None:
        """Ends it and removes its folder and its claim on the ports."""
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)
        for port in self._ports:
            give_back(port)
        _started.discard(self)

    def log_tail(self, lines: int = 30) -> str:
        if not self.log.exists():
            return "(no log)"
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def __enter__(self) -> Self:
        try:
            return self.start()
        except BaseException:
            self.close()
            raise

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _gone(self) -> None:
        assert self.process is not None
        self.process.wait()
        watch("gone", self.process.pid)
        self.paused = False


def wait_until(
    what: str,
    condition: Callable[[], bool],
    seconds: float = READY_SECONDS,
    *,
    on_failure: Callable[[], str] = str,
) -> None:
    """Asks again and again until the condition holds; an OSError counts as no."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            if condition():
                return
        time.sleep(_POLL_SECONDS)
    raise ServerFailed(f"{what} was not ready in {seconds} s\n{on_failure()}")


def started() -> list[Server]:
    """The servers of this process that were started and not closed."""
    return sorted(_started, key=lambda server: server.port)


@atexit.register
def _close_all() -> None:
    # A forked child that ends must not take its parent's servers with it.
    if os.getpid() == _owner:
        for server in started():
            server.close()
