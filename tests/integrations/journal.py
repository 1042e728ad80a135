"""What the workers of an application have done, in the order in which they did it: a file."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

__all__ = ["Journal"]


class Journal:
    """A file of lines that many processes append to."""

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)

    def write(self, event: str, **fields: Any) -> None:
        """Appends a line with the event, this process and the fields: one write, so that it stays
        whole."""
        line = json.dumps({"event": event, "pid": os.getpid(), **fields}) + "\n"
        file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(file, line.encode())
        finally:
            os.close(file)

    def read(self, event: str | None = None) -> list[dict[str, Any]]:
        """The lines so far, of one event or of all."""
        if not self._path.exists():
            return []
        lines = [json.loads(line) for line in self._path.read_text().splitlines()]
        return [line for line in lines if event in (None, line["event"])]
