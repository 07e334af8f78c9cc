"""``run:`` of a training spec: what the run meets besides its steps."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from meshplan.planner.core.reading.spec_fields import BytesPerS, Seconds, SpecModel
from meshplan.planner.goodput.published import COUNTED

# Every failure of a node each minute, and a device that takes ten times as long: beyond that nothing trains.
MOST_FAILURES, MOST_SLOWDOWN = 1440.0, 10.0
_Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]


class CheckpointSpec(SpecModel):
    """How states are saved."""

    interval: Seconds | None = Field(default=None, description="training between two checkpoints; the best unless said")
    store_bandwidth: BytesPerS | None = Field(
        default=None, description="rate at which the store takes the whole cluster's checkpoint; 10 GB/s unless said"
    )
    asynchronous: Annotated[bool, Field(strict=True)] = Field(
        default=True, description="written in the background after a copy to the hosts; false: training waits"
    )
    blocking_time: Seconds | None = Field(
        default=None, description="training waits so long for a checkpoint; worked out from its bytes unless said"
    )


class CountedSpec(SpecModel):
    """Interruptions that were counted on this cluster, such as in the run so far."""

    interruptions: Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)] = Field(description="how many")
    node_days: Annotated[float, Field(gt=0, le=1e12, allow_inf_nan=False)] = Field(
        description="nodes × days of training that they were counted in"
    )


class RunSpec(SpecModel):
    """A run of all training tokens, with what interrupts it."""

    failures: Literal[tuple(COUNTED)] | None = Field(  # type: ignore[valid-type]  # names from the table
        default=None, description="interruptions as an operator counted them"
    )
    failures_per_node_day: Annotated[float, Field(ge=0, le=MOST_FAILURES, allow_inf_nan=False)] | None = Field(
        default=None, description="interruptions of one node in a day, such as 0.004"
    )
    counted: CountedSpec | None = Field(
        default=None, description="interruptions counted on this cluster; they narrow what is believed of its rate"
    )
    restart_time: Seconds | None = Field(
        default=None, description="from an interruption to the first new step; 10 min unless said"
    )
    broken_share: _Share | None = Field(
        default=None, description="share of interruptions after which a node needs repair; 0.68 unless said"
    )
    repair_time: Seconds | None = Field(default=None, description="until a broken node is back; 1 d unless said")
    silent_share: _Share = Field(default=0.0, description="share of interruptions by damage that is older (silent)")
    silent_age: Seconds | None = Field(default=None, description="age of that damage: younger checkpoints are useless")
    straggler_slowdown: Annotated[float, Field(ge=1, le=MOST_SLOWDOWN, allow_inf_nan=False)] = Field(
        default=1.0, description="margin for slow devices: steps take so many times as long"
    )
    checkpoint: CheckpointSpec = CheckpointSpec()
    availability: str | None = Field(
        default=None,
        min_length=1,
        description="CSV of time_s,nodes[,usd_per_node_hour][,trace]: nodes that come and go, such as spot instances",
    )
    finish_by: Seconds | None = Field(
        default=None, description="when the run should have ended, such as '30 d'; its probability is told"
    )

    @model_validator(mode="after")
    def _consistent(self) -> RunSpec:
        if self.failures is not None and self.failures_per_node_day is not None:
            raise ValueError("give either failures (counted by an operator) or failures_per_node_day (yours)")
        if (self.silent_share > 0.0) != (self.silent_age is not None):
            raise ValueError("silent_share and silent_age go together")
        return self
