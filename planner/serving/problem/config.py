"""A deployment: the choices of a serving plan, and the plain JSON in which a plan stores them.

A *layout* splits one engine instance (a worker) over its devices, a *pool* is a number of identical workers with one
role, a *configuration* is the pools: of the role ``mixed`` (aggregated; several pools where kinds of workers stand
behind one router), or ``prefill`` and ``decode`` (disaggregated, arXiv:2401.09670, arXiv:2311.18677).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

from meshplan.catalogs.constants.machines.device_shares import DeviceShare, MpsShare
from meshplan.catalogs.constants.machines.mig_profiles import MigProfile
from meshplan.catalogs.errors import EmitError
from meshplan.planner.serving.problem.quantization import Quantization
from meshplan.planner.serving.problem.weight_tiers import FfnDevices, Way, WeightTiers


class Role(Enum):
    """What a pool of workers does."""

    MIXED = "mixed"  # prefill and decode in the same engine
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Degrees of parallelism of one engine instance.

    Devices = tensor × pipeline × attention-data × context. Expert layers regroup the devices of a stage as
    expert × expert-tensor.

    Args:
        tensor_parallel: devices that split each attention block.
        pipeline_parallel: stages.
        attention_data_parallel: ranks with attention weights, KV cache and requests of their own, which exchange
            tokens in the expert layers.
        expert_parallel: devices over which experts are spread.
        expert_tensor_parallel: devices that split each expert.
        context_parallel: devices that split each sequence's KV cache (decode) and tokens (prefill).
    """

    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    attention_data_parallel: int = 1
    expert_parallel: int = 1
    expert_tensor_parallel: int = 1
    context_parallel: int = 1

    @property
    def devices_per_stage(self) -> int:
        """Devices of one pipeline stage."""
        return self.tensor_parallel * self.attention_data_parallel * self.context_parallel

    @property
    def num_devices(self) -> int:
        """Devices of one engine instance."""
        return self.devices_per_stage * self.pipeline_parallel

    @property
    def concurrent_batches(self) -> int:
        """Batches in flight at once: every attention data-parallel rank keeps one per pipeline stage."""
        return self.pipeline_parallel * self.attention_data_parallel


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """When a busy scheduler admits waiting prompts; admitting later trades TTFT for fuller prefill batches.

    An idle worker admits immediately.

    Args:
        receive_interval: decode iterations between two polls of the request queue; an iteration with prompts is always
            followed by a poll (SGLang ``--scheduler-recv-interval``).
        batch_wait_steps: most iterations for which prompts wait for others to be prefilled with (TensorRT-LLM
            ``batch_wait_timeout_iters``); 0 disables the wait.
        batch_wait_share: share of an iteration's token budget at which that wait ends
            (``batch_wait_max_tokens_ratio``).
        balance_wait_steps: iterations between admissions while fewer prompts wait than there are concurrent batches,
            so that attention data-parallel ranks prefill together (``attention_dp_config``: ``enable_balance`` and
            ``timeout_iters``); 0 disables it.
    """

    receive_interval: int = 1
    batch_wait_steps: int = 0
    batch_wait_share: float = 1.0
    balance_wait_steps: int = 0

    @property
    def is_immediate(self) -> bool:
        """No rule delays a prompt."""
        return self == Admission()


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """Settings of the engine's scheduler.

    Args:
        max_num_seqs: most requests running in one worker (all of its attention data-parallel ranks together).
        max_batched_tokens: token budget of one iteration of one attention data-parallel rank: prefill is cut into
            chunks so that it fits (Sarathi-Serve, arXiv:2403.02310).
        chunked_prefill: prompts may be cut and share an iteration with decodes; otherwise prompts are prefilled
            between decode iterations, whole unless one is longer than the budget.
        memory_fraction: share of device memory that weights, activations and KV cache may take.
        prefix_caching: cached prefixes are not prefilled again.
        cuda_graphs: iterations are replayed as CUDA graphs instead of being launched kernel by kernel.
        custom_all_reduce: the engine's own all-reduce kernels are used inside a node instead of NCCL's.
        stream_interval: iterations whose tokens are sent to a client at once: less work for the API server, whose
            messages hold several tokens.
        api_servers: processes of a worker that answer clients, a processor core each; None: as many as the engine
            starts by itself.
        admission: when prompts are admitted; not a choice of a plan, but measured servers may have set it.
    """

    max_num_seqs: int = 256
    max_batched_tokens: int = 8192
    chunked_prefill: bool = True
    memory_fraction: float = 0.9
    prefix_caching: bool = False
    cuda_graphs: bool = True
    custom_all_reduce: bool = True
    stream_interval: int = 1
    api_servers: int | None = None
    admission: Admission = Admission()


