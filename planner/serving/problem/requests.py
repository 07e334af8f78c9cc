"""The question of a serving plan as data: requests, objectives, and the choices that a plan makes.

A *layout* says how one engine instance (a worker) lies on its devices, a *pool* how many alike workers share a role,
a *config* which pools there are: one of the role ``mixed`` (aggregated), or ``prefill`` and ``decode``
(disaggregated, arXiv:2401.09670, arXiv:2311.18677).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from meshplan.planner.serving.problem.quantization import Quantization

PERCENTILES = ("mean", "p50", "p90", "p95", "p99")
LATENCIES = ("ttft", "tpot", "itl", "e2e")


class Role(Enum):
    """What a pool of workers does."""

    MIXED = "mixed"  # prefill and decode in the same engine
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How one engine instance lies on its devices.

    Devices = tensor × pipeline × attention-data × context. Expert layers regroup the devices of a stage as
    expert × expert-tensor.

    Args:
        tensor_parallel: devices that split each attention block.
        pipeline_parallel: stages.
        attention_data_parallel: ranks with attention and KV cache of their own that meet in the experts.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """When a scheduler that is at work lets prompts in: time to the first token traded for fuller prefills.

    An idle worker lets everyone in at once.

    Args:
        receive_interval: decode iterations from one look at what has arrived to the next; an iteration with prompts is
            followed by a look (SGLang ``--scheduler-recv-interval``).
        batch_wait_steps: most iterations for which prompts wait for others to be prefilled with (TensorRT-LLM
            ``batch_wait_timeout_iters``); 0 for none.
        batch_wait_share: share of an iteration's token budget at which that wait is over
            (``batch_wait_max_tokens_ratio``).
        balance_wait_steps: iterations from one chance of prompts to the next while fewer wait than there are lanes, so
            that attention-data ranks prefill together (``attention_dp_config``: ``enable_balance`` and
            ``timeout_iters``); 0 for none.
    """

    receive_interval: int = 1
    batch_wait_steps: int = 0
    batch_wait_share: float = 1.0
    balance_wait_steps: int = 0

    @property
    def is_immediate(self) -> bool:
        """Nobody waits by a rule."""
        return self == Admission()


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """What the engine's scheduler is told.

    Args:
        max_num_seqs: most requests running in one worker (all of its attention-data ranks together).
        max_batched_tokens: token budget of one iteration of one attention-data rank: prefill is cut into chunks so
            that it fits (Sarathi-Serve, arXiv:2403.02310).
        chunked_prefill: prompts may be cut and share an iteration with decodes; otherwise prompts are prefilled
            between decode iterations, whole unless one is longer than the budget.
        memory_fraction: share of device memory that weights, activations and KV cache may take.
        prefix_caching: cached prefixes are not prefilled again.
        cuda_graphs: iterations are replayed, not launched kernel by kernel.
        custom_all_reduce: the engine's own all-reduce kernels inside a node, not NCCL's.
        admission: when prompts are let in; a plan leaves it as it is, measured servers may have set it.
    """

    max_num_seqs: int = 256
    max_batched_tokens: int = 8192
    chunked_prefill: bool = True
    memory_fraction: float = 0.9
    prefix_caching: bool = False
    cuda_graphs: bool = True
    custom_all_reduce: bool = True
    admission: Admission = Admission()


KV_STORES = ("host", "nvme")


@dataclass(frozen=True, slots=True, kw_only=True)
class KvTier:
    """Where the KV cache of prefixes is kept that the devices have no room for.

    Args:
        store: ``host`` memory or ``nvme``.
        bytes_per_device: of it, for each device of a worker.
        bytes_per_s_per_device: at which a device's share of the cache comes back.
        latency_s: of one fetch.
    """

    store: str
    bytes_per_device: float
    bytes_per_s_per_device: float
    latency_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """Alike workers in one role.

    Args:
        role: see :class:`Role`.
        layout: of one worker.
        num_workers: workers behind the router.
        limits: of each worker's scheduler.
        quantization: formats of weights and KV cache.
        node_type: catalog name of the nodes that the workers lie on.
        kv_tier: beside the cache on the devices; None: prefixes that have no room there are lost.
    """

    role: Role
    layout: Layout
    num_workers: int
    limits: EngineLimits
    quantization: Quantization
    node_type: str
    kv_tier: KvTier | None = None

    @property
    def num_devices(self) -> int:
        """Devices of all workers."""
        return self.layout.num_devices * self.num_workers


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """Speculative decoding: a draft proposes, the model verifies (arXiv:2211.17192).

    Args:
        num_draft_tokens: γ, proposed per iteration.
        acceptance: α, probability that one proposed token is accepted, given those before it.
        draft_cost: time of one draft step over one decode iteration of the model.
    """

    num_draft_tokens: int
    acceptance: float
    draft_cost: float = 0.0

    @property
    def tokens_per_step(self) -> float:
        """Expected tokens per iteration: (1 − α^(γ+1)) / (1 − α), equation 1 of the paper.

        >>> Speculation(num_draft_tokens=1, acceptance=0.5).tokens_per_step
        1.5
        """
        if self.acceptance >= 1.0:
            return self.num_draft_tokens + 1.0
        return float((1.0 - self.acceptance ** (self.num_draft_tokens + 1)) / (1.0 - self.acceptance))


class Router(Enum):
    """How requests reach workers."""

    ROUND_ROBIN = "round_robin"
    LEAST_LOADED = "least_loaded"  # fewest tokens waiting and running
    PREFIX_AWARE = "prefix_aware"  # the worker that holds the longest prefix, unless it is overloaded


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingConfig:
    """Every choice of one serving plan.

    Args:
        engine: ``vllm``, ``sglang`` or ``trtllm``.
        pools: one of role MIXED, or one PREFILL and one DECODE.
        router: see :class:`Router`.
        speculation: None without a draft.
    """

    engine: str
    pools: tuple[Pool, ...]
    router: Router = Router.LEAST_LOADED
    speculation: Speculation | None = None

    @property
    def is_disaggregated(self) -> bool:
        """Prefill and decode run in different workers."""
        return len(self.pools) > 1

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


class Arrival(Enum):
    """How requests come."""

    CLOSED_LOOP = "closed_loop"  # a constant number in flight; each completion starts the next
    POISSON = "poisson"
    GAMMA = "gamma"  # bursty: gaps of a Gamma distribution with coefficient of variation > 1
    TRACE = "trace"
    ALL_AT_ONCE = "all_at_once"  # all queued at the start: offline throughput
    STATIC_BATCH = "static_batch"  # one batch, from its first token to its last


@dataclass(frozen=True, slots=True, kw_only=True)
class Requests:
    """The requests of a run, in order of arrival.

    Args:
        arrival_s: [n] seconds from the start, non-decreasing; in a closed loop only those of the first requests count.
        input_length: [n] prompt tokens, ≥ 1.
        output_length: [n] generated tokens, ≥ 1; the first comes out of prefill.
        concurrency: requests in flight of a closed loop; None for open arrivals.
        think_s: from a completion to the request that it starts, in a closed loop.
        cached_tokens: [n] prompt tokens whose KV a worker may hold already; None for none.
        prefix: [n] identity of the shared prefix, for routing; −1 without one. None for none.
        priority: [n] smaller goes first; None where all are equal.
    """

    arrival_s: NDArray[np.float64]
    input_length: NDArray[np.int64]
    output_length: NDArray[np.int64]
    concurrency: int | None = None
    think_s: float = 0.0
    cached_tokens: NDArray[np.int64] | None = None
    prefix: NDArray[np.int64] | None = None
    priority: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self.arrival_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingWorkload:
    """What the service is asked to do.

    Args:
        arrival: see :class:`Arrival`.
        input_length: mean prompt tokens of a request.
        output_length: mean generated tokens.
        length_ratio: lengths are uniform between this share of nominal and nominal; 1 for fixed lengths.
        request_rate_per_s: of open arrivals; None otherwise.
        concurrency: requests in flight of a closed loop, or the size of a static batch; None otherwise.
        think_s: from a completion in a closed loop to the request that it starts; above 0 that request misses the
            iteration that follows.
        burstiness: coefficient of variation of the gaps between arrivals, of GAMMA.
        num_requests: to simulate; None lets the simulator choose.
        prefix_hit_rate: share of prompt tokens found in the prefix cache.
        num_prefixes: distinct prefixes among which the requests are dealt at random, so that the share is found only
            where a worker still holds the prefix; None: it always does.
        trace: recorded requests, of TRACE.
    """

    arrival: Arrival
    input_length: float
    output_length: float
    length_ratio: float = 1.0
    request_rate_per_s: float | None = None
    concurrency: int | None = None
    think_s: float = 0.0
    burstiness: float = 1.0
    num_requests: int | None = None
    prefix_hit_rate: float = 0.0
    num_prefixes: int | None = None
    trace: Requests | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """One promise on latency.

    Args:
        metric: ``ttft``, ``tpot``, ``itl`` or ``e2e``.
        percentile: one of :data:`PERCENTILES`.
        limit_s: s.
    """

    metric: str
    percentile: str
    limit_s: float

    @property
    def key(self) -> str:
        """As in a spec: ``ttft_p99_s``."""
        return f"{self.metric}_{self.percentile}_s"


class ServingObjective(Enum):
    """What a serving plan is best at."""

    THROUGHPUT_PER_DEVICE = "throughput_per_device"  # output tokens/s per device
    USD_PER_MILLION_TOKENS = "usd_per_million_tokens"  # of output tokens
    NUM_DEVICES = "num_devices"
    MAX_REQUEST_RATE = "max_request_rate"
    ENERGY = "energy"  # joules per output token


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingLimits:
    """What a plan must stay within; None = no limit.

    Args:
        max_devices: by node type.
        max_usd_per_hour: of the devices in use.
        max_power_w: of the devices in use.
    """

    max_devices: Mapping[str, int] = field(default_factory=dict)
    max_usd_per_hour: float | None = None
    max_power_w: float | None = None
