"""``meshplan profile``: measure devices and links into the catalog, and look at what was measured."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshplan.catalogs.units import format_bandwidth, format_duration, format_flops
from meshplan.cli.options import DatabaseOption, ForceOption, FormatOption
from meshplan.cli.render import Column, Format, Row, show_document, show_rows
from meshplan.planner.core.text import counted

if TYPE_CHECKING:
    from meshplan.catalogs.database.repository import Catalog
    from meshplan.catalogs.measurements.rows import Measurements
    from meshplan.catalogs.measurements.types import ClusterProfile
    from meshplan.profiler.links.launch import RankEnvironment
    from meshplan.profiler.links.transport import Transport

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help=__doc__)

# GPUs behind NVLink need larger messages than sockets to reach their rate.
_GPU_MAX_BYTES = 2**30

QuickOption = Annotated[bool, typer.Option("--quick", help="Fewer points and repeats: seconds instead of a minute.")]
NameOption = Annotated[str | None, typer.Option("--name", metavar="CLUSTER", help="Cluster that this belongs to.")]
ClusterOption = Annotated[str, typer.Option("--name", metavar="CLUSTER", help="Name of the cluster profile.")]
BackendOption = Annotated[str, typer.Option("--backend", help="auto, numpy, torch-cpu or torch-gpu.")]


@app.command()
def device(
    quick: QuickOption = False,
    name: NameOption = None,
    backend: BackendOption = "auto",
    probe: Annotated[list[str] | None, typer.Option("--probe", help="Only this probe; may be repeated.")] = None,
    scratch: Annotated[Path | None, typer.Option("--scratch", help="Folder for the disk probe.")] = None,
    slug: Annotated[
        str | None,
        typer.Option("--as", metavar="SLUG", help="Catalog device that gets the measured curves and operator scales."),
    ] = None,
    with_attention: Annotated[
        bool, typer.Option("--with-attention", help="With --as: scale attention too, by torch's kernel.")
    ] = False,
    db: DatabaseOption = None,
    form: FormatOption = Format.TABLE,
) -> None:
    """Measure this machine's device: matrix products, attention, memory, optimizer, kernel launch, transfers, disk."""
    store = _store(db)
    if slug is not None:
        _catalog(store).device(slug)  # an unknown name is better refused before the minute of measuring
    document = _profiled_device(store, quick=quick, name=name, backend=backend, probes=probe, scratch=scratch)
    if slug is not None:
        _hand_on(store, document["run_id"], slug, with_attention=with_attention)
    _show(document, form)


@app.command()
def links(
    name: ClusterOption = "local",
    quick: QuickOption = False,
    rail: Annotated[list[str] | None, typer.Option("--rail", help="Network interface; repeat for several.")] = None,
    gpu: Annotated[bool, typer.Option("--gpu/--cpu", help="NCCL between GPUs, or Gloo between hosts.")] = False,
    timeout: Annotated[float, typer.Option("--timeout", help="Seconds after which a silent rank is lost.")] = 60.0,
    allow_mixed_versions: Annotated[
        bool, typer.Option("--allow-mixed-versions", help="Go on when ranks run different library versions.")
    ] = False,
    db: DatabaseOption = None,
    form: FormatOption = Format.TABLE,
) -> None:
    """Measure every directed pair and the collectives; start one process per device (torchrun, srun, mpirun)."""
    from meshplan.profiler.links.launch import rank_environment

    place = rank_environment(os.environ)
    document = _profiled_links(
        place, db, name=name, quick=quick, rails=rail, gpu=gpu, timeout_s=timeout, mixed=allow_mixed_versions
    )
    if document is not None:
        _show(document, form)


