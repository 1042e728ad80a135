"""What a fence from outside can make a resource remember has bounds, and nothing is forgotten."""

from __future__ import annotations

import asyncio
import json
import logging
import sqlite3
from contextlib import closing
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

import holdfast
from holdfast import Fence, Incompatible, Mode, StaleFence, Unsupported
from holdfast.fencing import file, http, rule
from holdfast.fencing.http.check import Checks

KEY = "a key of fences for these tests"


def slots_from(first: int, token: int = 1, count: int = 1024) -> Fence:
    return Fence("s", Mode.SLOTS, tuple(range(first, first + count)), 0, token)


def exclusive(name: str, token: int = 1) -> Fence:
    return Fence(name, Mode.EXCLUSIVE, (), 0, token)


def test_a_memory_has_room_for_so_many_slots() -> None:
    """Those that are remembered go on being fenced."""
    memory: rule.Memory | None = None
    for first in range(0, 4096, 1024):
        memory = rule.enter(memory, slots_from(first, token=5))
    with pytest.raises(Unsupported, match="4096 slots are remembered"):
        rule.enter(memory, slots_from(4096))
    assert memory is not None
    assert len(memory.slots) == 4096
    assert rule.refusal(memory, slots_from(0, token=4)) is not None
    assert rule.enter(memory, slots_from(0, token=6)).slots[0] == rule.Stamp(0, 6)
    answer = rule.refusal(memory, exclusive("s"))
    assert Fence.parse(str(answer)) == answer


def test_a_file_remembers_so_many_slots(tmp_path: Path) -> None:
    for first in range(0, 4096, 1024):
        with file.guard(tmp_path / "ledger", slots_from(first)):
            pass
    with pytest.raises(Unsupported, match="4096 slots"):
        file.guard(tmp_path / "ledger", slots_from(4096)).__enter__()
    with file.guard(tmp_path / "ledger", slots_from(0)):
        pass


def app(environ: Any, start_response: Any) -> list[bytes]:
    start_response("200 OK", [])
    return [b"done"]


def sender(**options: Any) -> Any:
    fenced = http.WsgiFence(app, **options)

    def send(fence: Fence) -> str:
        status: list[str] = []
        environ = {"HTTP_HOLDFAST_FENCE": str(fence)}
        body: Any = fenced(environ, lambda answer, _: status.append(answer))
        getattr(body, "close", lambda: None)()
        return status[0][:3]

    return send


def test_the_early_check_lets_pass_what_it_has_no_room_for() -> None:
    """Only the guard behind it counts; what it has seen it goes on refusing."""
    send = sender()
    assert {send(slots_from(first, token=5)) for first in range(0, 8192, 1024)} == {"200"}
    assert send(slots_from(0, token=4)) == "409"
    assert send(slots_from(7168, token=4)) == "200"


def test_the_slots_of_all_resources_together_are_bounded() -> None:
    """A thousand names with a thousand slots each, as one stranger can send."""
    checks = Checks(None, False, None, ())
    for number in range(150):
        checks.look(f"n{number}", slots_from(0, token=5))
        checks.look(f"n{number}", slots_from(0, token=6))
    assert sum(len(memory.slots) for memory in checks._seen.values()) <= 100_000
    with pytest.raises(StaleFence):
        checks.look("n149", slots_from(0, token=5))
    checks.look("n0", slots_from(0, token=1))


def test_a_gate_takes_in_so_many_new_resources(caplog: pytest.LogCaptureFixture) -> None:
    """Further ones are refused; those that it knows are fenced as ever."""
    with holdfast.connect("memory://full") as locks, caplog.at_level(logging.WARNING):
        send = sender(gate=http.Gate(locks, limit=3))
        assert [send(exclusive(name, 5)) for name in ("a", "b", "c", "d")] == ["200"] * 3 + ["503"]
        assert send(exclusive("c", 6)) == "200"
        assert send(exclusive("a", 4)) == "409"
        gate = http.Gate(locks, limit=0)
        with pytest.raises(Unsupported, match="use fence_keys, or raise limit"):
            gate.enter("d", exclusive("d")).__enter__()
        with gate.enter("a", exclusive("a", 5)):
            pass
    assert "half of its limit of 3 resources" in caplog.text


