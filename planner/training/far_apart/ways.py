"""Every way to train over the sites, priced: what is sent when, what a step takes, what must be held.

*Period.* Unless pinned, H is the fewest inner steps after which a mean step waits for less than :data:`HIDDEN` of an
inner step. Plain DiLoCo hides nothing: H = ⌈(X + C)/(HIDDEN·T)⌉. Streaming DiLoCo takes the fewest τ that hide its
largest fragment, τ = ⌈X_f/T⌉, and H = F(τ + 1): a fragment is sent before it is sent again. Beyond
:data:`MOST_PUBLISHED_STEPS` no H is chosen: what is then not hidden shows in the step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from meshplan.catalogs.units import format_bytes
from meshplan.planner.core.constants import BYTES_16_BIT
from meshplan.planner.core.plan import Plan
from meshplan.planner.training.estimator.exchange.offload import USABLE_HOST_SHARE, host_link_bytes_per_s
from meshplan.planner.training.far_apart import payloads
from meshplan.planner.training.far_apart.exchange import Exchange, Ring
from meshplan.planner.training.far_apart.payloads import Held, held_parameters, pass_s, trained_parameters
from meshplan.planner.training.far_apart.published import PUBLISHED
from meshplan.planner.training.far_apart.sites import Site
from meshplan.planner.training.problem.far_apart import (
    ASYNC_PIPELINE,
    DATA_PARALLEL,
    DILOCO,
    EIGHT_BIT,
    LOCAL_UPDATES,
    ONE_BIT,
    POWERSGD,
    STREAMING,
    TOP_K,
    FarApartSpec,
    WayName,
)
from meshplan.planner.training.problem.problem import TrainingConfig, TrainingProblem

# A mean step that waits for less of an inner step than this counts as hidden. Assumed: less than the constants can tell
# apart.
HIDDEN = 0.01
MOST_PUBLISHED_STEPS = PUBLISHED[DILOCO].most_steps
# Fragments of Streaming DiLoCo unless said: as TorchTitan's own configuration has them (0.3.0,
# experiments/torchft/llama3/config_registry.py).
USUAL_FRAGMENTS = 2
DEVICE, HOST = "device", "host"


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """A site at work.

    Args:
        site: its nodes.
        sequences: of a step.
        plan: its best plan for them.
        problem: its question.
        config: of the plan.
        room_bytes: of each device, which the plan leaves to a way.
    """

    site: Site
    sequences: int
    plan: Plan
    problem: TrainingProblem
    config: TrainingConfig
    room_bytes: float = 0.0

    @property
    def limit_bytes(self) -> float:
        """Device memory that the plan and a way may fill."""
        return float(self.plan.memory["limit_bytes"]) + self.room_bytes

    @property
    def step_s(self) -> float:
        """Time of an inner step."""
        return self.plan.predicted["iteration_s"].value

    @property
    def held(self) -> Held:
        """Parameters of its fullest rank."""
        return held_parameters(self.problem, self.config)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What all ways share.

    Args:
        asked: what the user pinned.
        problem: the whole question.
        workers: the sites, which take steps together.
        ring: that joins them.
    """

    asked: FarApartSpec
    problem: TrainingProblem
    workers: tuple[Worker, ...]
    ring: Ring

    @property
    def inner_step_s(self) -> float:
        """T: of the slowest site."""
        return max(one.step_s for one in self.workers)

    @property
    def num_devices(self) -> int:
        """Devices of all sites in use."""
        return sum(one.config.world_size for one in self.workers)


@dataclass(frozen=True, slots=True, kw_only=True)
class States:
    """What a way keeps beside a site's plan, on its fullest rank.

    Args:
        device_bytes: on the device.
        host_bytes: on a host, of all its ranks.
        outer_state: where the outer optimizer's copy and momentum lie; empty for ways without one.
    """

    device_bytes: float = 0.0
    host_bytes: float = 0.0
    outer_state: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedWay:
    """One way.

    Args:
        way: of :data:`~meshplan.planner.training.problem.far_apart.WAYS`.
        setting: the sites' plans that it was priced with.
        bits: of a number on the wire; None where that says nothing (low rank, top-k).
        exchange: what is sent when; None where the way cannot be.
        states: what it keeps.
        reason: why it cannot be; empty where it can.
        lacks_bytes: device memory with which it could be, where that is what it lacks.
    """

    way: WayName
    setting: Setting
    bits: int | None
    exchange: Exchange | None
    states: States = States()
    reason: str = ""
    lacks_bytes: float = 0.0

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.way} {self.bits}-bit" if self.way in LOCAL_UPDATES else self.way


