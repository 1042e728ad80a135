"""Where the embedded store's file lives, and which users may access it.

The file and a folder that is made for it are private to the user, or shared with one group on
request. The owner of a folder can replace the files in it, so all folders down to the file must
belong to this user or to root (or to a member of the group). All checks come before the first
write. Only SQLite opens the file itself: closing any other descriptor of it would drop SQLite's
locks in the whole process.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import suppress

from holdfast.errors import GuaranteeNotMet, Unsupported
from holdfast.stores.sqlite.host import refuse_network, refuse_shifted_clock
from holdfast.url import Url

__all__ = ["StoreFile", "store_file"]

_POSIX = os.name == "posix"
_JOURNAL_MAGIC = bytes.fromhex(
    "d9d505f920a163d7"
)  # also at the end of a journal that names another one


class StoreFile:
    """The store's file, and the group that shares it."""

    __slots__ = ("group", "path")

    def __init__(self, path: str, group: str | None = None) -> None:
        self.path, self.group = path, group

    @property
    def folder(self) -> str:
        return os.path.dirname(self.path)

    @property
    def file_mode(self) -> int:
        return 0o660 if self.group else 0o600

    @property
    def folder_mode(self) -> int:
        return 0o2770 if self.group else 0o700

    @property
    def socket_folder_mode(self) -> int:
        """Sticky if shared: no user can replace the sockets of another."""
        return 0o3770 if self.group else 0o700

    def ready(self) -> tuple[int, int]:
        """Checks the path and makes the folder and the file if they are missing. Returns device and
        inode number of the file. Raises before anything is changed."""
        try:
            refuse_shifted_clock(self.path)
            self._ready_folder()
            file = self._ready_file()
            self._check_beside()
            return file
        except OSError as error:
            raise _explained(self.path, error) from error

    def _ready_folder(self) -> None:
        missing: list[str] = []
        folder = self.folder
        while not os.path.exists(folder):
            missing.append(folder)
            folder = os.path.dirname(folder)
        refuse_network(folder)
        for above in _upwards(folder if missing else os.path.dirname(folder)):
            self._check_above(above)
        for part in reversed(missing):
            with suppress(FileExistsError):  # another process made it first
                os.mkdir(part, 0o700)
            if part != self.folder:
                self._check_above(part)
        if missing:
            self.share_folder(self.folder, self.folder_mode)
        self._check_folder(self.folder)  # also a new one: another user may have made it first

    def _check_above(self, folder: str) -> None:
        """A user who owns a folder above ours, or may rename files in it, can replace ours."""
        found = os.stat(folder)
        if not stat.S_ISDIR(found.st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), folder)
        if not _POSIX:
            return
        self._check_owner(found, folder)
        if found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX:
            raise GuaranteeNotMet(
                f"{folder} can be written by everybody, who could then replace {self.path}: "
                f"chmod +t it, or {_elsewhere()}"
            )

    def _check_owner(self, found: os.stat_result, path: str) -> None:
        if not self.trusts(found.st_uid):
            raise GuaranteeNotMet(
                f"{path} belongs to the user {found.st_uid}, who could replace the locks in "
                f"{self.path}: {_elsewhere()}"
            )

    def trusts(self, uid: int) -> bool:
        """Whether this user may own a folder: ourselves, root, or a member of the group."""
        if uid in (os.geteuid(), 0) or uid == os.stat("/").st_uid:
            return True  # in a user namespace root may have another number
        return self.group is not None and _is_member(uid, self.group)

    def _check_folder(self, folder: str) -> None:
        found = os.stat(folder)
        if not stat.S_ISDIR(found.st_mode):
            raise Unsupported(f"{folder} is not a folder, so no locks can be kept in it")
        if not _POSIX:
            return
        self._check_owner(found, folder)
        if found.st_mode & stat.S_IWOTH:
            below = f"name a file in a folder below it: {folder}/NAME/locks.db, where NAME is made"
            raise GuaranteeNotMet(
                f"{folder} can be written by everybody, who could then replace the locks in it: "
                f"{below if found.st_mode & stat.S_ISVTX else _elsewhere()}"
            )
        if self.group and not (found.st_gid == _gid(self.group) and found.st_mode & stat.S_ISGID):
            raise GuaranteeNotMet(
                f"{folder} does not pass the group {self.group!r} on to the files in it: "
                f"chgrp {self.group} and chmod 2770 it, or name a folder that does not exist yet"
            )

    def _ready_file(self) -> tuple[int, int]:
        try:
            found = os.lstat(self.path)
        except FileNotFoundError:
            self._make_file()
            found = os.lstat(self.path)
        if stat.S_ISLNK(found.st_mode):
            raise GuaranteeNotMet(f"{self.path} is a symbolic link: name the file that it leads to")
        if not stat.S_ISREG(found.st_mode):
            raise Unsupported(f"{self.path} is not a plain file")
        if _POSIX:
            self._check_file(found)
        if not os.access(self.path, os.R_OK | os.W_OK):
            read_only = _POSIX and os.statvfs(self.path).f_flag & os.ST_RDONLY
            code = errno.EROFS if read_only else errno.EACCES
            raise OSError(code, os.strerror(code), self.path)
        return found.st_dev, found.st_ino

    def _check_file(self, found: os.stat_result) -> None:
        mode = stat.S_IMODE(found.st_mode)
        if self.group:
            self._check_owner(found, self.path)
            if found.st_gid != _gid(self.group) or mode != self.file_mode:
                raise GuaranteeNotMet(
                    f"{self.path} is not shared with the group {self.group!r} alone: chgrp "
                    f"{self.group} and chmod 660 it while no program uses it"
                )
        elif mode & 0o077:
            raise GuaranteeNotMet(
                f"{self.path} is open to others (mode {mode:o}): chmod 600 it, or share it with "
                "a group by ?group=NAME"
            )
        elif found.st_uid != os.geteuid():
            raise GuaranteeNotMet(
                f"{self.path} belongs to the user {found.st_uid}: name a file of your own, or "
                "share one with a group by ?group=NAME"
            )

    def _check_beside(self) -> None:
        """SQLite uses the files that it finds beside ours; other users may have put them there."""
        for ending in ("-wal", "-shm", "-journal"):
            path = self.path + ending
            try:
                plain = stat.S_ISREG(os.lstat(path).st_mode)
                harmful = plain and ending == "-journal" and _names_another_journal(path)
            except FileNotFoundError:
                continue
            if not plain or harmful:
                what = "names a file that SQLite would delete" if plain else "is not a plain file"
                raise GuaranteeNotMet(
                    f"{path} {what}, and was not made by Holdfast: remove it while no program uses "
                    f"{self.path}"
                )

    def _make_file(self) -> None:
        """Makes the empty file under another name first: it must never have other rights."""
        draft = f"{self.path}.{os.urandom(8).hex()}"
        file = os.open(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        try:
            try:
                self._share(file, self.file_mode)
            finally:
                os.close(file)  # before any thread can open it through SQLite: see above
            os.link(draft, self.path)
        except FileExistsError:
            pass  # another process made it first; its file is checked like any other
        finally:
            os.unlink(draft)

    def share_folder(self, path: str, mode: int) -> None:
        """Sets group and mode of a new folder, unless it belongs to another user."""
        if not self.group:
            return
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            if os.fstat(folder).st_uid == os.geteuid():
                self._share(folder, mode)
        finally:
            os.close(folder)

    def _share(self, file: int, mode: int) -> None:
        """By descriptor: other members of the group may replace what is at a path."""
        if self.group and _POSIX:
            os.fchown(file, -1, _gid(self.group))
            os.fchmod(file, mode)


def _names_another_journal(journal: str) -> bool:
    """Whether a journal is part of a transaction over several files; Holdfast's never is.
    SQLite reads the name of another journal from it, and deletes that file."""
    file = os.open(journal, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))
    try:
        size = os.fstat(file).st_size
        os.lseek(file, max(0, size - len(_JOURNAL_MAGIC)), os.SEEK_SET)
        return os.read(file, len(_JOURNAL_MAGIC)) == _JOURNAL_MAGIC
    finally:
        os.close(file)


