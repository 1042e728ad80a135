"""``holdfast why`` and the same words in a timeout."""

from __future__ import annotations

import math
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import holdfast
from cli.processes import Cli, until
from holdfast import Holder, LockInfo, Mode, Waiter
from holdfast.cli.why import break_command, sentences

HOSTILE = "\x1b[2J"


def a_holder(**fields: object) -> Holder:
    told = Holder("web-1", 4711, "MainThread", "", "", "", Mode.EXCLUSIVE, 17, (), 100.0, 28.4)
    return told._replace(**fields)  # type: ignore[arg-type]


def a_waiter(**fields: object) -> Waiter:
    told = Waiter("web-2", 812, "MainThread", "", "", "", Mode.EXCLUSIVE, 108.0, 0)
    return told._replace(**fields)  # type: ignore[arg-type]


def said(*holders: Holder, waiters: tuple[Waiter, ...] = (), **fields: object) -> str:
    info = LockInfo("order:42", 1, holders, waiters)._replace(**fields)  # type: ignore[arg-type]
    return "\n".join(sentences(info, 112.0))


def test_one_holder() -> None:
    assert said(a_holder(note="charging")) == (
        "'order:42' is held by web-1 pid 4711 (MainThread), note 'charging', for 12 s.\n"
        "The hold ends within 28 s unless it is renewed.\n"
        "It is free when its holder releases it, or within 28 s if that process is dead. "
        "To end it now:"
    )


def test_waiters() -> None:
    assert "\nWeb-2" not in said(a_holder(), waiters=(a_waiter(),))
    assert "\nweb-2 pid 812 (MainThread) waits for it, for 4 s.\n" in said(
        a_holder(), waiters=(a_waiter(),)
    )
    several = (a_waiter(behind=3), a_waiter(since=111.0))
    text = "\n5 wait for it, the first one, web-2 pid 812 (MainThread), for 4 s.\n"
    assert text in said(a_holder(), waiters=several)


def test_holds_of_a_connection() -> None:
    text = said(a_holder(remaining=math.inf))
    assert "\nThe hold ends with its connection.\n" in text
    assert "or its process ends." in text


def holders_of(mode: Mode, many: int) -> list[Holder]:
    """Holds that end after 5, 6, … seconds."""
    slots = [(n,) if mode is Mode.SLOTS else () for n in range(many)]
    return [a_holder(mode=mode, slots=slots[n], remaining=5.0 + n) for n in range(many)]


def test_a_slot_is_free_at_the_first_end() -> None:
    text = said(*holders_of(Mode.SLOTS, 3), limit=3)
    assert "for 12 s and 2 more; 3 of 3 slots are taken.\n" in text
    assert "\nThe first of the holds ends within 5 s unless it is renewed.\n" in text
    assert (
        "\nA slot is free when one of its holders releases it, or within 5 s if the one whose hold "
        "ends first is dead. To end all holds now:"
    ) in text
    one = said(*holders_of(Mode.SLOTS, 1), limit=1)
    assert "\nA slot is free when its holder releases it, or within 5 s if that process" in one


def test_free_slots_can_be_had_at_once() -> None:
    text = said(*holders_of(Mode.SLOTS, 1), limit=3)
    assert "; 1 of 3 slots is taken.\n" in text
    assert "\nUp to 2 slots can be acquired at once. To end it now:" in text
    waited = said(*holders_of(Mode.SLOTS, 2), limit=3, waiters=(a_waiter(mode=Mode.SLOTS),))
    assert "at once. To end" not in waited
    assert "\nThe first waiter takes the free slots at once or needs more. More are free" in waited


def test_readers_get_in_beside_readers() -> None:
    text = said(*holders_of(Mode.SHARED, 2))
    assert "\nThe holds end within 6 s unless they are renewed.\n" in text
    assert (
        "\nA reader gets it at once. A writer gets it when its holders release it, or within 6 s "
        "if they are dead. To end all holds now:"
    ) in text
    assert "A reader" not in said(*holders_of(Mode.SHARED, 2), waiters=(a_waiter(),))


def test_nobody_holds_it() -> None:
    assert said() == (
        "Nobody holds 'order:42', and nobody waits for it: an acquire gets it at once."
    )
    text = said(waiters=(a_waiter(),), notice="waiters are not called here")
    assert text.startswith("Nobody holds 'order:42' at this moment; web-2 pid 812 (MainThread) w")
    assert text.endswith("\nThe store says: waiters are not called here.")


def test_hostile_texts_are_escaped() -> None:
    hostile = {"host": HOSTILE, "thread": HOSTILE}
    text = said(
        a_holder(**hostile, note=HOSTILE),
        waiters=(a_waiter(**hostile, note=HOSTILE),),
        name=f"a b{HOSTILE}",
        notice=HOSTILE,
    )
    assert "\x1b" not in text


@pytest.mark.parametrize(
    ("name", "url", "namespace", "command"),
    [
        ("a:1", None, None, "holdfast break a:1 --reason TEXT"),
        ("-x", None, "my-team", "holdfast break --namespace=my-team --reason TEXT -- -x"),
        (
            "a b",
            "redis://cache/0",
            None,
            "holdfast break 'a b' --url=redis://cache/0 --reason TEXT",
        ),
        ("a", "redis://:s3cret@cache", "t", "holdfast break a --url=… --namespace=t --reason TEXT"),
        ("a", "consul://c?token=s3cret", None, "holdfast break a --url=… --reason TEXT"),
        (f"a'b{HOSTILE}", None, None, r"holdfast break $'a\047b\033[2J' --reason TEXT"),
    ],
)
def test_the_command_that_ends_it(
    name: str, url: str | None, namespace: str | None, command: str
) -> None:
    assert break_command(name, url, namespace) == command


@pytest.mark.parametrize("name", ["-x", "it's \\ \u202eü"])
def test_the_command_is_for_the_same_store_and_name(cli: Cli, name: str, tmp_path: Path) -> None:
    """A shell runs what was printed; the store of the environment is another one."""
    shell = shutil.which("bash")
    assert shell is not None  # the Makefile needs it, too
    url = f"sqlite:///{tmp_path}/a store with a name too long for one line of the terminal.db"
    where = (f"--url={url}", "--namespace=my-team")
    with holdfast.connect(url, namespace="my-team") as locks:
        lease = locks.lock(name).acquire()
        assert lease is not None
        printed = cli("why", *where, "--", name).stdout.splitlines()[-1]
        command = printed.strip().replace("holdfast", f"{sys.executable} -m holdfast", 1)
        subprocess.run([shell, "-c", command], check=True, timeout=60, env=cli.environment)
        assert locks.inspect(name).holders == ()
        lease.release()


def test_the_command(cli: Cli) -> None:
    assert cli("why", "nightly").returncode == 1
    holder = cli.hold("nightly", "--note", "slow")
    cli.start("run", "nightly", "--", "true")
    until(lambda: cli.show("nightly")["waiters"])
    result = cli("why", "nightly")
    assert (result.returncode, result.stderr) == (0, "")
    assert f" pid {holder.pid} (MainThread), note 'slow', for " in result.stdout
    assert " waits for it, for " in result.stdout


def test_a_timeout_says_the_same() -> None:
    url = "memory://why"
    with (
        holdfast.connect(url) as ours,
        holdfast.connect(url) as theirs,
        ours.lock("name", note="slow"),
        pytest.raises(holdfast.LockTimeout) as caught,
        theirs.lock("name", timeout=0),
    ):
        pass
    text = str(caught.value)
    assert (
        "(MainThread), note 'slow', for 0 s; the hold ends within 30 s unless it is renewed" in text
    )
