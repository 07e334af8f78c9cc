"""Measurements in the database: written one by one as they are made, read back as frozen values.

Each measurement is its own transaction, so that a killed run leaves a valid catalog with all that was measured; the
run stays unfinished and :meth:`Measurements.resumable` finds it again.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Engine

from meshplan.catalogs.database import tables
from meshplan.catalogs.database.connection import reading, writing
from meshplan.catalogs.errors import UnknownEntryError
from meshplan.catalogs.measurements.types import (
    ClusterProfile,
    Fit,
    MeasuredLink,
    Measurement,
    Metric,
    ProfileRun,
    Spread,
)
from meshplan.catalogs.units import now


class Measurements:
    """What was measured, by run.

    Args:
        engine: an opened catalog.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    # --- writing --------------------------------------------------------------------------------------------------

    def start(
        self,
        kind: str,
        *,
        host: str,
        environment: Mapping[str, Any],
        protocol: Mapping[str, Any],
        cluster: str | None = None,
    ) -> ProfileRun:
        """A new, unfinished run."""
        run = ProfileRun(
            run_id=secrets.token_hex(6),
            kind=kind,
            cluster=cluster,
            host=host,
            environment=dict(environment),
            protocol=dict(protocol),
            started_at=now(),
        )
        with writing(self.engine) as connection:
            insert_run(connection, run)
        return run

    def add(self, run_id: str, measurements: Iterable[Measurement]) -> int:
        """Store measurements at once; those whose point the run has already are left as they are. Returns how many."""
        with writing(self.engine) as connection:
            return insert_measurements(connection, run_id, measurements)

    def finish(self, run_id: str) -> None:
        """Mark the run as complete."""
        table = tables.profile_runs
        with writing(self.engine) as connection:
            connection.execute(sa.update(table).where(table.c.run_id == run_id).values(finished_at=now()))

    def add_fits(self, run_id: str, fits: Iterable[Fit]) -> None:
        """Store fits in place of earlier ones of the same run, subject and model."""
        with writing(self.engine) as connection:
            insert_fits(connection, run_id, fits)

    def put_cluster(self, profile: ClusterProfile) -> None:
        """Store a cluster profile, in place of an earlier one of the same run."""
        with writing(self.engine) as connection:
            insert_cluster(connection, profile)

    def forget(self, run_id: str) -> bool:
        """Remove a run with all that belongs to it; whether there was one."""
        with writing(self.engine) as connection:
            query = sa.delete(tables.profile_runs).where(tables.profile_runs.c.run_id == run_id)
            return connection.execute(query).rowcount > 0

    # --- reading --------------------------------------------------------------------------------------------------

    def runs(self, *, kind: str | None = None, cluster: str | None = None) -> tuple[ProfileRun, ...]:
        """Runs, newest first."""
        table = tables.profile_runs
        query = sa.select(table).order_by(table.c.sequence.desc())
        if kind is not None:
            query = query.where(table.c.kind == kind)
        if cluster is not None:
            query = query.where(table.c.cluster == cluster)
        with reading(self.engine) as connection:
            return tuple(_run(row) for row in connection.execute(query).mappings())

    def run(self, run_id: str) -> ProfileRun:
        """One run.

        Raises:
            UnknownEntryError: no such run.
        """
        known = {run.run_id: run for run in self.runs()}
        if run_id not in known:
            raise UnknownEntryError("profile run", run_id, known)
        return known[run_id]

    def resumable(self, kind: str, *, host: str, protocol: Mapping[str, Any], cluster: str | None) -> ProfileRun | None:
        """The newest run of the same kind, place and protocol, where it was not finished."""
        newest = next((run for run in self.runs(kind=kind, cluster=cluster) if run.host == host), None)
        if newest is None or newest.finished_at is not None or newest.protocol != dict(protocol):
            return None
        return newest

    def keys(self, run_id: str) -> frozenset[str]:
        """The points that a run has measured."""
        table = tables.measurements
        with reading(self.engine) as connection:
            query = sa.select(table.c.key).where(table.c.run_id == run_id)
            return frozenset(connection.execute(query).scalars())

    def of_run(self, run_id: str) -> tuple[Measurement, ...]:
        """All measurements of a run, in the order in which they were made."""
        table = tables.measurements
        query = sa.select(table).where(table.c.run_id == run_id).order_by(table.c.id)
        with reading(self.engine) as connection:
            return tuple(_measurement(row) for row in connection.execute(query).mappings())

    def fits(self, run_id: str) -> tuple[Fit, ...]:
        """The fits of a run."""
        table = tables.fits
        query = sa.select(table).where(table.c.run_id == run_id).order_by(table.c.id)
        with reading(self.engine) as connection:
            return tuple(_fit(row) for row in connection.execute(query).mappings())

    def before(self, run: ProfileRun) -> ProfileRun | None:
        """The last finished run on the same host with the same protocol, back end and device included; None without."""

        def is_before(earlier: ProfileRun) -> bool:
            is_same = (earlier.host, earlier.protocol) == (run.host, run.protocol) and earlier.run_id != run.run_id
            return is_same and earlier.finished_at is not None and earlier.started_at <= run.started_at

        return next((earlier for earlier in self.runs(kind=run.kind) if is_before(earlier)), None)

    def cluster(self, name: str) -> ClusterProfile:
        """The newest profile of a cluster.

        Raises:
            UnknownEntryError: no such cluster.
        """
        profiles = self.cluster_history(name)
        if not profiles:
            with reading(self.engine) as connection:
                known = list(connection.execute(sa.select(tables.cluster_profiles.c.name)).scalars())
            raise UnknownEntryError("cluster profile", name, known)
        return profiles[0]

    def cluster_history(self, name: str) -> tuple[ClusterProfile, ...]:
        """Every profile of a cluster, newest first."""
        table, run = tables.cluster_profiles, tables.profile_runs
        query = (
            sa.select(table)
            .join(run, run.c.run_id == table.c.run_id)
            .where(table.c.name == name)
            .order_by(run.c.sequence.desc())
        )
        with reading(self.engine) as connection:
            return tuple(_cluster(row) for row in connection.execute(query).mappings())

    def cluster_names(self) -> tuple[str, ...]:
        """Names of the clusters that have a profile."""
        column = tables.cluster_profiles.c.name
        with reading(self.engine) as connection:
            return tuple(sorted(connection.execute(sa.select(column).distinct()).scalars()))


