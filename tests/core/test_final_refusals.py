"""What is final (a wrong password, no such database) is raised by the first attempt."""

from __future__ import annotations

import asyncio
import time
from typing import NoReturn

import pytest

import holdfast
from holdfast.cli.exits import BAD_SETTING, UNAVAILABLE, code_for
from holdfast.errors import BackendUnavailable

pytestmark = pytest.mark.parametrize("timeout", [0, 5, None])


class Refusing:
    """Answers every attempt with a refusal, and counts attempts and undos."""

    def __init__(self, *, final: bool) -> None:
        self.final, self.attempts, self.undos = final, 0, 0

    async def attempt(self, *_: object, **__: object) -> NoReturn:
        self.attempts += 1
        raise BackendUnavailable("the password is wrong", final=self.final)

    async def abandon(self, *_: object, **__: object) -> None:
        self.undos += 1


def test_a_final_refusal_ends_an_acquire_at_once(
    timeout: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusing = Refusing(final=True)
    with holdfast.connect("memory://", timeout=timeout) as locks:
        for backend in (locks._engine.backend, locks._engine.renewer.backend):
            monkeypatch.setattr(backend, "attempt", refusing.attempt)
            monkeypatch.setattr(backend, "abandon", refusing.abandon)
        started = time.monotonic()
        with pytest.raises(BackendUnavailable, match="password") as caught, locks.lock("a"):
            pass
        assert time.monotonic() - started < 2
    assert code_for(caught.value) == BAD_SETTING
    assert refusing.attempts == 1
    assert refusing.undos == 0  # nothing was changed, so no other login is tried to undo it


def test_a_final_refusal_ends_an_acquire_of_a_task_at_once(
    timeout: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusing = Refusing(final=True)

    async def main() -> None:
        async with holdfast.connect_async("memory://", timeout=timeout) as locks:
            monkeypatch.setattr(locks._engine.backend, "attempt", refusing.attempt)
            with pytest.raises(BackendUnavailable, match="password"):
                await locks.lock("a").acquire()

    asyncio.run(main())
    assert refusing.attempts == 1


def test_an_outage_is_tried_again(timeout: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    refusing = Refusing(final=False)
    with holdfast.connect("memory://", timeout=timeout, patience=0.5) as locks:
        for backend in (locks._engine.backend, locks._engine.renewer.backend):
            monkeypatch.setattr(backend, "attempt", refusing.attempt)
            monkeypatch.setattr(backend, "abandon", refusing.abandon)
        with (
            pytest.raises(BackendUnavailable, match="password") as caught,
            locks.lock("a", timeout=timeout and 0.5),
        ):
            pass
    assert code_for(caught.value) == UNAVAILABLE
    assert refusing.attempts > (timeout != 0)
