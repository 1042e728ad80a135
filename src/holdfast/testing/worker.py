"""One worker process: it opens a client and does what its standard input says, line by line.

Started by ``holdfast.testing.processes``. It is one coroutine for both clients: over the blocking
client nothing suspends and everything happens on the main thread.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
import traceback
from collections.abc import Awaitable, Callable
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.core.drive import run_now
from holdfast.core.hold import grace_seconds
from holdfast.errors import LockLost
from holdfast.io.clock import now
from holdfast.testing import loops
from holdfast.testing.clients import open_client, run_here
from holdfast.testing.history import Recorder
from holdfast.testing.rules import Flavour

if TYPE_CHECKING:
    from holdfast.lease import AsyncLease
    from holdfast.locks_async import AsyncLocks
    from holdfast.primitives.lock_async import AsyncLock

__all__: list[str] = []


class Worker:
    """The verbs. What each returns is its answer."""

    def __init__(self, client: AsyncLocks, flavour: Flavour) -> None:
        self.client, self.flavour = client, flavour
        self.leases: dict[str, AsyncLease] = {}

    async def pause(self, seconds: float) -> None:
        if self.flavour is Flavour.BLOCKING:
            time.sleep(seconds)
        else:
            await asyncio.sleep(seconds)

    async def check(self) -> bool:
        """Contacts the store."""
        await self.client.check()
        return True

    async def acquire(self, name: str, timeout: float | None = None, **options: Any) -> int | None:
        """The token, or nothing if it was not acquired."""
        lease = await self.client.lock(name, **options).acquire(timeout=timeout)
        if lease is None:
            return None
        self.leases[name] = lease
        return lease.token

    async def cost_of_waiting(self, name: str) -> float:
        """Waits for a lock; how much of its own CPU time that took, in seconds."""
        began = time.process_time()
        async with self.client.lock(name):
            return time.process_time() - began

    async def release(self, name: str) -> bool | None:
        return await self.leases.pop(name).release()

    async def hand_over(self, name: str) -> str:
        return await self.leases.pop(name).hand_over()

    async def take_over(self, name: str, text: str) -> int:
        """The token."""
        lease = self.leases[name] = await self.client.take_over(text)
        return lease.token

    async def state(self, name: str) -> dict[str, Any]:
        """What the holder believes."""
        lease = self.leases[name]
        return {"held": lease.held, "lost": lease.lost, "remaining": lease.remaining}

    async def lose(self, name: str) -> str:
        """Stays busy until the hold is lost; why."""
        while not self.leases[name].lost:
            await self.pause(0.01)
        return self.leases[name].reason

    async def contend(
        self, name: str, seconds: float, hold: float, history: str, process: str
    ) -> int:
        """Takes and gives back one lock for a while, recorded; how often."""
        recorder = Recorder(Path(history), process)
        lock = self.client.lock(name)
        count, ends = 0, now() + seconds
        while now() < ends:
            await self._hold_once(lock, recorder, str(count), name, hold)
            count += 1
        recorder.close()
        return count

    async def _hold_once(
        self, lock: AsyncLock, recorder: Recorder, attempt: str, name: str, hold: float
    ) -> None:
        recorder.asked(attempt, name)
        doubtful_at = inf
        try:
            async with lock as lease:
                certain_until = now() + lease.remaining
                doubtful_at = certain_until - grace_seconds(lease.ttl)
                recorder.held(attempt, lease.token, certain_until)
                try:
                    await self.pause(hold)
                finally:  # also if the block is cancelled: it releases before its certain end
                    _record_end(recorder, attempt, lease)
        except LockLost:
            # A machine that stands still for longer than a ttl ends a hold; nothing else may.
            if now() < doubtful_at:
                raise

    async def fork(self, name: str) -> dict[str, Any]:
        """Forks inside a hold; returns what the child found, through a pipe."""
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                text = json.dumps(self._in_child(name))
            except BaseException:  # noqa: BLE001 - the child may only tell and end
                text = json.dumps({"error": traceback.format_exc()})
            os.write(write, text.encode())
            os._exit(0)
        os.close(write)
        await self._until_gone(child)
        with os.fdopen(read) as pipe:
            found: dict[str, Any] = json.loads(pipe.read())
        return found

    async def _until_gone(self, child: int) -> None:
        # The child may wait for this process to renew what it holds: do not block the loop.
        while os.waitpid(child, os.WNOHANG) == (0, 0):  # noqa: ASYNC222 - it does not wait
            await self.pause(0.01)

    def _in_child(self, name: str) -> dict[str, Any]:
        work = self._as_child(name)
        return run_now(work) if self.flavour is Flavour.BLOCKING else loops.run(work)

    async def _as_child(self, name: str) -> dict[str, Any]:
        lease = self.leases[name]
        found: dict[str, Any] = {"held": lease.held, "lost": lease.lost}
        found["released"] = await lease.release()
        found["taken"] = bool(await self.client.lock(name).acquire(blocking=False))
        async with self.client.lock(f"{name} of the child", ttl=5) as own:
            found["token"] = own.token
        return found

    async def run_forever(self, key: str) -> None:
        """Runs a job that never ends; says that it has begun."""

        def job(lease: AsyncLease) -> None:
            say({"answer": {"token": lease.token}})
            while True:
                time.sleep(1)

        await self.client.once(key).run(job)

    async def close(self) -> bool:
        await self.client.close()
        return True


def _record_end(recorder: Recorder, attempt: str, lease: AsyncLease) -> None:
    """Records that the holder believes no longer; before that, what renewals have added."""
    certain_until = now() + lease.remaining
    if lease.held:
        recorder.kept(attempt, certain_until)
    recorder.ended(attempt)


async def serve(worker: Worker, next_line: Callable[[], Awaitable[str]]) -> None:
    """Answers each line until there is none, or until it is asked to leave."""
    while line := await next_line():
        verb, options = json.loads(line)
        if verb == "leave":  # with all that it holds
            return
        try:
            answer = {"answer": await getattr(worker, verb)(**options)}
        except Exception as error:  # noqa: BLE001 - the parent judges it
            answer = {"error": type(error).__name__, "detail": traceback.format_exc()}
        say(answer)


def say(answer: dict[str, Any]) -> None:
    """One line of standard output."""
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def main() -> None:
    url, kind, options = json.loads(sys.argv[1])
    flavour = Flavour(kind)
    if flavour is Flavour.BLOCKING:
        client = open_client(url, flavour, run_here, **options)

        async def read() -> str:
            return sys.stdin.readline()

        run_now(serve(Worker(client, flavour), read))
        return

    async def serve_async() -> None:
        client = open_client(url, flavour, run_here, **options)
        loop = asyncio.get_running_loop()
        await serve(Worker(client, flavour), lambda: loop.run_in_executor(None, sys.stdin.readline))

    loops.run(serve_async())


if __name__ == "__main__":
    main()
