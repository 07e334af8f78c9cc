"""Invalid values of a training spec that no search could make legal, each with its path in the spec.

A check takes what the names mean (a shape, a machine, a framework's rules) and adds sentences to :class:`Problems`.
"""

from __future__ import annotations

from meshplan.catalogs.models.shapes import ModelShape
from meshplan.planner.cluster.machine import Machine
from meshplan.planner.cluster.network.network import Network
from meshplan.planner.core.problems import Problems
from meshplan.planner.training.pipeline.orders import ZIGZAG
from meshplan.planner.training.problem.frameworks.arithmetic import ANY_FRAMEWORK
from meshplan.planner.training.problem.frameworks.rules import FrameworkRules
from meshplan.planner.training.problem.frameworks.table import FRAMEWORKS
from meshplan.planner.training.problem.layers import layers_problem
from meshplan.planner.training.problem.precisions import missing_units
from meshplan.planner.training.problem.problem import OFFLOADED_LAYERS, OFFLOADS, Phase
from meshplan.planner.training.problem.spec import TrainingSpec
from meshplan.planner.training.problem.switches import FRAMEWORKS_OWN


def check_mapping(spec: TrainingSpec, network: Network | None, problems: Problems) -> None:
    """A mapping that was given: every usable node once, and links that a mapping can matter for."""
    if not isinstance(spec.mapping, list):
        return
    if network is None:
        problems.say("mapping", "all links of this cluster are alike: give cluster.profile or describe its links")
        return
    if problems:
        return
    seen: set[int] = set()
    for node in spec.mapping:
        if node not in network.usable:
            why = (
                "is excluded" if node < network.num_nodes else f"does not exist: there are {network.num_nodes}, from 0"
            )
            problems.say("mapping", f"node {node} {why}")
        elif node in seen:
            problems.say("mapping", f"node {node} appears twice; a node holds one slot")
        seen.add(node)


def check_choices(spec: TrainingSpec, shape: ModelShape, machine: Machine, problems: Problems) -> None:
    """Choices that no search could make legal."""
    fixed, device = spec.fixed, machine.device
    missing = missing_units(device, spec.workload.precision)
    if missing is not None:
        problems.say("workload.precision", missing)
    heads = shape.num_attention_heads
    if fixed.tensor_parallel is not None and heads % fixed.tensor_parallel:
        legal = [t for t in range(1, heads + 1) if heads % t == 0]
        problems.say("fixed.tensor_parallel", f"{fixed.tensor_parallel} does not divide {heads} heads; legal: {legal}")
    if fixed.pipeline_parallel is not None and fixed.pipeline_parallel > shape.num_hidden_layers:
        problems.say("fixed.pipeline_parallel", f"{fixed.pipeline_parallel} stages, {shape.num_hidden_layers} layers")
    _check_experts(spec, shape, problems)
    batch = spec.workload.num_sequences
    if fixed.data_parallel is not None and batch % fixed.data_parallel:
        problems.say("fixed.data_parallel", f"{fixed.data_parallel} does not divide the global batch of {batch}")
    elif fixed.micro_batch_size is not None and batch % ((fixed.data_parallel or 1) * fixed.micro_batch_size):
        problems.say(
            "fixed.micro_batch_size",
            f"{fixed.micro_batch_size} × data_parallel does not divide the global batch of {batch}",
        )
    product = 1
    for degree in (fixed.tensor_parallel, fixed.pipeline_parallel, fixed.context_parallel, fixed.data_parallel):
        product *= degree or 1
    if product > machine.num_devices:
        problems.say("fixed", f"the pinned degrees need {product} devices, the cluster has {machine.num_devices}")
    positions = shape.num_position_embeddings
    if positions and spec.workload.sequence_length > positions:
        problems.say("workload.sequence_length", f"{shape.name} has learned positions for {positions} tokens only")
    if spec.workload.phase.has_adapters and shape.latent is not None:
        problems.say("workload.phase", "LoRA on multi-head latent attention is not modelled yet")
    if spec.workload.phase.has_adapters and shape.blocks is not None:
        problems.say("workload.phase", "LoRA on layers that are not attention and an MLP is not modelled yet")
    if spec.workload.phase is Phase.QLORA and shape.moe is not None:
        problems.say("workload.phase", "QLoRA is modelled for dense models: experts are no linear layers to quantise")


def _check_experts(spec: TrainingSpec, shape: ModelShape, problems: Problems) -> None:
    """Choices about experts need a model that has some, and degrees that divide them."""
    fixed, workload = spec.fixed, spec.workload
    if shape.moe is not None:
        experts = shape.moe.num_experts
        if fixed.expert_parallel is not None and experts % fixed.expert_parallel:
            message = f"{fixed.expert_parallel}: it does not divide {experts} experts"
            problems.say("fixed.expert_parallel", message)
        return
    dense = "a dense model has no experts"
    for name in ("expert_parallel", "expert_tensor_parallel"):
        degree = getattr(fixed, name) or 1
        if degree > 1:
            problems.say(f"fixed.{name}", f"{degree}: {dense}")
    for name in ("expert_imbalance", "drops_tokens", "expert_capacity_factor"):
        if name in workload.model_fields_set:
            problems.say(f"workload.{name}", dense)
    for name in ("expert_dispatcher", "expert_parallel_overlap"):
        if getattr(fixed, name) not in (None, False):
            problems.say(f"fixed.{name}", dense)


