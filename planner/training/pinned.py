"""One configuration from pinned choices: what the user fixed, plain defaults for the rest, every broken rule named."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from meshplan.catalogs.errors import Problem, SpecError
from meshplan.planner.training.pipeline.orders import ZIGZAG
from meshplan.planner.training.problem.choices import plain_defaults
from meshplan.planner.training.problem.layers import layers_problem, split_layers_ignoring_ends
from meshplan.planner.training.problem.problem import OFFLOADED_LAYERS, TrainingConfig, TrainingProblem
from meshplan.planner.training.problem.schedules import schedules_of

# The plain stage, then the usual one of FSDP, which shards gradients too or nothing.
ZERO_STAGES = (plain_defaults()["zero_stage"], 3, 2, 0)


def fixed_config(problem: TrainingProblem) -> TrainingConfig:
    """The configuration that ``fixed`` describes.

    Defaults are those of :func:`~meshplan.planner.training.problem.choices.plain_defaults`; data parallelism takes the
    devices that are left.

    Raises:
        SpecError: the choices do not fit the devices, the batch or the framework's rules.
    """
    chosen = {**plain_defaults(), **problem.fixed, **problem.settled}
    chosen["virtual_pipeline_stages"] = chunks = _chunks_per_stage(problem)
    layers = problem.fixed.get("layers_per_chunk")
    if layers is not None and "pipeline_parallel" not in problem.fixed:
        chosen["pipeline_parallel"] = max(len(layers) // chunks, 1)
    tensor, context, pipeline = (chosen[f"{axis}_parallel"] for axis in ("tensor", "context", "pipeline"))
    model_devices = tensor * pipeline * context
    data = chosen.setdefault("data_parallel", max(problem.most_devices // model_devices, 1))
    sequences_per_pass = chosen["micro_batch_size"] * data
    problems = _impossible(problem, model_devices * data, sequences_per_pass, pipeline * chunks)
    if problems:
        raise SpecError(problems)
    chosen.setdefault("data_parallel_shard", data if chosen["zero_stage"] else 1)
    chosen.setdefault("sequence_parallel", tensor > 1 and problem.rules.sequence_parallel)
    if chosen["optimizer_offload"] or chosen["parameter_offload"] or chosen[OFFLOADED_LAYERS]:
        chosen["offload_to"] = problem.limits.offload_to
    is_block = chosen["activation_recompute"] == "block"
    chosen["recompute_num_layers"] = problem.fixed.get("recompute_num_layers", 1) if is_block else 0
    chosen["pipeline_schedule"] = _schedule(problem, pipeline, chunks)
    chosen.setdefault("layers_per_chunk", _layers(problem, pipeline * chunks))
    chosen["num_microbatches"] = problem.workload.global_batch_size // sequences_per_pass
    config = _with_zero_stage(problem, TrainingConfig(**{**chosen, **_context_style(problem, context)}))
    broken = problem.rules.broken(problem.shape, config)
    if broken:
        raise SpecError([Problem(path="fixed", message=f"{problem.rules.name}: {rule.message}") for rule in broken])
    return config


def _with_zero_stage(problem: TrainingProblem, config: TrainingConfig) -> TrainingConfig:
    """The configuration under the first stage of :data:`ZERO_STAGES` that the framework takes, where none is pinned.

    Where others are wrong too, the stage that breaks the fewest rules: no rule is named for what nobody has asked.
    """
    if "zero_stage" in problem.fixed:
        return config
    shards = [problem.fixed.get("data_parallel_shard", config.data_parallel if stage else 1) for stage in ZERO_STAGES]
    tried = [
        replace(config, zero_stage=stage, data_parallel_shard=shard)
        for stage, shard in zip(ZERO_STAGES, shards, strict=True)
    ]
    return min(tried, key=lambda other: len(problem.rules.broken(problem.shape, other)))


def _layers(problem: TrainingProblem, chunks: int) -> tuple[int, ...]:
    """Layers of each chunk; embedding and LM head count as layers unless they are split over all stages."""
    layers = problem.shape.num_hidden_layers
    if problem.fixed.get("vocabulary_parallel", False):
        return split_layers_ignoring_ends(layers, chunks)
    usual = problem.rules.usual_layers(layers, chunks)
    if usual is None:
        message = f"{problem.rules.name} cannot split {layers} layers into {chunks} chunks: give another number"
        raise SpecError.at("fixed.pipeline_parallel", message)
    return usual


def _chunks_per_stage(problem: TrainingProblem) -> int:
    """Model chunks per stage, as pinned or the fewest that the pinned schedule takes where that is a zigzag."""
    usual = 2 if problem.fixed.get("pipeline_schedule") in ZIGZAG else 1
    return int(problem.fixed.get("virtual_pipeline_stages", usual))


def _context_style(problem: TrainingProblem, context: int) -> dict[str, Any]:
    """Exchange between context-parallel ranks; all-to-alls inside a ring take two neighbours unless more are pinned."""
    style = problem.fixed.get("context_parallel_style", problem.rules.context_parallel_style)
    if context == 1 or style == "ring":
        return {"context_parallel_style": "ring", "context_parallel_heads": 1}
    heads = problem.fixed.get("context_parallel_heads", 2) if style == "all-to-all+ring" else 1
    return {"context_parallel_style": str(style), "context_parallel_heads": int(heads)}


def _schedule(problem: TrainingProblem, pipeline: int, chunks: int) -> str:
    """The pinned schedule, or the usual one of the split."""
    allowed, pinned = problem.rules.pipeline_schedules, problem.fixed.get("pipeline_schedule")
    possible = schedules_of(pipeline, chunks, allowed=allowed, pinned=None if pinned is None else str(pinned))
    if possible:
        return possible[0]
    usual = schedules_of(pipeline, chunks, allowed=allowed)
    message = (
        f"{problem.rules.name} runs {pipeline} stages of {chunks} chunks as {' or '.join(map(repr, usual))}, "
        f"not as {pinned!r}"
    )
    raise SpecError.at("fixed.pipeline_schedule", message)


def _impossible(problem: TrainingProblem, devices: int, per_pass: int, chunks: int) -> list[Problem]:
    """What the pins cannot mean: more devices or chunks than there are, or a batch that they do not divide."""
    found = []
    batch = problem.workload.global_batch_size
    most, layers = problem.most_devices, problem.shape.num_hidden_layers
    if devices > most:
        why = f"; {problem.machine.no_network}" if devices <= problem.limits.max_devices else ""
        found.append(Problem(path="fixed", message=f"the degrees need {devices} devices, there are {most}{why}"))
    if batch % per_pass:
        found.append(
            Problem(path="fixed", message=f"micro_batch_size × data_parallel = {per_pass} does not divide {batch}")
        )
    if chunks > layers:
        found.append(Problem(path="fixed", message=f"{chunks} model chunks, but the model has {layers} layers"))
    given = problem.fixed.get("layers_per_chunk")
    if given is not None:
        per_stage = _chunks_per_stage(problem)
        wrong = layers_problem(given, layers, pipeline_parallel=chunks // per_stage, virtual_pipeline_stages=per_stage)
        if wrong is not None:
            found.append(Problem(path="fixed.layers_per_chunk", message=wrong))
    return found
