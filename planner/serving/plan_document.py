"""A serving plan's JSON as it may come from anybody; see :mod:`meshplan.planner.core.plan_document`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from meshplan.catalogs.constants.machines.device_shares import MOST_REPLICAS, MpsShare
from meshplan.catalogs.constants.machines.mig_profiles import MigProfile, mig_profiles
from meshplan.planner.core.plan_document import (
    Closed,
    Count,
    Model,
    Name,
    Nothing,
    Number,
    PartDocument,
    PlanDocument,
    Positive,
    RejectedDocument,
    Section,
    Share,
    SolutionDocument,
    Text,
    as_json,
)
from meshplan.planner.core.reading.spec_fields import MAX_DEVICES
from meshplan.planner.expert_placement.problem.recordings import MOST_EXPERTS
from meshplan.planner.serving.problem.config import (
    EngineLimits,
    KvConnector,
    KvTier,
    Layout,
    Role,
    Router,
    Speculation,
    serving_config_from_document,
)
from meshplan.planner.serving.problem.engines import ENGINES
from meshplan.planner.serving.problem.quantization import KV_CACHE_BYTES, SCHEMES, Quantization
from meshplan.planner.serving.problem.spec import ServingSpec
from meshplan.planner.serving.problem.weight_tiers import KERNEL_NAMES, FfnDevices, Way, WeightTiers

_Devices = Annotated[int, Field(ge=1, le=MAX_DEVICES)]
_MAX_BATCH = 10**9  # tokens or requests of one iteration
_MAX_BYTES = 1e15  # of weights in host memory
_MAX_DOUBT = 20.0  # log factor of times
_MAX_SLOTS = 10**6  # slots of experts over all layers: 250 layers of 4,000


def _sound_layout(layout: Layout) -> Layout:
    sizes = {name: getattr(layout, name) for name in Layout.__dataclass_fields__}
    wrong = [f"{name} is {size}" for name, size in sizes.items() if not 1 <= size <= MAX_DEVICES]
    if wrong:
        raise ValueError(f"{', '.join(wrong)}: not within 1 and {MAX_DEVICES}")
    return layout


def _sound_limits(limits: EngineLimits) -> EngineLimits:
    if not (1 <= limits.max_num_seqs <= _MAX_BATCH and 1 <= limits.max_batched_tokens <= _MAX_BATCH):
        raise ValueError(f"max_num_seqs and max_batched_tokens must be within 1 and {_MAX_BATCH}")
    if not 0.0 < limits.memory_fraction <= 1.0:
        raise ValueError(f"memory_fraction is {limits.memory_fraction}, not above 0 and at most 1")
    return limits


def _sound_formats(formats: Quantization) -> Quantization:
    unknown = {formats.attention, formats.mlp, formats.experts} - set(SCHEMES)
    if unknown or formats.kv_cache not in KV_CACHE_BYTES:
        raise ValueError(f"unknown format {', '.join(sorted(unknown)) or formats.kv_cache}")
    return formats


def _sound_tiers(tiers: WeightTiers) -> WeightTiers:
    sizes = (tiers.host_bytes, tiers.streamed_bytes_per_device, tiers.drive_bytes)
    if not 0.0 <= tiers.drive_doubt <= _MAX_DOUBT:
        raise ValueError(f"weight_tiers.drive_doubt is {tiers.drive_doubt}, not within 0 and {_MAX_DOUBT:g}")
    counts = (tiers.device_experts, tiers.host_layers, tiers.threads, tiers.numa_nodes, tiers.device_prefill_tokens)
    if not all(0.0 <= size <= _MAX_BYTES for size in sizes) or not all(0 <= count <= _MAX_BATCH for count in counts):
        raise ValueError(f"weight_tiers: sizes must be within 0 and {_MAX_BYTES:g} bytes, counts within {_MAX_BATCH}")
    if (tiers.kernel or tiers.way is Way.EXPERTS_ON_HOST) and tiers.kernel not in KERNEL_NAMES:
        raise ValueError(f"weight_tiers.kernel is {tiers.kernel!r}; known: {', '.join(KERNEL_NAMES)}")
    return tiers


def _sound_ffn(ffn: FfnDevices) -> FfnDevices:
    if not 1 <= ffn.num_devices <= MAX_DEVICES or not 1 <= ffn.micro_batches <= _MAX_BATCH:
        raise ValueError(f"ffn: {ffn.num_devices} devices must be within 1 and {MAX_DEVICES}, micro_batches at least 1")
    return ffn


def _known_mig(profile: MigProfile) -> MigProfile:
    if not any(profile in profiles.values() for profiles in mig_profiles().values()):
        raise ValueError(f"mig: {profile} is no profile of this version's catalog: plan again")
    return profile


def _sound_mps(share: MpsShare) -> MpsShare:
    replicas = share.instances
    if not 1 < replicas <= MOST_REPLICAS or not 0.0 < share.memory_bytes <= _MAX_BYTES:
        raise ValueError(f"mps: {replicas} replicas of a device must be within 2 and {MOST_REPLICAS}, and have memory")
    if share != MpsShare.of(share.memory_bytes * replicas, replicas):
        raise ValueError(f"mps: {share} is no equal part of {replicas}: plan again")
    return share


def _stated(*names: str) -> BeforeValidator:
    """These keys are there: reports show the document's own values, not the defaults of what is read from it."""

    def check(value: Any) -> Any:
        missing = [name for name in names if isinstance(value, Mapping) and name not in value]
        if missing:
            raise ValueError(f"{', '.join(missing)}: missing")
        return value

    return BeforeValidator(check)


