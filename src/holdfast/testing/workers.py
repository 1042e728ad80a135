"""Threads for blocking calls, one per task: what a test writes as tasks, a blocking client sees
as threads.

A thread's life is its task's: when the task is done the thread ends, as the owner of a hold
ends with its task in the asyncio client.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["Workers"]

T = TypeVar("T")
_Job = tuple[Callable[[], Any], asyncio.AbstractEventLoop, "asyncio.Future[Any]"]


class _Worker:
    """One daemon thread. A call that never returns fails its test; the test run goes on."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self.thread.start()

    def put(self, job: _Job | None) -> None:
        self._jobs.put(job)

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            work, loop, future = job
            result, error = None, None
            try:
                result = work()
            except BaseException as raised:  # noqa: BLE001 - raised again in the caller
                error = raised
            if not loop.is_closed():
                loop.call_soon_threadsafe(_settle, future, result, error)
            # A thread that idles here must not keep alive what a test has dropped.
            del job, work, future, result, error


def _settle(future: asyncio.Future[Any], result: object, error: BaseException | None) -> None:
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)


class Workers:
    """The threads of one bench."""

    def __init__(self) -> None:
        self._by_task: dict[asyncio.Task[Any], _Worker] = {}

    async def run(self, work: Callable[[], T]) -> T:
        """Runs a blocking call in the current task's own thread."""
        task = asyncio.current_task()
        assert task is not None
        worker = self._by_task.get(task)
        if worker is None:
            worker = self._by_task[task] = _Worker(task.get_name())
            task.add_done_callback(self._end)
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        worker.put((work, loop, future))
        del work
        return await future

    def _end(self, task: asyncio.Task[Any]) -> None:
        worker = self._by_task.pop(task, None)
        if worker is not None:
            worker.put(None)

    def close(self) -> None:
        """Lets all threads end once their current call returns."""
        for task in list(self._by_task):
            self._end(task)
