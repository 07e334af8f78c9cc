"""From what a spec says of its hosts to what may be kept there, and the engine that then serves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from meshplan.catalogs.constants.machines.host_processors import ASSUMED, HostProcessor, host_processors
from meshplan.planner.cluster.lookup import drives_bytes_per_s
from meshplan.planner.serving.estimator.memory import weights_bytes
from meshplan.planner.serving.problem.config import Layout
from meshplan.planner.serving.problem.engines.table import ENGINES, SGLANG
from meshplan.planner.serving.problem.weight_tiers import Way
from meshplan.planner.serving.tiers.host import Host
from meshplan.planner.serving.tiers.kernels import device_misses
from meshplan.planner.serving.tiers.placement import HostTiering
from meshplan.planner.serving.tiers.popularity import Popularity, even, from_loads

if TYPE_CHECKING:
    from meshplan.catalogs.models.shapes import ModelShape
    from meshplan.planner.cluster.machine import Machine
    from meshplan.planner.cluster.spec import ClusterSpec
    from meshplan.planner.core.problems import Problems
    from meshplan.planner.serving.problem.expert_routing import ExpertRouting
    from meshplan.planner.serving.problem.quantization import Quantization
    from meshplan.planner.serving.problem.spec import ServingSpec


def host_tiering(
    spec: ServingSpec,
    shape: ModelShape,
    machines: Mapping[str, Machine],
    experts: ExpertRouting | None,
    problems: Problems,
) -> HostTiering | None:
    """What may lie in the hosts' memory; None where a spec states no memory of its hosts.

    Args:
        spec: the question.
        shape: the model.
        machines: node types of the cluster.
        experts: routing, where the spec gives it.
        problems: what cannot be answered; grows.
    """
    asked = spec.fixed.device_experts
    if spec.cluster.host_memory is None:
        if asked is not None:
            problems.say("fixed.device_experts", "the others lie in host memory: say cluster.host_memory")
        return None
    if asked is not None and shape.moe is None:
        problems.say("fixed.device_experts", f"{asked}: a dense model has no experts")
    if asked is not None and Way.EXPERTS_ON_HOST.value not in ENGINES[spec.constraints.target].weight_ways:
        problems.say("fixed.device_experts", f"{spec.constraints.target} has no flag for it: target sglang has")
    host = host_of(spec.cluster, problems)
    if host is None:
        return None
    return HostTiering(
        hosts=dict.fromkeys(machines, host), popularity=_popularity(shape, experts), pinned_experts=asked
    )


def host_of(cluster: ClusterSpec, problems: Problems) -> Host | None:
    """The host that a spec describes; None, with a problem, where its processor is unknown."""
    known = host_processors()
    name = cluster.host_processor or ASSUMED
    if name not in known:
        names = ", ".join(slug for slug in known if slug != ASSUMED)
        problems.say("cluster.host_processor", f"{name!r} is unknown (known: {names}); or give host_memory_bandwidth")
        return None
    processor: HostProcessor = known[name]
    sockets = cluster.host_sockets or 1
    return Host(
        memory_bytes=cluster.host_memory or 0.0,
        processor=processor,
        sockets=sockets,
        bandwidth_bytes_per_s=cluster.host_memory_bandwidth or sockets * processor.memory_bandwidth_bytes_per_s,
        is_assumed=cluster.host_processor is None and cluster.host_memory_bandwidth is None,
        drives_bytes_per_s=drives_bytes_per_s(cluster, problems),
    )


def _popularity(shape: ModelShape, experts: ExpertRouting | None) -> Popularity | None:
    if shape.moe is None:
        return None
    if experts is None:
        return even(shape.moe.num_experts, shape.moe.num_experts_per_token)
    return from_loads(experts.load, shape.moe.num_experts_per_token, experts.source)


def engine_for(
    spec: ServingSpec, shape: ModelShape, machines: Mapping[str, Machine], formats: Sequence[Quantization]
) -> str:
    """The engine of a question that names none: SGLang with KTransformers' kernels for mixtures of experts that exceed
    the devices in every format where these can run, because other engines stream every expert; else the spec's default.
    Weights exceed the devices where they take more than the default engine uses of their memory.
    """
    default = spec.constraints.target
    if "target" in spec.constraints.model_fields_set or shape.moe is None:
        return default
    least = min(weights_bytes(shape, one, Layout()) for one in formats)
    rules = ENGINES[default]
    room = max(
        min(machine.num_devices, machine.joined_devices)
        * rules.default_limits(machine.device).memory_fraction
        * machine.device.usable_memory_bytes
        for machine in machines.values()
    )
    runs = any(not device_misses(machine.device) for machine in machines.values())
    return SGLANG.name if runs and least > room else default
