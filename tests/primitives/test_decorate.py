"""Only a function whose body has ended when it returns can be decorated. The body of a generator
would run outside of the lock or the job, so it is refused at once."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import partial
from typing import Any

import pytest

import holdfast


def rows(day: str) -> Iterator[str]:
    yield day


async def async_rows(day: str) -> AsyncIterator[str]:
    yield day


class Rows:
    def __call__(self, day: str) -> Iterator[str]:
        yield day


async def coroutine(day: str) -> str:
    return day


def plain(day: str) -> str:
    return day


class Coroutine:
    async def __call__(self, day: str) -> str:
        return day


GENERATORS = {
    "generator": rows,
    "async generator": async_rows,
    "method": Rows().__call__,
    "partial": partial(rows, "mon"),
    "callable": Rows(),
}
WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "lock": lambda locks: locks.lock("report"),
    "read": lambda locks: locks.rwlock("report").read(),
    "write": lambda locks: locks.rwlock("report").write(),
    "semaphore": lambda locks: locks.semaphore("report", 2),
    "campaign": lambda locks: locks.election("report").campaign(),
    "once": lambda locks: locks.once("report"),
    "every": lambda locks: locks.every(60, "report"),
}
CLIENTS = {"blocking": holdfast.connect, "asyncio": holdfast.connect_async}
JOBS = ("once", "every")


def through(client: str, work: Callable[[Any], Awaitable[None]]) -> None:
    async def body() -> None:
        locks: Any = CLIENTS[client](f"memory://{secrets.token_hex(8)}")
        await work(locks)
        closed = locks.close()
        if closed is not None:
            await closed

    asyncio.run(body())


@pytest.mark.parametrize("function", GENERATORS.values(), ids=GENERATORS)
@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("client", CLIENTS)
def test_a_generator_is_refused_as_a_decorated_function(
    client: str, wrapper: str, function: Any
) -> None:
    async def work(locks: Any) -> None:
        with pytest.raises(
            TypeError, match="is a generator function: its body runs while"
        ) as raised:
            WRAPPERS[wrapper](locks)(function)
        assert ("job" if wrapper in JOBS else "lock") in str(raised.value)

    through(client, work)


@pytest.mark.parametrize("function", GENERATORS.values(), ids=GENERATORS)
@pytest.mark.parametrize("wrapper", JOBS)
@pytest.mark.parametrize("client", CLIENTS)
def test_a_generator_is_refused_as_a_job(client: str, wrapper: str, function: Any) -> None:
    """It would be recorded as done before its body has run."""

    async def work(locks: Any) -> None:
        job = WRAPPERS[wrapper](locks)
        args = () if isinstance(function, partial) else ("mon",)

        async def run(*words: Any) -> Any:
            done = job.run(*words)
            return await done if client == "asyncio" else done

        with pytest.raises(TypeError, match="is a generator function"):
            await run(function, *args)
        assert (await run(lambda: "it is still to be run")).ran

    through(client, work)


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_each_client_has_its_kind_of_function(wrapper: str) -> None:
    async def blocking(locks: Any) -> None:
        for function in (coroutine, Coroutine(), partial(coroutine, "mon")):
            with pytest.raises(TypeError, match=r"async def: .* connect_async\(\)"):
                WRAPPERS[wrapper](locks)(function)
        assert WRAPPERS[wrapper](locks)(plain)("mon") == "mon"

    async def asynchronous(locks: Any) -> None:
        with pytest.raises(TypeError, match=r"is a plain def: .* connect\(\)"):
            WRAPPERS[wrapper](locks)(plain)
        assert await WRAPPERS[wrapper](locks)(coroutine)("mon") == "mon"

    through("blocking", blocking)
    through("asyncio", asynchronous)


@pytest.mark.parametrize("client", ["lock", "once"])
def test_fields_are_arguments(client: str) -> None:
    with holdfast.connect("memory://") as locks:
        make = getattr(locks, client)
        for template in ("report:{hour}", "report:{}", "report:{0}"):
            with pytest.raises(ValueError, match=r"report:.*plain\(\)"):
                make(template)(plain)


def test_braces_are_written_twice() -> None:
    with holdfast.connect("memory://") as locks:

        def held() -> list[str]:
            return [info.name for info in locks.list()]

        assert locks.lock("a{{b}}")(held)() == ["a{b}"]
        assert locks.lock("a{{b}}")(lambda: locks.lock("a{b}").locked())() is True