@app.command("all")
def everything(
    name: ClusterOption = "local",
    quick: QuickOption = False,
    backend: BackendOption = "auto",
    db: DatabaseOption = None,
    form: FormatOption = Format.TABLE,
) -> None:
    """Measure the device of rank 0, then, where a launcher started several processes, the links."""
    from meshplan.catalogs.errors import ProfileError
    from meshplan.profiler.links.launch import rank_environment

    try:
        place: RankEnvironment | None = rank_environment(os.environ)
    except ProfileError:
        place = None
        _say("no launcher: only the device is measured; start with torchrun, srun or mpirun for the links")
    document: dict[str, Any] = {"measurements": []}
    if place is None or place.rank == 0:
        document = _profiled_device(_store(db), quick=quick, name=name, backend=backend, probes=None, scratch=None)
    if place is not None and place.world_size > 1:
        over = _profiled_links(
            place, db, name=name, quick=quick, rails=None, gpu=backend == "torch-gpu", timeout_s=600.0, mixed=False
        )
        if over is not None:
            document = over | {"measurements": document["measurements"] + over["measurements"]}
    if place is None or place.rank == 0:
        _show(document, form)


@app.command()
def show(
    name: Annotated[str | None, typer.Argument(help="Cluster; every profile run when left out.")] = None,
    db: DatabaseOption = None,
    form: FormatOption = Format.TABLE,
) -> None:
    """Show the runs, or a cluster's matrix, its findings, and what drifted since the profile before."""
    store = _store(db)
    if name is None:
        runs = [
            {
                "run_id": run.run_id,
                "kind": run.kind,
                "cluster": run.cluster,
                "host": run.host,
                "started_at": run.started_at,
                "finished_at": run.finished_at,
                "measurements": len(store.keys(run.run_id)),
            }
            for run in store.runs()
        ]
        show_rows(runs, tuple(Column(key=key, title=key.replace("_", " ")) for key in _RUN_KEYS), form)
        return
    from meshplan.catalogs.measurements.drift import link_drifts, staleness_warning

    history = store.cluster_history(name)
    profile = store.cluster(name)
    document = _cluster_summary(profile)
    stale = staleness_warning(name, profile.measured_at)
    document["warnings"] = [stale] if stale else []
    if len(history) > 1:
        document["drift"] = [str(drift) for drift in link_drifts(history[1].links, profile.links)]
    if form in (Format.JSON, Format.YAML):
        show_document(document, form)
        return
    from meshplan.profiler.pictures import terminal_matrix

    for line in (terminal_matrix(profile), *document["warnings"], *document.get("drift", ())):
        _say(line)
    rows = [
        {
            "from": link.source,
            "to": link.target,
            "rail": link.rail,
            "bandwidth_bytes_per_s": link.bandwidth_bytes_per_s.value,
            "latency_s": link.latency_s.value,
        }
        for link in profile.links
    ]
    show_rows(rows, _LINK_COLUMNS, form)


