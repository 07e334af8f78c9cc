"""What emitters of frameworks share: the mapping table's row, refusals by rule, reading of what was emitted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from meshplan.catalogs.errors import CannotExpressError
from meshplan.catalogs.model_shapes import ModelShape
from meshplan.planner.emit.registry import Feature
from meshplan.planner.problems.frameworks import FrameworkRules
from meshplan.planner.problems.training import TrainingConfig

HANDED_OVER = "training_config.json (MESHPLAN_CONFIG)"
BY_THE_SCRIPT = "handed over only: nothing checks that the script obeys"


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """How one term of a plan is said.

    Args:
        name: our term: a field of ``TrainingConfig``.
        words: configuration → the target's keys and values; empty where its default already says it.
        said_by: the keys, for the support matrix.
        verified_by: what judged them.
    """

    name: str
    words: Callable[[TrainingConfig], Mapping[str, Any]]
    said_by: str
    verified_by: str


def feature_rows(terms: Sequence[Term]) -> tuple[Feature, ...]:
    """Rows of the support matrix."""
    return tuple(Feature(name=term.name, expressed_by=term.said_by, verified_by=term.verified_by) for term in terms)


def refuse(
    rules: FrameworkRules, shape: ModelShape, config: TrainingConfig, known: Mapping[str, Sequence[str]]
) -> None:
    """Stop where the framework has no words for the plan.

    Args:
        rules: the framework's.
        shape: the model.
        config: the choices.
        known: choices by name: what the framework has a word for.

    Raises:
        CannotExpressError: with what is missing and the nearest that can be said.
    """
    for field, names in known.items():
        if getattr(config, field) not in names:
            raise CannotExpressError(rules.name, f"{field} {getattr(config, field)!r}", "one of " + ", ".join(names))
    broken = rules.broken(shape, config)
    if broken:
        raise CannotExpressError(
            rules.name,
            "this configuration: " + "; ".join(f"{rule.message} ({rule.source})" for rule in broken),
            f"what meshplan plan finds with constraints.target: {rules.name}",
        )
    if not rules.uneven_layers and len(set(config.layers_per_chunk)) > 1:
        raise CannotExpressError(
            rules.name, "stages of unequal length", "a number of stages and chunks that divides the layers"
        )
