"""Prepared data folders: making one takes seconds, copying it does not."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

from servers.missing import cache_folder


def copy_template(kind: str, program: Path, make: Callable[[Path], None], target: Path) -> None:
    """Fills `target` from the template of this kind, which is made once per program version."""
    version = subprocess.run([program, "--version"], check=True, capture_output=True, text=True)
    words = "".join(c if c.isalnum() or c in ".-" else "-" for c in version.stdout.split("(")[-1])
    template = cache_folder() / f"{kind}-{os.geteuid()}-{words.strip('-')[:60]}"
    if not template.exists():
        _build(template, make)
    shutil.copytree(template, target, symlinks=True, dirs_exist_ok=True)


def _build(template: Path, make: Callable[[Path], None]) -> None:
    # In a temporary folder, since the server's own user must reach it, and renamed into place at
    # the end, since another process may be building the same.
    with tempfile.TemporaryDirectory(prefix="holdfast-template-") as work:
        made = Path(work) / "data"
        Path(work).chmod(0o755)
        made.mkdir(mode=0o700)
        make(made)
        template.parent.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=".template-", dir=template.parent)) / "data"
        shutil.copytree(made, aside, symlinks=True)
        try:
            aside.rename(template)
        except OSError:
            if not template.exists():
                raise
        finally:
            shutil.rmtree(aside.parent, ignore_errors=True)