# Where a second tier of KV cache may lie.
KV_STORES = ("host", "nvme", "remote")


@dataclass(frozen=True, slots=True, kw_only=True)
class KvTier:
    """A second tier of KV cache, below device memory, for prefixes that the devices have no room for.

    Args:
        store: one of :data:`KV_STORES`: ``host`` (memory) and ``nvme`` are a worker's own; ``remote``, the memory of
            all workers' hosts over the network, is one store of a pool.
        bytes_per_device: capacity for each device of a worker, or (``remote``) that it contributes.
        bytes_per_s_per_device: rate at which a device's share of the cache is fetched.
        latency_s: latency of one fetch.
    """

    store: str
    bytes_per_device: float
    bytes_per_s_per_device: float
    latency_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """Identical workers with one role.

    Args:
        role: see :class:`Role`.
        layout: degrees of parallelism of one worker.
        num_workers: workers behind the router.
        limits: limits of each worker's scheduler.
        quantization: formats of weights and KV cache.
        node_type: catalog name of the nodes that the workers run on.
        kv_tier: second tier of KV cache; None: prefixes evicted from the devices are lost.
        weight: of each worker, for a router between pools of one role; relative to the others' weights.
        power_cap_w: power limit of each device, W; None for the board's own.
        weight_tiers: weights beyond device memory; None where all lie on the devices.
        share: how each device is shared, by MIG or MPS: a worker has one part; None: whole devices.
        ffn: devices of each worker for its MLPs or experts; None: those of the layout compute them.
    """

    role: Role
    layout: Layout
    num_workers: int
    limits: EngineLimits
    quantization: Quantization
    node_type: str
    kv_tier: KvTier | None = None
    weight: int = 1
    power_cap_w: float | None = None
    weight_tiers: WeightTiers | None = None
    share: DeviceShare | None = None
    ffn: FfnDevices | None = None

    @property
    def sides(self) -> tuple[tuple[str, int], ...]:
        """(node type, devices of one worker): its own, and those for its MLPs or experts where they lie apart."""
        own = (self.node_type, self.layout.num_devices)
        return (own,) if self.ffn is None else (own, (self.ffn.node_type, self.ffn.num_devices))

    @property
    def num_ranks(self) -> int:
        """Devices of all workers, or parts of devices that they share: one a rank."""
        return sum(size for _, size in self.sides) * self.num_workers

    @property
    def fraction_of_device(self) -> float:
        """Share of a whole device's memory that one worker may take; an instance of MIG is a device of its own."""
        replicas = self.share.instances if isinstance(self.share, MpsShare) else 1
        return self.limits.memory_fraction / replicas

    @property
    def num_devices(self) -> int:
        """Devices of all workers, whole ones."""
        return self.num_ranks if self.share is None else -(-self.num_ranks // self.share.instances)


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """Speculative decoding: a draft model proposes tokens, the model verifies them (arXiv:2211.17192).

    Args:
        num_draft_tokens: γ, proposed per iteration.
        acceptance: α, probability that one proposed token is accepted, given those before it.
        draft_cost: time of one draft step over one decode iteration of the model.
        method: where drafts come from: ``ngram``, ``eagle3``, ``mtp``, ``draft_model``; empty where the spec does not
            say, and launcher files take the draft model that it names, or prediction layers.
    """

    num_draft_tokens: int
    acceptance: float
    draft_cost: float = 0.0
    method: str = ""

    @property
    def verified_tokens(self) -> int:
        """Tokens of one request that an iteration verifies: γ drafted and one more."""
        return self.num_draft_tokens + 1

    @property
    def tokens_per_step(self) -> float:
        """Expected tokens per iteration: (1 − α^(γ+1)) / (1 − α), equation 1 of the paper.

        >>> Speculation(num_draft_tokens=1, acceptance=0.5).tokens_per_step
        1.5
        """
        if self.acceptance >= 1.0:
            return self.num_draft_tokens + 1.0
        return float((1.0 - self.acceptance ** (self.num_draft_tokens + 1)) / (1.0 - self.acceptance))


class KvConnector(Enum):
    """What moves KV caches from prefill to decode workers."""

    NIXL = "nixl"
    MOONCAKE = "mooncake"


class Router(Enum):
    """How requests reach workers."""

    ROUND_ROBIN = "round_robin"
    LEAST_LOADED = "least_loaded"  # fewest tokens waiting and running
    PREFIX_AWARE = "prefix_aware"  # the worker that holds the longest prefix, unless it is overloaded
    LEAST_CONNECTIONS = "least_connections"  # fewest requests in flight for the weight of the worker's pool


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingConfig:
    """Every choice of one serving plan.

    Args:
        engine: ``vllm``, ``sglang``, ``trtllm`` or ``llama.cpp``.
        pools: one or more of role MIXED, or one PREFILL and one DECODE. Several pools of one role are behind one
            router, with a name and a weight for each kind of worker.
        router: see :class:`Router`.
        kv_connector: see :class:`KvConnector`; of disaggregated ones alone.
        speculation: None without a draft.
        expert_map: expert in each slot of each MoE layer, of the pools that spread experts over devices; None: one copy
            each, in order.
    """

    engine: str
    pools: tuple[Pool, ...]
    router: Router = Router.LEAST_LOADED
    speculation: Speculation | None = None
    expert_map: tuple[tuple[int, ...], ...] | None = None
    kv_connector: KvConnector = KvConnector.NIXL

    @property
    def is_disaggregated(self) -> bool:
        """Prefill and decode run in different workers."""
        return any(pool.role is not Role.MIXED for pool in self.pools)

    @property
    def num_workers(self) -> int:
        """Workers of all pools."""
        return sum(pool.num_workers for pool in self.pools)

    @property
    def pool_names(self) -> tuple[str, ...]:
        """A name for each pool: its role, numbered where several pools have that role."""
        roles = [pool.role for pool in self.pools]
        return tuple(
            role.value if roles.count(role) == 1 else f"{role.value}_{roles[: index + 1].count(role)}"
            for index, role in enumerate(roles)
        )

    @property
    def num_devices(self) -> int:
        """Devices of all pools."""
        return sum(pool.num_devices for pool in self.pools)

    def pool(self, role: Role) -> Pool:
        """The pool with a role.

        Raises:
            KeyError: there is none.
        """
        for pool in self.pools:
            if pool.role is role:
                return pool
        raise KeyError(role)


# --- as JSON ----------------------------------------------------------------------------------------------------------


def serving_config_document(config: ServingConfig) -> dict[str, Any]:
    """The choices as plain JSON, with the number of devices of each pool and of all pools."""
    moved = {} if config.kv_connector is KvConnector.NIXL else {"kv_connector": config.kv_connector.value}
    lies = {} if config.expert_map is None else {"expert_map": [list(layer) for layer in config.expert_map]}
    return {
        "engine": config.engine,
        "num_devices": config.num_devices,
        "pools": [_pool_document(pool) for pool in config.pools],
        "router": config.router.value,
        "speculation": None if config.speculation is None else _speculation_document(config.speculation),
        **lies,
        **moved,
    }


def _speculation_document(speculation: Speculation) -> dict[str, Any]:
    document = asdict(speculation)
    if not speculation.method:
        del document["method"]
    return document


def serving_config_from_document(document: Mapping[str, Any]) -> ServingConfig:
    """Read back what :func:`serving_config_document` wrote.

    Raises:
        EmitError: fields are missing or unknown, values have no meaning, or the counts of devices contradict.
    """
    try:
        config = ServingConfig(
            engine=str(document["engine"]),
            pools=tuple(_pool_from(pool) for pool in document["pools"]),
            router=Router(document["router"]),
            speculation=None if document["speculation"] is None else Speculation(**document["speculation"]),
            expert_map=tuple(tuple(layer) for layer in document["expert_map"]) if "expert_map" in document else None,
            kv_connector=KvConnector(document.get("kv_connector", KvConnector.NIXL)),
        )
    except (KeyError, TypeError, ValueError) as error:
        what = f"field {error} is missing" if isinstance(error, KeyError) else str(error)
        raise EmitError(f"this is no serving configuration: {what}; plan again with this version") from error
    stated = document.get("num_devices", config.num_devices)
    if stated != config.num_devices:
        raise EmitError(f"the configuration says {stated} devices, its pools make {config.num_devices}; plan again")
    return config


def _pool_document(pool: Pool) -> dict[str, Any]:
    limits = asdict(pool.limits)
    del limits["admission"]  # not a choice of a plan
    tier: dict[str, Any] = {} if pool.kv_tier is None else {"kv_tier": asdict(pool.kv_tier)}
    weight = {} if pool.weight == 1 else {"weight": pool.weight}
    cap = {} if pool.power_cap_w is None else {"power_cap_w": pool.power_cap_w}
    way = "mps" if isinstance(pool.share, MpsShare) else "mig"
    share = {} if pool.share is None else {way: asdict(pool.share)}
    ffn = {} if pool.ffn is None else {"ffn": asdict(pool.ffn)}
    beyond = {} if pool.weight_tiers is None else {"weight_tiers": asdict(pool.weight_tiers)}
    if beyond:
        beyond["weight_tiers"]["way"] = beyond["weight_tiers"]["way"].value
        if not pool.weight_tiers or not pool.weight_tiers.drive_bytes:
            del beyond["weight_tiers"]["drive_bytes"], beyond["weight_tiers"]["drive_doubt"]
    return {
        "role": pool.role.value,
        "layout": asdict(pool.layout),
        "num_workers": pool.num_workers,
        "num_devices": pool.num_devices,
        "limits": limits,
        "quantization": asdict(pool.quantization),
        "node_type": pool.node_type,
        **tier,
        **weight,
        **cap,
        **share,
        **ffn,
        **beyond,
    }


def _pool_from(document: Mapping[str, Any]) -> Pool:
    return Pool(
        role=Role(document["role"]),
        layout=Layout(**document["layout"]),
        num_workers=int(document["num_workers"]),
        limits=EngineLimits(**document["limits"]),
        quantization=Quantization(**document["quantization"]),
        node_type=str(document["node_type"]),
        kv_tier=KvTier(**document["kv_tier"]) if "kv_tier" in document else None,
        weight=int(document.get("weight", 1)),
        power_cap_w=float(document["power_cap_w"]) if "power_cap_w" in document else None,
        ffn=FfnDevices(**document["ffn"]) if "ffn" in document else None,
        weight_tiers=_weight_tiers_from(document["weight_tiers"]) if "weight_tiers" in document else None,
        share=_share_from(document),
    )


def _share_from(document: Mapping[str, Any]) -> DeviceShare | None:
    if "mps" in document:
        return MpsShare(**document["mps"])
    return MigProfile(**document["mig"]) if "mig" in document else None


def _weight_tiers_from(document: Mapping[str, Any]) -> WeightTiers:
    return WeightTiers(**{**document, "way": Way(document["way"])})


def pins_text(config: ServingConfig) -> str:
    """The key of a spec that has the search look at this deployment.

    >>> from meshplan.planner.serving.problem.quantization import Quantization
    >>> own = {"num_workers": 2, "limits": EngineLimits(), "quantization": Quantization.uniform("fp8")}
    >>> pool = Pool(role=Role.MIXED, layout=Layout(tensor_parallel=4, pipeline_parallel=2), node_type="n", **own)
    >>> pins_text(ServingConfig(engine="vllm", pools=(pool,)))
    'fixed: {mode: aggregated, tensor_parallel: 4, pipeline_parallel: 2}'
    """
    pins = {pool.role: {k: v for k, v in asdict(pool.layout).items() if v > 1} for pool in config.pools}
    alone = pins.pop(Role.MIXED, None)
    said = {role.value: _flow(own) for role, own in pins.items()} if alone is None else alone
    return f"fixed: {_flow({'mode': 'disaggregated' if alone is None else 'aggregated', **said})}"


def _flow(mapping: Mapping[str, Any]) -> str:
    return "{" + ", ".join(f"{key}: {value}" for key, value in mapping.items()) + "}"