class _Pool(Closed):
    role: Role
    layout: Annotated[Layout, AfterValidator(_sound_layout)]
    num_workers: _Devices
    num_devices: _Devices
    limits: Annotated[
        EngineLimits,
        AfterValidator(_sound_limits),
        _stated("max_num_seqs", "max_batched_tokens", "chunked_prefill", "memory_fraction", "prefix_caching"),
    ]
    quantization: Annotated[
        Quantization, AfterValidator(_sound_formats), _stated("attention", "mlp", "experts", "kv_cache")
    ]
    node_type: Name
    kv_tier: KvTier | None = None
    weight: Annotated[Count, Field(ge=1)] = 1
    power_cap_w: Positive | None = None
    mig: Annotated[MigProfile, AfterValidator(_known_mig)] | None = None
    mps: Annotated[MpsShare, AfterValidator(_sound_mps)] | None = None
    ffn: Annotated[FfnDevices, AfterValidator(_sound_ffn)] | None = None
    weight_tiers: Annotated[WeightTiers, AfterValidator(_sound_tiers)] | None = None
    kind: Text = ""  # of an allocation's pools
    offer: Text = ""


def _known_engine(name: str) -> str:
    if name not in ENGINES:
        raise ValueError(f"must be one of {', '.join(ENGINES)}")
    return name


def _even_map(layers: list[list[int]]) -> list[list[int]]:
    slots = {len(layer) for layer in layers}
    if len(slots) != 1 or not 0 < len(layers) * max(slots) <= _MAX_SLOTS:
        raise ValueError(f"layers of {sorted(slots)} slots: all have as many, {_MAX_SLOTS} together at most")
    if not all(0 <= expert < MOST_EXPERTS for layer in layers for expert in layer):
        raise ValueError(f"experts are whole numbers from 0 to {MOST_EXPERTS - 1}")
    return layers


class ServingChoices(Closed):
    """The choices of one deployment."""

    engine: Annotated[str, AfterValidator(_known_engine)]
    num_devices: _Devices
    pools: Annotated[list[_Pool], Field(min_length=1)]
    router: Router
    kv_connector: KvConnector = KvConnector.NIXL
    speculation: Speculation | None
    expert_map: Annotated[list[list[int]], AfterValidator(_even_map)] | None = None
    name: Text = ""  # of an allocation's services
    model: Text = ""


