"""What ``release()`` answers: ``True`` ended, ``False`` gone before, ``None`` unknown."""

from __future__ import annotations

import asyncio
from typing import NoReturn
from uuid import uuid4

import pytest

import holdfast
from holdfast.errors import BackendUnavailable, LockLost

ANSWERS = pytest.mark.parametrize("answer", [True, False, None])


def _backend_answers(answer: bool | None, holder: object, patch: pytest.MonkeyPatch) -> None:
    async def release(*_: object) -> bool | None:
        return answer

    patch.setattr(holder, "release", release)


@ANSWERS
def test_release_answers_what_the_store_answers(
    answer: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with holdfast.connect(f"memory://{uuid4().hex}") as locks:
        _backend_answers(answer, locks._engine.backend, monkeypatch)
        lease = locks.lock("name").acquire()
        assert lease
        assert lease.release() is answer
        assert lease.lost is (answer is False)  # an unknown outcome is no loss


@ANSWERS
def test_release_of_a_task_answers_what_the_store_answers(
    answer: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> bool | None:
        async with holdfast.connect_async(f"memory://{uuid4().hex}") as locks:
            _backend_answers(answer, locks._engine.backend, monkeypatch)
            lease = await locks.lock("name").acquire()
            assert lease
            return await lease.release()

    assert asyncio.run(main()) is answer


def test_a_block_whose_release_is_unknown_was_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    with holdfast.connect(f"memory://{uuid4().hex}") as locks:
        _backend_answers(None, locks._engine.backend, monkeypatch)
        with locks.lock("name"):
            pass
        _backend_answers(False, locks._engine.backend, monkeypatch)
        with pytest.raises(LockLost), locks.lock("other"):
            pass


def test_a_release_that_the_store_refuses_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(*_: object) -> NoReturn:
        raise BackendUnavailable("not enough good replicas to write", final=True)

    with holdfast.connect(f"memory://{uuid4().hex}") as locks:
        lease = locks.lock("name").acquire()
        assert lease
        monkeypatch.setattr(locks._engine.backend, "release", refuse)
        assert lease.release() is None
        assert lease.release() is False  # idempotent


@pytest.mark.parametrize(
    ("answers", "expected"),
    [((True, True), True), ((None, True), None), ((None, False), False), ((True, False), False)],
)
def test_several_leases_answer_for_all(
    answers: tuple[bool | None, ...], expected: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = list(answers)

    async def release(*_: object) -> bool | None:
        return left.pop()

    with holdfast.connect(f"memory://{uuid4().hex}") as locks:
        monkeypatch.setattr(locks._engine.backend, "release", release)
        several = locks.multi(["a", "b"]).acquire()
        assert several
        assert several.release() is expected