def _upwards(folder: str) -> Iterator[str]:
    """A folder and all folders above it."""
    above = ""
    while folder != above:
        yield folder
        above, folder = folder, os.path.dirname(folder)


def store_file(url: Url) -> StoreFile:
    """The file of ``local`` or ``sqlite:///path``. Touches no file. Raises ``ValueError``."""
    group = url.options.get("group") or None
    if group and _POSIX:
        _gid(group)
    if url.scheme == "local":
        if url.hosts or url.path.strip("/"):
            raise ValueError("local takes no path: sqlite:///path names a file")
        return StoreFile(_default_path(), group)
    if url.hosts or url.username:
        raise ValueError(
            "sqlite:// takes no host: write sqlite:///absolute/path, with three slashes"
        )
    path = url.path if _POSIX else url.path.lstrip("/")
    if not path.strip("/") or path.endswith("/"):
        raise ValueError("sqlite:/// needs a file: sqlite:///var/lib/app/locks.db")
    # The folders may be reached through links; the file itself may not be one.
    folder, name = os.path.split("/" + path.lstrip("/") if _POSIX else path)
    return StoreFile(os.path.join(os.path.realpath(folder), name), group)


def _default_path() -> str:
    state = os.environ.get("XDG_STATE_HOME" if _POSIX else "LOCALAPPDATA", "")
    if not os.path.isabs(state):
        home = os.environ.get("HOME", "")
        state = os.path.join(home if os.path.isabs(home) else _home_of_record(), ".local", "state")
    return os.path.join(os.path.realpath(state), "holdfast", "locks.db")


