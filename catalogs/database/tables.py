"""All tables of the catalog: which columns exist, nothing else.

Numbers about hardware live in one table, ``facts``, so that value, spread, evidence level, source and date are kept
by one mechanism; the tables of devices, links and node types hold names only. ``origin`` tells rows that ship with
meshplan (``seed``, replaced on ``catalog upgrade``) from the user's own (``user``, never touched).

A change here needs a new revision under ``migrations/versions``; ``tests/catalogs/database/test_migrations.py``
compares both.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    JSON,
    Boolean,
    CheckConstraint,
    Column,
    Float,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    UniqueConstraint,
    event,
)
from sqlalchemy.engine import Connection

# Revision of migrations/versions that describes exactly the tables below.
SCHEMA_REVISION = "0006"

metadata = MetaData()

facts = Table(
    "facts",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("subject_kind", String, nullable=False),  # device | link | node_type
    Column("subject", String, nullable=False),  # slug
    Column("field", String, nullable=False),  # name of the dataclass field, dotted where nested
    Column("value", Float, nullable=False),  # SI unit, which the field's name ends with
    Column("low", Float),
    Column("high", Float),
    Column("num_samples", Integer, nullable=False, default=0),
    Column("level", String, nullable=False),  # value of hardware.EvidenceLevel
    Column("source", String, nullable=False),
    Column("date", String, nullable=False),  # ISO 8601 day
    Column("imported_at", String, nullable=False),  # ISO 8601 UTC
    Column("origin", String, nullable=False),
    UniqueConstraint("subject_kind", "subject", "field", "level", "source", "date", name="uq_facts"),
    CheckConstraint("value >= 0", name="ck_facts_value"),
    CheckConstraint("source <> ''", name="ck_facts_source"),
)
Index("ix_facts_subject", facts.c.subject_kind, facts.c.subject)

devices = Table(
    "devices",
    metadata,
    Column("slug", String, primary_key=True),
    Column("name", String, nullable=False),
    Column("vendor", String, nullable=False),
    Column("architecture", String, nullable=False),
    Column("origin", String, nullable=False),
)

links = Table(
    "links",
    metadata,
    Column("slug", String, primary_key=True),
    Column("name", String, nullable=False),
    Column("technology", String, nullable=False),
    Column("origin", String, nullable=False),
)

node_types = Table(
    "node_types",
    metadata,
    Column("slug", String, primary_key=True),
    Column("name", String, nullable=False),
    Column("device", String, nullable=False),
    Column("scale_up_link", String, nullable=False),
    Column("scale_out_link", String),
    Column("origin", String, nullable=False),
)

prices = Table(
    "prices",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("node_type", String, nullable=False),
    Column("provider", String, nullable=False),
    Column("region", String, nullable=False),
    Column("terms", String, nullable=False),
    Column("usd_per_hour", Float, nullable=False),  # whole node
    Column("date", String, nullable=False),
    Column("source", String, nullable=False),
    Column("origin", String, nullable=False),
    UniqueConstraint("node_type", "provider", "region", "terms", "date", "source", name="uq_prices"),
    CheckConstraint("usd_per_hour >= 0", name="ck_prices_usd_per_hour"),
    CheckConstraint("source <> ''", name="ck_prices_source"),
)
Index("ix_prices_node_type", prices.c.node_type)

models = Table(
    "models",
    metadata,
    Column("slug", String, primary_key=True),
    Column("name", String, nullable=False),
    Column("family", String, nullable=False),  # Hugging Face model_type
    Column("document", JSON, nullable=False),  # the model's config.json
    Column("source", String, nullable=False),
    Column("date", String, nullable=False),
    Column("origin", String, nullable=False),
)

calibrations = Table(
    "calibrations",
    metadata,
    Column("framework", String, primary_key=True),
    Column("architecture", String, primary_key=True),
    Column("document", JSON, nullable=False),  # named constants of the estimators
    Column("source", String, nullable=False),
    Column("date", String, nullable=False),
    Column("origin", String, nullable=False),
)

# Tables whose rows ship with meshplan or are a user's own, as ``origin`` says.
ENTRIES = (facts, prices, devices, links, node_types, models, calibrations)

plans = Table(
    "plans",
    metadata,
    Column("plan_id", String, primary_key=True),
    Column("kind", String, nullable=False),
    Column("name", String, nullable=False),
    Column("tag", String, unique=True),
    Column("spec_digest", String, nullable=False),
    Column("catalog_digest", String, nullable=False),
    Column("document", JSON, nullable=False),
    Column("created_at", String, nullable=False),  # ISO 8601 UTC
    Column("sequence", Integer, nullable=False),  # order of insertion: clocks may repeat or go back
)

recorded_runs = Table(
    "recorded_runs",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("plan_id", String, ForeignKey("plans.plan_id", ondelete="CASCADE"), nullable=False),
    Column("document", JSON, nullable=False),  # what was measured
    Column("recorded_at", String, nullable=False),
)
Index("ix_recorded_runs_plan_id", recorded_runs.c.plan_id)

meta = Table(
    "meta",
    metadata,
    Column("key", String, primary_key=True),  # seed_digest
    Column("value", String, nullable=False),
)

profile_runs = Table(
    "profile_runs",
    metadata,
    Column("run_id", String, primary_key=True),
    Column("kind", String, nullable=False),  # device | links | import
    Column("cluster", String),  # name of the cluster profile that the run belongs to
    Column("host", String, nullable=False),
    Column("environment", JSON, nullable=False),  # clocks, driver and library versions
    Column("protocol", JSON, nullable=False),  # warm-up, repeats, data, what counts as an outlier
    Column("started_at", String, nullable=False),  # ISO 8601 UTC
    Column("finished_at", String),  # none: killed, or still running; it can be resumed
    Column("sequence", Integer, nullable=False),  # order of insertion: clocks may repeat or go back
)

measurements = Table(
    "measurements",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("run_id", String, ForeignKey("profile_runs.run_id", ondelete="CASCADE"), nullable=False),
    Column("key", String, nullable=False),  # probe, subject and parameters: what a resumed run has already
    Column("probe", String, nullable=False),
    Column("device", String),
    Column("link", String),  # "a -> b" with hosts, or the group of a collective
    Column("dtype", String),
    Column("parameters", JSON, nullable=False),  # shape, or size_bytes
    Column("metric", String, nullable=False),  # flops_per_s | bytes_per_s | latency_s
    Column("value", Float, nullable=False),
    Column("low", Float, nullable=False),
    Column("high", Float, nullable=False),
    Column("n", Integer, nullable=False),
    Column("warnings", JSON, nullable=False),  # outliers, throttling, clock jumps
    Column("source", String, nullable=False),
    Column("host", String, nullable=False),
    Column("measured_at", String, nullable=False),
    UniqueConstraint("run_id", "key", name="uq_measurements"),
    CheckConstraint("low <= value AND value <= high AND low > 0", name="ck_measurements_spread"),
    CheckConstraint("n > 0", name="ck_measurements_n"),
    CheckConstraint("source <> ''", name="ck_measurements_source"),
)
Index("ix_measurements_probe", measurements.c.probe)

cluster_profiles = Table(
    "cluster_profiles",
    metadata,
    Column("name", String, primary_key=True),
    Column("run_id", String, ForeignKey("profile_runs.run_id", ondelete="CASCADE"), primary_key=True),
    Column("document", JSON, nullable=False),  # hosts, devices, rails, directed links, what was not measured
    Column("measured_at", String, nullable=False),
)

fits = Table(
    "fits",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("run_id", String, ForeignKey("profile_runs.run_id", ondelete="CASCADE"), nullable=False),
    Column("subject", String, nullable=False),  # device, link, class of links, group
    Column("model", String, nullable=False),
    Column("coefficients", JSON, nullable=False),
    Column("residual_median", Float, nullable=False),  # |predicted/measured - 1| on the points of the fit
    Column("residual_p90", Float, nullable=False),
    Column("held_out_median", Float, nullable=False),  # the same on points that a fit had not seen
    Column("held_out_p90", Float, nullable=False),
    Column("num_points", Integer, nullable=False),
    Column("source", String, nullable=False),
    UniqueConstraint("run_id", "subject", "model", name="uq_fits"),
)

jobs = Table(
    "jobs",
    metadata,
    Column("number", Integer, primary_key=True),  # order of submission
    Column("job_id", String, nullable=False, unique=True),
    Column("kind", String, nullable=False),
    Column("digest", String, nullable=False),  # of the question
    Column("document", JSON, nullable=False),  # the question
    Column("client", String, nullable=False),
    Column("state", String, nullable=False),  # value of jobs.JobState
    Column("attempts", Integer, nullable=False),  # how often it was claimed
    Column("worker", String),  # who holds it, or held it last
    Column("cancel_asked", Boolean, nullable=False),
    Column("progress", JSON),
    Column("plan_id", String),  # no foreign key: a plan may be deleted, what became of the job stays
    Column("problem", JSON),  # why it failed
    # Seconds since 1970, UTC, by the clock of the database: workers' clocks differ.
    Column("submitted_s", Float, nullable=False),
    Column("started_s", Float),
    Column("beat_s", Float),
    Column("finished_s", Float),
    CheckConstraint("state IN ('queued', 'running', 'done', 'failed', 'cancelled')", name="ck_jobs_state"),
)
Index("ix_jobs_state", jobs.c.state, jobs.c.number)
# One job at a time for a question; one that is about to stop no longer counts.
_ASKED = jobs.c.state.in_(["queued", "running"]) & ~jobs.c.cancel_asked
_ONCE_ASKED = Index("uq_jobs_asked", jobs.c.kind, jobs.c.digest, unique=True, sqlite_where=_ASKED)


@event.listens_for(jobs, "before_create")
def _once_asked_on_postgresql(_table: Table, connection: Connection, **_options: Any) -> None:
    """The same condition there: named above, it would load that dialect for every command on SQLite (start-up)."""
    if connection.dialect.name == "postgresql":
        _ONCE_ASKED.dialect_options["postgresql"]["where"] = _ASKED


# Who wants a job's answer: the one who submitted it, and those who asked the same while it was open.
job_askers = Table(
    "job_askers",
    metadata,
    Column("job_id", String, ForeignKey("jobs.job_id", ondelete="CASCADE"), primary_key=True),
    Column("client", String, primary_key=True),
)

studies = Table(
    "studies",
    metadata,
    Column("study_id", String, primary_key=True),
    Column("name", String, nullable=False),
    Column("document", JSON, nullable=False),  # the sweep, and the digest of each of its points
    Column("created_at", String, nullable=False),  # ISO 8601 UTC
    Column("sequence", Integer, nullable=False),  # order of insertion: clocks may repeat or go back
)

study_points = Table(
    "study_points",
    metadata,
    Column("digest", String, primary_key=True),  # of the question: studies that ask the same share it
    Column("state", String, nullable=False),  # value of studies.points.PointState
    Column("owner", String),  # who is at work on it, or was last
    Column("attempts", Integer, nullable=False),  # how often it was claimed
    Column("deaths", Integer, nullable=False),  # how many processes ended while they answered it
    Column("answer", JSON),  # the headline
    Column("plan_id", String),  # no foreign key: a plan may be deleted, the headline stays
    Column("problem", JSON),  # why it failed
    # Seconds since 1970, UTC, by the clock of the database.
    Column("beat_s", Float),
    Column("finished_s", Float),
    CheckConstraint("state IN ('waiting', 'running', 'done', 'failed')", name="ck_study_points_state"),
)
Index("ix_study_points_owner", study_points.c.owner, study_points.c.state)

# What answers leave behind and none rests on; rows before those that they refer to.
WRITTEN_BY_ANSWERS = (recorded_runs, plans, job_askers, jobs, study_points, studies)
