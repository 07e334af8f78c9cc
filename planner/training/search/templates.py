"""Every legal candidate, as arrays: all choices but the pipeline split, sorted by the devices they need.

A *template* is what sets the time of a layer: (tensor, context, data, expert, expert-tensor parallelism, micro-batch).
Under a pipeline split it becomes :class:`~meshplan.planner.training.estimator.candidates.Candidates`, one for every
ZeRO stage, sharding group and recompute of all layers or none; they are made of a few templates at a time, because
there may be millions. How many layers of a chunk recompute in blocks is decided later (:mod:`.memory_savers`). Limits
on a single value (heads, batch, sequence, experts) are applied here, once; rules that relate several choices are the
framework's.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

from meshplan.catalogs.models.attention import AttentionKind
from meshplan.catalogs.models.shapes import ModelShape
from meshplan.planner.core.arrays import IntArray
from meshplan.planner.training.estimator.candidates import Candidates, PipelineSplit, split_layers
from meshplan.planner.training.problem.choice import Choice, Recompute
from meshplan.planner.training.problem.choices import ALL_STATES, COLUMNS
from meshplan.planner.training.problem.layers import split_layers_evenly, split_layers_ignoring_ends
from meshplan.planner.training.problem.problem import OFFLOADED_LAYERS, OFFLOADS, TrainingProblem
from meshplan.planner.training.problem.schedules import schedules_of
from meshplan.planner.training.search.bounds.distinct import distinct

ZERO_STAGES = (0, 1, 2, 3)
# What a template chooses, but for sequence parallelism, which follows from it.
TEMPLATE = (
    "tensor_parallel",
    "context_parallel",
    "data_parallel",
    "micro_batch_size",
    "expert_parallel",
    "expert_tensor_parallel",
)

# Places of the optional choices in COLUMNS.
_OPTIONAL = [place for place, choice in enumerate(COLUMNS) if choice.is_optional]


def divisors(number: int) -> list[int]:
    """All divisors, ascending.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Templates:
    """All templates of a problem, ascending by devices of one stage.

    Args:
        columns: column of a candidate that every template chooses → array [n].
        stage_devices: tensor × context × data parallelism, ascending [n].
        num_variants: candidates of each template: its ZeRO stages, sharding groups and modes of recompute [n].
        illegal: reason → values of a single choice that no candidate may take.
    """

    columns: Mapping[str, IntArray]
    stage_devices: IntArray
    num_variants: IntArray
    illegal: Mapping[str, tuple[str, ...]]

    def __len__(self) -> int:
        return len(self.stage_devices)

    def between(self, least: float, most: float) -> slice:
        """Rows whose stage needs from ``least`` to ``most`` devices."""
        if least > most:
            return slice(0, 0)
        # Whole numbers: for others NumPy turns all rows into floats first.
        first = int(np.searchsorted(self.stage_devices, math.ceil(least), side="left"))
        last = int(np.searchsorted(self.stage_devices, math.floor(most), side="right"))
        return slice(first, max(first, last))

    def pinned(self, problem: TrainingProblem, choices: Mapping[str, Any]) -> tuple[Templates, IntArray]:
        """The templates that have some choices, and their rows; choices that templates do not make are left to the
        candidates.

        Args:
            problem: the question with these choices pinned.
            choices: choice → value.
        """
        keep = np.ones(len(self), dtype=bool)
        for name, value in choices.items():
            if name in self.columns:
                keep &= self.columns[name] == value
        rows = np.flatnonzero(keep)
        columns = {name: column[rows] for name, column in self.columns.items()}
        made = Templates(
            columns=columns,
            stage_devices=self.stage_devices[rows],
            num_variants=_num_variants(problem, columns["data_parallel"]),
            illegal=self.illegal,
        )
        return made, rows


def _kv_fits(shape: ModelShape, t: int) -> bool:
    heads = shape.num_key_value_heads
    return shape.attention is AttentionKind.MULTI_HEAD_LATENT or heads % t == 0 or t % heads == 0


def _choices(problem: TrainingProblem, name: str, legal: Iterable[int]) -> list[int]:
    """The legal values of one choice, or the pinned one where it is among them."""
    values = list(legal)
    if name in problem.fixed:
        pinned = int(problem.fixed[name])
        return [pinned] if pinned in values else []
    return values


