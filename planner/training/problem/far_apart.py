"""Sites that a slow network joins, as users ask about them: ways to train over them, and what each costs in tokens.

What the ways are and what they cost stands in :mod:`meshplan.planner.training.far_apart`.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import Field, model_validator

from meshplan.planner.core.reading.spec_fields import SpecModel, Whole

WayName = Literal[
    "data-parallel", "diloco", "streaming-diloco", "powersgd", "top-k", "8-bit", "1-bit", "async-pipeline"
]
DATA_PARALLEL: Final = "data-parallel"
DILOCO: Final = "diloco"
STREAMING: Final = "streaming-diloco"
POWERSGD: Final = "powersgd"
TOP_K: Final = "top-k"
EIGHT_BIT: Final = "8-bit"
ONE_BIT: Final = "1-bit"
ASYNC_PIPELINE: Final = "async-pipeline"
WAYS: tuple[WayName, ...] = (DATA_PARALLEL, DILOCO, STREAMING, POWERSGD, TOP_K, EIGHT_BIT, ONE_BIT, ASYNC_PIPELINE)
# Ways that exchange outer gradients after many steps; the others exchange something in every step: gradients, or the
# activations and their gradients of a pipeline over sites that never flushes.
LOCAL_UPDATES = (DILOCO, STREAMING)

MOST_SYNC_STEPS = 10_000
MOST_FRAGMENTS = 1024
MOST_RANK = 4096
# Tokens more for the same loss beyond which nobody would ask: ten times as many.
MOST_MORE_TOKENS = 9.0

MoreTokens = Annotated[float, Field(ge=0, le=MOST_MORE_TOKENS, allow_inf_nan=False)]
Bits = Literal[32, 16, 8, 4]


class FarApartSpec(SpecModel):
    """Ways to train over sites, compared in one table.

    A way is chosen only where ``more_tokens`` says what it costs in tokens, or ``way`` asks for it: its loss after the
    same tokens is not that of synchronous training.
    """

    way: WayName | None = Field(default=None, description="take this one, whatever it costs")
    ways: Annotated[list[WayName], Field(min_length=1, max_length=len(WAYS))] = Field(
        default=list(WAYS), description="what to compare, beside the synchronous plan and the best single site"
    )
    more_tokens: dict[WayName, MoreTokens] = Field(
        default={}, description="tokens more for the same loss, your number for each way: {diloco: 0.03} is 3 %"
    )
    sync_steps: Annotated[int, Whole(most=MOST_SYNC_STEPS)] | None = Field(
        default=None, description="inner steps between exchanges, H; the fewest that hide them unless said"
    )
    outer_gradient_bits: Annotated[list[Bits], Field(min_length=1, max_length=4)] = Field(
        default=[32, 4], description="of an outer gradient on the wire: 32, 16, 8, 4"
    )
    fragments: Annotated[int, Whole(least=2, most=MOST_FRAGMENTS)] | None = Field(
        default=None, description="of streaming-diloco, exchanged one after the other; 2 unless said"
    )
    overlap_steps: Annotated[int, Whole(most=MOST_SYNC_STEPS)] | None = Field(
        default=None, description="inner steps during which a fragment is on its way, τ; the fewest that hide it"
    )
    outer_state: Literal["auto", "device", "host"] = Field(
        default="auto", description="where the outer optimizer's copy and momentum lie; on the devices if they fit"
    )
    powersgd_rank: Annotated[int, Whole(most=MOST_RANK)] = Field(default=4, description="r of powersgd")
    top_k_share: Annotated[float, Field(gt=0, le=0.5)] = Field(default=0.001, description="of gradients that are sent")
    warm_up_share: Annotated[float, Field(ge=0, lt=1)] = Field(
        default=0.2, description="of the steps of 1-bit that send whole gradients"
    )

    def may_choose(self, way: WayName) -> bool:
        """Whether a way is chosen if it is best: the one asked for, else those whose tokens are accounted for."""
        return way in self.more_tokens if self.way is None else way == self.way

    @model_validator(mode="after")
    def _steps_fit(self) -> FarApartSpec:
        pieces = self.fragments or 2
        if self.sync_steps is not None and self.fragments is not None and self.sync_steps % pieces:
            near = max(pieces, self.sync_steps // pieces * pieces)
            raise ValueError(f"sync_steps {self.sync_steps} is no multiple of fragments {pieces}; nearest: {near}")
        if self.sync_steps is not None and self.overlap_steps is not None:
            most = self.sync_steps // pieces - 1
            if self.overlap_steps > most:
                raise ValueError(
                    f"overlap_steps {self.overlap_steps}: with {pieces} fragments and sync_steps {self.sync_steps} one "
                    f"is sent every {self.sync_steps // pieces} steps, so at most {most}"
                )
        if self.way is not None and self.way not in self.ways:
            raise ValueError(f"way {self.way} is not among ways: {', '.join(self.ways)}")
        return self
