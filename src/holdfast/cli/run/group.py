"""A process group, and whether a process still runs in it."""

from __future__ import annotations

import contextlib
import os
import signal

__all__ = ["ProcessGroup"]

# A scan of /proc can miss a process that is born behind it while its parent dies before it.
SCANS = 3


class ProcessGroup:
    """The group that a command leads; used by the command's own parent only.

    A group's number is not given away while its leader is unreaped or the group has a process.
    The parent therefore says when it has reaped the leader, and from then on nothing is signalled
    that was not seen alive in the group just before.
    """

    def __init__(self, leader: int) -> None:
        self.number = leader
        self.reaped = False

    def signal(self, signum: int) -> None:
        """Signals the whole group; an empty group is no error."""
        if self.reaped and self.member() is None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.number, signum)

    def member(self) -> int | None:
        """One process that lives in the group (its number where it is known), or ``None``.

        Zombies don't count: where nobody reaps orphans, as in many containers, they stay forever.
        """
        for _ in range(SCANS):
            try:
                os.killpg(self.number, 0)
            except ProcessLookupError:
                return None
            except PermissionError:
                pass  # there is a process that we may not signal: a set-user-id program
            try:
                found = _alive_in(self.number)
            except OSError:  # no /proc: the signal above is the best answer there is
                return self.number
            if found is not None:
                return found
        return None


def _alive_in(group: int) -> int | None:
    for entry in os.listdir("/proc"):  # noqa: PTH208 - names are all that is needed, and many
        if entry.isdigit() and _lives_in(entry, group):
            return int(entry)
    return None


def _lives_in(pid: str, group: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:  # noqa: PTH123 - pathlib is slow to import
            text = file.read()
    except OSError:
        return False  # it has ended
    # The command's name stands in brackets and may itself contain brackets and blanks.
    fields = text[text.rindex(b")") + 2 :].split()
    state, process_group, threads = fields[0], int(fields[2]), int(fields[17])
    # A process whose first thread has ended looks like a zombie while the others run on.
    return process_group == group and (state not in (b"Z", b"X") or threads > 1)


def end_group_of_lost_guardian(number: int) -> None:
    """Kills a group whose guardian has just died: its number was reserved until this moment."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(number, signal.SIGKILL)
