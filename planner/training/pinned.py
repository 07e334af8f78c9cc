"""One configuration from pinned choices: what the user fixed, plain defaults for the rest, every broken rule named."""

from __future__ import annotations

from typing import Any

from meshplan.catalogs.errors import Problem, SpecError
from meshplan.planner.training.pipeline.layers import layers_problem, split_layers_evenly, split_layers_ignoring_ends
from meshplan.planner.training.pipeline.orders import ZIGZAG
from meshplan.planner.training.pipeline.schedules import schedules_of
from meshplan.planner.training.problem.problem import OFFLOADS, Phase, TrainingConfig, TrainingProblem


def fixed_config(problem: TrainingProblem) -> TrainingConfig:
    """The configuration that ``fixed`` describes.

    Defaults: degrees 1, data parallelism from the devices that are left, micro-batch 1, ZeRO-1, no recompute, experts
    split like the dense layers' tensor parallelism only where pinned.

    Raises:
        SpecError: the choices do not fit the devices, the batch or the framework's rules.
    """
    fixed, workload = problem.fixed, problem.workload

    def number(name: str, default: int) -> int:
        return int(fixed.get(name, default))

    tensor, context, chunks = number("tensor_parallel", 1), number("context_parallel", 1), _chunks(problem)
    layers = fixed.get("layers_per_chunk")
    pipeline = number("pipeline_parallel", 1 if layers is None else max(len(layers) // chunks, 1))
    model_devices = tensor * pipeline * context
    data = number("data_parallel", max(problem.limits.max_devices // model_devices, 1))
    micro, batch = number("micro_batch_size", 1), workload.global_batch_size
    problems = _impossible(problem, model_devices * data, batch, micro * data, pipeline * chunks)
    if problems:
        raise SpecError(problems)
    zero = number("zero_stage", 1)
    offloads: dict[str, Any] = {choice: bool(fixed.get(choice, False)) for choice in OFFLOADS.values()}
    if offloads["optimizer_offload"] or offloads["parameter_offload"]:
        offloads["offload_to"] = problem.limits.offload_to
    schedule = _schedule(problem, pipeline, chunks)
    config = TrainingConfig(
        tensor_parallel=tensor,
        pipeline_parallel=pipeline,
        virtual_pipeline_stages=chunks,
        context_parallel=context,
        data_parallel=data,
        data_parallel_shard=number("data_parallel_shard", data if zero else 1),
        expert_parallel=number("expert_parallel", 1),
        expert_tensor_parallel=number("expert_tensor_parallel", 1),
        sequence_parallel=bool(fixed.get("sequence_parallel", tensor > 1 and problem.rules.sequence_parallel)),
        zero_stage=zero,
        activation_recompute=str(fixed.get("activation_recompute", "none")),
        pipeline_schedule=schedule,
        layers_per_chunk=_deal(problem, pipeline * chunks) if layers is None else layers,
        micro_batch_size=micro,
        num_microbatches=batch // (micro * data),
        global_batch_size=batch,
        sequence_length=workload.sequence_length,
        precision=workload.precision,
        recompute_num_layers=_block(problem),
        **offloads,
        vocabulary_parallel=bool(fixed.get("vocabulary_parallel", False)),
        zero_hpz_partition_size=number("zero_hpz_partition_size", 1),
        outer_zero_stage=number("outer_zero_stage", 0),
        gathered_num_layers=number("gathered_num_layers", 0),
        **_context_style(problem, context),
        expert_capacity_factor=workload.capacity_factor,
        quantised_weights=workload.phase is Phase.QLORA,
        **problem.expert_transport,
    )
    broken = problem.rules.broken(problem.shape, config)
    if broken:
        raise SpecError([Problem(path="fixed", message=f"{problem.rules.name}: {rule.message}") for rule in broken])
    return config


def _deal(problem: TrainingProblem, chunks: int) -> tuple[int, ...]:
    """Layers of each chunk; the ends count where they lie on a chunk of their own."""
    deal = split_layers_ignoring_ends if problem.fixed.get("vocabulary_parallel", False) else split_layers_evenly
    return deal(problem.shape.num_hidden_layers, chunks)


def _chunks(problem: TrainingProblem) -> int:
    """Chunks a stage; a V has two."""
    usual = 2 if problem.fixed.get("pipeline_schedule") in ZIGZAG else 1
    return int(problem.fixed.get("virtual_pipeline_stages", usual))


def _block(problem: TrainingProblem) -> int:
    """Layers of each chunk that are recomputed; ``block`` alone means one."""
    is_block = problem.fixed.get("activation_recompute") == "block"
    return int(problem.fixed.get("recompute_num_layers", 1)) if is_block else 0


def _context_style(problem: TrainingProblem, context: int) -> dict[str, Any]:
    """How sequences are split, where they are; all-to-alls inside a ring take two neighbours unless more are asked."""
    style = problem.fixed.get("context_parallel_style", "ring")
    if context == 1 or style == "ring":
        return {}
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
    raise SpecError([Problem(path="fixed.pipeline_schedule", message=message)])


def _impossible(problem: TrainingProblem, devices: int, batch: int, per_pass: int, chunks: int) -> list[Problem]:
    found = []
    most, layers = problem.limits.max_devices, problem.shape.num_hidden_layers
    if devices > most:
        found.append(Problem(path="fixed", message=f"the degrees need {devices} devices, there are {most}"))
    if batch % per_pass:
        found.append(
            Problem(path="fixed", message=f"micro_batch_size × data_parallel = {per_pass} does not divide {batch}")
        )
    if chunks > layers:
        found.append(Problem(path="fixed", message=f"{chunks} model chunks, but the model has {layers} layers"))
    given = problem.fixed.get("layers_per_chunk")
    if given is not None:
        per_stage = _chunks(problem)
        wrong = layers_problem(given, layers, pipeline_parallel=chunks // per_stage, virtual_pipeline_stages=per_stage)
        if wrong is not None:
            found.append(Problem(path="fixed.layers_per_chunk", message=wrong))
    return found
