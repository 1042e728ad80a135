"""A fence in Redis: the check and the write are one script.

    guard = fencing.redis.guard(client, "stock:7", lease)
    left = int(guard.get())    # enters, and reads
    guard.set(left - 1)        # StaleFence if a newer holder has been here since

The resource is a key, unless ``key=`` names another; what it remembers is kept beside it, in the
same slot of a cluster. With ``redis.asyncio`` every method is awaited.
"""

from __future__ import annotations

import hashlib
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

from holdfast.claim import Fence, Keys
from holdfast.core.drive import run_now
from holdfast.errors import StaleFence
from holdfast.fencing.redis_script import PRELUDE, wrap
from holdfast.fencing.rule import NOBODY, Memory, Stamp, as_fence, check_resource, refusal, stale

__all__ = ["RedisGuard", "guard"]

DIGITS = 20
"""Numbers are compared as text of equal length: Lua's own lose what is over 53 bits."""

_ENTER = wrap("return 1")
_GET = wrap("return redis.call('GET', KEYS[1])")
_HGETALL = wrap("return redis.call('HGETALL', KEYS[1])")
_SET = wrap("return redis.call('SET', KEYS[1], unpack(ARGV))")
_DELETE = wrap("return redis.call('DEL', unpack(KEYS))")
_HSET = wrap("return redis.call('HSET', KEYS[1], unpack(ARGV))")


def guard(client: Any, resource: str, lease: Any, *, fence_keys: Keys = ()) -> RedisGuard:
    """Guards a resource in Redis with a lease, a fence, or a fence's text.

    With ``fence_keys`` what is not a lease must be signed by one of them.

    ``client`` is a ``redis.Redis``, ``redis.asyncio.Redis`` or one of their clusters. Nothing is
    sent yet: each method of the guard enters and acts in one script.
    """
    return RedisGuard(client, check_resource(resource), as_fence(lease, fence_keys))


class RedisGuard:
    """A resource in Redis and a fence. Every method raises ``StaleFence`` if a newer holder has
    entered. Before the first read, read through it or call ``enter()``."""

    def __init__(self, client: Any, resource: str, fence: Fence) -> None:
        if not hasattr(client, "evalsha") or hasattr(client, "command_stack"):
            kind = f"{type(client).__module__}.{type(client).__qualname__}"
            raise TypeError(f"a guard takes a client of redis-py (no pipeline), not {kind}")
        self.resource, self.fence = resource, fence
        self._client = client
        self._asynchronous = any(".asyncio" in kind.__module__ for kind in type(client).__mro__)
        mode, slots = str(fence.mode), [str(slot) for slot in fence.slots]
        self._head = [fence.name, mode, _stamp(fence), str(len(slots)), *slots]

    def __repr__(self) -> str:
        return f"<Guard of {self.resource!r} in Redis, {self.fence!r}>"

    def enter(self) -> Any:
        """Enters and does nothing else."""
        return self._do(self._nothing())

    def get(self, *, key: str | None = None) -> Any:
        """Enters and reads a text value, as the client gives it; ``None`` if there is none."""
        return self._do(self._ask(_GET, [self._key(key)]))

    def hgetall(self, *, key: str | None = None) -> Any:
        """Enters and reads a hash, as a dict."""
        return self._do(self._hgetall(self._key(key)))

    def set(
        self,
        value: Any,
        *,
        key: str | None = None,
        ex: int | None = None,
        px: int | None = None,
        keepttl: bool = False,
    ) -> Any:
        """Enters and sets a value; ``ex``, ``px`` and ``keepttl`` as in Redis."""
        words = [value]
        words += [] if ex is None else ["EX", int(ex)]
        words += [] if px is None else ["PX", int(px)]
        words += ["KEEPTTL"] if keepttl else []
        return self._do(self._truth(self._ask(_SET, [self._key(key)], words)))

    def delete(self, *keys: str) -> Any:
        """Enters and deletes the keys, or the resource itself; returns how many there were."""
        return self._do(self._ask(_DELETE, keys or [self.resource]))

    def hset(self, mapping: Mapping[str, Any], *, key: str | None = None) -> Any:
        """Enters and sets fields of a hash; returns how many are new."""
        words = [word for pair in mapping.items() for word in pair]
        if not words:
            raise ValueError("hset() takes at least one field")
        return self._do(self._ask(_HSET, [self._key(key)], words))

    def run(self, script: str, keys: Sequence[str] = (), args: Sequence[Any] = ()) -> Any:
        """Enters and runs a Lua script of your own, with its ``KEYS`` and ``ARGV``, in one step.

        It is not run at all if the fence is refused. Its answer is given back.
        """
        return self._do(self._ask(wrap(script), list(keys), list(args)))

    def _do(self, work: Coroutine[Any, Any, Any]) -> Any:
        return work if self._asynchronous else run_now(work)

    def _key(self, key: str | None) -> str:
        return self.resource if key is None else key

    async def _nothing(self) -> None:
        await self._ask(_ENTER, [])

    async def _truth(self, work: Coroutine[Any, Any, Any]) -> bool:
        return bool(await work)

    async def _hgetall(self, key: str) -> dict[Any, Any]:
        words = await self._ask(_HGETALL, [key])
        if isinstance(words, dict):  # RESP 3
            return words
        return dict(zip(words[::2], words[1::2], strict=True))

    async def _ask(self, script: str, keys: Sequence[str], args: Sequence[Any] = ()) -> Any:
        names = [fence_key(self.resource), *keys]
        answer = await self._evaluate(script, len(names), [*names, *self._head, *args])
        if int(answer[0]) == 1:
            result = answer[1] if len(answer) > 1 else None
            if isinstance(result, Exception):
                raise result
            return result
        raise self._refused(answer[1:])

    async def _evaluate(self, script: str, count: int, words: list[Any]) -> Any:
        from redis.exceptions import NoScriptError

        text = PRELUDE + script
        sha = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
        try:
            return await self._call(self._client.evalsha(sha, count, *words))
        except NoScriptError:
            return await self._call(self._client.eval(text, count, *words))

    async def _call(self, answer: Any) -> Any:
        return await answer if self._asynchronous else answer

    def _refused(self, reply: Sequence[Any]) -> StaleFence:
        name, kind, writer, highest, slot, entered = map(_text, reply)
        if kind == "slots":
            seen = {int(slot): _read(entered)} if slot else {-1: NOBODY}
            memory = Memory(name, NOBODY, NOBODY, seen)
        else:
            memory = Memory(name, _read(writer), _read(highest))
        against = refusal(memory, self.fence)
        assert against is not None, "the script and the rule differ"
        return stale(self.resource, self.fence, against)


def fence_key(resource: str) -> str:
    """Where a resource's memory is kept: in a cluster, in the resource's own slot."""
    start = resource.find("{")
    tagged = start >= 0 and resource.find("}", start + 1) > start + 1
    return f"{resource}:holdfast-fence" if tagged else f"{{{resource}}}:holdfast-fence"


def _stamp(fence: Fence) -> str:
    return f"{fence.epoch:0{DIGITS}d}{fence.token:0{DIGITS}d}"


def _read(stamp: str) -> Stamp:
    return Stamp(int(stamp[:DIGITS]), int(stamp[DIGITS:])) if stamp else NOBODY


def _text(word: Any) -> str:
    return word.decode() if isinstance(word, bytes) else str(word)
