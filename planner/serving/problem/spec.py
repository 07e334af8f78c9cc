"""Schema of a serving spec: pydantic models that report every error at once, with its path."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from meshplan.catalogs.constants.machines.device_shares import MOST_REPLICAS
from meshplan.catalogs.constants.speculation import speculation_profiles
from meshplan.planner.cluster.spec import ClusterSpec, PriceSpec
from meshplan.planner.core.reading.spec_fields import Count, Dollars, SpecModel, TimeInSeconds, Whole
from meshplan.planner.core.reading.spec_reader import read_spec
from meshplan.planner.serving.problem.config import KV_STORES, KvConnector, KvTier, Speculation
from meshplan.planner.serving.problem.expert_routing import ExpertRoutingSpec
from meshplan.planner.serving.problem.pins import SchemeName, ServingFixedSpec
from meshplan.planner.serving.problem.problem import ServingObjective
from meshplan.planner.serving.problem.quantization import KV_CACHE_BYTES
from meshplan.planner.serving.problem.slo import Slo, known_slos, slos_of
from meshplan.planner.serving.problem.speculation import METHODS
from meshplan.planner.serving.problem.workload.spec import MAX_LATENCY_S, ServingWorkloadSpec

GIB, GB = 2.0**30, 1e9

Latency = Annotated[float, Field(gt=0, le=MAX_LATENCY_S, allow_inf_nan=False), TimeInSeconds()]
if TYPE_CHECKING:
    KvCacheFormat = str
    KvStore = str
else:  # built from the tables, so that a new format is known here too; mypy reads only literals that are written out
    KvCacheFormat = Literal[tuple(KV_CACHE_BYTES)]
    KvStore = Literal[tuple(KV_STORES)]


SpeculationMethod = Literal["ngram", "eagle3", "mtp", "draft_model"]
# Methods whose drafts come from a checkpoint of their own.
_LOADED: tuple[SpeculationMethod, ...] = ("eagle3", "draft_model")
Yield = Annotated[float, Field(ge=1, le=65, allow_inf_nan=False)]


class SpeculationSpec(SpecModel):
    """Speculative decoding: with stated drafts, or with a method and depth that the plan chooses (choose)."""

    num_draft_tokens: Annotated[int, Whole(most=64)] | None = Field(
        default=None, description="tokens drafted an iteration; not with choose"
    )
    acceptance: Annotated[float, Field(ge=0, le=1)] | None = Field(
        default=None, description="probability that a drafted token is accepted; not with choose"
    )
    draft_cost: Annotated[float, Field(ge=0, le=1)] | None = Field(
        default=None,
        description="time of one draft step over one decode iteration of the model; 0, or with choose by the method",
    )
    method: SpeculationMethod | None = Field(default=None, description="where drafts come from; not with choose")
    choose: Annotated[list[SpeculationMethod], Field(min_length=1)] | None = Field(
        default=None, description="methods that the plan may take, each at every depth of the profile, or none of them"
    )
    profile: str | dict[SpeculationMethod, dict[Annotated[int, Field(ge=1, le=64)], Yield]] = Field(
        default="sharegpt",
        description="tokens of a step by method and drafted tokens, or the name of a shipped profile",
    )

    draft_model: str | None = Field(
        default=None,
        min_length=1,
        description="checkpoint of the draft, for launcher files; if the catalog has it, its memory and cost count",
    )

    @model_validator(mode="after")
    def _is_stated_or_chosen(self) -> Self:
        stated = {"num_draft_tokens": self.num_draft_tokens, "acceptance": self.acceptance}
        if self.choose is None:
            missing = [name for name, value in stated.items() if value is None]
            if missing:
                raise ValueError(f"{' and '.join(missing)} missing (or choose: a list of {', '.join(METHODS)})")
            if "profile" in self.model_fields_set:
                raise ValueError("profile is of choose: acceptance says what stated drafts yield; leave profile out")
            if self.draft_model is not None and self.method not in (None, *_LOADED):
                raise ValueError(f"draft_model is of {' or '.join(_LOADED)}, not of {self.method}: leave it out")
            return self
        if given := [name for name, value in {**stated, "method": self.method}.items() if value is not None]:
            raise ValueError(f"{', '.join(given)} cannot be stated beside choose, which finds them")
        if self.draft_model is not None and not set(_LOADED) & set(self.choose):
            raise ValueError(f"draft_model is of {' or '.join(_LOADED)}, and choose has neither: leave it out")
        held = self.acceptance_profile
        if without := [method for method in self.choose if not held.get(method)]:
            raise ValueError(
                f"the profile says nothing of {', '.join(without)}: give tokens of a step by drafted tokens, such as "
                f"profile: {{{without[0]}: {{1: 1.7, 2: 2.1}}}}"
            )
        for method, yields in held.items():
            if wrong := [drafted for drafted, gained in yields.items() if gained > drafted + 1]:
                raise ValueError(f"profile.{method}.{wrong[0]}: a step of {wrong[0]} drafts yields at most one more")
        if "draft_model" in self.choose and self.draft_cost is None and self.draft_model is None:
            raise ValueError(
                "draft_cost is missing: what one step of the draft model takes over one of the model (or name a "
                "draft_model that the catalog has)"
            )
        return self

    @property
    def acceptance_profile(self) -> Mapping[str, Mapping[int, float]]:
        """Tokens of a step by method and drafted tokens.

        Raises:
            ValueError: no shipped profile has that name.
        """
        if not isinstance(self.profile, str):
            return {str(method): yields for method, yields in self.profile.items()}
        shipped = speculation_profiles()
        if self.profile not in shipped:
            raise ValueError(f"no profile {self.profile!r} is shipped (there are {', '.join(sorted(shipped))})")
        return shipped[self.profile]

    @property
    def value(self) -> Speculation | None:
        """As the estimator takes it; None where the plan is to choose."""
        if self.num_draft_tokens is None or self.acceptance is None:
            return None
        return Speculation(
            num_draft_tokens=self.num_draft_tokens,
            acceptance=self.acceptance,
            draft_cost=self.draft_cost or 0.0,
            method=self.method or "",
        )


class KvTierSpec(SpecModel):
    """A second tier of KV cache: host memory, NVMe or other hosts' memory; stated, or sized by the plan (choose)."""

    store: KvStore = "host"
    gib_per_device: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = Field(
        default=None, description="capacity for each device; not with choose"
    )
    gb_per_s_per_device: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = Field(
        default=None, description="rate at which a device's share of the cache is fetched; not with choose"
    )
    latency_s: Annotated[float, Field(ge=0, le=MAX_LATENCY_S), TimeInSeconds()] = Field(
        default=0.0, description="latency of one fetch"
    )
    choose: Annotated[list[KvStore], Field(min_length=1)] | None = Field(
        default=None, description="stores of which the plan may take one, in the size that its prefixes need, or none"
    )

    @model_validator(mode="after")
    def _is_stated_or_chosen(self) -> Self:
        stated = {"gib_per_device": self.gib_per_device, "gb_per_s_per_device": self.gb_per_s_per_device}
        missing = [name for name, value in stated.items() if value is None]
        if self.choose is None and missing:
            raise ValueError(f"{' and '.join(missing)} missing (or choose: a list of {', '.join(KV_STORES)})")
        if self.choose is not None and self.model_fields_set != {"choose"}:
            given = ", ".join(sorted(self.model_fields_set - {"choose"}))
            raise ValueError(f"{given} cannot be stated beside choose, which finds them")
        return self

    @property
    def value(self) -> KvTier | None:
        """As the simulation takes it; None where the plan is to choose."""
        if self.gib_per_device is None or self.gb_per_s_per_device is None:
            return None
        return KvTier(
            store=self.store,
            bytes_per_device=self.gib_per_device * GIB,
            bytes_per_s_per_device=self.gb_per_s_per_device * GB,
            latency_s=self.latency_s,
        )