def _is_config(document: dict[str, Any]) -> dict[str, Any]:
    """The choices of a deployment whose pools are of role mixed, or one prefill and one decode."""
    if not document:
        return document
    as_json(ServingChoices, document)
    roles = sorted(pool["role"] for pool in document["pools"])
    if set(roles) != {"mixed"} and roles != ["decode", "prefill"]:
        raise ValueError(f"pools have the roles {', '.join(roles)}; all mixed, or one prefill and one decode")
    config = serving_config_from_document(document)
    for pool, stated in zip(config.pools, document["pools"], strict=True):
        if pool.num_devices != stated["num_devices"]:
            raise ValueError(f"a pool says {stated['num_devices']} devices, its workers make {pool.num_devices}")
    return document


ServingConfigDocument = Annotated[dict[str, Any], AfterValidator(_is_config)]


class _MemoryPool(Section):
    role: Annotated[str, Field(pattern="^(mixed|prefill|decode)$")]
    device: Text
    device_memory_bytes: Share
    budget_bytes: Share
    weights_bytes: Share
    workspace_bytes: Share
    kv_cache_bytes: Share
    kv_bytes_per_token: Share
    kv_capacity_tokens: Count


class _Memory(Section):
    pools: list[_MemoryPool]


class _Part(PartDocument):
    pool: Text


class _Calibration(Section):
    engine: Text
    architecture: Text
    num_runs: Count
    error_p90: dict[Text, Annotated[float, Field(ge=0.0, le=10.0)]]
    start_error_p90: dict[Text, Annotated[float, Field(ge=0.0, le=10.0)]] = Field(default_factory=dict)
    basis: dict[Text, Text] = Field(default_factory=dict)


class _Power(Section):
    error_p90: dict[Text, Share] = Field(default_factory=dict)
    num_runs: Count = 0
    slowdown_error_p90: Share = 0.0


class _Provenance(Section):
    model: Model
    power: _Power = _Power()
    calibration: dict[Text, _Calibration] = Field(default_factory=dict)
    sources: dict[Text, Text] = Field(default_factory=dict)
    not_validated: tuple[Text, ...] = ()


class _Ranked(Section):
    name: Text
    chosen: bool
    config: ServingConfigDocument
    label: Text
    num_devices: Count
    ttft_p99_s: Number | None
    tpot_mean_s: Number | None
    requests_per_s: Number
    output_tokens_per_s_per_device: Number
    usd_per_hour: Number | None
    reason: Text


class _Miss(Section):
    limit: Text
    excess_text: Text
    label: Text


class _Change(Section):
    change: Text
    label: Text


class _Solution(SolutionDocument):
    kept: bool | None = None
    nearest_miss: _Miss | None = None
    least_change: tuple[_Change, ...] = ()


class _Point(Section):
    label: Text
    node_type: Text
    quantization: Text
    num_running: Count
    tokens_per_s_per_user: Positive
    tokens_per_s_per_device: Positive
    keeps_promises: bool


class _Sensitivity(Section):
    change: Text
    ttft_p99_s: Number | None
    tpot_mean_s: Number | None
    broken: list[Text]


class _Ends(Section):
    low: Number
    high: Number


class _Sampling(Section):
    num_requests: Count
    intervals: dict[Text, _Ends]
    attainment: Number = 0.0
    attainment_at_least: Number = 0.0
    kept_by_runs_of: Count | None = None


class _Series(Closed):
    end_s: list[Number]
    decoding: list[Number]
    prefilling: list[Number]
    queued: list[Number]
    kv_use: list[Number]

    @model_validator(mode="after")
    def _are_as_long(self) -> Self:
        lengths = {len(getattr(self, name)) for name in type(self).model_fields}
        if len(lengths) > 1 or 0 in lengths:
            raise ValueError("the lists of the series have different lengths, or are empty")
        return self


class _Overlap(Section):
    pool: Text
    requests_per_s: Share
    resource: Text
    share: Share
    batch_share: Share
    order_share: Share
    rest_share: Share