@app.command()
def picture(
    name: Annotated[str, typer.Argument(help="Cluster, or run of a device.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="HTML file to write.")],
    force: ForceOption = False,
    db: DatabaseOption = None,
    form: FormatOption = Format.TABLE,
) -> None:
    """Write the bandwidth matrix of a cluster, or the efficiency curves of a device run, as one HTML file."""
    if out.suffix.lower() not in (".html", ".htm"):
        raise typer.BadParameter(f"{out} would hold HTML (SVG inside); end it in .html", param_hint="--out")
    from meshplan.profiler.pictures import cluster_page, device_page

    store = _store(db)
    if name in store.cluster_names():
        page = cluster_page(store.cluster(name))
    else:
        page = device_page(store.run(name), store.of_run(name))
    _write(out, page, force=force)
    show_document({"written": str(out)}, form)


@app.command("export")
def export_profile(
    name: Annotated[str, typer.Argument(help="Cluster.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="JSON file to write.")],
    force: ForceOption = False,
    db: DatabaseOption = None,
    form: FormatOption = Format.TABLE,
) -> None:
    """Write the newest profile of a cluster, with every measurement and fit, as one JSON file."""
    import json

    from meshplan.catalogs.measurements.exchange import export_cluster

    document = export_cluster(_store(db), name)
    _write(out, json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False) + "\n", force=force)
    show_document({"written": str(out), "measurements": len(document["measurements"])}, form)


@app.command("import")
def import_profile(
    file: Annotated[Path, typer.Argument(help="A file of 'profile export', or a log of nccl-tests or mpiGraph.")],
    name: NameOption = None,
    device_name: Annotated[
        str | None, typer.Option("--device", help="Device that an nccl-tests log was measured on.")
    ] = None,
    db: DatabaseOption = None,
    form: FormatOption = Format.TABLE,
) -> None:
    """Read a profile of another catalog, or the log of another tool: all of it, or nothing and what is wrong."""
    from meshplan.catalogs.importers.logs import import_file

    show_document(import_file(_store(db), file, cluster=name, device=device_name), form)


def _store(db: str | None) -> Measurements:
    from meshplan.catalogs.database.opening import open_database
    from meshplan.catalogs.measurements.rows import Measurements

    return Measurements(open_database(db))


def _catalog(store: Measurements) -> Catalog:
    from meshplan.catalogs.database.repository import Catalog

    return Catalog(store.engine)


def _hand_on(store: Measurements, run_id: str, slug: str, *, with_attention: bool) -> None:
    """Make what a run measured facts of a catalog device, so that plans use it."""
    from meshplan.catalogs.surfaces.operator_scales import operator_scales
    from meshplan.planner.serving.estimator.operators import measured_as
    from meshplan.profiler.device.facts import gemm_facts, scale_facts

    catalog, run = _catalog(store), store.run(run_id)
    curves, bad = gemm_facts(run, store.fits(run_id))
    device = catalog.device(slug)
    ratios = operator_scales(device, store.of_run(run_id), measured_as=catalog.device(measured_as(device)))
    scales, absurd = scale_facts(run, ratios, with_attention=with_attention)
    catalog.add_facts("device", slug, [*curves, *scales])
    _say(
        f"{slug}: {counted(len(curves) + len(scales), 'fact')} measured here"
        if curves or scales
        else f"{slug}: too few matrix products"
    )
    for fact in scales:
        _say(f"  {fact.field} {fact.value:.3g} ({fact.evidence.low:.3g} … {fact.evidence.high:.3g})")
    for line in bad:
        _say(f"  left out, {line}")
    for line in absurd:
        _say(f"  left out, {line}; is this machine a {slug}?")


def _profiled_device(
    store: Measurements,
    *,
    quick: bool,
    name: str | None,
    backend: str,
    probes: Sequence[str] | None,
    scratch: Path | None,
) -> dict[str, Any]:
    from meshplan.catalogs.measurements.drift import drifts
    from meshplan.profiler.device.opening import open_backend
    from meshplan.profiler.device.run import DeviceOptions, profile_device

    options = DeviceOptions(is_quick=quick, probes=probes, cluster=name, scratch=scratch, progress=_say)
    opened = open_backend(backend)
    if backend == "auto" and not opened.is_accelerator:
        _say(
            f"note: no GPU is seen from here, so that the processor is measured ({opened.device}); for a GPU: "
            "pip install torch, --backend torch-gpu"
        )
    profile = profile_device(store, opened, options)
    _say(
        f"{counted(len(profile.measurements), 'measurement')} ({profile.num_resumed} resumed) in {profile.wall_s:.1f} s"
    )
    earlier = store.before(profile.run)
    moved = drifts(store.of_run(earlier.run_id), profile.measurements) if earlier else ()
    for drift in moved:
        _say(f"drift since {earlier.started_at if earlier else ''}: {drift}")
    return {
        "run_id": profile.run.run_id,
        "measurements": [measurement.document() for measurement in profile.measurements],
        "drift": [str(drift) for drift in moved],
        "failures": list(profile.failures),
        "wall_s": round(profile.wall_s, 3),
    }


def _profiled_links(
    place: RankEnvironment,
    db: str | None,
    *,
    name: str,
    quick: bool,
    rails: Sequence[str] | None,
    gpu: bool,
    timeout_s: float,
    mixed: bool,
) -> dict[str, Any] | None:
    from dataclasses import replace

    from meshplan.catalogs.errors import ProfileError
    from meshplan.profiler.links.probes import FULL, QUICK
    from meshplan.profiler.links.run import DEFAULT_RAIL, LinkOptions, profile_links
    from meshplan.profiler.links.transport import TorchTransport, rendezvous_store

    if gpu and len(rails or ()) > 1:
        raise ProfileError(
            "NCCL chooses its interface once a process, so with --gpu one run measures one rail; start it once per "
            "rail, each under a --name of its own"
        )

    def transports() -> Iterator[tuple[str, Transport]]:
        rendezvous = rendezvous_store(place, use_gpu=gpu, timeout_s=timeout_s)
        for number, rail in enumerate(rails or (None,)):
            transport = TorchTransport(place, rendezvous, number=number, rail=rail, use_gpu=gpu, timeout_s=timeout_s)
            yield rail or DEFAULT_RAIL, transport
            transport.close()

    protocol = QUICK if quick else FULL
    options = LinkOptions(
        cluster=name,
        protocol=replace(protocol, max_bytes=_GPU_MAX_BYTES) if gpu else protocol,
        allow_mixed_versions=mixed,
        progress=_say,
    )
    # Rank 0 alone opens the catalog, and before it joins: a read-only file must not leave the others waiting.
    profile = profile_links(_store(db) if place.rank == 0 else None, transports(), options)
    if profile is None:
        return None
    for line in (*profile.cluster.findings, *profile.notes):
        _say(line)
    return {
        "run_id": profile.run.run_id,
        **_cluster_summary(profile.cluster),
        "measurements": [measurement.document() for measurement in profile.measurements],
        "notes": list(profile.notes),
        "wall_s": round(profile.wall_s, 3),
    }


def _cluster_summary(profile: ClusterProfile) -> dict[str, Any]:
    return {
        "cluster": profile.name,
        "measured_at": profile.measured_at,
        "endpoints": list(profile.endpoints),
        "rails": list(profile.rails),
        "bandwidth_bytes_per_s": profile.bandwidths(),
        "findings": list(profile.findings),
        "unmeasured": [f"{source} -> {target}" for source, target in profile.unmeasured],
    }


def _show(document: dict[str, Any], form: Format) -> None:
    if form in (Format.JSON, Format.YAML):
        show_document(document, form)
        return
    show_rows(document["measurements"], _COLUMNS, form)


def _value(row: Row) -> str:
    for metric, text in (
        ("flops_per_s", format_flops),
        ("bytes_per_s", format_bandwidth),
        ("latency_s", format_duration),
    ):
        if metric in row:
            spread = row[metric]
            return f"{text(spread['value'])} ({text(spread['low'])} – {text(spread['high'])})"
    return ""


def _shape(row: Row) -> str:
    shape = " ".join(f"{key}={value}" for key, value in row.get("shape", {}).items())
    return f"{shape} {row['size_bytes']} B".strip() if "size_bytes" in row else shape


_RUN_KEYS = ("run_id", "kind", "cluster", "host", "started_at", "finished_at", "measurements")
_LINK_COLUMNS = (
    Column(key="from", title="From"),
    Column(key="to", title="To"),
    Column(key="rail", title="Rail"),
    Column(key="bandwidth_bytes_per_s", title="Bandwidth", right=True, text=format_bandwidth),
    Column(key="latency_s", title="Latency", right=True, text=format_duration),
)
_COLUMNS = (
    Column(key="probe", title="Probe"),
    Column(key="device", title="Device or link", derive=lambda row: str(row.get("device") or row.get("link"))),
    Column(key="dtype", title="Dtype", optional=True),
    Column(key="shape", title="Shape or size", derive=_shape),
    Column(key="value", title="Median (10 % – 90 %)", derive=_value, right=True),
    Column(key="n", title="n", right=True),
)


def _write(path: Path, text: str, *, force: bool) -> None:
    from meshplan.catalogs.writing import write_file

    write_file(path, text, force=force)


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")
