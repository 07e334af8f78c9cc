"""The frameworks that ``constraints.target`` of a spec may name."""

from __future__ import annotations

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


def framework_rules(name: str) -> FrameworkRules | None:
    """Rules of the framework ``name``; None where none are known, so that nothing is invented."""
    return FRAMEWORKS.get(name)
