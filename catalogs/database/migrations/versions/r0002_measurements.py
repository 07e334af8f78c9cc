"""Measurements: profile runs, what they measured, the cluster profiles and fits made from it.

The tables are written out again instead of imported from ``tables.py``, which moves on while this revision stays.

Revision ID: 0002
Revises: 0001
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """Create the tables of measurements; nothing that was there changes."""
    op.create_table(
        "profile_runs",
        sa.Column("run_id", sa.String, primary_key=True),
        sa.Column("kind", sa.String, nullable=False),
        sa.Column("cluster", sa.String),
        sa.Column("host", sa.String, nullable=False),
        sa.Column("environment", sa.JSON, nullable=False),
        sa.Column("protocol", sa.JSON, nullable=False),
        sa.Column("started_at", sa.String, nullable=False),
        sa.Column("finished_at", sa.String),
        sa.Column("sequence", sa.Integer, nullable=False),
    )
    _create_measurements()
    op.create_table(
        "cluster_profiles",
        sa.Column("name", sa.String, primary_key=True),
        _run_id(primary_key=True),
        sa.Column("document", sa.JSON, nullable=False),
        sa.Column("measured_at", sa.String, nullable=False),
    )
    op.create_table(
        "fits",
        sa.Column("id", sa.Integer, primary_key=True),
        _run_id(),
        sa.Column("subject", sa.String, nullable=False),
        sa.Column("model", sa.String, nullable=False),
        sa.Column("coefficients", sa.JSON, nullable=False),
        sa.Column("residual_median", sa.Float, nullable=False),
        sa.Column("residual_p90", sa.Float, nullable=False),
        sa.Column("held_out_median", sa.Float, nullable=False),
        sa.Column("held_out_p90", sa.Float, nullable=False),
        sa.Column("num_points", sa.Integer, nullable=False),
        sa.Column("source", sa.String, nullable=False),
        sa.UniqueConstraint("run_id", "subject", "model", name="uq_fits"),
    )


def downgrade() -> None:
    """Drop every measurement."""
    for name in ("fits", "cluster_profiles", "measurements", "profile_runs"):
        op.drop_table(name)


def _create_measurements() -> None:
    op.create_table(
        "measurements",
        sa.Column("id", sa.Integer, primary_key=True),
        _run_id(),
        sa.Column("key", sa.String, nullable=False),
        sa.Column("probe", sa.String, nullable=False),
        sa.Column("device", sa.String),
        sa.Column("link", sa.String),
        sa.Column("dtype", sa.String),
        sa.Column("parameters", sa.JSON, nullable=False),
        sa.Column("metric", sa.String, nullable=False),
        sa.Column("value", sa.Float, nullable=False),
        sa.Column("low", sa.Float, nullable=False),
        sa.Column("high", sa.Float, nullable=False),
        sa.Column("n", sa.Integer, nullable=False),
        sa.Column("warnings", sa.JSON, nullable=False),
        sa.Column("source", sa.String, nullable=False),
        sa.Column("host", sa.String, nullable=False),
        sa.Column("measured_at", sa.String, nullable=False),
        sa.UniqueConstraint("run_id", "key", name="uq_measurements"),
        sa.CheckConstraint("low <= value AND value <= high AND low > 0", name="ck_measurements_spread"),
        sa.CheckConstraint("n > 0", name="ck_measurements_n"),
        sa.CheckConstraint("source <> ''", name="ck_measurements_source"),
    )
    op.create_index("ix_measurements_probe", "measurements", ["probe"])


def _run_id(*, primary_key: bool = False) -> sa.Column[str]:
    return sa.Column(
        "run_id",
        sa.String,
        sa.ForeignKey("profile_runs.run_id", ondelete="CASCADE"),
        primary_key=primary_key,
        nullable=False,
    )
