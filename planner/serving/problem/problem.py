"""A serving question with every name looked up: what the search is given."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

from meshplan.catalogs.constants.engine_recipes import EngineRecipe
from meshplan.catalogs.constants.machines.device_shares import DeviceShare
from meshplan.catalogs.constants.power import PowerCalibration, PowerConstants, power_calibration
from meshplan.catalogs.constants.serving import ServingCalibration, ServingConstants
from meshplan.catalogs.hardware import Device
from meshplan.catalogs.models.shapes import ModelShape
from meshplan.planner.cluster.machine import Machine
from meshplan.planner.cluster.shares import cut
from meshplan.planner.serving.problem.config import EngineLimits, KvConnector, KvTier, Pool, Role, Speculation
from meshplan.planner.serving.problem.engines.rules import EngineRules
from meshplan.planner.serving.problem.expert_routing import ExpertRouting
from meshplan.planner.serving.problem.quantization import Quantization
from meshplan.planner.serving.problem.requests import Arrival, ServingWorkload
from meshplan.planner.serving.problem.slo import Slo
from meshplan.planner.serving.problem.speculation import Drafter, drafter_of
from meshplan.planner.serving.problem.weight_tiers import Separation, Tiering

# Share of a worker's highest rate that may be planned: a queue without headroom never empties.
MAX_UTILIZATION = 0.95


class ServingObjective(Enum):
    """What the chosen plan is best at."""

    THROUGHPUT_PER_DEVICE = "throughput_per_device"  # output tokens/s per device: see pays_idle_devices
    USD_PER_MILLION_TOKENS = "usd_per_million_tokens"  # of output tokens
    NUM_DEVICES = "num_devices"
    MAX_REQUEST_RATE = "max_request_rate"
    ENERGY = "energy"  # joules per output token


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingLimits:
    """Limits on devices, money and power; None = no limit.

    Args:
        max_devices: devices of all node types together.
        max_worker_devices: devices of one worker.
        max_usd_per_hour: price of the nodes in use.
        max_power_w: average power of the devices in use.
        rents_devices: single devices are rented, at their share of a node's price; otherwise whole nodes are.
    """

    max_devices: int | None = None
    max_worker_devices: int | None = None
    max_usd_per_hour: float | None = None
    max_power_w: float | None = None
    rents_devices: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Pinned:
    """Choices fixed by the user.

    Args:
        is_disaggregated: True or False where the mode is pinned, None where the search chooses.
        by_role: role → field of ``Layout`` or ``EngineLimits``, or ``num_workers`` → value; MIXED holds for all roles.
        memory_fractions: role → share of a device's memory that a worker may take; MIXED holds for all roles.
        mode_pins: fields of the spec that pin the mode together; empty where the search chooses or the task decides.
    """

    is_disaggregated: bool | None = None
    mode_pins: tuple[str, ...] = ()
    by_role: Mapping[Role, Mapping[str, int]] = field(default_factory=dict)
    memory_fractions: Mapping[Role, float] = field(default_factory=dict)

    def of(self, role: Role) -> Mapping[str, int]:
        """What is pinned for pools of a role; a role's own value overrides the common one."""
        return {**self.by_role.get(Role.MIXED, {}), **self.by_role.get(role, {})}

    def memory_fraction(self, role: Role) -> float | None:
        """The share that is pinned for pools of a role; None: the engine's own."""
        return self.memory_fractions.get(role, self.memory_fractions.get(Role.MIXED))


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Model, hardware and engine: what a configuration is priced and simulated with.

    Args:
        shape: the model.
        machines: node type → devices and links.
        recipe: how the engine schedules.
        constants: node type → calibrated constants.
        experts: routing and the places of experts; None where nothing is known of them.
        power: constants of the devices' power by load, which say what a power limit slows.
        tiering: weights in host memory; None where all lie on the devices.
        separation: MLPs or experts on devices of their own; None where they never are.
        drafter: where drafts come from; None without any.
    """

    shape: ModelShape
    machines: Mapping[str, Machine]
    recipe: EngineRecipe
    constants: Mapping[str, ServingConstants]
    experts: ExpertRouting | None = None
    power: PowerConstants = field(default_factory=lambda: power_calibration().constants)
    tiering: Tiering | None = None
    separation: Separation | None = None
    drafter: Drafter | None = None

    def machine(self, pool: Pool) -> Machine:
        """The machine of a pool, cut as the pool's devices are."""
        return cut(self.machines[pool.node_type], pool.share)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingProblem:
    """A serving question with everything looked up.

    Args:
        shape: the model.
        machines: node type → its devices, links and price; ``num_devices`` is what the plan may use of it.
        workload: the requests; without rate and concurrency the plan chooses the load.
        slos: latency limits that a plan must meet.
        objective: what the plan is best at.
        limits: on money and power.
        rules: rules of the target engine.
        recipe: how the engine schedules.
        calibrations: node type → the estimator's constants.
        quantizations: formats to choose from.
        speculation: None without a draft.
        speculation_options: methods and depths of drafts to choose from, or none of them; empty: nothing to choose.
        draft_shape: the draft model, where one is named that the catalog has.
        kv_tier: second KV cache tier of mixed workers; None without one.
        kv_stores: where such a tier may lie, in the size that the plan finds; empty: nothing to choose.
        kv_connector: what moves caches between workers that prefill and that decode.
        pinned: see :class:`Pinned`.
        experts: routing and the places of experts; None where nothing is known of them.
        power: constants of the devices' power by load.
        power_caps_w: power limits of a device to choose from, W; empty for the board's own.
        share: how every device is shared; None: whole devices. The machines are those of its parts.
        share_options: ways to choose from besides, by MIG or MPS; empty: nothing to choose.
        tiering: what may lie in host memory; None where none was stated.
        separation: what may be split between attention and FFN devices; None where nothing may.
    """

    shape: ModelShape
    machines: Mapping[str, Machine]
    workload: ServingWorkload
    slos: tuple[Slo, ...]
    objective: ServingObjective
    limits: ServingLimits
    rules: EngineRules
    recipe: EngineRecipe
    calibrations: Mapping[str, ServingCalibration]
    quantizations: tuple[Quantization, ...]
    speculation: Speculation | None = None
    speculation_options: tuple[Speculation, ...] = ()
    draft_shape: ModelShape | None = None
    kv_tier: KvTier | None = None
    kv_stores: tuple[str, ...] = ()
    kv_connector: KvConnector = KvConnector.NIXL
    pinned: Pinned = field(default_factory=Pinned)
    experts: ExpertRouting | None = None
    power: PowerCalibration = field(default_factory=power_calibration)
    power_caps_w: tuple[float, ...] = ()
    share: DeviceShare | None = None
    share_options: tuple[DeviceShare, ...] = ()
    tiering: Tiering | None = None
    separation: Separation | None = None

    @property
    def with_each_draft(self) -> tuple[ServingProblem, ...]:
        """The question with each choice of drafts stated, none first; itself where there is nothing to choose."""
        choices = (self.speculation, *self.speculation_options)
        return tuple(replace(self, speculation=choice, speculation_options=()) for choice in choices)

    def with_share(self, profile: DeviceShare | None) -> ServingProblem:
        """The question with every device shared in one way; its devices then are the parts."""
        if profile is None:
            return replace(self, share_options=())
        most = self.limits.max_devices
        return replace(
            self,
            machines={name: cut(machine, profile) for name, machine in self.machines.items()},
            limits=replace(self.limits, max_devices=None if most is None else most * profile.instances),
            share=profile,
            share_options=(),
        )

    @property
    def with_each_share(self) -> tuple[ServingProblem, ...]:
        """The question with each way to share the devices stated, whole ones first."""
        return tuple(self.with_share(profile) for profile in (None, *self.share_options))

    @property
    def site(self) -> Site:
        """Model, hardware and engine alone."""
        constants = {name: calibration.constants for name, calibration in self.calibrations.items()}
        return Site(
            shape=self.shape,
            machines=self.machines,
            recipe=self.recipe,
            constants=constants,
            experts=self.experts,
            power=self.power.constants,
            tiering=self.tiering,
            separation=self.separation,
            drafter=self.drafter,
        )

    @property
    def drafter(self) -> Drafter | None:
        """Where drafts come from; None without any."""
        return drafter_of(self.speculation, self.shape, self.draft_shape)

    def engine_limits(self, device: Device, role: Role = Role.MIXED) -> EngineLimits:
        """The engine's own limits on a device, with the share of its memory that is pinned for a role."""
        limits, share = self.rules.default_limits(device), self.pinned.memory_fraction(role)
        return limits if share is None else replace(limits, memory_fraction=share)

    def caps_of(self, device: Device) -> tuple[float | None, ...]:
        """Power limits of a device to choose from, W, the highest first; None: its board's own, which none exceeds."""
        own = device.tdp_w
        caps = sorted(self.power_caps_w, reverse=True)
        return tuple(dict.fromkeys(None if own is not None and cap >= own else cap for cap in caps)) or (None,)

    @property
    def num_devices(self) -> int:
        """Devices that a plan may use, whole ones."""
        have = sum(machine.num_devices // machine.instances_per_device for machine in self.machines.values())
        most = self.limits.max_devices
        if most is None:
            return have
        return min(have, most if self.share is None else most // self.share.instances)

    @property
    def has_free_load(self) -> bool:
        """Neither rate nor concurrency is given: the plan says how much it can take."""
        load = (self.workload.request_rate_per_s, self.workload.concurrency, self.workload.trace)
        return self.workload.arrival is not Arrival.ALL_AT_ONCE and all(part is None for part in load)

    @property
    def has_free_rate(self) -> bool:
        """The load is free and an SLO limits the wait of a request (TTFT or E2E); without one, concurrency is fixed."""
        return self.has_free_load and self.limit_s("ttft", "e2e") < float("inf")

    @property
    def pays_idle_devices(self) -> bool:
        """Throughput per device counts every device of a rented node.

        Nodes are rented whole, and what they finish is the plan's to raise: a device that idles is paid for nothing.
        Where requests arrive at a rate, that is what is finished, and the objective asks for the fewest devices: the
        others are free for something else, in parts that divide the node
        (:func:`~meshplan.planner.serving.problem.nodes.taken_up`). So they are where single devices are rented.
        """
        counts_devices = self.objective is ServingObjective.THROUGHPUT_PER_DEVICE
        is_given = self.workload.request_rate_per_s is not None or self.workload.trace is not None
        return counts_devices and not self.limits.rents_devices and not is_given

    @property
    def has_poisson_arrivals(self) -> bool:
        """Requests arrive by themselves and at random, whatever the deployment does."""
        if self.has_free_rate:
            return self.workload.open_arrival is Arrival.POISSON
        return self.workload.arrival is Arrival.POISSON

    @property
    def tpot_limit_s(self) -> float:
        """The tightest SLO on the time between tokens (TPOT or ITL), at any percentile; infinite without one."""
        return self.limit_s("tpot", "itl")

    def limit_s(self, *metrics: str) -> float:
        """The tightest SLO on one of some latencies, at any percentile; infinite without one."""
        return min((slo.limit_s for slo in self.slos if slo.metric in metrics), default=float("inf"))
