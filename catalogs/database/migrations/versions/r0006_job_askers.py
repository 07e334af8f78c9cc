"""Who asked a job's question: it is cancelled once none of them wants the answer any more.

The table is written out again instead of imported from ``tables.py``, which moves on while this revision stays.

Revision ID: 0006
Revises: 0005
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    """Create the table; those who submitted the jobs that are there have asked them."""
    op.create_table(
        "job_askers",
        sa.Column("job_id", sa.String, sa.ForeignKey("jobs.job_id", ondelete="CASCADE"), primary_key=True),
        sa.Column("client", sa.String, primary_key=True),
    )
    op.execute("INSERT INTO job_askers (job_id, client) SELECT job_id, client FROM jobs")


def downgrade() -> None:
    """Forget who asked; the jobs stay."""
    op.drop_table("job_askers")
