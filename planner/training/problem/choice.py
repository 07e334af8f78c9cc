"""The row of the table of choices (:mod:`.choices`), and the codes by which names stand in columns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np

from meshplan.planner.core.reading.spec_fields import MAX_DEVICES


class Recompute(IntEnum):
    """Which activations the backward pass computes again; codes of :data:`RECOMPUTE_MODES`, simplest first."""

    NONE = 0
    SELECTIVE = 1  # the attention core (Korthikanti et al., arXiv:2205.05198)
    BLOCK = 2  # the first layers of each chunk from their inputs, the others not
    FULL = 3  # every layer from its input


class ContextStyle(IntEnum):
    """How the ranks of a context-parallel group exchange; codes of :data:`CONTEXT_PARALLEL_STYLES`, simplest first."""

    RING = 0  # keys and values travel round a ring, causal work split evenly (the framework's way)
    RING_PLAIN = 1  # the same without evening out
    ALL_GATHER = 2  # keys and values gathered on every rank
    ALL_TO_ALL = 3  # heads for tokens in an all-to-all (DeepSpeed Ulysses, arXiv:2309.14509)
    ALL_TO_ALL_AND_RING = 4  # all-to-alls of some ranks inside a ring of the others (USP, arXiv:2405.07719)


RECOMPUTE_MODES = ("none", "selective", "block", "full")
CONTEXT_PARALLEL_STYLES = ("ring", "ring-plain", "all-gather", "all-to-all", "all-to-all+ring")


@dataclass(frozen=True, slots=True)
class Choice:
    """One choice of a training plan.

    Args:
        name: field of :class:`~meshplan.planner.training.problem.problem.TrainingConfig`; key of the spec.
        about: what it means, one sentence.
        section: section of a spec that gives it; empty where nothing in a spec gives it under this name.
        kind: ``int``, ``float``, ``bool`` or ``tuple`` (of counts, or of some of ``values``); else of no meaning with
            ``values``.
        values: the names that it may take, the code of each its position.
        least, most: bounds of a number, both allowed.
        default: the plain value where nobody pins it; None where it follows from other choices.
        follows: from what it follows.
        is_optional: plans leave it out at its default, so that a new choice changes no old plan.
        per: ``candidate`` (an array of :class:`~meshplan.planner.training.estimator.candidates.Candidates`), ``split``
            (shared through :class:`~meshplan.planner.training.estimator.candidates.PipelineSplit`) or ``question``
            (the same for all candidates).
        stored_as: attribute that holds it there, where it has another name.
        simplicity: position in the order among equally good candidates; 0: not compared.
        larger_is_simpler: the order among equals prefers the larger number.
        is_on_request: the search varies it only where ``constraints.search_over`` names it: no measured run has it.
        about_experts: makes sense in a model with experts only.
        short: usual abbreviations, separated by spaces.
        probes: values that the support matrix tries; by default all of ``values``, or both of a switch.
        probe_with: other choices that a probe needs to mean something.
    """

    name: str
    about: str
    _: KW_ONLY
    section: str = "fixed"
    kind: type[Any] = int
    values: tuple[str, ...] = ()
    least: int = 1
    most: int | None = MAX_DEVICES
    default: Any = None
    follows: str = ""
    is_optional: bool = False
    per: str = "candidate"
    stored_as: str = ""
    simplicity: int = 0
    larger_is_simpler: bool = False
    is_on_request: bool = False
    about_experts: bool = False
    short: str = ""
    probes: tuple[Any, ...] = ()
    probe_with: Mapping[str, int] = field(default_factory=dict)

    @property
    def abbreviations(self) -> tuple[str, ...]:
        """Usual short names."""
        return tuple(self.short.split())

    @property
    def column(self) -> str:
        """Array of a batch of candidates; empty where it is none."""
        return (self.stored_as or self.name) if self.per == "candidate" else ""

    @property
    def split(self) -> str:
        """Attribute of a pipeline split; empty where it is none."""
        return (self.stored_as or self.name) if self.per == "split" else ""

    @property
    def tried(self) -> tuple[Any, ...]:
        """Values that the support matrix tries."""
        if self.probes or not self.section:
            return self.probes
        return (False, True) if self.kind is bool else self.values

    @property
    def dtype(self) -> type[np.generic]:
        """Type of its column: switches, or numbers and codes."""
        return np.bool_ if self.kind is bool or self.column == "on_nvme" else np.int64

    def encode(self, value: Any) -> int:
        """A value as it stands in a column: names by their code."""
        return self.values.index(value) if self.values else value

    def decode(self, value: Any) -> Any:
        """One number of a column as the value that it stands for."""
        return self.values[int(value)] if self.values else self.kind(value)

    def decoded(self, column: Any) -> Any:
        """A column with names in place of codes, [n]."""
        return np.array(self.values)[column.astype(np.int64)] if self.values else column

    def rank(self, value: Any) -> int:
        """How far a value is from plain; less is simpler."""
        code = int(self.encode(value))
        return -code if self.larger_is_simpler else code

    @property
    def type_text(self) -> str:
        """The type for a reader, such as ``whole number from 1``."""
        if self.values:
            return ("list of " if self.kind is tuple else "") + " | ".join(self.values)
        if self.kind is int:
            return f"{self.least} to {self.most}" if self.most not in (None, MAX_DEVICES) else f"from {self.least}"
        return {bool: "true | false", tuple: "list of counts"}.get(self.kind, "number")
