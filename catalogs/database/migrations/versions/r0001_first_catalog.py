"""First catalog: devices, links, node types, prices, models, calibrations, plans and the facts behind them.

The tables are written out again instead of imported from ``tables.py``, which moves on while this revision stays.

Revision ID: 0001
Revises: nothing
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Create every table of revision 0001."""
    _create_facts()
    _create_hardware()
    _create_prices()
    _create_models()
    _create_plans()
    op.create_table(
        "meta",
        sa.Column("key", sa.String, primary_key=True),
        sa.Column("value", sa.String, nullable=False),
    )


def downgrade() -> None:
    """Back to an empty database."""
    for name in (
        "recorded_runs",
        "plans",
        "calibrations",
        "models",
        "prices",
        "node_types",
        "links",
        "devices",
        "facts",
        "meta",
    ):
        op.drop_table(name)


def _create_facts() -> None:
    op.create_table(
        "facts",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("subject_kind", sa.String, nullable=False),
        sa.Column("subject", sa.String, nullable=False),
        sa.Column("field", sa.String, nullable=False),
        sa.Column("value", sa.Float, nullable=False),
        sa.Column("low", sa.Float),
        sa.Column("high", sa.Float),
        sa.Column("num_samples", sa.Integer, nullable=False),
        sa.Column("level", sa.String, nullable=False),
        sa.Column("source", sa.String, nullable=False),
        sa.Column("date", sa.String, nullable=False),
        sa.Column("imported_at", sa.String, nullable=False),
        sa.Column("origin", sa.String, nullable=False),
        sa.UniqueConstraint("subject_kind", "subject", "field", "level", "source", "date", name="uq_facts"),
        sa.CheckConstraint("value >= 0", name="ck_facts_value"),
        sa.CheckConstraint("source <> ''", name="ck_facts_source"),
    )
    op.create_index("ix_facts_subject", "facts", ["subject_kind", "subject"])


def _create_hardware() -> None:
    op.create_table(
        "devices",
        sa.Column("slug", sa.String, primary_key=True),
        sa.Column("name", sa.String, nullable=False),
        sa.Column("vendor", sa.String, nullable=False),
        sa.Column("architecture", sa.String, nullable=False),
        sa.Column("origin", sa.String, nullable=False),
    )
    op.create_table(
        "links",
        sa.Column("slug", sa.String, primary_key=True),
        sa.Column("name", sa.String, nullable=False),
        sa.Column("technology", sa.String, nullable=False),
        sa.Column("origin", sa.String, nullable=False),
    )
    op.create_table(
        "node_types",
        sa.Column("slug", sa.String, primary_key=True),
        sa.Column("name", sa.String, nullable=False),
        sa.Column("device", sa.String, nullable=False),
        sa.Column("scale_up_link", sa.String, nullable=False),
        sa.Column("scale_out_link", sa.String),
        sa.Column("origin", sa.String, nullable=False),
    )


def _create_prices() -> None:
    op.create_table(
        "prices",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("node_type", sa.String, nullable=False),
        sa.Column("provider", sa.String, nullable=False),
        sa.Column("region", sa.String, nullable=False),
        sa.Column("terms", sa.String, nullable=False),
        sa.Column("usd_per_hour", sa.Float, nullable=False),
        sa.Column("date", sa.String, nullable=False),
        sa.Column("source", sa.String, nullable=False),
        sa.Column("origin", sa.String, nullable=False),
        sa.UniqueConstraint("node_type", "provider", "region", "terms", "date", "source", name="uq_prices"),
        sa.CheckConstraint("usd_per_hour >= 0", name="ck_prices_usd_per_hour"),
        sa.CheckConstraint("source <> ''", name="ck_prices_source"),
    )
    op.create_index("ix_prices_node_type", "prices", ["node_type"])


def _create_models() -> None:
    op.create_table(
        "models",
        sa.Column("slug", sa.String, primary_key=True),
        sa.Column("name", sa.String, nullable=False),
        sa.Column("family", sa.String, nullable=False),
        sa.Column("document", sa.JSON, nullable=False),
        sa.Column("source", sa.String, nullable=False),
        sa.Column("date", sa.String, nullable=False),
        sa.Column("origin", sa.String, nullable=False),
    )
    op.create_table(
        "calibrations",
        sa.Column("framework", sa.String, primary_key=True),
        sa.Column("architecture", sa.String, primary_key=True),
        sa.Column("document", sa.JSON, nullable=False),
        sa.Column("source", sa.String, nullable=False),
        sa.Column("date", sa.String, nullable=False),
        sa.Column("origin", sa.String, nullable=False),
    )


def _create_plans() -> None:
    op.create_table(
        "plans",
        sa.Column("plan_id", sa.String, primary_key=True),
        sa.Column("kind", sa.String, nullable=False),
        sa.Column("name", sa.String, nullable=False),
        sa.Column("tag", sa.String, unique=True),
        sa.Column("spec_digest", sa.String, nullable=False),
        sa.Column("catalog_digest", sa.String, nullable=False),
        sa.Column("document", sa.JSON, nullable=False),
        sa.Column("created_at", sa.String, nullable=False),
        sa.Column("sequence", sa.Integer, nullable=False),
    )
    op.create_table(
        "recorded_runs",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("plan_id", sa.String, sa.ForeignKey("plans.plan_id", ondelete="CASCADE"), nullable=False),
        sa.Column("document", sa.JSON, nullable=False),
        sa.Column("recorded_at", sa.String, nullable=False),
    )
    op.create_index("ix_recorded_runs_plan_id", "recorded_runs", ["plan_id"])
