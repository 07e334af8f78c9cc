"""A condition that a framework or an engine puts on a configuration: named, with its message and its source."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from meshplan.catalogs.models.shapes import ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class LegalityRule:
    """One condition that a framework puts on a training configuration.

    Args:
        name: short, stable; rejected candidates are counted under it.
        holds: (model, configuration or columns) → whether it is met, element-wise.
        message: what is required, in the vocabulary of specs.
        stage: where the framework notices: ``parser``, ``process groups`` or ``run time``.
        source: file of the framework and version.
        about: choices that can violate it; while all of them have their defaults the rule need not be checked.
    """

    name: str
    holds: Callable[[ModelShape, Any], Any]
    message: str
    stage: str
    source: str
    about: tuple[str, ...] = ()