# --- rows ---------------------------------------------------------------------------------------------------------


def insert_run(connection: Connection, run: ProfileRun) -> None:
    """Write a run; one that is there already stays."""
    known = sa.select(tables.profile_runs.c.run_id).where(tables.profile_runs.c.run_id == run.run_id)
    if connection.execute(known).first() is not None:
        return
    sequence = connection.execute(sa.select(sa.func.coalesce(sa.func.max(tables.profile_runs.c.sequence), 0))).scalar()
    connection.execute(sa.insert(tables.profile_runs), [asdict(run) | {"sequence": int(sequence or 0) + 1}])


def insert_measurements(connection: Connection, run_id: str, measurements: Iterable[Measurement]) -> int:
    """Write the measurements whose points the run does not have."""
    table = tables.measurements
    present = set(connection.execute(sa.select(table.c.key).where(table.c.run_id == run_id)).scalars())
    rows = {
        measurement.key: {
            "run_id": run_id,
            "key": measurement.key,
            "metric": measurement.metric.value,
            "parameters": dict(measurement.parameters),
            "warnings": list(measurement.warnings),
            **{name: getattr(measurement, name) for name in ("probe", "device", "link", "dtype")},
            **{name: getattr(measurement, name) for name in ("source", "host", "measured_at")},
            **{name: getattr(measurement.spread, name) for name in ("value", "low", "high", "n")},
        }
        for measurement in measurements
        if measurement.key not in present
    }
    if rows:
        connection.execute(sa.insert(table), list(rows.values()))
    return len(rows)


def insert_fits(connection: Connection, run_id: str, fits: Iterable[Fit]) -> None:
    """Write fits over earlier ones."""
    table = tables.fits
    for fit in fits:
        same = (table.c.run_id == run_id, table.c.subject == fit.subject, table.c.model == fit.model)
        connection.execute(sa.delete(table).where(*same))
        connection.execute(sa.insert(table), [asdict(fit) | {"run_id": run_id}])


def insert_cluster(connection: Connection, profile: ClusterProfile) -> None:
    """Write a cluster profile over an earlier one of the same run."""
    table = tables.cluster_profiles
    connection.execute(sa.delete(table).where(table.c.name == profile.name, table.c.run_id == profile.run_id))
    row = {"name": profile.name, "run_id": profile.run_id, "measured_at": profile.measured_at}
    connection.execute(sa.insert(table), [row | {"document": cluster_document(profile)}])


def cluster_document(profile: ClusterProfile) -> dict[str, Any]:
    """The matrix and what belongs to it, as plain JSON."""
    return {
        "endpoints": list(profile.endpoints),
        "links": [asdict(link) for link in profile.links],
        "unmeasured": [list(pair) for pair in profile.unmeasured],
        "findings": list(profile.findings),
    }


def cluster_from_document(name: str, run_id: str, measured_at: str, document: Mapping[str, Any]) -> ClusterProfile:
    """The inverse of :func:`cluster_document`."""
    return ClusterProfile(
        name=name,
        run_id=run_id,
        measured_at=measured_at,
        endpoints=tuple(document["endpoints"]),
        links=tuple(
            MeasuredLink(**link | {name: Spread(**link[name]) for name in ("bandwidth_bytes_per_s", "latency_s")})
            for link in document["links"]
        ),
        unmeasured=tuple((source, target) for source, target in document["unmeasured"]),
        findings=tuple(document["findings"]),
    )


def _cluster(row: Mapping[Any, Any]) -> ClusterProfile:
    return cluster_from_document(row["name"], row["run_id"], row["measured_at"], row["document"])


def _run(row: Mapping[Any, Any]) -> ProfileRun:
    return ProfileRun(**{name: value for name, value in row.items() if name != "sequence"})


def _measurement(row: Mapping[Any, Any]) -> Measurement:
    texts = {name: row[name] for name in ("probe", "device", "link", "dtype", "source", "host", "measured_at")}
    return Measurement(
        **texts,
        parameters=row["parameters"],
        metric=Metric(row["metric"]),
        spread=Spread(value=row["value"], low=row["low"], high=row["high"], n=row["n"]),
        warnings=tuple(row["warnings"]),
    )


def _fit(row: Mapping[Any, Any]) -> Fit:
    return Fit(**{name: value for name, value in row.items() if name not in ("id", "run_id")})
