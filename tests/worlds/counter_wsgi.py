"""A WSGI application for gunicorn: each request adds one to a number in a file, under a lock."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import holdfast

__all__ = ["app"]

locks = holdfast.connect()


def app(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
    number = _add_one(Path(os.environ["COUNTER"]))
    world = "gevent" if _patched() else "threads"
    body = json.dumps({"number": number, "worker": os.getpid(), "world": world}).encode()
    start_response("200 OK", [("Content-Length", str(len(body)))])
    return [body]


def _patched() -> bool:
    """Whether gevent has replaced the standard library's waiting."""
    monkey = sys.modules.get("gevent.monkey")
    return monkey is not None and bool(monkey.is_module_patched("threading"))


def _add_one(counter: Path) -> int:
    """Not atomic: two at once would lose one."""
    with locks.lock("counter"):
        number = int(counter.read_text()) + 1
        time.sleep(0.001)
        counter.write_text(str(number))
    return number
