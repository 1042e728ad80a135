"""What the examples share: which store, a namespace of their own, and other processes.

Every example runs on the embedded store, and on any other by its URL:

    python examples/flash_sale.py
    python examples/flash_sale.py --url redis://localhost:6379/0
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import secrets
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from typing import Any

import holdfast

__all__ = ["Scene", "arguments", "processes"]

_spawning = multiprocessing.get_context("spawn")
Queue = _spawning.Queue
Pipe = _spawning.Pipe
Event = _spawning.Event


class Scene:
    """Where everybody in an example meets."""

    def __init__(self, url: str, ttl: float, *require: str) -> None:
        """``require`` names what the example needs of a store; one that can't is told at once."""
        self.url, self.ttl, self.require = url, ttl, require
        self.namespace = f"example-{secrets.token_hex(4)}"
        try:
            self.connect().close()
        except (holdfast.HoldfastError, ValueError, ImportError) as error:
            raise SystemExit(str(error)) from None

    def connect(self) -> holdfast.Locks:
        """A client of its own for each process."""
        return holdfast.connect(
            self.url, ttl=self.ttl, namespace=self.namespace, require=self.require
        )


def arguments(text: str, *, ttl: float = 30.0) -> argparse.ArgumentParser:
    """The options of an example: ``--url`` and ``--ttl``."""
    parser = argparse.ArgumentParser(description=text)
    default = os.environ.get("HOLDFAST_URL", "local")
    parser.add_argument("--url", default=default, help="the store (local: embedded, this machine)")
    parser.add_argument("--ttl", type=float, default=ttl, help="how long a hold lasts unrenewed")
    return parser


def processes(count: int, work: Callable[..., None], *args: Any) -> list[BaseProcess]:
    """Starts as many processes as there are hosts in the story; each is given its number. They
    end with this one."""
    made: list[BaseProcess] = []
    for number in range(count):
        process = _spawning.Process(target=work, args=(number, *args), daemon=True)
        process.start()
        made.append(process)
    return made
