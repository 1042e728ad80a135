"""A table."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "a1"
down_revision = None


def upgrade() -> None:
    op.create_table("seed", sa.Column("id", sa.Integer, primary_key=True))


def downgrade() -> None:
    op.drop_table("seed")
