"""The harness of this store: one server, a fault proxy before it, and the package as installed.

``tests/examples/test_memcached_store.py`` runs the suite with it, as the tests of a package of its
own would.
"""

from __future__ import annotations

import importlib
import os
import shutil
import sys
import tempfile
import tomllib
from pathlib import Path

from harnesses.served import ServedHarness
from holdfast.testing import Knob
from servers.memcached import MemcachedServer

__all__ = ["Installed", "MemcachedHarness"]

HERE = Path(__file__).parent


class Installed:
    """The package on the path of this process and of its workers, with the entry points of its
    ``pyproject.toml``: what ``pip install`` does, without a network."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="holdfast-memcached-store-"))
        project = tomllib.loads((HERE / "pyproject.toml").read_text())["project"]
        info = self._folder / f"holdfast_memcached-{project['version']}.dist-info"
        info.mkdir()
        about = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
        (info / "METADATA").write_text(about)
        groups = project["entry-points"].items()
        lines = [
            f"[{name}]\n" + "".join(f"{k} = {v}\n" for k, v in g.items()) for name, g in groups
        ]
        (info / "entry_points.txt").write_text("\n".join(lines))
        self._path, self._before = (
            [str(HERE / "src"), str(self._folder)],
            os.environ.get("PYTHONPATH"),
        )
        sys.path[:0] = self._path
        os.environ["PYTHONPATH"] = os.pathsep.join([*self._path, *filter(None, [self._before])])
        importlib.invalidate_caches()

    def close(self) -> None:
        for entry in self._path:
            sys.path.remove(entry)
        if self._before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = self._before
        shutil.rmtree(self._folder)


class MemcachedHarness(ServedHarness):
    """memcached that was just started: without the quarantine, or every test would wait for it.

    It has no ``KILL``: it does not come back with its data. What it does instead has tests of its
    own."""

    name = "memcached"
    ttl = 1.0
    extra_recovery = (
        6.0  # the skew of four seconds, and a clock of whole seconds that a timer counts
    )
    suffix = "?quarantine=0"
    knobs = frozenset(Knob) - {Knob.KILL}

    def make_server(self) -> MemcachedServer:
        return MemcachedServer()

    def start(self) -> None:
        self._installed = Installed()
        try:
            super().start()
        except BaseException:
            self._installed.close()
            raise

    def stop(self) -> None:
        super().stop()
        self._installed.close()
