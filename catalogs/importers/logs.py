"""Logs of other tools as runs of the catalog; :func:`import_file` tells the formats apart by their first lines."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshplan.catalogs.errors import CatalogError, why
from meshplan.catalogs.importers.mpigraph import cluster_of, is_mpigraph, read_mpigraph
from meshplan.catalogs.importers.nccl_tests import is_nccl_tests, read_nccl_tests
from meshplan.catalogs.measurements.exchange import import_cluster
from meshplan.catalogs.untrusted.documents import DocumentError, parse, read_text
from meshplan.catalogs.untrusted.limits import MAX_TEXT_BYTES

if TYPE_CHECKING:
    from meshplan.catalogs.measurements.rows import Measurements
    from meshplan.catalogs.measurements.types import Measurement


def import_file(store: Measurements, path: Path, *, cluster: str | None, device: str | None) -> dict[str, Any]:
    """Import an exported profile, or a log of nccl-tests, rccl-tests or mpiGraph, as a run of its own.

    Args:
        store: the catalog to write.
        path: the file.
        cluster: name for the cluster; mpiGraph needs one.
        device: device that a collective was measured on.

    Raises:
        CatalogError: unreadable, malformed, or in no known format.
    """
    try:
        text = read_text(path, MAX_TEXT_BYTES)
    except (OSError, DocumentError) as error:
        raise CatalogError(f"cannot read {path}: {why(error)}") from error
    day = datetime.fromtimestamp(path.stat().st_mtime, UTC).isoformat(timespec="seconds")
    if text.lstrip().startswith("{"):
        try:
            document = parse(text, is_json=True, name=str(path))
        except DocumentError as error:
            raise CatalogError(str(error)) from error
        return import_cluster(store, document, name=cluster)
    if is_mpigraph(text):
        rows = read_mpigraph(text, name=path.name, measured_at=day)
        return _stored(store, rows, tool="mpiGraph", cluster=cluster or path.stem)
    if is_nccl_tests(text):
        rows = read_nccl_tests(text, name=path.name, measured_at=day, device=device)
        return _stored(store, rows, tool="nccl-tests", cluster=cluster)
    raise CatalogError(
        f"{path.name} is in no format that 'profile import' knows: an exported profile (JSON), a log of nccl-tests or "
        "rccl-tests, or the output of mpiGraph"
    )


def _stored(store: Measurements, rows: Sequence[Measurement], *, tool: str, cluster: str | None) -> dict[str, Any]:
    run = store.start("import", host="elsewhere", environment={}, protocol={"tool": tool}, cluster=cluster)
    added = store.add(run.run_id, rows)
    if tool == "mpiGraph" and cluster is not None:
        store.put_cluster(cluster_of(rows, name=cluster, run_id=run.run_id))
    store.finish(run.run_id)
    return {"cluster": cluster, "run_id": run.run_id, "measurements": added}
