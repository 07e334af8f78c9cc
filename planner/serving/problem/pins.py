"""Schema of what a serving spec pins: choices of all workers, and of those of each role."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import Field, model_validator

from meshplan.planner.core.reading.spec_fields import Count, SpecModel, Whole
from meshplan.planner.serving.problem.quantization import SCHEMES

Share = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]
if TYPE_CHECKING:
    SchemeName = str
else:  # built from the table, so that a new scheme is known here too; mypy reads only literals that are written out
    SchemeName = Literal[tuple(SCHEMES)]


class LayoutSpec(SpecModel):
    """Pinned choices of one worker."""

    tensor_parallel: Count | None = None
    pipeline_parallel: Count | None = None
    attention_data_parallel: Count | None = None
    expert_parallel: Count | None = None
    expert_tensor_parallel: Count | None = None
    context_parallel: Count | None = None
    max_num_seqs: Count | None = None
    max_batched_tokens: Count | None = None
    memory_fraction: Share | None = Field(
        default=None,
        description="share of device memory that weights, workspace and KV cache take; default: the engine's own",
    )
    num_workers: Count | None = Field(default=None, description="replicas")
    stream_interval: Count | None = Field(default=None, description="tokens sent to a client at once; default: 1")
    api_servers: Count | None = Field(
        default=None,
        description="vLLM: API servers of a worker, a processor core each; default: one, or one for each attention "
        "data-parallel rank",
    )

    def pinned(self) -> dict[str, int]:
        """The pinned numbers of devices, requests, tokens and workers alone."""
        chosen = self.model_dump(include=set(LayoutSpec.model_fields) - {"memory_fraction"}, exclude_none=True)
        return {name: int(value) for name, value in chosen.items()}

    @property
    def pins_something(self) -> bool:
        """Whether any choice of a worker is pinned."""
        return bool(self.pinned()) or self.memory_fraction is not None


class ServingFixedSpec(LayoutSpec):
    """Pinned choices; the search decides the others."""

    mode: Literal["aggregated", "disaggregated"] | None = None
    device_experts: Annotated[int, Whole(least=0)] | None = Field(
        default=None, description="routed experts of each MoE layer in device memory, the others in cluster.host_memory"
    )
    quantization: SchemeName | None = None
    prefill: LayoutSpec = LayoutSpec()
    decode: LayoutSpec = LayoutSpec()

    @model_validator(mode="after")
    def _roles_are_of_the_mode(self) -> Self:
        roles = [name for name in ("prefill", "decode") if getattr(self, name).pins_something]
        if roles and self.mode == "aggregated":
            raise ValueError(f"{' and '.join(roles)} is of disaggregated workers: leave it or mode: aggregated out")
        return self

    @property
    def is_disaggregated(self) -> bool | None:
        """The mode that is pinned, by itself or by a choice of one role alone; None where the plan chooses."""
        if self.prefill.pins_something or self.decode.pins_something:
            return True
        return None if self.mode is None else self.mode == "disaggregated"
