"""Studies: sweeps over specs, and their points, each a question that is answered once.

The tables are written out again instead of imported from ``tables.py``, which moves on while this revision stays.

Revision ID: 0005
Revises: 0004
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    """Create the tables of studies and of their points; nothing that was there changes."""
    op.create_table(
        "studies",
        sa.Column("study_id", sa.String, primary_key=True),
        sa.Column("name", sa.String, nullable=False),
        sa.Column("document", sa.JSON, nullable=False),
        sa.Column("created_at", sa.String, nullable=False),
        sa.Column("sequence", sa.Integer, nullable=False),
    )
    op.create_table(
        "study_points",
        sa.Column("digest", sa.String, primary_key=True),
        sa.Column("state", sa.String, nullable=False),
        sa.Column("owner", sa.String),
        sa.Column("attempts", sa.Integer, nullable=False),
        sa.Column("deaths", sa.Integer, nullable=False),
        sa.Column("answer", sa.JSON),
        sa.Column("plan_id", sa.String),
        sa.Column("problem", sa.JSON),
        sa.Column("beat_s", sa.Float),
        sa.Column("finished_s", sa.Float),
        sa.CheckConstraint("state IN ('waiting', 'running', 'done', 'failed')", name="ck_study_points_state"),
    )
    op.create_index("ix_study_points_owner", "study_points", ["owner", "state"])


def downgrade() -> None:
    """Drop every study; the plans that they made stay."""
    op.drop_table("study_points")
    op.drop_table("studies")
