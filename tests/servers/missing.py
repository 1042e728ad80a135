"""Finding a server's program, and saying which package would bring it."""

import os
import shutil
from pathlib import Path


class ServerMissing(Exception):
    """The program of a server is not on this machine; a skip, or a failure where it is required."""

    def __init__(self, name: str, package: str) -> None:
        super().__init__(f"{name} is not installed (package {package}; see `make servers`)")
        self.name = name
        self.package = package


def required() -> bool:
    """Whether a missing server is a failure here."""
    return os.environ.get("HOLDFAST_REQUIRE_SERVERS") == "1"


def cache_folder() -> Path:
    """Where scripts/install-servers puts binaries, and where prepared data folders are kept."""
    if chosen := os.environ.get("HOLDFAST_SERVERS"):
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "holdfast" / "servers"


def program(name: str, package: str, *patterns: str) -> Path:
    """The newest file that one of the glob patterns finds under the root, else `name` on PATH."""
    for pattern in patterns:
        if found := sorted(Path("/").glob(pattern.lstrip("/"))):
            return found[-1]
    # Servers live in sbin, which is not on everybody's PATH.
    path = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin", str(cache_folder())])
    if on_path := shutil.which(name, path=path):
        return Path(on_path)
    raise ServerMissing(name, package)