def priced_ways(setting: Setting) -> tuple[PricedWay, ...]:
    """Every way that was asked about, in the order of the spec."""
    return tuple(one for name in dict.fromkeys(setting.asked.ways) for one in _priced(setting, name))


def priced_again(way: PricedWay, setting: Setting) -> PricedWay:
    """A way with other plans of the sites."""
    return next(one for one in _priced(setting, way.way) if one.name == way.name)


def _priced(setting: Setting, name: WayName) -> Iterator[PricedWay]:
    if name == ASYNC_PIPELINE:
        yield _async_pipeline(setting)
        return
    if name not in LOCAL_UPDATES:
        yield _every_step(setting, name)
        return
    for bits in dict.fromkeys(setting.asked.outer_gradient_bits):
        yield _local_updates(setting, name, bits)


# --- gradients of every step ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sent:
    """What a way sends of the gradients of a step.

    Args:
        payload_bytes: of the whole model.
        bits: of a number on the wire; None where that says nothing.
        compute_s: compressing and restoring, on the slowest site.
        kept_bytes: residuals of error feedback on the fullest rank of each site.
    """

    payload_bytes: float
    kept_bytes: tuple[float, ...]
    bits: int | None = None
    compute_s: float = 0.0


def _every_step(setting: Setting, name: WayName) -> PricedWay:
    """Gradients are exchanged in every step, whole or compressed."""
    sent = _SENT[name](setting)
    if isinstance(sent, str):
        return PricedWay(way=name, setting=setting, bits=None, exchange=None, reason=sent)
    warms_up = name == ONE_BIT
    exchange = Exchange(
        sync_steps=1,
        fragment_bytes=(sent.payload_bytes,),
        is_gathered=name == TOP_K,
        compute_s=sent.compute_s,
        whole_share=setting.asked.warm_up_share if warms_up else 0.0,
        whole_bytes=_whole(setting).payload_bytes if warms_up and setting.asked.warm_up_share else 0.0,
    )
    kept = max(sent.kept_bytes)
    over = (_over(one, extra) for one, extra in zip(setting.workers, sent.kept_bytes, strict=True))
    reason = next((why for why in over if why), "")
    return PricedWay(
        way=name,
        setting=setting,
        bits=sent.bits,
        exchange=exchange,
        states=States(device_bytes=kept),
        reason=reason,
        lacks_bytes=kept if reason else 0.0,
    )


def _numbers_bytes(setting: Setting, bits: int) -> float:
    """A number of so many bits for each trained parameter."""
    return trained_parameters(setting.problem) * bits / payloads.BITS_PER_BYTE


def _owned(setting: Setting) -> list[float]:
    """Trained parameters of a rank of each site, which share them evenly."""
    return [trained_parameters(setting.problem) / one.config.world_size for one in setting.workers]


def _passes_s(setting: Setting, passes: int) -> float:
    """So many passes through memory over what a rank owns, on the slowest site."""
    devices = (one.problem.machine.device for one in setting.workers)
    return max(pass_s(device, owned, passes) for device, owned in zip(devices, _owned(setting), strict=True))


def _whole(setting: Setting) -> _Sent:
    bits = round(payloads.gradient_bytes(setting.problem) * payloads.BITS_PER_BYTE)
    return _Sent(payload_bytes=_numbers_bytes(setting, bits), bits=bits, kept_bytes=(0.0,) * len(setting.workers))


def _eight_bit(setting: Setting) -> _Sent:
    return _Sent(
        payload_bytes=_numbers_bytes(setting, 8),
        bits=8,
        compute_s=_passes_s(setting, payloads.QUANTISE_PASSES),
        kept_bytes=tuple(payloads.RESIDUAL_BYTES * owned for owned in _owned(setting)),
    )


def _one_bit(setting: Setting) -> _Sent:
    """A second residual is that of the part that a rank sums."""
    twice = 1.0 + 1.0 / setting.ring.num_sites
    return _Sent(
        payload_bytes=_numbers_bytes(setting, 1),
        bits=1,
        compute_s=_passes_s(setting, payloads.QUANTISE_PASSES),
        kept_bytes=tuple(payloads.RESIDUAL_BYTES * owned * twice for owned in _owned(setting)),
    )


def _top_k(setting: Setting) -> _Sent:
    each = payloads.gradient_bytes(setting.problem) + payloads.INDEX_BYTES
    return _Sent(
        payload_bytes=trained_parameters(setting.problem) * setting.asked.top_k_share * each,
        compute_s=_passes_s(setting, payloads.TOP_K_PASSES),
        kept_bytes=tuple(payloads.RESIDUAL_BYTES * owned for owned in _owned(setting)),
    )