def _cross(
    rows: dict[str, IntArray], name: str, options: Mapping[int, list[int]], key: IntArray
) -> dict[str, IntArray]:
    """Extend each row by every option of its key."""
    keys, which = distinct(key)
    tables = [np.asarray(options[int(value)], dtype=np.int64) for value in keys]
    sizes = np.array([len(table) for table in tables], dtype=np.int64)
    flat = np.concatenate([*tables, np.zeros(0, dtype=np.int64)])
    counts, first = sizes[which], (np.cumsum(sizes) - sizes)[which]
    repeat = np.repeat(np.arange(len(key)), counts)
    place = np.arange(len(repeat)) - np.repeat(np.cumsum(counts) - counts, counts)
    extended = {column: array[repeat] for column, array in rows.items()}
    extended[name] = flat[first[repeat] + place]
    return extended


def make_templates(problem: TrainingProblem) -> Templates:
    """Enumerate the templates of a problem."""
    shape, workload, most = problem.shape, problem.workload, problem.limits.max_devices
    tensor_all = [t for t in range(1, most + 1) if shape.num_attention_heads % t == 0]
    tensor = _choices(problem, "tensor_parallel", [t for t in tensor_all if _kv_fits(shape, t)])
    context = _choices(problem, "context_parallel", [c for c in divisors(workload.sequence_length) if c <= most])
    data = _choices(problem, "data_parallel", [d for d in divisors(workload.global_batch_size) if d <= most])
    grid = np.array(np.meshgrid(tensor, context, data, indexing="ij"), dtype=np.int64).reshape(3, -1)
    grid = grid[:, grid.prod(axis=0) <= most]
    rows = {"tensor_parallel": grid[0], "context_parallel": grid[1], "data_parallel": grid[2]}
    micro = {d: _choices(problem, "micro_batch_size", divisors(workload.global_batch_size // d)) for d in data}
    rows = _cross(rows, "micro_batch_size", micro, rows["data_parallel"])
    rows = _with_experts(problem, rows)
    rows["sequence_parallel"] = (rows["tensor_parallel"] > 1) & bool(
        problem.fixed.get("sequence_parallel", problem.rules.sequence_parallel)
    )
    stage_devices = rows["tensor_parallel"] * rows["context_parallel"] * rows["data_parallel"]
    order = np.argsort(stage_devices, kind="stable")
    illegal = {
        "num_attention_heads is not a multiple of tensor_parallel": tuple(
            f"tensor_parallel={t}" for t in range(2, min(most, problem.machine.domain_size) + 1) if t not in tensor_all
        ),
        "num_key_value_heads and tensor_parallel do not divide": tuple(
            f"tensor_parallel={t}" for t in tensor_all if not _kv_fits(shape, t)
        ),
    }
    columns = {name: column[order] for name, column in rows.items()}
    return Templates(
        columns=columns,
        stage_devices=stage_devices[order],
        num_variants=_num_variants(problem, columns["data_parallel"]),
        illegal=illegal,
    )


def _num_variants(problem: TrainingProblem, data_parallel: IntArray) -> IntArray:
    """Candidates that :func:`template_candidates` makes of each template, [n]."""
    degrees, which = distinct(data_parallel)
    states = _with_states(problem, {"data_parallel": degrees, "_place": np.arange(len(degrees))})
    counts = np.bincount(states["_place"], minlength=len(degrees)) * len(recompute_modes(problem))
    return np.asarray(counts[which], dtype=np.int64)


def recompute_modes(problem: TrainingProblem) -> list[int]:
    """The modes of templates. Recompute of a block starts from templates without recompute."""
    known = [mode for mode in Recompute if mode.name.lower() in problem.rules.recompute_modes]
    if problem.fixed.get("activation_recompute") == Recompute.BLOCK.name.lower():
        return [int(Recompute.NONE)] if Recompute.BLOCK in known else []
    known = [mode for mode in known if mode is not Recompute.BLOCK]
    if "activation_recompute" in problem.fixed:
        pinned = Recompute[str(problem.fixed["activation_recompute"]).upper()]
        return [int(pinned)] if pinned in known else []
    recipe = problem.calibration.recipe
    if recipe.flash_attention and recipe.selective_kept_share == 1.0:
        # Fused attention keeps no scores: selective recompute is the same as none to the estimator.
        known = [mode for mode in known if mode is not Recompute.SELECTIVE]
    return [int(mode) for mode in known]


def _with_experts(problem: TrainingProblem, rows: dict[str, IntArray]) -> dict[str, IntArray]:
    moe = problem.shape.moe
    experts = _choices(problem, "expert_parallel", divisors(moe.num_experts) if moe else [1])
    widths = divisors(moe.expert_intermediate_size) if moe else [1]
    tensor = _choices(problem, "expert_tensor_parallel", widths)
    devices = rows["tensor_parallel"] * rows["context_parallel"] * rows["data_parallel"]
    fitting = {
        int(count): [
            e * len(widths) + i for e in experts for i, w in enumerate(widths) if w in tensor and count % (e * w) == 0
        ]
        for count in distinct(devices)[0]
    }
    rows = _cross(rows, "_pair", fitting, devices)
    pair = rows.pop("_pair")
    rows["expert_parallel"] = pair // len(widths)
    rows["expert_tensor_parallel"] = np.asarray(widths, dtype=np.int64)[pair % len(widths)]
    return rows


def tries_smaller_groups(problem: TrainingProblem) -> bool:
    """Whether templates shard over all of data parallelism, and smaller groups are tried after pricing.

    Not where the size is pinned, nor where groups are sharded once more (``outer_zero_stage``): then templates have
    every size.
    """
    outer = "outer_zero_stage"
    return (
        "data_parallel_shard" not in problem.fixed and outer not in problem.search_over and outer not in problem.fixed
    )


def _with_states(problem: TrainingProblem, rows: dict[str, IntArray]) -> dict[str, IntArray]:
    """ZeRO stage and, from stage 1 on, the ranks that share one copy of the sharded states."""
    stages = _choices(problem, "zero_stage", ZERO_STAGES)
    shards = {}
    for d in distinct(rows["data_parallel"])[0].tolist():
        groups = [d] if tries_smaller_groups(problem) else _choices(problem, "data_parallel_shard", divisors(d))
        pairs = [(0, 1)] if 0 in stages and problem.fixed.get("data_parallel_shard", 1) == 1 else []
        pairs += [(stage, shard) for stage in stages if stage >= 1 for shard in groups]
        shards[d] = [stage + len(ZERO_STAGES) * shard for stage, shard in pairs]
    rows = _cross(rows, "_state", shards, rows["data_parallel"])
    state = rows.pop("_state")
    rows["zero_stage"] = state % len(ZERO_STAGES)
    rows["data_parallel_shard"] = state // len(ZERO_STAGES)
    return rows


def pipeline_splits(problem: TrainingProblem) -> list[PipelineSplit]:
    """Every number of stages and chunks with the usual split of the layers, fewest stages first, then chunks."""
    shape, layers = problem.shape, problem.shape.num_hidden_layers
    most = min(layers, problem.limits.max_devices)
    given = problem.fixed.get("layers_per_chunk")
    splits = []
    for p in _choices(problem, "pipeline_parallel", range(1, most + 1)):
        chunks = list(range(1, layers // p + 1 if p > 1 else 2))
        if given is not None:
            chunks = [len(given) // p] if len(given) % p == 0 and (p > 1 or len(given) == 1) else []
        for v in _choices(problem, "virtual_pipeline_stages", chunks):
            splits += [
                split_layers(
                    shape,
                    pipeline_parallel=p,
                    virtual_pipeline_stages=v,
                    layers_per_chunk=layers_per_chunk,
                    schedule=schedule,
                    vocabulary_parallel=bool(problem.fixed.get("vocabulary_parallel", False)),
                )
                for layers_per_chunk in _layer_splits(problem, p * v)
                for schedule in _schedules(problem, p, v)
            ]
    return splits


def _schedules(problem: TrainingProblem, p: int, v: int) -> tuple[str, ...]:
    """The pipeline schedules that are looked at for p stages of v chunks."""
    asked = problem.fixed.get("pipeline_schedule")
    return schedules_of(
        p,
        v,
        allowed=problem.rules.pipeline_schedules,
        pinned=None if asked is None else str(asked),
        unvalidated=problem.limits.unvalidated_schedules,
    )


def _layer_splits(problem: TrainingProblem, chunks: int) -> tuple[tuple[int, ...], ...]:
    """Layers of each chunk: as given by the user, else those of the framework; where it takes all, as even as possible.

    Others are then found where they may win (:mod:`~meshplan.planner.training.search.layers.uneven`).
    """
    given = problem.fixed.get("layers_per_chunk")
    layers, rules = problem.shape.num_hidden_layers, problem.rules
    if given is not None:
        return (tuple(given),) if sum(given) == layers and rules.splits_as(given) else ()
    if rules.layer_splits is not None:
        return rules.layer_splits(layers, chunks)
    split = split_layers_ignoring_ends if problem.fixed.get("vocabulary_parallel", False) else split_layers_evenly
    return (split(layers, chunks),)


def template_candidates(
    problem: TrainingProblem, templates: Templates, rows: slice | IntArray, split: PipelineSplit
) -> Candidates:
    """Every candidate of the templates ``rows`` under ``split``, template by template; no rule is applied yet."""
    columns = _with_states(problem, {name: array[rows] for name, array in templates.columns.items()})
    modes = recompute_modes(problem)
    columns = _cross(columns, "recompute", {0: modes}, np.zeros(len(columns["data_parallel"]), dtype=np.int64))
    return candidates_with(problem, columns, split)


def candidates_with(problem: TrainingProblem, columns: Mapping[str, IntArray], split: PipelineSplit) -> Candidates:
    """Candidates of these columns, every other choice as pinned or at its default."""
    num_rows = len(columns["data_parallel"])
    plain = {
        one.column: np.full(num_rows, one.encode(one.default), dtype=one.dtype) for one in COLUMNS if one.is_optional
    }
    for name in OFFLOADS.values():
        plain[name][:] = bool(problem.fixed.get(name, False))
    plain[OFFLOADED_LAYERS][:] = int(problem.fixed.get(OFFLOADED_LAYERS, 0))
    plain["on_nvme"][:] = problem.limits.offload_to == "nvme"
    plain["optimizer_offload_percent"][:] = int(problem.fixed.get("optimizer_offload_percent", ALL_STATES))
    batch = problem.workload.global_batch_size
    num_microbatches = batch // (columns["micro_batch_size"] * columns["data_parallel"])
    return Candidates(split=split, num_microbatches=num_microbatches, **plain, **columns)


def rule_view(problem: TrainingProblem, batch: Candidates) -> SimpleNamespace:
    """Candidates as the framework's rules see them: choice → array [n], or one value for all.

    An optional choice that is alike in every candidate is that one value: rules are quicker over one than over many.
    """
    codes = [batch.codes(choice) for choice in COLUMNS]
    is_alike = np.zeros(len(COLUMNS), dtype=bool)
    if len(batch):
        columns = np.array([codes[place] for place in _OPTIONAL])
        is_alike[_OPTIONAL] = (columns == columns[:, :1]).all(axis=1)
    view = {
        choice.name: choice.decode(column[0]) if alike else choice.decoded(column)
        for choice, column, alike in zip(COLUMNS, codes, is_alike.tolist(), strict=True)
    }
    return SimpleNamespace(**problem.settled, **batch.shared(), **view)


def legal_candidates(problem: TrainingProblem, batch: Candidates, refused: Counter[str]) -> Candidates:
    """The candidates that the framework's rules allow; the others are counted in ``refused``."""
    view = rule_view(problem, batch)
    plain = {choice.name for choice in COLUMNS if choice.is_optional and _is_default(view, choice)}
    rules = [rule for rule in problem.rules.rules if not rule.about or not plain.issuperset(rule.about)]
    holds = np.ones((len(rules), len(batch)), dtype=bool)
    for row, rule in zip(holds, rules, strict=True):
        row[:] = rule.holds(problem.shape, view)
    keep = np.ones(len(batch), dtype=bool)
    for place in np.flatnonzero(~holds.all(axis=1)):  # few rules of most batches
        count = int(np.count_nonzero(keep & ~holds[place]))
        if count:
            refused[rules[place].message] += count
            keep &= holds[place]
    return batch.take(keep)


def _is_default(view: SimpleNamespace, choice: Choice) -> bool:
    """Whether a choice is at its default in every candidate."""
    value = getattr(view, choice.name)
    return not isinstance(value, np.ndarray) and value == choice.default
