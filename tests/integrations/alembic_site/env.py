"""The environment of Alembic in tests: with ``UNLOCKED`` as Alembic makes it, else under a lock."""

from __future__ import annotations

import os
from contextlib import nullcontext

from alembic import context
from sqlalchemy import create_engine, pool

from holdfast.integrations.alembic import locked

# A transaction of this kind keeps its snapshot: a process that waits in one stops an index from
# being made concurrently, and then reads what was there before it waited.
isolation = os.environ.get("ISOLATION", "READ COMMITTED")
engine = create_engine(os.environ["DATABASE"], poolclass=pool.NullPool, isolation_level=isolation)
lock = nullcontext() if "UNLOCKED" in os.environ else locked(ttl=2)
with engine.connect() as connection:
    context.configure(connection=connection, transaction_per_migration=True)
    with lock, context.begin_transaction():
        context.run_migrations()