class ServingConstraintsSpec(SpecModel):
    """Limits of a plan."""

    max_devices: Count | None = None
    max_usd_per_hour: Dollars | None = None
    max_power_w: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    rent: Literal["node", "device"] = Field(
        default="node", description="what is paid for: whole nodes, or single devices at a share of the node's price"
    )
    target: Literal["vllm", "sglang", "trtllm", "llama.cpp"] = Field(
        default="vllm", description="engine whose rules the plan obeys"
    )
    price: PriceSpec = PriceSpec()


class ServingSpec(SpecModel):
    """A serving question."""

    kind: Literal["serving"]
    model: str = Field(min_length=1, description="model of the catalog, or path of a Hugging Face config.json")
    cluster: ClusterSpec
    workload: ServingWorkloadSpec
    slo: Annotated[dict[str, Latency], AfterValidator(known_slos)] = Field(
        default_factory=dict, description="such as {ttft_p99_s: 3.0, tpot_p95_s: 50 ms}"
    )
    objective: ServingObjective = Field(
        default=ServingObjective.THROUGHPUT_PER_DEVICE,
        description="throughput_per_device counts all devices of rented nodes; with a rate or a trace the parts of a "
        "node in use that divide it, three of eight as four; with rent: device those in use",
    )
    quantization: list[SchemeName] | None = Field(
        default=None, min_length=1, description="formats that the plan may choose from; default: as published"
    )
    kv_cache: KvCacheFormat = "bf16"
    kv_tier: KvTierSpec | None = Field(
        default=None, description="keeps prefixes that the devices have no room for; with workload.num_prefixes"
    )
    kv_connector: KvConnector | None = Field(
        default=None,
        description="what moves KV caches between workers that prefill and that decode: nixl, which plans assume, or "
        "mooncake (vLLM, SGLang)",
    )
    speculation: SpeculationSpec | None = None
    experts: ExpertRoutingSpec | None = Field(
        default=None,
        description="recorded or named routing of a mixture of experts; default: the skew that kernels were timed with",
    )
    power_caps_w: list[Annotated[float, Field(gt=0, allow_inf_nan=False)]] | None = Field(
        default=None,
        min_length=1,
        description="power limits of a device that the plan may choose from (nvidia-smi --power-limit); one pins it; "
        "default: the board's own",
    )
    mig: list[str] | Literal["choose"] | None = Field(
        default=None,
        min_length=1,
        description="profiles of NVIDIA's MIG into which the plan may cut every device (3g.40gb), one worker in each "
        "instance, or choose for all of the device; default: whole devices",
    )
    mps: list[Annotated[int, Field(ge=2, le=MOST_REPLICAS)]] | Literal["choose"] | None = Field(
        default=None,
        min_length=1,
        description="numbers of replicas that the plan may run on one device at the same time under CUDA's MPS, or "
        "choose for 2, 3 and 4; vLLM alone; default: one server a device",
    )
    attention_ffn: Literal["choose", "disaggregated"] | None = Field(
        default=None,
        description="choose: decode workers may have their MLPs or experts on devices of their own; disaggregated: "
        "they must (no engine launches it); default: never",
    )
    constraints: ServingConstraintsSpec = ServingConstraintsSpec()
    fixed: ServingFixedSpec = ServingFixedSpec()

    @property
    def slos(self) -> tuple[Slo, ...]:
        """The latency limits."""
        return slos_of(self.slo)


def read_serving_spec(document: Mapping[str, Any]) -> ServingSpec:
    """Validate a document; every problem at once.

    Raises:
        SpecError: with the path and the fix of each problem.
    """
    return read_spec(ServingSpec, document)
