"""The choices of a deployment as they may come from anybody: degrees, limits, formats and parts within their ranges."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field

from meshplan.catalogs.constants.machines.device_shares import MOST_REPLICAS, MpsShare
from meshplan.catalogs.constants.machines.mig_profiles import MigProfile, mig_profiles
from meshplan.planner.core.plan_document import (
    Closed,
    Count,
    Name,
    Positive,
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
from meshplan.planner.serving.problem.engines.table import ENGINES
from meshplan.planner.serving.problem.quantization import KV_CACHE_BYTES, SCHEMES, Quantization
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
    if not 1 <= limits.stream_interval <= _MAX_BATCH:
        raise ValueError(f"stream_interval is {limits.stream_interval}, not within 1 and {_MAX_BATCH}")
    if limits.api_servers is not None and not 1 <= limits.api_servers <= MAX_DEVICES:
        raise ValueError(f"api_servers is {limits.api_servers}, not within 1 and {MAX_DEVICES}")
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
