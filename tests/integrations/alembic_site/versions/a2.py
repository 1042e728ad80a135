"""A row that must be written once; it takes its time."""

from __future__ import annotations

import os
import time

from alembic import op

from integrations.journal import Journal

revision = "a2"
down_revision = "a1"


def upgrade() -> None:
    op.execute("INSERT INTO seed DEFAULT VALUES")
    journal = Journal(os.environ["JOURNAL"])
    journal.write("seeds")
    time.sleep(float(os.environ.get("SLOW_SECONDS", "0")))
    while "HOLD" in os.environ and not journal.read("finish"):
        time.sleep(0.02)


def downgrade() -> None:
    op.execute("DELETE FROM seed")
