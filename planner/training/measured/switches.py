"""The switches of a measured training run: what its row states, else what the scripts of its benchmark set."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshplan.catalogs.constants.training_benchmarks import TrainingBenchmark, practice_of
from meshplan.planner.training.problem.problem import Phase
from meshplan.planner.training.problem.switches import Launches, TrainingPractice
from meshplan.planner.validation.fields import Section

# Values of the keys in ``parallelism`` that state the switches of TrainingPractice.
GRAPHS = {"none": Launches.EAGER, "partial": Launches.PARTLY_GRAPHED, "full": Launches.GRAPHED}
DISPATCHERS = {"alltoall": False, "deepep": True, "hybridep": True}
# Switch → the key that states it.
ROW_KEYS = {
    "launches": "cuda_graphs",
    "fused_dispatch": "expert_dispatcher",
    "overlaps_experts": "expert_parallel_overlap",
}


def observed_practice(
    row: Mapping[str, Any], choices: Section, precision: str, phase: Phase
) -> tuple[TrainingPractice, tuple[str, ...]]:
    """CUDA graphs and the transport of expert tokens in a measured run.

    Args:
        row: the whole row.
        choices: its ``parallelism``.
        precision: of matrix products.
        phase: what was trained.

    Returns:
        The switches, and the keys of those that come from the benchmark's scripts because the row does not state them.

    Raises:
        UnsupportedError: a value that is none of the known ones.
    """
    model, hardware, framework = (Section(row, name) for name in ("model", "hardware", "framework"))
    known = practice_of(
        TrainingBenchmark(
            observed_as=framework.text("name"),
            release=str(framework.values.get("version") or ""),
            model=str(model.values.get("name") or ""),
            device=hardware.text("device"),
            precision=precision,
            phase=phase.value,
        )
    )
    settings = dict(known)
    if choices.states("cuda_graphs"):
        settings["launches"] = choices.one_of("cuda_graphs", GRAPHS)
    if choices.states("expert_dispatcher"):
        settings["fused_dispatch"] = choices.one_of("expert_dispatcher", DISPATCHERS)
    if choices.states("expert_parallel_overlap"):
        settings["overlaps_experts"] = choices.flag("expert_parallel_overlap", default=False)
    unstated = tuple(ROW_KEYS[name] for name in known if not choices.states(ROW_KEYS[name]))
    settings["launches"] = Launches(settings.get("launches", Launches.EAGER))
    return TrainingPractice(**settings), unstated
