"""What both middlewares do with a header: read it, refuse early, say so as a problem document."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from holdfast.claim import LONGEST_FENCE, Fence, FenceKeys, Keys
from holdfast.errors import (
    BackendUnavailable,
    HoldfastError,
    InvalidName,
    LockTimeout,
    StaleFence,
    UntrustedFence,
)
from holdfast.fencing.gate import Gate
from holdfast.fencing.rule import Full, Memory, as_fence, check_resource, enter, refusal, stale

__all__ = ["HEADER", "KEY", "STALE", "Checks", "Problem", "Refused", "refused_for"]

HEADER = "Holdfast-Fence"
KEY = "holdfast.fence"
"""Under which the fence is handed on, in an ASGI scope or a WSGI environ."""
STALE = "urn:holdfast:stale-fence"
REMEMBERED = 10_000
REMEMBERED_SLOTS = 100_000
"""Of all resources together. The early check may forget: the guard's memory is what counts."""

Resource = Callable[[Mapping[str, Any]], "str | None"]


class Problem(NamedTuple):
    """A problem document (RFC 9457)."""

    status: int
    phrase: str
    body: bytes
    headers: tuple[tuple[str, str], ...]


class Refused(Exception):
    """The request goes no further."""

    def __init__(self, status: int, phrase: str, kind: str, detail: str, **more: str) -> None:
        super().__init__(detail)
        fields = {"type": kind, "title": phrase, "status": status, "detail": detail, **more}
        body = json.dumps(fields).encode()
        headers = [("content-type", "application/problem+json"), ("content-length", str(len(body)))]
        if status == 503:
            headers.append(("retry-after", "1"))
        self.problem = Problem(status, phrase, body, tuple(headers))


def refused_for(error: HoldfastError) -> Refused | None:
    """The refusal for an error that a handler or a gate raised; ``None`` for other errors."""
    if isinstance(error, StaleFence):
        fences = {"fence": error.fence, "highest": error.highest}
        more = {word: fence._unsigned() for word, fence in fences.items() if fence is not None}
        return Refused(409, "Conflict", STALE, str(error), **more)
    if isinstance(error, UntrustedFence):
        return _untrusted(error)
    if isinstance(error, Full):
        detail = "the gate before this resource takes in no new ones"
        return Refused(503, "Service Unavailable", "urn:holdfast:gate-full", detail)
    if isinstance(error, LockTimeout | BackendUnavailable):
        # What is said here goes to a stranger: not who holds the gate, nor where the store is.
        detail = "the gate before this resource could not be passed in time"
        return Refused(503, "Service Unavailable", "urn:holdfast:gate-busy", detail)
    return None


def _untrusted(error: UntrustedFence) -> Refused:
    return Refused(403, "Forbidden", "urn:holdfast:untrusted-fence", str(error))


class Checks:
    """The highest fences that this process has seen, and what is done with a request's."""

    def __init__(
        self, resource: Resource | None, required: bool, gate: Gate | None, fence_keys: Keys
    ) -> None:
        self._resource, self._required, self.gate = resource, required, gate
        self._keys = FenceKeys(fence_keys)
        if gate is not None and not self._keys:
            self._keys = gate.fence_keys
        self._seen: OrderedDict[str, Memory] = OrderedDict()
        self._slots = 0
        self._mutex = threading.Lock()

    def read(self, values: list[str]) -> Fence | None:
        """The request's fence; raises ``Refused`` if it is required and missing, or invalid."""
        if not values:
            if self._required:
                detail = f"this resource is changed by holders of a lock only: send {HEADER}"
                kind = "urn:holdfast:fence-required"
                raise Refused(428, "Precondition Required", kind, detail)
            return None
        try:
            if len(values) > 1 or len(values[0]) > LONGEST_FENCE:
                raise ValueError(f"one header, of {LONGEST_FENCE} characters at most")
            return as_fence(values[0].strip(), self._keys)
        except UntrustedFence as error:
            raise _untrusted(error) from None
        except ValueError as error:
            raise Refused(400, "Bad Request", "urn:holdfast:bad-fence", str(error)) from None

    def name(self, fence: Fence, request: Mapping[str, Any]) -> str:
        """The resource that a request is about; raises ``Refused`` if nothing can be called so."""
        named = None if self._resource is None else self._resource(request)
        try:
            return check_resource(fence.name if named is None else named)
        except InvalidName as error:
            raise Refused(400, "Bad Request", "urn:holdfast:bad-name", str(error)) from None

    def look(self, resource: str, fence: Fence) -> None:
        """The early check; raises ``StaleFence``."""
        with self._mutex:
            memory = self._seen.get(resource)
            against = refusal(memory, fence)
            if against is None:
                with suppress(Full):
                    self._remember(resource, enter(memory, fence))
        if against is not None:
            raise stale(resource, fence, against)

    def _remember(self, resource: str, memory: Memory) -> None:
        """Keeps it as the newest; the oldest are forgotten where there are too many."""
        before = self._seen.pop(resource, None)
        self._seen[resource] = memory
        self._slots += len(memory.slots) - (len(before.slots) if before else 0)
        while len(self._seen) > REMEMBERED or self._slots > REMEMBERED_SLOTS:
            _, forgotten = self._seen.popitem(last=False)
            self._slots -= len(forgotten.slots)
