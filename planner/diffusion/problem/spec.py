"""The diffusion question as users write it; every error at once with its path."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from meshplan.planner.cluster.spec import ClusterSpec, PriceSpec
from meshplan.planner.core.reading.spec_fields import MAX_USD, Count, Dollars, SpecModel, TimeInSeconds, Whole
from meshplan.planner.core.reading.spec_reader import read_spec

MAX_PIXELS, MAX_FRAMES, MAX_STEPS, MAX_BATCH = 16_384, 4096, 1000, 1024
MAX_RATE_PER_S, MAX_LATENCY_S = 1e6, 1e6
Pixels = Annotated[int, Whole(least=64, most=MAX_PIXELS)]


class DiffusionObjective(Enum):
    """What is best.

    ``latency`` is that of one batch; ``usd_per_item`` and ``energy`` are of one image or video.
    """

    LATENCY = "latency"
    THROUGHPUT_PER_DEVICE = "throughput_per_device"
    USD_PER_ITEM = "usd_per_item"
    NUM_DEVICES = "num_devices"
    ENERGY = "energy"


class DiffusionWorkloadSpec(SpecModel):
    """What is made, and how often; sizes that are left out are those of the model's own pipeline."""

    height: Pixels | None = Field(default=None, description="pixels")
    width: Pixels | None = Field(default=None, description="pixels")
    frames: Annotated[int, Whole(most=MAX_FRAMES)] | None = Field(default=None, description="of a video")
    steps: Annotated[int, Whole(most=MAX_STEPS)] | None = Field(default=None, description="denoising steps")
    batch_size: Annotated[int, Whole(most=MAX_BATCH)] | None = Field(
        default=None, description="items that a replica makes together; default: the plan chooses, up to 32"
    )
    request_rate_per_s: Annotated[float, Field(gt=0, le=MAX_RATE_PER_S, allow_inf_nan=False)] | None = Field(
        default=None, description="items asked for, per second; replicas are as many as carry it"
    )


class DiffusionSloSpec(SpecModel):
    """Limits of a plan."""

    latency_s: Annotated[float, Field(gt=0, le=MAX_LATENCY_S, allow_inf_nan=False), TimeInSeconds()] | None = Field(
        default=None,
        description="from the start of a batch to its decoded pictures, without waiting for a free replica",
    )
    usd_per_item: Annotated[float, Field(gt=0, le=MAX_USD, allow_inf_nan=False)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _knows_serving_keys(cls, value: Any) -> Any:
        if isinstance(value, Mapping):
            for key in value:
                if str(key).startswith(("ttft", "tpot", "itl", "e2e")):
                    raise ValueError(f"{key} is of language models; images and videos have latency_s and usd_per_item")
        return value


class DiffusionConstraintsSpec(SpecModel):
    """Limits on the deployment."""

    target: Literal["xdit"] = Field(default="xdit", description="engine whose rules the plan obeys")
    max_devices: Count | None = None
    max_usd_per_hour: Dollars | None = None
    max_power_w: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    stale_activations: bool = Field(
        default=False,
        description="PipeFusion may be chosen: patches see keys and values of the step before, which changes pictures",
    )
    price: PriceSpec = PriceSpec()


class DiffusionFixedSpec(SpecModel):
    """Pinned choices; the search decides the others."""

    ulysses: Count | None = None
    ring: Count | None = None
    cfg_parallel: Count | None = None
    pipefusion: Count | None = None
    tensor_parallel: Count | None = None
    replicas: Count | None = None
    batch_size: Annotated[int, Whole(most=MAX_BATCH)] | None = None

    def pinned(self) -> dict[str, int]:
        """The pinned choices alone."""
        return {name: int(value) for name, value in self.model_dump(exclude_none=True).items()}


class DiffusionSpec(SpecModel):
    """A diffusion question: images or videos from a diffusion transformer."""

    kind: Literal["diffusion"]
    model: str = Field(min_length=1, description="diffusion model of the catalog, such as flux.1-dev, or its id")
    cluster: ClusterSpec
    workload: DiffusionWorkloadSpec = DiffusionWorkloadSpec()
    slo: DiffusionSloSpec = DiffusionSloSpec()
    objective: DiffusionObjective = DiffusionObjective.LATENCY
    constraints: DiffusionConstraintsSpec = DiffusionConstraintsSpec()
    fixed: DiffusionFixedSpec = DiffusionFixedSpec()

    @model_validator(mode="after")
    def _consistent(self) -> DiffusionSpec:
        asked, pinned = self.workload.batch_size, self.fixed.batch_size
        if asked is not None and pinned is not None and asked != pinned:
            raise ValueError(f"workload.batch_size is {asked} and fixed.batch_size {pinned}: give one of them")
        return self


def read_diffusion_spec(document: Mapping[str, Any]) -> DiffusionSpec:
    """Validate a document; every problem at once.

    Raises:
        SpecError: with the path and the fix of each problem.
    """
    return read_spec(DiffusionSpec, document)
