"""One cluster's profile as one file: the run, the matrix, every measurement and fit, and back into another catalog."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from typing import Any

from meshplan.catalogs.database.connection import writing
from meshplan.catalogs.errors import CatalogError
from meshplan.catalogs.measurements.rows import (
    Measurements,
    cluster_document,
    cluster_from_document,
    insert_cluster,
    insert_fits,
    insert_measurements,
    insert_run,
)
from meshplan.catalogs.measurements.types import ClusterProfile, Fit, Measurement, Metric, ProfileRun, Spread

FORMAT = "meshplan-profile/1"
_KEYS = ("format", "cluster", "measured_at", "run", "profile", "measurements", "fits")


def export_cluster(store: Measurements, name: str) -> dict[str, Any]:
    """The newest profile of a cluster with all that belongs to it, as plain JSON.

    Raises:
        UnknownEntryError: no such cluster.
    """
    profile = store.cluster(name)
    return {
        "format": FORMAT,
        "cluster": name,
        "measured_at": profile.measured_at,
        "run": asdict(store.run(profile.run_id)),
        "profile": cluster_document(profile),
        "measurements": [asdict(measurement) for measurement in store.of_run(profile.run_id)],
        "fits": [asdict(fit) for fit in store.fits(profile.run_id)],
    }


def import_cluster(store: Measurements, document: Any, *, name: str | None = None) -> dict[str, Any]:
    """Write an exported profile, all of it or nothing; the same run twice changes nothing.

    Args:
        store: the catalog to write.
        document: what :func:`export_cluster` made.
        name: another name for the cluster.

    Returns:
        ``{cluster, run_id, measurements}``, the number of new measurements.

    Raises:
        CatalogError: not such a document, or malformed.
    """
    if not isinstance(document, Mapping) or document.get("format") != FORMAT:
        raise CatalogError(f"not an exported profile: format must be {FORMAT!r}")
    missing = [key for key in _KEYS if key not in document]
    if missing:
        raise CatalogError(f"the exported profile lacks {', '.join(missing)}; export it again")
    try:
        run = ProfileRun(**document["run"])
        cluster = name or str(document["cluster"])
        profile = cluster_from_document(cluster, run.run_id, document["measured_at"], document["profile"])
        measurements = [_measurement(row) for row in document["measurements"]]
        fits = [Fit(**row) for row in document["fits"]]
        _check_time(profile.measured_at)
        _check_names(profile)
        _check_numbers(measurements, fits)
    except (TypeError, ValueError, KeyError) as error:
        raise CatalogError(f"the exported profile is malformed, nothing was imported: {error}") from error
    with writing(store.engine) as connection:
        insert_run(connection, run)
        added = insert_measurements(connection, run.run_id, measurements)
        insert_fits(connection, run.run_id, fits)
        insert_cluster(connection, profile)
    return {"cluster": cluster, "run_id": run.run_id, "measurements": added}


def _measurement(row: Mapping[str, Any]) -> Measurement:
    content = dict(row)
    return Measurement(
        **content
        | {
            "metric": Metric(content["metric"]),
            "spread": Spread(**content["spread"]),
            "warnings": tuple(content["warnings"]),
        }
    )


def _check_time(measured_at: object) -> None:
    """A date and time with its zone, from which the age of a profile is told.

    Raises:
        ValueError: it is none.
    """
    try:
        is_one = isinstance(measured_at, str) and datetime.fromisoformat(measured_at).tzinfo is not None
    except ValueError:
        is_one = False
    if not is_one:
        raise ValueError(f"measured_at must be such as 2026-11-21T10:00:00+00:00, not {measured_at!r:.60}")


def _check_names(profile: ClusterProfile) -> None:
    """Names are texts, endpoints are different, and links join endpoints.

    Raises:
        ValueError: which one is not.
    """
    ends = [end for link in profile.links for end in (link.source, link.target)]
    ends += [end for pair in profile.unmeasured for end in pair]
    for text in (*profile.endpoints, *ends, *(link.rail for link in profile.links), *profile.findings):
        if not isinstance(text, str):
            raise ValueError(f"endpoints, links, rails and findings must be texts, not {text!r:.60}")
    if len(set(profile.endpoints)) < len(profile.endpoints):
        twice = next(name for name, count in Counter(profile.endpoints).items() if count > 1)
        raise ValueError(f"the endpoint {twice} is listed twice")
    unknown = sorted(set(ends) - set(profile.endpoints))
    if unknown:
        raise ValueError(f"{unknown[0]} is no endpoint of the profile: {', '.join(profile.endpoints)[:200]}")


def _check_numbers(measurements: Sequence[Measurement], fits: Sequence[Fit]) -> None:
    """Parameters of measurements are numbers or texts by their names, coefficients of fits numbers.

    Raises:
        ValueError: of which they are not.
    """
    for row in measurements:
        parameters: object = row.parameters
        if not isinstance(parameters, dict) or not all(
            isinstance(one, int | float | str) for one in parameters.values()
        ):
            raise ValueError(f"the parameters of {row.probe!r:.60} must be numbers or texts by their names")
    for fit in fits:
        coefficients: object = fit.coefficients
        if not isinstance(coefficients, dict) or not all(isinstance(one, int | float) for one in coefficients.values()):
            raise ValueError(f"the coefficients of {fit.subject!r:.60} must be numbers by their names")
