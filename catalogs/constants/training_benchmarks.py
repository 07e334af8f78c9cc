"""How published training benchmarks ran: what their tables leave unsaid and their scripts say.

They ship as ``seed/training_benchmarks.yaml``. A user's plan never depends on them; they fill the choices of measured
runs, so that a framework's constants do not have to stand for its flags.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from meshplan.catalogs.constants.entries import read_entry, seed_content
from meshplan.catalogs.constants.releases import release_numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingBenchmark:
    """The properties of a benchmark run that decide its settings.

    Args:
        observed_as: name of the framework in the measurement.
        release: the framework's; empty where the measurement does not say.
        model: name in the measurement.
        device: slug.
        precision: number format of matrix products.
        phase: ``pretraining``, ``sft`` or ``lora``.
        num_devices: of the run.
        pipeline_parallel: of the run.
    """

    observed_as: str
    release: str
    model: str
    device: str
    precision: str
    phase: str
    num_devices: int = 1
    pipeline_parallel: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class _Preset:
    """Settings of a benchmark, and which runs they hold for; empty tuples and texts match everything."""

    observed_as: str
    model: str
    source: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    choices: Mapping[str, Any] = field(default_factory=dict)
    devices: tuple[str, ...] = ()
    precisions: tuple[str, ...] = ()
    phases: tuple[str, ...] = ()
    since: str = ""
    before: str = ""
    least_devices: int = 1
    pipelined: bool | None = None

    def holds(self, run: TrainingBenchmark) -> bool:
        """Whether the run had these settings; never where they depend on a release that is not known."""
        release = release_numbers(run.release)
        return (
            (bool(run.release) or not (self.since or self.before))
            and run.observed_as == self.observed_as
            and run.model.startswith(self.model)
            and all(
                not allowed or value in allowed
                for allowed, value in (
                    (self.devices, run.device),
                    (self.precisions, run.precision),
                    (self.phases, run.phase),
                )
            )
            and run.num_devices >= self.least_devices
            and (self.pipelined is None or self.pipelined == (run.pipeline_parallel > 1))
            and (not self.since or release >= release_numbers(self.since))
            and (not self.before or release < release_numbers(self.before))
        )


@cache
def _presets() -> tuple[_Preset, ...]:
    return tuple(
        read_entry(
            _Preset,
            {"since" if key == "from" else key: value for key, value in entry.items()},
            observed_as=benchmark["observed_as"],
        )
        for benchmark in seed_content("training_benchmarks.yaml")["benchmarks"]
        for entry in benchmark["runs"]
    )


def practice_of(run: TrainingBenchmark) -> dict[str, Any]:
    """The switches that the benchmark's scripts gave the run, by their names in ``TrainingPractice``; empty where
    nothing is known.
    """
    return _merged(preset.settings for preset in _presets() if preset.holds(run))


def choices_of(run: TrainingBenchmark) -> dict[str, Any]:
    """The choices that the benchmark's scripts gave the run and its table leaves out, by their keys in
    ``parallelism`` of an observation; empty where nothing is known.
    """
    return _merged(preset.choices for preset in _presets() if preset.holds(run))


def _merged(found: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """All of them, the later ones over the earlier ones."""
    merged: dict[str, Any] = {}
    for item in found:
        merged.update(item)
    return merged