def _home_of_record() -> str:
    try:
        import pwd

        return pwd.getpwuid(os.getuid()).pw_dir
    except (ImportError, KeyError):
        raise Unsupported(
            "no home for the local store: HOME is not set and the user database names none. "
            "Set HOME or XDG_STATE_HOME, or name a file: sqlite:///path"
        ) from None


def _gid(group: str) -> int:
    import grp

    try:
        return grp.getgrnam(group).gr_gid
    except KeyError:
        raise ValueError(f"group={group!r}: there is no such group here") from None


def _is_member(uid: int, group: str) -> bool:
    import grp
    import pwd

    try:
        user = pwd.getpwuid(uid)
    except KeyError:
        return False
    return user.pw_gid == _gid(group) or user.pw_name in grp.getgrnam(group).gr_mem


def _elsewhere() -> str:
    """Advice for folders of another user: in a container, or by sudo in a user's home."""
    where = (
        "name a file in a folder of your own, such as sqlite:///tmp/NAME/locks.db (NAME is made)"
    )
    if _POSIX and os.geteuid() == 0 and "SUDO_UID" in os.environ:
        return f"{where}, or let sudo -H give you root's own home"
    return f"{where}; for local, set XDG_STATE_HOME to such a folder"


def _explained(path: str, error: OSError) -> Unsupported:
    what = f"{error.filename or path}: {error.strerror or error}"
    if error.errno == errno.EROFS:
        return Unsupported(f"no locks can be kept in {path}: the file system is read-only ({what})")
    if error.errno in (errno.EACCES, errno.EPERM):
        return Unsupported(
            f"no locks can be kept in {path}: no right to write there ({what}); {_elsewhere()}"
        )
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return Unsupported(f"no locks can be kept in {path}: the disk is full ({what})")
    return Unsupported(f"no locks can be kept in {path} ({what})")