class _WhatIf(Section):
    name: Text
    label: Text
    num_running: Count
    tpot_s: Number
    tokens_per_s_per_device: Number
    usd_per_million_tokens: Number | None = None


class _Shape(Section):
    name: Text
    label: Text
    by_engine: bool
    ttft_mean_s: Number | None
    ttft_p99_s: Number | None
    tpot_mean_s: Number | None
    num_rejected: Count


class _Hops(Section):
    same_device: Number
    same_node: Number
    other_node: Number


class _Experts(Section):
    pool: Text
    expert_parallel: Count
    unused_because: Text | None = None
    load_factor: Number = 0.0
    hops: _Hops | Nothing = Nothing()
    num_copies: Count = 0
    copies_bytes_per_device: Number = 0.0


class _SpeculationRow(Section):
    num_running: Count
    method: Text | None
    num_draft_tokens: Count
    speed_up: Number


class _SpeculationAnswer(Section):
    by_load: tuple[_SpeculationRow, ...]
    hurts_from: Count | None
    running: Number


class _KvStore(Section):
    store: Text
    bytes_per_device: Number | None = None
    needed_bytes_per_device: Number | None = None
    bytes_per_s_per_device: Number | None = None
    break_even_bytes_per_s_per_device: Number | None = None
    objective: float | None = None
    reason: str = ""
    is_chosen: bool


class _ImagesAnswer(Section):
    tokens: Count
    encoder_bytes: Number
    encode_s: Number


class _SoundAnswer(Section):
    frames: Count
    encoder_bytes: Number
    cache_bytes: Number
    encode_s: Number


class _Answer(Section):
    pareto: tuple[_Point, ...] = ()
    num_running: Number = 0.0
    sensitivity: tuple[_Sensitivity, ...] = ()
    sampling: _Sampling | None = None
    series: _Series | Nothing = Nothing()
    overlap: tuple[_Overlap, ...] = ()
    what_if: tuple[_WhatIf, ...] = ()
    what_if_simulated: tuple[_Shape, ...] = ()
    num_idle_devices: Count = 0
    idle_because: Text | None = None
    useful_batch: Count | None = None
    experts: tuple[_Experts, ...] = ()
    max_request_rate_per_s: Number | None = None
    speculation: _SpeculationAnswer | Nothing = Nothing()
    kv_stores: tuple[_KvStore, ...] = ()
    images: _ImagesAnswer | Nothing = Nothing()
    sound: _SoundAnswer | Nothing = Nothing()

    @model_validator(mode="after")
    def _idle_has_a_reason(self) -> Self:
        if self.num_idle_devices and self.idle_because is None:
            raise ValueError("idle_because is missing")
        return self


class ServingPlanDocument(PlanDocument):
    """A plan of the kind ``serving``."""

    spec: ServingSpec
    config: ServingConfigDocument
    memory: _Memory | Nothing
    breakdown: list[_Part]
    provenance: _Provenance
    solution: _Solution
    alternatives: list[_Ranked]
    rejected: list[RejectedDocument]
    answer: _Answer | None = None

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        if not self.config:
            if self.solution.status != "infeasible":
                raise ValueError(f"config is empty, and the status {self.solution.status}")
            return self
        if isinstance(self.memory, Nothing):
            raise ValueError("memory is empty")
        if {pool.role for pool in self.memory.pools} != {pool["role"] for pool in self.config["pools"]}:
            raise ValueError("memory.pools are not the pools of the config")
        if not {"output_tokens_per_s_per_device", "requests_per_s"} <= self.predicted.keys():
            raise ValueError("predicted lacks output_tokens_per_s_per_device or requests_per_s")
        ranks = sum(pool.num_ranks for pool in serving_config_from_document(self.config).pools)
        if self.rank_table is not None and len(self.rank_table) != ranks:
            raise ValueError(f"rank_table has {len(self.rank_table)} ranks for {ranks} devices")
        return self


PLAN = ServingPlanDocument
