"""What the embedded store must know about its machine: boot, host, type of the file system.

Leases use the boot-time clock, so they have a meaning only for the kernel that was running when
they were written. The boot id identifies that kernel.
"""

from __future__ import annotations

import os
import re
import sys

from holdfast.errors import GuaranteeNotMet

__all__ = ["Machine", "file_system", "refuse_network", "this_machine"]

_BOOT_ID = "/proc/sys/kernel/random/boot_id"
_TIME_OFFSETS = "/proc/self/timens_offsets"
_MACHINE_IDS = ("/etc/machine-id", "/var/lib/dbus/machine-id")
_MOUNTS = "/proc/self/mountinfo"

# Shared memory and POSIX locks of a file must work between all processes that open it.
_NETWORK = frozenset(
    {"nfs", "nfs4", "cifs", "smb", "smb2", "smb3", "smbfs", "ncpfs", "afs", "coda", "9p"}
    | {"virtiofs", "vboxsf", "prl_fs", "drvfs", "vmhgfs", "ceph", "glusterfs", "lustre"}
    | {"gpfs", "beegfs", "pvfs2", "orangefs", "ocfs2", "gfs2", "acfs"}
)


class Machine:
    """The ids of this boot and this host. An empty text means that the system has none."""

    __slots__ = ("boot", "host")

    def __init__(self, boot: str, host: str) -> None:
        self.boot, self.host = boot, host


def this_machine() -> Machine:
    """Reads the ids each time: a checkpointed container may be restored under another kernel."""
    return Machine(
        _read(_BOOT_ID) or _boot_session(), next(filter(None, map(_read, _MACHINE_IDS)), "")
    )


def refuse_shifted_clock(path: str) -> None:
    """Raises ``GuaranteeNotMet`` in a time namespace whose boot clock differs from the host's."""
    for line in _read(_TIME_OFFSETS).splitlines():
        clock, seconds, nanoseconds = [*line.split(), "0", "0", "0"][:3]
        if clock == "boottime" and (int(seconds) or int(nanoseconds)):
            raise GuaranteeNotMet(
                f"{path}: this process runs in a time namespace whose boot clock is shifted by "
                f"{seconds} s, so its leases would have other ends for other processes"
            )


def _read(path: str) -> str:
    try:
        with open(path) as file:
            return file.read().strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _boot_session() -> str:
    """The boot id on macOS. Other systems have none: there the clock shows a reboot."""
    if sys.platform == "darwin":
        import ctypes

        size = ctypes.c_size_t(64)
        text = ctypes.create_string_buffer(size.value)
        libc = ctypes.CDLL(None)
        failed = libc.sysctlbyname(b"kern.bootsessionuuid", text, ctypes.byref(size), None, 0)
        return "" if failed else text.value.decode("ascii", "replace")
    return ""


def file_system(folder: str, mounts: str | None = None) -> str:
    """The type of the file system of a folder; an empty text if it is unknown.

    >>> mounts = "1 0 0:5 / / rw - ext4 /dev/a rw\\n2 1 0:6 / /srv rw - nfs4 h:/x rw"
    >>> file_system("/srv/locks", mounts)
    'nfs4'
    """
    best, kind = -1, ""
    real = os.path.realpath(folder)
    for line in (_read(_MOUNTS) if mounts is None else mounts).splitlines():
        fields, _, rest = line.partition(" - ")
        point = _unescape(fields.split(" ")[4])
        inside = real == point or real.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= best:  # of two mounts on one point the later hides the earlier
            best, kind = len(point), rest.split(" ")[0]
    return kind


def _unescape(text: str) -> str:
    if "\\" not in text:
        return text
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def refuse_network(folder: str, mounts: str | None = None) -> None:
    """Raises ``GuaranteeNotMet`` on a network file system, where other machines' locks would not
    exclude ours."""
    kind = file_system(folder, mounts)
    if kind in _NETWORK or (kind.startswith("fuse") and kind != "fuseblk"):
        raise GuaranteeNotMet(
            f"{folder} is on a {kind} file system: file locks and shared memory do not work "
            "across hosts, so two processes could hold one lock. Name a file on a local disk (for "
            "local, set XDG_STATE_HOME to a folder there), or use a server such as redis:// or "
            "postgresql:// for locks between machines"
        )
