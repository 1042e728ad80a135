"""Claims for tests of backends."""

from __future__ import annotations

import secrets

from holdfast.claim import Claim, Mode, write_label

__all__ = ["claim_of"]


def claim_of(
    name: str = "name",
    mode: Mode = Mode.EXCLUSIVE,
    weight: int = 1,
    limit: int = 0,
    *,
    ttl: float = 30.0,
) -> Claim:
    """Return a claim with a new owner."""
    label = write_label("host", 1, "thread", "")
    return Claim(name, mode, weight, limit, ttl, secrets.token_hex(16), label)