def _low_rank(setting: Setting) -> _Sent | str:
    """PowerSGD, or why it cannot be."""
    problem, workers, rank = setting.problem, setting.workers, setting.asked.powersgd_rank
    if problem.workload.phase.has_adapters:
        return "adapters are of low rank already"
    low = [payloads.low_rank(problem.shape, rank, one.config.tensor_parallel) for one in workers]
    found = [one for one in low if one is not None]
    if not found:
        return "the matrices of latent attention and recurrent layers are not listed one by one"
    return _Sent(
        payload_bytes=max(one.numbers for one in found) * payloads.gradient_bytes(problem),
        compute_s=max(_low_rank_s(one, each.flops) for one, each in zip(workers, found, strict=True)),
        kept_bytes=tuple(payloads.RESIDUAL_BYTES * one.held.whole for one in workers),
    )


def _low_rank_s(worker: Worker, flops: float) -> float:
    """Time of PowerSGD on a rank: its products, or their passes through memory."""
    device, config = worker.problem.machine.device, worker.config
    products = payloads.products_s(device, flops / (config.tensor_parallel * config.pipeline_parallel))
    return max(products, pass_s(device, worker.held.whole, payloads.POWERSGD_PASSES))


# What each way sends in every step, or why it cannot.
_SENT: Mapping[WayName, Callable[[Setting], _Sent | str]] = {
    DATA_PARALLEL: _whole,
    EIGHT_BIT: _eight_bit,
    ONE_BIT: _one_bit,
    TOP_K: _top_k,
    POWERSGD: _low_rank,
}


# --- a pipeline over sites that never flushes -------------------------------------------------------------------------


def _async_pipeline(setting: Setting) -> PricedWay:
    """Each site has a share of the layers and works on the whole batch; nobody waits for a flush.

    A site takes as long for its share of the layers as its plan for as large a share of the batch, but layers are
    whole: what the fullest site has too much of is C. Of its layers it keeps the weights twice (PipeDream-2BW); what
    the layers of other sites free is not counted: micro-batches in flight lie there.
    """
    problem, batch = setting.problem, sum(one.sequences for one in setting.workers)
    layers = problem.shape.num_hidden_layers
    if len(setting.workers) > layers:
        why = f"{len(setting.workers)} sites and {layers} layers: a site has none"
        return PricedWay(way=ASYNC_PIPELINE, setting=setting, bits=None, exchange=None, reason=why)
    rates = [one.sequences / batch * layers / one.step_s for one in setting.workers]
    dealt = payloads.layers_of_sites(rates, layers)
    fullest = max(count / rate for count, rate in zip(dealt, rates, strict=True))
    exchange = Exchange(
        sync_steps=1,
        fragment_bytes=(payloads.hop_bytes(problem),),
        overlap_steps=1,
        is_hop=True,
        compute_s=max(0.0, fullest - setting.inner_step_s),
    )
    weight = problem.calibration.recipe.weight_bytes
    kept = [weight * one.held.whole * count / layers for one, count in zip(setting.workers, dealt, strict=True)]
    reason = next((why for one, extra in zip(setting.workers, kept, strict=True) if (why := _over(one, extra))), "")
    return PricedWay(
        way=ASYNC_PIPELINE,
        setting=setting,
        bits=round(BYTES_16_BIT * payloads.BITS_PER_BYTE),
        exchange=exchange,
        states=States(device_bytes=max(kept)),
        reason=reason,
        lacks_bytes=max(kept) if reason else 0.0,
    )


# --- local updates --------------------------------------------------------------------------------------------------


def _local_updates(setting: Setting, name: WayName, bits: int) -> PricedWay:
    """Outer gradients are exchanged after H inner steps, whole or in fragments that inner steps hide."""
    count = _fragments(setting) if name == STREAMING else 1
    if count is None:
        steps, layers = setting.asked.sync_steps, setting.problem.shape.num_hidden_layers
        why = f"sync_steps {steps} has no divisor from 2 to {layers}: no equal number of fragments"
        return PricedWay(way=name, setting=setting, bits=bits, exchange=None, reason=why)
    payload = trained_parameters(setting.problem) * bits / payloads.BITS_PER_BYTE
    shares = payloads.fragment_shares(setting.problem.shape, count) if count > 1 else (1.0,)
    states, reason, lacks = _outer_states(setting, max(shares))
    compute = max(_outer_step_s(one, states.outer_state) for one in setting.workers)
    fragments = tuple(payload * share for share in shares)
    steps, overlap = _period(setting, fragments, compute)
    exchange = Exchange(sync_steps=steps, fragment_bytes=fragments, overlap_steps=overlap, compute_s=compute)
    return PricedWay(
        way=name, setting=setting, bits=bits, exchange=exchange, states=states, reason=reason, lacks_bytes=lacks
    )


