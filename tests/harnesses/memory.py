"""``memory://``: no server, no other processes."""

from __future__ import annotations

from holdfast.testing import Harness

__all__ = ["HARNESSES"]


class MemoryHarness(Harness):
    """The locks of this process."""

    name = "memory"
    url = "memory://"
    ttl = 0.3
    between_processes = False


HARNESSES = (MemoryHarness,)
