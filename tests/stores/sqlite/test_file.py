"""Where the embedded store's file may be, and who may touch it."""

from __future__ import annotations

import grp
import os
import pwd
import stat
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.claim import Busy
from holdfast.core.drive import run_now
from holdfast.errors import GuaranteeNotMet, Unsupported
from holdfast.stores.sqlite.file import store_file
from holdfast.stores.sqlite.host import file_system, refuse_network
from holdfast.url import parse_url
from stores.sqlite.helpers import Program, backend_of, claim, store_of, take, try_to_take

GROUP = grp.getgrgid(os.getgid()).gr_name


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_everything_is_private(tmp_path: Path) -> None:
    path = tmp_path / "new" / "locks.db"
    before = os.umask(0)
    try:
        with backend_of(path) as backend:
            take(backend)
            assert isinstance(try_to_take(backend, claim()), Busy)
            sockets = Path(f"{path}-wake")
            assert [mode_of(path), mode_of(path.parent), mode_of(sockets)] == [0o600, 0o700, 0o700]
            assert [mode_of(each) for each in sockets.iterdir()] == [0o600]
            assert {mode_of(each) for each in path.parent.glob("locks.db-[ws][ah][lm]")} == {0o600}
    finally:
        os.umask(before)


def test_a_group_shares_all_of_it(tmp_path: Path) -> None:
    path = tmp_path / "new" / "locks.db"
    before = os.umask(0o077)
    try:
        with backend_of(path, options=f"?group={GROUP}") as backend:
            take(backend)
            try_to_take(backend, claim())
            sockets = Path(f"{path}-wake")
            assert [mode_of(path), mode_of(path.parent)] == [0o660, 0o2770]
            assert mode_of(sockets) == 0o3770  # sticky: no user can replace the socket of another
            assert [mode_of(each) for each in sockets.iterdir()] == [0o660]
            assert {mode_of(each) for each in path.parent.glob("locks.db-[ws][ah][lm]")} == {0o660}
    finally:
        os.umask(before)
    with backend_of(path) as alone, pytest.raises(GuaranteeNotMet, match="open to others"):
        take(alone)


