"""Errors of a step time by kind of work, where there were two numbers: of dense models and of mixtures of experts.

What is not known of a set fitted earlier – its error for a related framework, or beside known runs – takes the same
numbers, which were the wider ones.

Revision ID: 0003
Revises: 0002
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"

CALIBRATIONS = sa.table(
    "calibrations", sa.column("framework"), sa.column("architecture"), sa.column("document", sa.JSON)
)
DENSE, EXPERTS = "time_error_p90", "moe_time_error_p90"
ERRORS = ("error_p90", "related_error_p90", "cluster_error_p90")


def upgrade() -> None:
    """Rewrite the training constants that have the two numbers."""

    def with_kinds(document: dict[str, Any]) -> dict[str, Any] | None:
        if DENSE not in document or EXPERTS not in document:
            return None
        kept = {key: value for key, value in document.items() if key not in (DENSE, EXPERTS)}
        errors = {"dense": document[DENSE], "adapters": document[DENSE], "experts": document[EXPERTS]}
        return {**kept, **dict.fromkeys(ERRORS, errors)}

    _rewrite(with_kinds)


def downgrade() -> None:
    """Back to the two numbers."""

    def with_two(document: dict[str, Any]) -> dict[str, Any] | None:
        errors = document.get("error_p90", {})
        if "dense" not in errors:
            return None
        kept = {key: value for key, value in document.items() if key not in (*ERRORS, "basis")}
        return {**kept, DENSE: errors["dense"], EXPERTS: errors["experts"]}

    _rewrite(with_two)


def _rewrite(changed: Callable[[dict[str, Any]], dict[str, Any] | None]) -> None:
    """Replace every document for which ``changed`` returns another."""
    connection, table = op.get_bind(), CALIBRATIONS
    for row in connection.execute(sa.select(table)).all():
        document = changed(row.document)
        if document is not None:
            here = (table.c.framework == row.framework) & (table.c.architecture == row.architecture)
            connection.execute(sa.update(table).where(here).values(document=document))
