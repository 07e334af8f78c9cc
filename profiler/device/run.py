"""Runs the device probes: each measurement goes into the catalog as it is made, so a killed run can be resumed.

``profile_device`` finds the newest unfinished run of this host with the same backend and protocol, skips what it has
measured, measures the rest, fits the curves and marks the run as finished. A probe that fails (no memory, disk full)
is reported with its fix and does not take the others with it.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from meshplan.catalogs.errors import MeshplanError, ProfileError
from meshplan.catalogs.measurements.rows import Measurements
from meshplan.catalogs.measurements.types import Measurement, Metric, ProfileRun, Spread, point_key
from meshplan.catalogs.units import now
from meshplan.profiler.device.backends import Backend
from meshplan.profiler.device.fits import device_fits
from meshplan.profiler.device.probes import Case, Effort, cases
from meshplan.profiler.environment import host_name, own_version
from meshplan.profiler.protocol import FULL, QUICK, Clock, Timing, as_rate, measure

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceProfile:
    """What a device run did.

    Args:
        run: the run, finished unless something failed.
        measurements: all of the run, those of an earlier, killed part too.
        num_resumed: how many of them were there already.
        failures: one sentence per case that could not be measured.
        wall_s: seconds of this part.
    """

    run: ProfileRun
    measurements: tuple[Measurement, ...]
    num_resumed: int
    failures: tuple[str, ...]
    wall_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceOptions:
    """How to profile a device.

    Args:
        is_quick: fewer cases, fewer repeats.
        probes: names; None for all.
        cluster: the cluster profile that the device belongs to.
        scratch: folder for the disk probe; None for a temporary one.
        progress: called with each line of progress.
        clock: where time comes from.
    """

    is_quick: bool = False
    probes: Sequence[str] | None = None
    cluster: str | None = None
    scratch: Path | None = None
    progress: Progress = lambda _: None
    clock: Clock = field(default_factory=Clock)


def profile_device(store: Measurements, backend: Backend, options: DeviceOptions) -> DeviceProfile:
    """Measure one device and write the catalog.

    Raises:
        ProfileError: nothing at all could be measured, or an unknown probe.
        CatalogError: the catalog cannot be written.
    """
    start = time.perf_counter()
    protocol = QUICK if options.is_quick else FULL
    document = protocol.document() | {"backend": backend.name, "device": backend.device}
    host = host_name()
    run = store.resumable("device", host=host, protocol=document, cluster=options.cluster) or store.start(
        "device", host=host, environment=backend.environment(), protocol=document, cluster=options.cluster
    )
    have = store.keys(run.run_id)
    failures: list[str] = []
    with tempfile.TemporaryDirectory(prefix="meshplan-") as temporary:
        effort = Effort(
            is_quick=options.is_quick,
            is_accelerator=backend.is_accelerator,
            scratch=options.scratch or Path(temporary),
        )
        for case in cases(backend, effort, options.probes):
            if point_key(case.probe, backend.device, case.dtype, case.parameters) in have:
                continue
            begin = time.perf_counter()
            try:
                operation = case.prepare()
                timing = measure(operation, protocol, synchronize=backend.synchronize, clock=options.clock)
            except (MemoryError, OSError, RuntimeError, ProfileError) as error:
                failures.append(explained(case, error))
                options.progress(failures[-1])
                continue
            measurement = _measurement(case, timing, backend, host, throttled=backend.throttled(begin))
            store.add(run.run_id, [measurement])
            options.progress(_line(measurement))
    found = store.of_run(run.run_id)
    if not found:
        raise ProfileError("no probe could measure anything:\n" + "\n".join(f"  - {line}" for line in failures))
    store.add_fits(run.run_id, device_fits(found))
    if not failures:
        store.finish(run.run_id)
    return DeviceProfile(
        run=store.run(run.run_id),
        measurements=found,
        num_resumed=len(have),
        failures=tuple(failures),
        wall_s=time.perf_counter() - start,
    )


def explained(case: Case, error: BaseException) -> str:
    """One sentence that names the probe, the reason and the fix."""
    name = f"{case.probe} {dict(case.parameters)}"
    if isinstance(error, MeshplanError):
        return f"{name}: {error}"
    if isinstance(error, MemoryError):
        return f"{name}: not enough memory; free some, or measure with --quick, whose arrays are smaller"
    if isinstance(error, OSError):
        return f"{name}: {error.strerror or error}; give a folder with room and write permission with --scratch"
    return f"{name}: {str(error).splitlines()[0]}; leave the probe out with --probe, or measure with --quick"


def tool_source() -> str:
    """The source that is stored with what this tool measured."""
    found = own_version()
    return f"meshplan {found} profile" if found else "meshplan profile"


def _measurement(case: Case, timing: Timing, backend: Backend, host: str, *, throttled: str | None) -> Measurement:
    spread: Spread = timing.spread if case.metric is Metric.LATENCY_S else as_rate(timing, case.work)
    return Measurement(
        probe=case.probe,
        device=backend.device,
        dtype=case.dtype,
        parameters=dict(case.parameters),
        metric=case.metric,
        spread=spread,
        source=f"{tool_source()} ({backend.name})",
        host=host,
        measured_at=now(),
        warnings=(*timing.warnings, *([throttled] if throttled else [])),
    )


def _line(measurement: Measurement) -> str:
    shape = " ".join(f"{name}={value}" for name, value in measurement.parameters.items())
    spread = measurement.spread
    odd = f"  ({'; '.join(measurement.warnings)})" if measurement.warnings else ""
    return (
        f"{measurement.probe} {measurement.dtype or ''} {shape}: {spread.value:.4g} {measurement.metric.value} "
        f"± {spread.relative_width:.1%} (n={spread.n}){odd}"
    )
