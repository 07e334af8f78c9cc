"""A diffusion plan's JSON as it may come from anybody; see :mod:`meshplan.planner.core.plan_document`."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from meshplan.planner.core.plan_document import (
    Closed,
    Count,
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
)
from meshplan.planner.diffusion.problem.spec import DiffusionSpec

_Degree = Annotated[int, Field(ge=1, le=100_000)]
_Size = Annotated[int, Field(ge=1, le=10**6)]
_Word = Annotated[str, Field(pattern=r"^([\w][\w.+/-]{0,199})?$")]
_Source = Annotated[str, Field(pattern=r"^https://huggingface\.co/[\w.-]+/[\w.-]+$")]


class _Config(Closed):
    ulysses: _Degree
    ring: _Degree
    cfg_parallel: Literal[1, 2]
    pipefusion: _Degree
    tensor_parallel: _Degree
    replicas: _Degree
    batch_size: _Degree


class _Xdit(Section):
    runner: _Word
    script: _Word

    @model_validator(mode="after")
    def _starts_somewhere(self) -> Self:
        if bool(self.runner) == bool(self.script):
            raise ValueError("a model is started by a runner or by a script")
        return self


class _Vae(Section):
    tiled: bool


class _Model(Section):
    slug: Name
    name: Text
    source: _Source
    xdit: _Xdit
    vae: _Vae


class _Job(Closed):
    height: _Size
    width: _Size
    frames: _Size
    steps: _Size


class _Calibration(Section):
    architecture: Text
    num_runs: Count


class _Provenance(Section):
    model: _Model
    job: _Job
    calibration: _Calibration
    node_type: Name
    devices_per_host: _Degree
    unmeasured: list[Text]


class _Worst(Closed):
    transformer_bytes: Share
    text_encoders_and_vae_bytes: Share
    activation_bytes: Share
    context_bytes: Share
    typical_bytes: Share
    bound_bytes: Share


class _Memory(Section):
    worst: _Worst
    usable_bytes: Positive


class _Row(Closed):
    config: _Config
    num_devices: Count
    why: Text
    latency_s: Number
    images_per_s: Number | None = None
    videos_per_s: Number | None = None
    power_w: Number | None = None
    energy_per_item_j: Number | None = None
    usd_per_item: Number | None = None
    memory_bound_bytes: Share


class _Change(Section):
    change: Text


class _Miss(Section):
    config: _Config
    label: Text
    limit: Text
    excess_text: Text


class _Solution(SolutionDocument):
    nearest_miss: _Miss | None = None
    num_devices: Count = 0
    least_change: tuple[_Change, ...] = ()
    utilization: Share = 1.0
    broken: tuple[Text, ...] = ()


class DiffusionPlanDocument(PlanDocument):
    """A plan of the kind ``diffusion``."""

    spec: DiffusionSpec
    config: _Config | Nothing
    provenance: _Provenance
    memory: _Memory | Nothing
    breakdown: list[PartDocument]
    alternatives: list[_Row]
    rejected: list[RejectedDocument]
    solution: _Solution

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        if isinstance(self.config, Nothing):
            if self.solution.status != "infeasible":
                raise ValueError(f"config is empty, and the status {self.solution.status}")
            return self
        if isinstance(self.memory, Nothing) or "latency_s" not in self.predicted:
            raise ValueError("a plan with a configuration predicts latency_s and has its memory")
        return self


PLAN = DiffusionPlanDocument