def _fragments(setting: Setting) -> int | None:
    """Fragments of Streaming DiLoCo: as pinned, else the fewest that divide a pinned H."""
    asked, layers = setting.asked, setting.problem.shape.num_hidden_layers
    if asked.fragments is not None:
        return asked.fragments if asked.fragments <= layers else None
    if asked.sync_steps is None:
        return USUAL_FRAGMENTS
    return next((count for count in range(2, layers + 1) if asked.sync_steps % count == 0), None)


def _period(setting: Setting, fragments: Sequence[float], compute_s: float) -> tuple[int, int]:
    """(H, τ); see the module docstring."""
    asked, inner, count = setting.asked, setting.inner_step_s, len(fragments)
    longest = max(map(setting.ring.exchange_s, fragments))
    if count == 1:
        fewest = max(1, math.ceil((longest + compute_s) / (HIDDEN * inner)))
        return asked.sync_steps or min(fewest, MOST_PUBLISHED_STEPS), 0
    most = (asked.sync_steps or MOST_PUBLISHED_STEPS) // count - 1
    overlap = asked.overlap_steps if asked.overlap_steps is not None else min(most, max(1, math.ceil(longest / inner)))
    if asked.sync_steps is not None:
        return asked.sync_steps, overlap
    waits = sum(max(0.0, setting.ring.exchange_s(one) - overlap * inner) for one in fragments) + compute_s
    rounds = max(overlap + 1, min(math.ceil(waits / (HIDDEN * inner * count)), most + 1))
    return rounds * count, overlap


def _outer_step_s(worker: Worker, outer_state: str) -> float:
    """C: the outer optimizer of all of a rank's parameters; from the host its copy comes and goes back."""
    device, owned = worker.problem.machine.device, worker.held.owned
    copied = 2.0 * payloads.BYTES_32_BIT * owned / host_link_bytes_per_s(device) if outer_state == HOST else 0.0
    return pass_s(device, owned, payloads.OUTER_PASSES) + copied


def _outer_states(setting: Setting, largest_share: float) -> tuple[States, str, float]:
    """Where the outer optimizer's states lie, why they do not fit, and the device memory that they lack if that is why.

    Every worker must hold them. Whoever leaves the place open lacks no more than hosts cannot take.
    """
    under_way = [payloads.PSEUDO_GRADIENT_BYTES * largest_share * one.held.owned for one in setting.workers]
    kept = [payloads.OUTER_STATE_BYTES * one.held.owned for one in setting.workers]
    together = [sum(pair) for pair in zip(under_way, kept, strict=True)]
    over = [why for one, extra in zip(setting.workers, together, strict=True) if (why := _over(one, extra))]
    asked = setting.asked.outer_state
    if asked == DEVICE or (asked == "auto" and not over):
        states = States(device_bytes=max(together), outer_state=DEVICE)
        return (states, over[0], max(together)) if over else (states, "", 0.0)
    near = [_over(one, extra) for one, extra in zip(setting.workers, under_way, strict=True)]
    on_host = [
        extra * min(one.problem.machine.devices_per_host, one.config.world_size)
        for one, extra in zip(setting.workers, kept, strict=True)
    ]
    far = [_over_host(one, extra) for one, extra in zip(setting.workers, on_host, strict=True)]
    states = States(device_bytes=max(under_way), host_bytes=max(on_host), outer_state=HOST)
    reason = next(filter(None, near + far), "")
    if not reason:
        return states, "", 0.0
    lacks = max(under_way) if not any(far) else max(together) if asked == "auto" else 0.0
    return states, f"{over[0]}; {reason}" if over and asked == "auto" else reason, lacks


def _over(worker: Worker, extra_bytes: float) -> str:
    """Why more bytes do not fit on a worker's fullest device; empty where they do."""
    limit, safe = worker.limit_bytes, worker.plan.memory["worst"]["safe_bytes"]
    excess = safe + extra_bytes - limit
    if excess <= 0.0:
        return ""
    return (
        f"{format_bytes(extra_bytes)} more on a device of {worker.site.name} are {format_bytes(excess)} over "
        f"{format_bytes(limit)}: constraints.memory_headroom: {math.ceil(extra_bytes / 2**30)} GiB leaves room"
    )


def _over_host(worker: Worker, extra_bytes: float) -> str:
    """Why the states do not fit on a host; empty where they do."""
    memory = worker.problem.limits.host_memory_bytes or worker.problem.machine.host_memory_bytes
    if memory is None:
        return "the memory of a host is not known: say cluster.host_memory"
    usable = USABLE_HOST_SHARE * memory
    if extra_bytes <= usable:
        return ""
    return f"{format_bytes(extra_bytes)} on a host of {worker.site.name}, of {format_bytes(usable)} that jobs may use"