@pytest.mark.parametrize("mode", [Mode.EXCLUSIVE, Mode.SHARED])
def test_a_gate_that_is_full_writes_nothing(tmp_path: Path, mode: Mode) -> None:
    """A lock that was taken leaves its counter behind, for a week."""
    path = tmp_path / "locks.db"

    def stored() -> list[object]:
        with closing(sqlite3.connect(path)) as database:
            names = database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
            tables = [database.execute(f"SELECT * FROM {name}").fetchall() for (name,) in names]
        return [row for table in tables for row in table if "gate/" in str(row)]

    with holdfast.connect(f"sqlite://{path}") as locks:
        send = sender(gate=http.Gate(locks, limit=1))
        assert send(Fence("known", mode, (), 0, 5)) == "200"
        before = stored()
        assert before
        sent = [send(Fence(f"invented {number}", mode, (), 0, 5)) for number in range(5)]
        assert sent == ["503"] * 5
        assert stored() == before


def test_a_gate_has_room_again_on_the_next_day(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that meets new orders every day need not be started anew."""
    with holdfast.connect("memory://days") as locks:
        moment = monotonic()
        send = sender(gate=http.Gate(locks, limit=1))
        assert [send(exclusive(name)) for name in ("a", "b")] == ["200", "503"]
        monkeypatch.setattr("holdfast.fencing.gate.monotonic", lambda: moment + 24 * 3600 + 60)
        assert [send(exclusive(name)) for name in ("b", "c")] == ["200", "503"]


@pytest.mark.parametrize("size", [507, 508, 512])
def test_a_gate_of_any_name(size: int) -> None:
    """The gate's own name is longer, and a lock's name has an end."""
    name = "n" * size
    with holdfast.connect("memory://long") as locks:
        send = sender(gate=http.Gate(locks))
        assert [send(exclusive(name, token)) for token in (5, 4)] == ["200", "409"]
        other = name[:-1] + "m"
        assert send(exclusive(other, 1)) == "200"


@pytest.mark.parametrize("name", ["", "\x1b[2J", "n" * 513])
def test_a_resource_that_can_not_be_called_so(name: str) -> None:
    """It often comes from the request's path, which strangers write."""
    assert sender(resource=lambda _: name)(exclusive("a")) == "400"


def test_a_gate_with_keys_has_no_such_limit() -> None:
    """Names in signed fences are those of locks."""
    with holdfast.connect("memory://signed", fence_keys=KEY) as locks:
        gate = http.Gate(locks, limit=0)
        with gate.enter("d", exclusive("d").signed(KEY)):
            pass


def test_a_gate_of_asyncio_is_bounded_too() -> None:
    async def body() -> None:
        async with holdfast.connect_async("memory://full-async") as locks:
            gate = http.Gate(locks, limit=1)
            async with gate.enter("a", exclusive("a")):
                pass
            with pytest.raises(Unsupported, match="raise limit"):
                await gate.enter("b", exclusive("b")).__aenter__()

    asyncio.run(body())


GOOD = {"format": 1, "name": "s", "writer": [0, 1], "highest": [0, 1], "slots": {}}


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        "",
        "7",
        json.dumps({**GOOD, "writer": [0, 1e999]}),
        json.dumps({**GOOD, "writer": [0, 2**63]}),
        json.dumps({**GOOD, "writer": [True, 1]}),
        json.dumps({**GOOD, "highest": [0]}),
        json.dumps({**GOOD, "name": 7}),
        json.dumps({**GOOD, "name": "a\n"}),
        json.dumps({**GOOD, "slots": {"x": [0, 1]}}),
        json.dumps({**GOOD, "slots": [1]}),
    ],
    ids=lambda text: text[:60],
)
def test_a_damaged_memory_lets_nobody_in(text: str, tmp_path: Path) -> None:
    """Whoever can write the file beside the resource, or the record of a gate."""
    with pytest.raises(Incompatible, match="so it refuses all"):
        rule.unpack(text, "the gate 'x'")
