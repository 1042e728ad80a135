"""The user under which a server runs: PostgreSQL and MariaDB refuse to be root."""

import os
import shutil
from pathlib import Path


def account(user: str | None) -> str | None:
    """The user to change to: only root can, and only root must."""
    return user if os.geteuid() == 0 else None


def give_to(folder: Path, user: str | None) -> None:
    """Makes the user the owner of the folder and of everything in it."""
    if user is None:
        return
    shutil.chown(folder, user, user)
    for path in folder.rglob("*"):
        shutil.chown(path, user, user)