def check_framework(spec: TrainingSpec, shape: ModelShape, rules: FrameworkRules, problems: Problems) -> None:
    """Choices that the framework has no flag for."""
    precision, recompute = spec.workload.precision, spec.fixed.activation_recompute
    if precision not in rules.precisions:
        problems.say("workload.precision", f"{rules.name} is planned in {', '.join(rules.precisions)}, not {precision}")
    for rule in rules.refusing({"precision": precision}, shape):
        problems.say("workload.precision", f"{rules.name}: {rule.message}")
    if spec.workload.phase is Phase.QLORA:
        if not rules.quantised_weights:
            able = ", ".join(name for name, other in FRAMEWORKS.items() if other.quantised_weights)
            problems.say("workload.phase", f"{rules.name} has no weights in four bits; constraints.target: {able}")
        if precision not in {"bf16", "fp16"}:
            problems.say("workload.precision", f"QLoRA multiplies in bf16 or fp16, not {precision}")
    if recompute is not None and recompute not in rules.recompute_modes:
        offered = ", ".join(rules.recompute_modes)
        problems.say("fixed.activation_recompute", f"{rules.name} has {offered}, not {recompute}")
    _check_loss(spec, rules, problems)
    if spec.fixed.vocabulary_parallel and rules.name != ANY_FRAMEWORK.name:
        message = f"{rules.name} does not have it: 'constraints.target: any' prices it without a framework"
        problems.say("fixed.vocabulary_parallel", message)
    schedule = spec.fixed.pipeline_schedule
    if schedule is not None and schedule not in rules.pipeline_schedules:
        offered = ", ".join(rules.pipeline_schedules)
        fix = "'constraints.target: any' prices it without a framework"
        problems.say("fixed.pipeline_schedule", f"{rules.name} runs {offered}, not {schedule}: {fix}")


def _check_loss(spec: TrainingSpec, rules: FrameworkRules, problems: Problems) -> None:
    """A loss, states of the optimizer and its step in the backward pass, where the framework's rules are about them."""
    fixed = spec.fixed
    if fixed.optimizer_in_backward and spec.workload.phase.has_adapters:
        problems.say("fixed.optimizer_in_backward", "gradients of adapters are small, and no recipe frees them so")
    own = (None, False, FRAMEWORKS_OWN)
    for name in ("loss", "optimizer", "optimizer_in_backward"):
        value = getattr(fixed, name)
        if value not in own and _refuses(rules, name, value):
            able = ", ".join(other for other, theirs in FRAMEWORKS.items() if not _refuses(theirs, name, value))
            problems.say(f"fixed.{name}", f"plans for {rules.name} are made without; constraints.target: {able}")


def _refuses(rules: FrameworkRules, choice: str, value: str | bool) -> bool:
    """Whether the framework has no word for a value, whatever else is chosen."""
    return any(rule.stage == "parser" for rule in rules.refusing({choice: value}))


def check_layers(spec: TrainingSpec, shape: ModelShape, rules: FrameworkRules, problems: Problems) -> None:
    """Pinned layers of each chunk: as many as the model has, uneven only where the framework takes it; no stages."""
    layers, fixed = spec.fixed.layers_per_chunk, spec.fixed
    if fixed.stages is not None:
        message = "describes a job on several node types: pin degrees by their names on one, or leave it out"
        problems.say("fixed.stages", message)
    if layers is None:
        return
    chunks = fixed.virtual_pipeline_stages or (2 if fixed.pipeline_schedule in ZIGZAG else 1)
    wrong = layers_problem(
        layers,
        shape.num_hidden_layers,
        pipeline_parallel=fixed.pipeline_parallel,
        virtual_pipeline_stages=chunks,
    )
    if wrong is not None:
        problems.say("fixed.layers_per_chunk", wrong)
    elif not rules.splits_as(layers):
        usual = rules.usual_layers(sum(layers), len(layers))
        fix = "another number of stages or chunks" if usual is None else f"such as {list(usual)}"
        problems.say("fixed.layers_per_chunk", f"{rules.name} cannot split {sum(layers)} layers so: give {fix}")


def check_offload(spec: TrainingSpec, machine: Machine, problems: Problems) -> None:
    """What lies in host memory needs a host whose memory is known."""
    pinned = [choice for choice in (*OFFLOADS.values(), OFFLOADED_LAYERS) if getattr(spec.fixed, choice)]
    where = f"fixed.{pinned[0]}" if pinned else "constraints.offload"
    known = machine.host_memory_bytes is not None or spec.constraints.host_memory is not None
    if (pinned or spec.constraints.offload) and not known:
        problems.say(where, "the catalog has no host memory for these nodes: give cluster.host_memory")
