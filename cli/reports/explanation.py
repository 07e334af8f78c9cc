"""Why a training plan is as it is, as a person reads it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshplan.cli.render import TABLE_WIDTH
from meshplan.cli.reports.quantities import percent
from meshplan.cli.reports.training import (
    alternatives_section,
    config_text,
    infeasible_section,
    paragraph,
    question_text,
    rejected_section,
)

if TYPE_CHECKING:
    from meshplan.planner.core.plan import Plan
    from meshplan.planner.training.explanation import Explanation


def explanation_report(plan: Plan, explanation: Explanation, *, width: int = TABLE_WIDTH) -> str:
    """The plan's choices, why they won, why others lost, what binds, what the numbers rest on."""
    sections = [paragraph(question_text(plan.spec), width)]
    if not plan.config:
        return "\n".join([*sections, infeasible_section(plan, width), rejected_section(plan, width)])
    lines = {
        "Chosen": config_text(plan.config),
        "Proof": explanation.proof,
        "Runner-up": explanation.runner_up,
        "Time": explanation.time,
        "Limits": "; ".join(explanation.limits),
        "Constants": explanation.calibration,
        "Assumed": "; ".join(explanation.assumed),
        "Evidence": ", ".join(f"{percent(share)} {level}" for level, share in explanation.evidence.items()),
    }
    label_width = max(map(len, lines)) + 2
    sections.append(
        "".join(
            paragraph(f"{label + ':':<{label_width}}{text}", width, indent=" " * label_width)
            for label, text in lines.items()
            if text
        )
    )
    sections += [alternatives_section(plan, width), rejected_section(plan, width)]
    cited = "".join(
        paragraph(f"  {what}: {source}", width, indent="    ") for what, source in explanation.sources.items()
    )
    sections.append(f"Sources\n{cited}" if cited else "")
    return "\n".join(section for section in sections if section)