def test_the_group_option_does_not_share_a_private_file(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir(0o700)
    with backend_of(folder / "locks.db") as backend:
        take(backend)
    options = f"?group={GROUP}"
    with (
        backend_of(folder / "locks.db", options=options) as shared,
        pytest.raises(GuaranteeNotMet, match="chmod 2770"),
    ):
        take(shared)
    folder.chmod(0o2770)
    with (
        backend_of(folder / "locks.db", options=options) as shared,
        pytest.raises(GuaranteeNotMet, match="chmod 660"),
    ):
        take(shared)


def test_a_folder_that_became_a_link_is_not_shared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another user replaces the new folder by a link to another folder."""
    private = tmp_path / "private"
    private.mkdir(0o700)
    made = os.mkdir

    def exchanged(path: str, mode: int) -> None:
        made(path, mode)
        Path(path).rmdir()
        Path(path).symlink_to(private)

    monkeypatch.setattr(os, "mkdir", exchanged)
    options = f"?group={GROUP}"
    with (
        backend_of(tmp_path / "new" / "locks.db", options=options) as backend,
        pytest.raises(Unsupported),
    ):
        take(backend)
    assert mode_of(private) == 0o700


def test_an_unknown_group_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such group"):
        store_of(tmp_path / "locks.db", options="?group=no-such-group-here")


def test_links_are_not_followed(tmp_path: Path) -> None:
    target = tmp_path / "elsewhere.db"
    (tmp_path / "locks.db").symlink_to(target)
    with (
        backend_of(tmp_path / "locks.db") as backend,
        pytest.raises(GuaranteeNotMet, match="symbolic link"),
    ):
        take(backend)
    assert not target.exists()


JOURNAL = bytes.fromhex("d9d505f920a163d7")


def journal_over_several_files(database: Path, common: Path) -> bytes:
    """What a crash leaves of a transaction over several files: it names their common journal."""
    name, page = bytes(common), 2048
    head = JOURNAL + struct.pack(">IIIII", 0, 1, database.stat().st_size // page, 512, page)
    sum_of = sum(name)  # of signed bytes, and these are ASCII
    tail = struct.pack(">I", 0x40000000 // page + 1) + name
    return head.ljust(512, b"\0") + tail + struct.pack(">II", len(name), sum_of) + JOURNAL


def test_a_journal_deletes_no_other_file(tmp_path: Path) -> None:
    """Any user with write access to the folder could put it there, for root to open."""
    path, precious = tmp_path / "locks.db", tmp_path / "precious"
    precious.write_text("not a journal")
    with backend_of(path) as backend:
        take(backend)
    journal = Path(f"{path}-journal")
    journal.write_bytes(journal_over_several_files(path, precious))
    with backend_of(path) as backend, pytest.raises(GuaranteeNotMet, match="would delete"):
        take(backend, claim("another name"))
    assert precious.exists()
    journal.write_bytes(b"")
    with backend_of(path) as backend:
        take(backend, claim("another name"))


@pytest.mark.parametrize("ending", ["-wal", "-shm", "-journal"])
def test_links_beside_the_file_are_refused_at_once(tmp_path: Path, ending: str) -> None:
    path, precious = tmp_path / "locks.db", tmp_path / "precious"
    precious.write_text("not a log")
    Path(f"{path}{ending}").symlink_to(precious)
    with backend_of(path) as backend, pytest.raises(GuaranteeNotMet, match="not a plain file"):
        take(backend)
    assert precious.read_text() == "not a log"


def test_a_folder_that_all_can_write_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o1777)
    with (
        backend_of(folder / "locks.db") as backend,
        pytest.raises(GuaranteeNotMet, match="written by everybody"),
    ):
        take(backend)
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    ("mode", "name", "message"),
    [
        (0o1777, "locks.db", "folder/NAME/locks.db"),
        (
            0o777,
            "locks.db",
            "sqlite:///tmp/NAME/locks.db",
        ),  # a folder below it would be refused too
        (0o777, "below/locks.db", "chmod .t it, or .* sqlite:///tmp/NAME/locks.db"),
    ],
)
def test_a_refusal_names_a_folder_that_is_taken(
    tmp_path: Path, mode: int, name: str, message: str
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    folder.chmod(mode)
    with backend_of(folder / name) as backend, pytest.raises(GuaranteeNotMet, match=message):
        take(backend)
    if mode & stat.S_ISVTX:
        with backend_of(folder / "NAME" / "locks.db") as backend:
            take(backend)


def test_a_path_that_is_no_plain_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "locks.db").mkdir()
    with (
        backend_of(tmp_path / "locks.db") as backend,
        pytest.raises(Unsupported, match="not a plain file"),
    ):
        take(backend)


def test_a_file_in_the_way_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "folder").touch()
    with (
        backend_of(tmp_path / "folder" / "locks.db") as backend,
        pytest.raises(Unsupported, match=r"folder"),
    ):
        take(backend)


STRANGER = 64123
only_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


def refused(path: Path, message: str, options: str = "") -> None:
    """The store refuses the path, and leaves no file behind."""
    before = sorted(path.parent.glob("*"))
    with (
        backend_of(path, options=options) as backend,
        pytest.raises(GuaranteeNotMet, match=message),
    ):
        take(backend)
    assert sorted(path.parent.glob("*")) == before


@only_root
@pytest.mark.parametrize("path", ["locks.db", "mine/locks.db", "not/there/yet/locks.db"])
def test_a_stranger_s_folder_is_refused(tmp_path: Path, path: str) -> None:
    """Also as a folder above ours: its owner can replace ours."""
    theirs = tmp_path / "theirs"
    (theirs / "mine").mkdir(parents=True)
    os.chown(theirs, STRANGER, STRANGER)
    refused(theirs / path, f"theirs belongs to the user {STRANGER}")


@only_root
@pytest.mark.parametrize("folders", ["faster", "faster/mine"])
def test_a_stranger_who_makes_the_folder_first_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folders: str
) -> None:
    made = os.mkdir

    def faster(path: str, mode: int) -> None:
        made(path, mode)
        if path.endswith("faster"):
            os.chown(path, STRANGER, STRANGER)
            raise FileExistsError(path)

    monkeypatch.setattr(os, "mkdir", faster)
    with (
        backend_of(tmp_path / folders / "locks.db") as backend,
        pytest.raises(GuaranteeNotMet, match=f"faster belongs to the user {STRANGER}"),
    ):
        take(backend)
    assert not (tmp_path / folders / "locks.db").exists()


@only_root
def test_sudo_in_a_user_s_home_is_pointed_to_root_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.chown(tmp_path, STRANGER, -1)
    monkeypatch.setenv("SUDO_UID", str(STRANGER))
    refused(tmp_path / "locks.db", "sudo -H")


@only_root
def test_root_does_not_use_a_stranger_s_file(tmp_path: Path) -> None:
    path = tmp_path / "locks.db"
    with backend_of(path) as backend:
        take(backend)
    os.chown(path, STRANGER, STRANGER)
    refused(path, f"belongs to the user {STRANGER}")


@only_root
def test_a_member_s_folder_is_shared_and_a_stranger_s_is_not(tmp_path: Path) -> None:
    nobody = pwd.getpwnam("nobody")
    options = f"?group={grp.getgrgid(nobody.pw_gid).gr_name}"
    folder = tmp_path / "shared"
    folder.mkdir()
    os.chown(folder, nobody.pw_uid, nobody.pw_gid)
    folder.chmod(0o2770)
    with backend_of(folder / "locks.db", options=options) as backend:
        take(backend)
    os.chown(folder, STRANGER, nobody.pw_gid)
    folder.chmod(0o2770)
    refused(folder / "locks.db", f"belongs to the user {STRANGER}", options)


@only_root
def test_a_stranger_s_folder_of_sockets_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "locks.db"
    wake = Path(f"{path}-wake")
    wake.mkdir(0o700)
    os.chown(wake, STRANGER, STRANGER)
    with backend_of(path) as backend:
        take(backend)
        with pytest.raises(GuaranteeNotMet, match="not a folder for Holdfast's wake-ups"):
            try_to_take(backend, claim())


def test_a_folder_that_all_can_write_may_be_above_if_it_is_sticky(tmp_path: Path) -> None:
    above = tmp_path / "open"
    above.mkdir()
    above.chmod(0o777)
    refused(above / "mine" / "locks.db", "written by everybody")
    above.chmod(0o1777)
    with backend_of(above / "mine" / "locks.db") as backend:
        take(backend)


@only_root
def test_another_user_s_file_is_not_ours(tmp_path: Path) -> None:
    folder = tmp_path / "theirs"
    with backend_of(folder / "locks.db") as backend:
        take(backend)
    lines = (
        "import grp, pwd\n"
        "nobody = pwd.getpwnam('nobody')\n"
        "os.setgroups([]); os.setgid(nobody.pw_gid); os.setuid(nobody.pw_uid)\n"
        "try:\n"
        "    with backend_of(path) as backend: take(backend)\n"
        "except Exception as error: print(type(error).__name__, error)\n"
    )
    for parent in (folder, *folder.parents):
        if parent != Path(parent.anchor):
            parent.chmod(mode_of(parent) | 0o005)
    with Program(folder / "locks.db", lines) as program:
        assert "belongs to the user 0" in program.says()


@only_root
def test_two_members_of_the_group_exclude_each_other(tmp_path: Path) -> None:
    group = grp.getgrgid(pwd.getpwnam("nobody").pw_gid).gr_name
    path, options = tmp_path / "shared" / "locks.db", f"?group={group}"
    for parent in tmp_path.parents:
        if parent != Path(parent.anchor) and parent.stat().st_uid == os.geteuid():
            parent.chmod(mode_of(parent) | 0o005)
    tmp_path.chmod(0o755)
    lines = (
        "import grp, pwd, holdfast.stores.sqlite.wakeups\n"  # while it can still read them
        "nobody = pwd.getpwnam('nobody')\n"
        "os.setgroups([]); os.setgid(nobody.pw_gid); os.setuid(nobody.pw_uid)\n"
        f"with backend_of(path, options={options!r}) as backend:\n"
        "    asked = claim()\n"
        "    busy = try_to_take(backend, asked); print('waits', flush=True)\n"
        "    run_now(backend.wait(asked, busy, backend._runtime.now() + 30))\n"
        "    take(backend, asked); print('holds', flush=True)\n"
    )
    with backend_of(path, options=options) as backend:
        held = take(backend)
        with Program(path, lines) as program:
            assert program.says() == "waits"
            assert run_now(backend.release(held))
            assert program.says() == "holds"


@pytest.mark.parametrize(
    ("kind", "refused"),
    [
        ("ext4", False), ("xfs", False), ("btrfs", False), ("tmpfs", False), ("overlay", False),
        ("fuseblk", False), ("nfs4", True), ("nfs", True), ("cifs", True), ("9p", True),
        ("fuse.sshfs", True), ("fuse", True), ("virtiofs", True), ("ceph", True),
    ],
)  # fmt: skip
def test_network_file_systems_are_refused(kind: str, refused: bool) -> None:
    mounts = (
        "22 1 8:1 / / rw - ext4 /dev/a rw\n"
        "23 22 8:2 / /srv rw shared:1 - xfs /dev/b rw\n"
        f"24 23 0:9 / /srv/with\\040space rw - {kind} what rw\n"
    )
    assert file_system("/srv/other", mounts) == "xfs"
    assert file_system("/srv/with space/deep", mounts) == kind
    if refused:
        with pytest.raises(GuaranteeNotMet, match=kind):
            refuse_network("/srv/with space/deep", mounts)
    else:
        refuse_network("/srv/with space/deep", mounts)


def test_the_later_mount_hides_the_earlier() -> None:
    mounts = "1 0 8:1 / / rw - ext4 /dev/a rw\n2 1 0:9 / / rw - nfs4 h:/ rw\n"
    assert file_system("/any", mounts) == "nfs4"


def test_local_is_in_the_user_s_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = tmp_path.resolve()
    monkeypatch.setenv("XDG_STATE_HOME", str(real / "state"))
    assert store_file(parse_url("local")).path == str(real / "state/holdfast/locks.db")
    monkeypatch.setenv("XDG_STATE_HOME", "not/absolute")
    monkeypatch.setenv("HOME", str(real))
    assert store_file(parse_url("local")).path == str(real / ".local/state/holdfast/locks.db")


def test_without_home_the_user_database_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.delenv("HOME", raising=False)
    home = Path(pwd.getpwuid(os.getuid()).pw_dir).resolve()
    assert store_file(parse_url("local")).path == str(home / ".local/state/holdfast/locks.db")

    def nobody(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", nobody)
    with pytest.raises(Unsupported, match="HOME is not set"):
        store_file(parse_url("local"))


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("sqlite://host/path", "no host"),
        ("sqlite:///", "needs a file"),
        ("sqlite:///folder/", "needs a file"),
        ("sqlite:///path?unknown=1", "no option"),
        ("local://path", "no path"),
    ],
)
def test_urls_without_a_meaning_are_refused(url: str, message: str) -> None:
    from holdfast.core.contract import Settings
    from holdfast.url import open_store

    with pytest.raises(ValueError, match=message):
        open_store(url, Settings())


READ_ONLY = """
import subprocess, sys
from stores.sqlite.helpers import *
from pathlib import Path
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "none", sys.argv[1]], check=True)
path = Path(sys.argv[1]) / "folder" / "locks.db"
if sys.argv[2] == "used":
    with backend_of(path) as backend: take(backend)
subprocess.run(["mount", "-o", "remount,ro", sys.argv[1]], check=True)
try:
    with backend_of(path) as backend: take(backend)
except Exception as error: print(type(error).__name__, error)
"""


@pytest.mark.parametrize("state", ["new", "used"])
def test_a_read_only_disk_says_so(tmp_path: Path, state: str) -> None:
    enter = ["unshare", "-m"] if os.geteuid() == 0 else ["unshare", "-rm"]
    done = subprocess.run(
        [*enter, sys.executable, "-c", READ_ONLY, str(tmp_path), state],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith("Unsupported "), done.stdout
    assert "read-only" in done.stdout
