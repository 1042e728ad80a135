"""An index that PostgreSQL makes outside of a transaction: it waits for all open snapshots."""

from __future__ import annotations

from alembic import op

revision = "a3"
down_revision = "a2"


def upgrade() -> None:
    with op.get_context().autocommit_block():
        op.create_index("by_id", "seed", ["id"], postgresql_concurrently=True)


def downgrade() -> None:
    op.drop_index("by_id", "seed")
