"""The log: a record per event with its fields, and the lock of the current block in any line."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import MutableMapping
from typing import Any

import pytest
import structlog

import holdfast
from holdfast import observe

from .recorder import wait_until


def fields(caplog: pytest.LogCaptureFixture, logger: str) -> list[dict[str, Any]]:
    return [vars(record)["holdfast"] for record in caplog.records if record.name == logger]


def test_every_event_is_a_record_with_its_fields(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "holdfast")
    with (
        holdfast.connect("memory://log-fields", observers=[observe.Logging()]) as locks,
        locks.lock("order:42", ttl=0.5) as lease,
    ):
        wait_until(lambda: bool(fields(caplog, "holdfast.renew")), "a renewal")
    granted, released, *_ = fields(caplog, "holdfast.lock")
    assert (granted["event"], released["event"]) == ("acquired", "released")
    expected = {"store": "memory://log-fields", "name": "order:42", "kind": "order"}
    expected |= {"mode": "exclusive", "token": str(lease.token)}
    assert {word: str(granted[word]) for word in expected} == expected
    assert granted["waited"] >= 0
    assert released["held"] > 0
    assert fields(caplog, "holdfast.renew")[0]["event"] == "renewed"


def test_the_level_can_be_chosen(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "holdfast")
    with (
        holdfast.connect("memory://log-level", observers=[observe.Logging("WARNING")]) as locks,
        locks.lock("a"),
    ):
        pass
    levels = [record.levelname for record in caplog.records if "'a'" in record.getMessage()]
    assert levels == ["WARNING", "WARNING"]
    with pytest.raises(ValueError, match="level of logging"):
        observe.Logging("LOUD")


def test_a_loss_has_its_fields_without_an_observer(caplog: pytest.LogCaptureFixture) -> None:
    with holdfast.connect("memory://log-lost") as locks:
        lease = locks.lock("order:42").acquire()
        assert lease is not None
        locks.break_lock("order:42", reason="stuck")
    broken, lost = fields(caplog, "holdfast.lock")
    if broken["event"] == "lost":
        broken, lost = lost, broken
    assert (broken["event"], broken["reason"]) == ("broken", "stuck")
    assert (lost["event"], lost["name"], lost["token"]) == ("lost", "order:42", lease.token)


def test_the_lines_of_a_block_name_its_lock() -> None:
    records: list[logging.LogRecord] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record)

    logger, handler = logging.getLogger("the program"), Keep()
    handler.addFilter(observe.LockFilter())
    logger.addHandler(handler)
    with holdfast.connect("memory://log-filter", observers=[observe.Logging()]) as locks:
        logger.warning("before")
        with locks.lock("outer") as outer:
            with locks.lock("inner") as inner:
                logger.warning("inside")
            logger.warning("outside")
        logger.warning("after")
    logger.removeHandler(handler)
    seen = [(vars(record)["lock"], vars(record)["token"]) for record in records]
    assert seen == [
        (None, None),
        ("inner", inner.token),
        ("outer", outer.token),
        (None, None),
    ]


def test_tasks_have_blocks_of_their_own() -> None:
    async def work(locks: holdfast.AsyncLocks, name: str) -> str:
        async with locks.lock(name):
            await asyncio.sleep(0.05)
            use = observe.current()
            return "" if use is None else use.name

    async def main() -> list[str]:
        url = "memory://log-tasks"
        async with holdfast.connect_async(url, observers=[observe.Logging()]) as locks:
            return await asyncio.gather(*(work(locks, f"name:{number}") for number in range(5)))

    assert asyncio.run(main()) == [f"name:{number}" for number in range(5)]
    assert observe.current() is None


def test_a_processor_of_structlog() -> None:
    lines: list[MutableMapping[str, Any]] = []

    def keep(_: Any, __: str, event: MutableMapping[str, Any]) -> str:
        lines.append(event)
        return ""

    logger = structlog.wrap_logger(
        structlog.PrintLogger(), processors=[observe.structlog_context, keep]
    )
    with holdfast.connect("memory://structlog", observers=[observe.Logging()]) as locks:
        logger.info("before")
        with locks.lock("order:42") as lease:
            logger.info("inside", token="mine")
            logger.info("inside")
    assert lines == [
        {"event": "before"},
        {"event": "inside", "token": "mine", "lock": "order:42"},
        {"event": "inside", "token": lease.token, "lock": "order:42"},
    ]
