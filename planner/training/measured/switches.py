"""The switches of a measured training run: what its row states, else what the scripts of its benchmark set."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshplan.catalogs.constants.training_benchmarks import TrainingBenchmark, practice_of
from meshplan.planner.training.problem.problem import Phase
from meshplan.planner.training.problem.switches import Launches, TrainingPractice
from meshplan.planner.validation.fields import Section

# Words of ``parallelism`` for the switches of TrainingPractice.
GRAPHS = {"none": Launches.EAGER, "partial": Launches.PARTLY_GRAPHED, "full": Launches.GRAPHED}
DISPATCHERS = {"alltoall": False, "deepep": True, "hybridep": True}
PRACTICE_WORDS = {
    "launches": "cuda_graphs",
    "fused_dispatch": "expert_dispatcher",
    "overlaps_experts": "expert_parallel_overlap",
}


def observed_practice(
    row: Mapping[str, Any], choices: Section, precision: str, phase: Phase
) -> tuple[TrainingPractice, tuple[str, ...]]:
    """Graphs and the experts' transport of a measured run.

    Args:
        row: the whole row.
        choices: its ``parallelism``.
        precision: of matrix products.
        phase: what was trained.

    Returns:
        The switches, and the words for those that only the benchmark's scripts tell.

    Raises:
        UnsupportedError: a word that is none.
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
        settings["launches"] = _worded(choices, "cuda_graphs", GRAPHS)
    if choices.states("expert_dispatcher"):
        settings["fused_dispatch"] = _worded(choices, "expert_dispatcher", DISPATCHERS)
    if choices.states("expert_parallel_overlap"):
        settings["overlaps_experts"] = choices.flag("expert_parallel_overlap", default=False)
    unsaid = tuple(PRACTICE_WORDS[name] for name in known if not choices.states(PRACTICE_WORDS[name]))
    settings["launches"] = Launches(settings.get("launches", Launches.EAGER))
    return TrainingPractice(**settings), unsaid


def _worded(choices: Section, key: str, words: Mapping[str, Any]) -> Any:
    """What one of ``words`` stands for."""
    word = choices.text(key)
    if word not in words:
        raise choices.wrong(key, f"one of {', '.join(words)}")
    return words[word]
