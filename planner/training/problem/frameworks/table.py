"""The frameworks that ``constraints.target`` of a spec may name."""

from __future__ import annotations

import copyreg
import pickle
from typing import Any

from meshplan.planner.training.problem.frameworks.accelerate import ACCELERATE
from meshplan.planner.training.problem.frameworks.arithmetic import ANY_FRAMEWORK
from meshplan.planner.training.problem.frameworks.axolotl import AXOLOTL
from meshplan.planner.training.problem.frameworks.deepspeed import DEEPSPEED
from meshplan.planner.training.problem.frameworks.megatron import MEGATRON
from meshplan.planner.training.problem.frameworks.rules import FrameworkRules
from meshplan.planner.training.problem.frameworks.torchtitan import TORCHTITAN
from meshplan.planner.training.problem.frameworks.torchtune import TORCHTUNE

FRAMEWORKS = {
    rules.name: rules for rules in (MEGATRON, TORCHTITAN, DEEPSPEED, ACCELERATE, AXOLOTL, TORCHTUNE, ANY_FRAMEWORK)
}


def _by_name(rules: FrameworkRules) -> Any:
    """How rules travel between processes: they hold functions, which do not, so that known ones go by their name."""
    if FRAMEWORKS.get(rules.name) is rules:
        return framework_rules, (rules.name,)
    return object.__reduce_ex__(rules, pickle.HIGHEST_PROTOCOL)


copyreg.pickle(FrameworkRules, _by_name)


def framework_rules(name: str) -> FrameworkRules | None:
    """Rules of the framework ``name``; None where none are known, so that nothing is invented."""
    return FRAMEWORKS.get(name)
