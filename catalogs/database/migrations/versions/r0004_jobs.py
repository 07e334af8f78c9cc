"""Jobs: questions that wait for a worker, are worked on, or were answered.

The table is written out again instead of imported from ``tables.py``, which moves on while this revision stays.

Revision ID: 0004
Revises: 0003
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    """Create the table of jobs; nothing that was there changes."""
    op.create_table(
        "jobs",
        sa.Column("number", sa.Integer, primary_key=True),
        sa.Column("job_id", sa.String, nullable=False, unique=True),
        sa.Column("kind", sa.String, nullable=False),
        sa.Column("digest", sa.String, nullable=False),
        sa.Column("document", sa.JSON, nullable=False),
        sa.Column("client", sa.String, nullable=False),
        sa.Column("state", sa.String, nullable=False),
        sa.Column("attempts", sa.Integer, nullable=False),
        sa.Column("worker", sa.String),
        sa.Column("cancel_asked", sa.Boolean, nullable=False),
        sa.Column("progress", sa.JSON),
        sa.Column("plan_id", sa.String),
        sa.Column("problem", sa.JSON),
        sa.Column("submitted_s", sa.Float, nullable=False),
        sa.Column("started_s", sa.Float),
        sa.Column("beat_s", sa.Float),
        sa.Column("finished_s", sa.Float),
        sa.CheckConstraint("state IN ('queued', 'running', 'done', 'failed', 'cancelled')", name="ck_jobs_state"),
    )
    op.create_index("ix_jobs_state", "jobs", ["state", "number"])
    asked = sa.column("state", sa.String).in_(["queued", "running"]) & ~sa.column("cancel_asked", sa.Boolean)
    op.create_index(
        "uq_jobs_asked", "jobs", ["kind", "digest"], unique=True, sqlite_where=asked, postgresql_where=asked
    )


def downgrade() -> None:
    """Drop every job; the plans that they made stay."""
    op.drop_table("jobs")
