"""The one plan that ``fixed.stages`` of a spec describes, every broken rule named."""

from __future__ import annotations

from collections.abc import Sequence

from meshplan.catalogs.errors import SpecError
from meshplan.planner.core.problems import Problems
from meshplan.planner.training.mixed.options import zero_stage
from meshplan.planner.training.mixed.stages import MixedConfig, MixedProblem, Share, Stage
from meshplan.planner.training.problem.spec import StageSpec


def pinned_stages(problem: MixedProblem, stages: Sequence[StageSpec]) -> MixedConfig:
    """The plan of pinned stages.

    Raises:
        SpecError: stages that do not hold the model, take different micro-batches, or need more devices than there are.
    """
    problems = Problems()
    shape, batch = problem.any.shape, problem.any.workload.global_batch_size
    if not stages:
        problems.say(
            "fixed.stages", "say every stage of the one plan to price, or ask for the best with 'meshplan plan'"
        )
    made = []
    for index, stage in enumerate(stages):
        path = f"fixed.stages[{index}]"
        if stage.node_type not in problem.names:
            problems.say(f"{path}.node_type", f"{stage.node_type} is not in cluster.nodes: {', '.join(problem.names)}")
            continue
        if shape.num_attention_heads % stage.tensor_parallel:
            message = f"{stage.tensor_parallel} does not divide {shape.num_attention_heads} heads"
            problems.say(f"{path}.tensor_parallel", message)
        share = Share(
            pool=problem.names.index(stage.node_type),
            data_parallel=stage.data_parallel,
            micro_batch_size=stage.micro_batch_size,
        )
        made.append(
            Stage(
                num_layers=stage.num_layers,
                tensor_parallel=stage.tensor_parallel,
                shares=(share,),
                activation_recompute=stage.activation_recompute,
            )
        )
    problems.check()
    sequences = {stage.sequences for stage in made}
    layers = sum(stage.num_layers for stage in made)
    if layers != shape.num_hidden_layers:
        problems.say("fixed.stages", f"{layers:g} layers in all, the model has {shape.num_hidden_layers}")
    if len(sequences) > 1:
        several = ", ".join(map(str, sorted(sequences)))
        problems.say("fixed.stages", f"data_parallel × micro_batch_size must be the same in all stages, is {several}")
    elif batch % max(sequences):
        problems.say("fixed.stages", f"micro-batches of {max(sequences)} sequences do not divide a batch of {batch}")
    config = MixedConfig(
        stages=tuple(made),
        num_microbatches=max(batch // max(sequences), 1),
        zero_stage=zero_stage(problem),
        sequence_parallel=problem.any.rules.sequence_parallel,
    )
    for pool, name in enumerate(problem.names):
        own = problem.pools[pool]
        wanted, there = config.devices_of(pool), own.limits.max_devices
        if wanted > there:
            problems.say("fixed.stages", f"{wanted} devices of {name}, there are {there}")
        elif wanted > own.most_devices:
            problems.say("fixed.stages", f"{wanted} devices of {name}: {own.machine.no_network}")
    if problems:
        raise SpecError(problems)
    return config
