"""Schema of a sweep file: a spec, the fields that vary, and how the answers are compared."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from meshplan.planner.core.kinds import DEFAULT_TOP
from meshplan.planner.core.reading.documents import read_document, read_question
from meshplan.planner.core.reading.doors import STUDY, refuse_other
from meshplan.planner.core.reading.spec_fields import Bytes, SpecModel, Whole
from meshplan.planner.core.reading.spec_reader import read_spec

KIND = "sweep"
MAX_TOP = 1000
MAX_SECONDS = 1e7
Limit = Annotated[float, Field(gt=0, le=MAX_SECONDS, allow_inf_nan=False)]
Varied = Annotated[list[Any], Field(min_length=1)]


class SweepOptions(SpecModel):
    """How each plan is searched for; the options of "meshplan plan" with the same names and defaults."""

    seed: Annotated[int, Whole(least=0, most=2**31)] = Field(default=0, description="of pseudo-random choices")
    top: Annotated[int, Whole(most=MAX_TOP)] = Field(default=DEFAULT_TOP, description="candidates to keep in each plan")
    time_limit_s: Limit | None = Field(default=None, description="after which the best so far is taken, with its gap")
    memory_limit: Bytes | None = Field(default=None, description="that one point takes, from which on the same happens")
    certify: bool = Field(default=False, description="check each answer by a second, independent way")


class SweepSpec(SpecModel):
    """Many questions: ``base`` with each of ``points``, and with each combination of the values in ``over``."""

    kind: Literal["sweep"]
    name: str | None = Field(
        default=None, max_length=200, description="what you call the study; default: the file's name"
    )
    base: str | dict[str, Any] = Field(description="path of a spec, or a spec written here")
    ask: Literal["plan", "estimate"] = Field(
        default="plan", description="plan: search and store each; estimate: price what 'fixed' pins"
    )
    over: dict[str, Varied] = Field(
        default_factory=dict, description="dotted field of the spec → values: every combination is asked (a grid)"
    )
    points: list[dict[str, Any]] = Field(
        default_factory=list, description="dotted field → value, one mapping a point: asked one by one (a list)"
    )
    options: SweepOptions = SweepOptions()
    limit_s: Limit | None = Field(default=None, description="seconds after which a point is given up and told")
    best: str | None = Field(default=None, description="metric that the best point has; default: by the objective")
    group_by: list[str] = Field(
        default_factory=list, description="varied fields: a best point for each of their values"
    )
    pareto: list[str] | None = Field(
        default=None, min_length=2, description="metrics of the Pareto front; default: by the kind of the spec"
    )

    @model_validator(mode="after")
    def _consistent(self) -> SweepSpec:
        if not self.over and not self.points:
            raise ValueError("give what varies: over (a grid), points (a list), or both")
        both = sorted({name for point in self.points for name in point} & set(self.over))
        if both:
            raise ValueError(f"{', '.join(both)}: in over and in points; give it in one of them")
        unknown = sorted(set(self.group_by) - set(self.fields))
        if unknown:
            raise ValueError(f"group_by: {', '.join(unknown)} does not vary; what varies: {', '.join(self.fields)}")
        if self.ask == "estimate" and self.options != SweepOptions():
            raise ValueError("options are those of a search: leave them out with ask: estimate")
        return self

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields that vary, in the order of writing: those of the list, then those of the grid."""
        return tuple(dict.fromkeys([*(name for point in self.points for name in point), *self.over]))


def read_sweep(path: Path) -> tuple[SweepSpec, dict[str, Any], Path]:
    """A sweep file: what it says, the spec that it varies, and the folder of that spec's paths.

    Raises:
        SpecError: a file is missing or malformed; every problem of the sweep at once.
    """
    document = read_document(path)
    refuse_other(document, STUDY, name=str(path))
    sweep = read_spec(SweepSpec, document)
    if isinstance(sweep.base, Mapping):
        return sweep, dict(sweep.base), path.parent
    base = path.parent / sweep.base
    return sweep, read_question(base), base.parent
