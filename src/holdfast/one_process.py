"""What belongs to the process that made it, and can't be sent to another one."""

from __future__ import annotations

from typing import SupportsIndex

__all__ = ["OneProcess"]


class OneProcess:
    """Base of clients, locks, leases and jobs: refuses to be pickled or copied.

    Their connections and threads belong to one process, and a lease is held by one owner. Without
    this, ``multiprocessing`` and task queues fail with an error about a part of them.
    """

    __slots__ = ()

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[object, ...]:
        raise TypeError(
            f"{self!r} can't be pickled or copied: it belongs to this process. Open a client in "
            "each process; send the fence (lease.fence) instead of a lease"
        )
