"""Every layout of one worker on one node type that the engine accepts and whose memory suffices.

Tensor-parallel degrees divide the attention heads; pipelines have any number of stages; attention data-parallel degrees
(for mixtures of experts) are powers of two; context parallelism is tried for long prompts. The rules of the engine then
decide which of the layouts are legal.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from meshplan.catalogs.hardware import Device
from meshplan.planner.cluster.machine import Machine
from meshplan.planner.serving.estimator.draft_memory import draft_memory
from meshplan.planner.serving.estimator.encoders.vision import encoder_bytes
from meshplan.planner.serving.estimator.memory import WorkerMemory, worker_memory
from meshplan.planner.serving.problem.config import EngineLimits, Layout, Role
from meshplan.planner.serving.problem.engines.rules import STAGES_WITH_DRAFTS
from meshplan.planner.serving.problem.problem import ServingProblem
from meshplan.planner.serving.problem.quantization import Quantization
from meshplan.planner.serving.problem.weight_tiers import FfnDevices, WeightTiers

# Largest degrees tried: no measured run goes beyond them, and latency only grows.
MAX_TENSOR, MAX_PIPELINE, MAX_DATA_PARALLEL, MAX_CONTEXT = 64, 16, 512, 8
# Prompt length from which splitting one sequence's KV cache is worth its communication.
LONG_CONTEXT_TOKENS = 32_768
# Most layouts of one worker that are priced; smaller workers come first, so that nothing cheap is cut off.
MAX_LAYOUTS = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedWorker:
    """One worker that fits its devices.

    Args:
        role: role of its pool.
        node_type: catalog name of its nodes.
        machine: device, links and price.
        layout: its degrees of parallelism.
        quantization: its formats.
        limits: limits of its scheduler; ``max_num_seqs`` is capped by what the KV cache can hold.
        memory: memory of its fullest device.
        power_cap_w: power limit of each device, W; None for the board's own.
        weight_tiers: weights beyond device memory; None where all lie on the devices.
        ffn: devices for its MLPs or experts; None: its own compute them.
        ffn_machine: theirs.
    """

    role: Role
    node_type: str
    machine: Machine
    layout: Layout
    quantization: Quantization
    limits: EngineLimits
    memory: WorkerMemory
    power_cap_w: float | None = None
    weight_tiers: WeightTiers | None = None
    ffn: FfnDevices | None = None
    ffn_machine: Machine | None = None

    @property
    def sides(self) -> tuple[tuple[str, Machine, int], ...]:
        """(node type, machine, devices): its own, and those for its MLPs or experts where they lie apart."""
        own = (self.node_type, self.machine, self.layout.num_devices)
        if self.ffn is None or self.ffn_machine is None:
            return (own,)
        return own, (self.ffn.node_type, self.ffn_machine, self.ffn.num_devices)

    @property
    def is_shared(self) -> bool:
        """Whether it has a part of a device."""
        return self.machine.instances_per_device > 1

    @property
    def num_devices(self) -> int:
        """Devices of one worker, or instances of devices that are cut."""
        return sum(size for _, _, size in self.sides)

    @property
    def withheld_share(self) -> float:
        """How far below its board's own limit each device is held, as a share of that; 0 without a power limit."""
        own = self.machine.device.tdp_w
        return 0.0 if self.power_cap_w is None or own is None else 1.0 - self.power_cap_w / own

    @property
    def most_workers(self) -> int:
        """Workers that may stand beside each other: one a host where its memory holds weights, which it reads alone."""
        if self.weight_tiers is None:
            return self.machine.num_devices
        return max(self.machine.num_devices // self.machine.devices_per_host, 1)


def placed_workers(problem: ServingProblem, role: Role, rejected: Counter[str]) -> Iterator[PlacedWorker]:
    """Workers of a role that the engine accepts and that fit, on every node type.

    Args:
        problem: the question.
        role: role of the pool.
        rejected: reason → number of layouts rejected for it; updated.
    """
    if problem.tiering is not None and problem.tiering.is_asked:
        yield from problem.tiering.placements(problem, role, rejected)
        return
    if problem.separation is not None and role is Role.DECODE:
        yield from problem.separation.placements(problem, rejected)
        if problem.separation.is_asked:
            return
    for node_type, machine in problem.machines.items():
        for quantization in problem.quantizations:
            missing = quantization.missing_on(machine.device)
            if missing:
                rejected[f"{machine.device.name} has no units for {', '.join(missing)}"] += 1
                continue
            for layout in layouts(problem, machine, role):
                reason = refusal(problem, machine, layout, quantization)
                if reason is not None:
                    rejected[reason] += 1
                    continue
                worker = _placed(problem, role, node_type, machine, layout, quantization)
                if worker is None:
                    rejected["weights, workspace and one request's KV cache do not fit the device"] += 1
                else:
                    for cap in problem.caps_of(machine.device):
                        yield replace(worker, power_cap_w=cap)
    if problem.tiering is not None:  # also where some layout fits: fewer devices may keep the SLOs
        yield from problem.tiering.placements(problem, role, rejected)


def refusal(problem: ServingProblem, machine: Machine, layout: Layout, quantization: Quantization) -> str | None:
    """Why a layout is none on a machine; None where network, engine, drafts and experts allow it."""
    rules = problem.rules
    if lacking := rules.without_kernels(quantization, machine.device):
        return f"{rules.name} has no kernels for weights in {', '.join(lacking)} on {machine.device.name}"
    if problem.share is not None and layout.num_devices > 1:
        return "no link joins parts of a device: a worker has one"
    if layout.num_devices > machine.joined_devices:
        return machine.no_network
    if rules.one_host and layout.num_devices > machine.devices_per_host:
        return f"{rules.name}: a worker lies on one host"
    violated = next((rule for rule in rules.layout_rules(quantization) if not rule.holds(problem.shape, layout)), None)
    if violated is not None:
        return f"{rules.name}: {violated.message}"
    if problem.speculation is not None and not rules.takes_drafts(layout):
        return f"{rules.name}: {STAGES_WITH_DRAFTS}"
    return None if problem.experts is None else problem.experts.misfit(layout)


def layouts(problem: ServingProblem, machine: Machine, role: Role) -> list[Layout]:
    """Layouts of one worker on a machine, fewest devices first; pinned degrees are kept."""
    pinned = problem.pinned.of(role)
    most = min(machine.num_devices, problem.limits.max_worker_devices or machine.num_devices)

    def degrees(name: str, free: list[int]) -> list[int]:
        return [pinned[name]] if name in pinned else free

    found = []
    heads = problem.shape.num_attention_heads
    tensors = [degree for degree in range(1, min(MAX_TENSOR, most) + 1) if heads % degree == 0]
    for tensor in degrees("tensor_parallel", tensors):
        for pipeline in degrees("pipeline_parallel", _stages(problem, most // tensor)):
            for ranks in degrees("attention_data_parallel", _data_ranks(problem, most // (tensor * pipeline))):
                for context in degrees("context_parallel", _contexts(problem, tensor)):
                    base = Layout(
                        tensor_parallel=tensor,
                        pipeline_parallel=pipeline,
                        attention_data_parallel=ranks,
                        context_parallel=context,
                    )
                    if base.num_devices <= most:
                        found += [
                            replace(base, expert_parallel=expert, expert_tensor_parallel=split)
                            for expert, split in _expert_groups(problem, base, pinned)
                        ]
    found.sort(key=lambda layout: (layout.num_devices, layout.pipeline_parallel, layout.tensor_parallel))
    return found[:MAX_LAYOUTS]


def _powers(most: int) -> list[int]:
    """1, 2, 4 … up to ``most``."""
    return [2**exponent for exponent in range(max(most, 1).bit_length())]


def _stages(problem: ServingProblem, most: int) -> list[int]:
    """Every number of pipeline stages within a domain's devices, then powers of two."""
    domain = max(machine.domain_size for machine in problem.machines.values())
    most = min(MAX_PIPELINE, problem.shape.num_hidden_layers, most)
    return [stages for stages in range(1, most + 1) if stages <= domain or stages & (stages - 1) == 0]


def _data_ranks(problem: ServingProblem, most: int) -> list[int]:
    return [1] if problem.shape.moe is None else _powers(min(MAX_DATA_PARALLEL, most))


def _contexts(problem: ServingProblem, tensor: int) -> list[int]:
    """Context-parallel degrees: they help where tensor parallelism would replicate the cache."""
    copied = problem.shape.latent is not None or tensor >= problem.shape.num_key_value_heads
    long = problem.workload.input_length >= LONG_CONTEXT_TOKENS
    return _powers(MAX_CONTEXT) if copied and long else [1]


def _expert_groups(problem: ServingProblem, layout: Layout, pinned: Mapping[str, int]) -> list[tuple[int, int]]:
    """(expert, expert-tensor) degrees: whole experts spread over all devices of a stage, or every expert split."""
    if problem.shape.moe is None:
        return [(1, 1)]
    stage = layout.devices_per_stage
    free = sorted({1, stage})
    if "expert_tensor_parallel" in pinned:
        free = [stage // pinned["expert_tensor_parallel"]]
    spread = [pinned["expert_parallel"]] if "expert_parallel" in pinned else free
    return [(expert, stage // expert) for expert in spread if expert >= 1 and stage % expert == 0]


def _placed(
    problem: ServingProblem,
    role: Role,
    node_type: str,
    machine: Machine,
    layout: Layout,
    quantization: Quantization,
    chunk: int | None = None,
    running: int | None = None,
) -> PlacedWorker | None:
    """The worker with as many running requests as its cache holds; None where one does not fit.

    Args:
        problem: the question.
        role: of its pool.
        node_type: catalog name of its nodes.
        machine: device, links and price.
        layout: degrees of parallelism.
        quantization: formats.
        chunk: token budget of one iteration; None for the engine's own. It bounds the running requests of a rank.
        running: requests of a rank that run at most; None for the engine's own.
    """
    ranks, held = layout.attention_data_parallel, tokens_held(problem, role)
    limits = default_limits(problem, role, machine.device, layout)
    if running is not None:
        limits = replace(limits, max_num_seqs=running * ranks)
    if chunk is not None:
        most = min(limits.max_num_seqs, chunk * ranks)
        limits = replace(limits, max_batched_tokens=chunk, max_num_seqs=most)
    memory = worker_memory(
        problem.shape,
        machine.device,
        layout,
        limits,
        quantization,
        context=held,
        experts=problem.experts,
        encoder_bytes=encoder_bytes(problem.shape, problem.workload.images, layout),
        padding=problem.rules.expert_padding(quantization, machine.device),
        drafts=draft_memory(problem.drafter, problem.shape, quantization, layout),
    )
    if memory.kv_capacity_tokens < held * ranks:
        return None
    if "max_num_seqs" not in problem.pinned.of(role):
        drafts = problem.speculation
        verified = 1 if drafts is None else drafts.verified_tokens
        decoding = problem.rules.most_decoding(layout, role, verified_tokens=verified)
        held_at_once = _whole(memory.kv_capacity_tokens / held, ranks)
        limits = replace(limits, max_num_seqs=int(min(limits.max_num_seqs, decoding, held_at_once)))
    return PlacedWorker(
        role=role,
        node_type=node_type,
        machine=machine,
        layout=layout,
        quantization=quantization,
        limits=limits,
        memory=memory,
    )


def with_chunk(problem: ServingProblem, placed: PlacedWorker, chunk: int) -> PlacedWorker | None:
    """The worker with another token budget of one iteration, whose workspace and running requests follow it."""
    runs_more = placed.limits.max_num_seqs > _default_running(problem, placed)
    return _again(problem, placed, chunk=chunk, running=problem.rules.most_running if runs_more else None)


def with_more_running(problem: ServingProblem, placed: PlacedWorker) -> PlacedWorker | None:
    """A mixed worker that runs more requests than its engine's default on such a board, where only that keeps it from
    them; None where there is none, or where the number is pinned.
    """
    most, default = problem.rules.most_running, _default_running(problem, placed)
    is_plain = placed.weight_tiers is None and placed.ffn is None and not placed.is_shared
    is_free = placed.role is Role.MIXED and "max_num_seqs" not in problem.pinned.of(placed.role)
    is_bound = placed.limits.max_num_seqs == default < most * placed.layout.attention_data_parallel
    return _again(problem, placed, running=most) if is_plain and is_free and is_bound else None


def _again(
    problem: ServingProblem, placed: PlacedWorker, *, chunk: int | None = None, running: int | None = None
) -> PlacedWorker | None:
    """The worker with other limits; None where it does not fit with them."""
    found = _placed(
        problem,
        placed.role,
        placed.node_type,
        placed.machine,
        placed.layout,
        placed.quantization,
        chunk=chunk,
        running=running,
    )
    return None if found is None else replace(found, power_cap_w=placed.power_cap_w)


def _default_running(problem: ServingProblem, placed: PlacedWorker) -> int:
    """Requests that the worker runs at most by itself, or as pinned."""
    return default_limits(problem, placed.role, placed.machine.device, placed.layout).max_num_seqs


def default_limits(problem: ServingProblem, role: Role, device: Device, layout: Layout) -> EngineLimits:
    """The engine's own limits of one worker, or the pinned ones, before its cache caps them."""
    pinned, limits = problem.pinned.of(role), problem.engine_limits(device, role)
    is_whole, longest = problem.shape.keeps_prompts_whole, math.ceil(problem.workload.input_length)
    longest = max(longest, problem.workload.sound_frames)
    budget = max(limits.max_batched_tokens, longest) if is_whole else limits.max_batched_tokens
    finds_prefixes = role is not Role.DECODE or problem.rules.prefix_caching_on_decode
    return replace(
        limits,
        max_num_seqs=pinned.get("max_num_seqs", limits.max_num_seqs * layout.attention_data_parallel),
        max_batched_tokens=pinned.get("max_batched_tokens", budget),
        stream_interval=pinned.get("stream_interval", limits.stream_interval),
        api_servers=pinned.get("api_servers", limits.api_servers),
        chunked_prefill=limits.chunked_prefill and not is_whole,  # its tokens attend to those of later chunks
        prefix_caching=limits.prefix_caching and finds_prefixes and problem.workload.prefix_hit_rate > 0.0,
    )


def tokens_held(problem: ServingProblem, role: Role) -> float:
    """Tokens of KV cache that one request of the longest kind holds at its end."""
    workload = problem.workload
    return workload.input_length + (1.0 if role is Role.PREFILL else workload.output_length)


def _whole(number: float, ranks: int) -> int:
    """Largest number of requests up to ``number`` that is a multiple of the ranks, at least one per rank."""
    return max(int(number) // ranks, 1) * ranks
