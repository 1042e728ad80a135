"""Real application servers with several workers, for the tests of web integrations."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx

from integrations.journal import Journal
from servers.ports import free_port, give_back
from servers.process import wait_until

__all__ = [
    "GUNICORN",
    "HEALTH_SECONDS",
    "PATIENT_SECONDS",
    "SERVERS",
    "UVICORN",
    "WORKERS",
    "Application",
    "serving",
]

TESTS = Path(__file__).parents[1]
WORKERS = 3
START_SECONDS = 90.0
END_SECONDS = 90.0
HEALTH_SECONDS, PATIENT_SECONDS = 10, 60
"""When uvicorn gives a worker up that does not answer; longer where a test pauses one. It may also
take so long to notice that one was killed."""
UVICORN: tuple[str, ...] = (
    "uvicorn",
    "{app}",
    "--loop",
    "uvloop",
    "--lifespan",
    "on",
    "--no-access-log",
)
UVICORN += (
    "--workers",
    "{workers}",
    "--port",
    "{port}",
    "--timeout-worker-healthcheck",
    "{health}",
)
GUNICORN: tuple[str, ...] = (
    "gunicorn",
    "{app}",
    "-k",
    "uvicorn_worker.UvicornWorker",
    "-w",
    "{workers}",
)
GUNICORN += ("-b", "127.0.0.1:{port}", "--no-control-socket", "--timeout", "120")
SERVERS = {"uvicorn": UVICORN, "gunicorn": GUNICORN}


class Application:
    """An application that is being served."""

    def __init__(
        self, port: int, journal: Journal, server: subprocess.Popen[bytes], log: Path
    ) -> None:
        self.journal, self.server, self.log = journal, server, log
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60)

    def answers(self) -> bool:
        """Whether it serves requests; raises if the server has ended."""
        assert self.server.poll() is None, "the server ended at its start"
        with suppress(httpx.TransportError):
            return self.http.get("/").is_success
        return False


@contextmanager
def serving(
    app: str,
    store: str,
    folder: Path,
    *,
    command: Sequence[str] = UVICORN,
    workers: int = WORKERS,
    wait: bool = True,
    health: int = HEALTH_SECONDS,
    **environment: str,
) -> Iterator[Application]:
    """Serves an application of this folder until the end of the block; it must end by itself."""
    port, log = free_port(), folder / "log"
    words = [word.format(app=app, port=port, workers=workers, health=health) for word in command]
    journal = folder / "journal"
    variables: Mapping[str, str] = {
        **os.environ,
        "HOLDFAST_URL": store,
        "NAMESPACE": f"t{secrets.token_hex(6)}",
        "JOURNAL": str(journal),
        # What is tested may be a copy, as with mutants: it comes first in the tests' own path.
        "PYTHONPATH": os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(TESTS), str(folder)]),
        **environment,
    }
    with log.open("w") as output:
        server = subprocess.Popen(
            [sys.executable, "-m", *words],
            env=variables,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    application = Application(port, Journal(journal), server, log)
    try:
        if wait:
            wait_until("the application", application.answers, START_SECONDS)
        yield application
        server.terminate()
        server.wait(END_SECONDS)
    finally:
        with suppress(ProcessLookupError):  # also workers that are stopped
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()
        application.http.close()
        give_back(port)
        print(log.read_text())
