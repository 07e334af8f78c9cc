"""Rows of the mapping table that training frameworks share, and the check that a framework can express a plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from meshplan.catalogs.errors import CannotExpressError
from meshplan.catalogs.models.shapes import ModelShape
from meshplan.planner.emit.terms import Arguments, Rows, Term, count, stated
from meshplan.planner.training.problem.choices import ALL_STATES
from meshplan.planner.training.problem.encoder_decoder import TRAINERS, whole_stacks
from meshplan.planner.training.problem.frameworks.rules import FrameworkRules
from meshplan.planner.training.problem.problem import TrainingConfig

# Read back where a framework offloads the activations of all layers, whose number it does not say.
ALL_LAYERS_AWAY = "offloads_all_layers"
HANDED_OVER = "training_config.json (MESHPLAN_CONFIG)"
BY_THE_SCRIPT = "handed over only: nothing checks that the script obeys"


def offloaded_percent(share: Any, key: str) -> Mapping[str, Any]:
    """A share of the optimizer states between 0 and 1 as whole per cent; nothing where it is not stated, or is all.

    Raises:
        ValueError: it is no such share, or moves nothing.
    """
    if share is None:
        return {}
    number = float(share) if isinstance(share, (int, float, str)) and not isinstance(share, bool) else -1.0
    if not 0.0 < number <= 1.0:
        raise ValueError(f"{key} is a share above 0 and up to 1, not {share!r}; without offload leave it out")
    percent = max(round(number * ALL_STATES), 1)
    return {} if percent == ALL_STATES else {"optimizer_offload_percent": percent}


class TrainingRows(Rows):
    """Makes the rows of a framework's table."""

    __slots__ = ()

    def number(
        self,
        key: str,
        name: str,
        *,
        aliases: Sequence[str] = (),
        only_with_experts: bool = False,
        is_text: bool = True,
        note: str = "",
    ) -> Term:
        """A number behind one key.

        Args:
            key: the argument that is written.
            name: field of the configuration.
            aliases: other arguments under which the target takes it.
            only_with_experts: not written for models without experts.
            is_text: written as the word of a command line; False for a number of a document.
            note: for the support matrix.
        """

        def write(config: TrainingConfig, shape: ModelShape) -> Arguments:
            value = getattr(config, name)
            return {} if only_with_experts and shape.moe is None else {key: str(value) if is_text else value}

        keys = (key, *aliases)
        return self.term(
            name, write, lambda arguments: stated(**{name: count(arguments, *keys)}), *keys, expressed_by=key + note
        )

    def switch(self, key: str, name: str, *, on: Any = "", note: str = "", verified_by: str = "") -> Term:
        """A choice that is written only where it is on.

        Args:
            key: the argument.
            name: field of the configuration.
            on: value of the argument: "" for a flag, True for a key of a document.
            note: for the support matrix.
            verified_by: what checked it, where that differs.
        """
        return self.term(
            name,
            lambda config, _: {key: on} if getattr(config, name) else {},
            lambda arguments: {name: True} if key in arguments and (on == "" or arguments[key] is on) else {},
            key,
            expressed_by=key.removeprefix("fsdp_config.") + note,
            verified_by=verified_by,
        )

    def handed_over(self, name: str) -> Term:
        """A term that the target has no argument for: the user's script reads it from ``training_config.json``."""
        return self.covered(name, HANDED_OVER, verified_by=BY_THE_SCRIPT)


def refuse(
    rules: FrameworkRules, shape: ModelShape, config: TrainingConfig, known: Mapping[str, Sequence[str]]
) -> None:
    """Stop where the framework cannot express the plan.

    Args:
        rules: legality rules of the framework.
        shape: the model.
        config: the choices.
        known: choices by name → values that the framework has an argument for.

    Raises:
        CannotExpressError: with what is missing and the nearest that can be expressed.
    """
    for choice, names in known.items():
        if getattr(config, choice) not in names:
            raise CannotExpressError(rules.name, f"{choice} {getattr(config, choice)!r}", "one of " + ", ".join(names))
    if shape.encoder is not None:
        if rules.name not in TRAINERS:
            raise CannotExpressError(rules.name, f"the encoder in front of {shape.name}", f"plans for {TRAINERS[0]}")
        rules = whole_stacks(rules)
    broken = rules.broken(shape, config)
    if broken:
        raise CannotExpressError(
            rules.name,
            "this configuration: " + "; ".join(f"{rule.message} ({rule.source})" for rule in broken),
            f"what meshplan plan finds with constraints.target: {rules.name}",
        )
    if not rules.splits_as(config.layers_per_chunk):
        raise CannotExpressError(
            rules.name,
            f"chunks of {', '.join(map(str, config.layers_per_chunk))} layers",
            "a number of stages and chunks that divides the layers",
        )
