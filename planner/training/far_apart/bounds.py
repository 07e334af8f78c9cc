"""What no plans of the sites can beat, whatever memory they leave to a way.

*Inner step.* With equal shares no site takes less than its own search proves for its share. With others the sites
cannot do the whole batch faster than all together at the rates that are proven for it alone:
T ≥ 1/Σ_i 1/T_i(batch). (Micro-batches of a smaller share can be repeated, so that T_i(share) ≥ T_i(batch)·share/batch.)

*Mean step.* T plus what a way cannot hide: every exchange of a way that exchanges in every step; X/H of plain DiLoCo
with H pinned. Of all other local updates nothing: H and τ hide what they can. Compression and the outer optimizer count
as nothing, and PowerSGD sends no less than without tensor parallelism.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from meshplan.planner.core.plan import Plan
from meshplan.planner.training.far_apart import payloads
from meshplan.planner.training.far_apart.ways import PricedWay, Setting
from meshplan.planner.training.problem.far_apart import DILOCO, LOCAL_UPDATES, POWERSGD


def least_inner_step_s(setting: Setting, alone: Sequence[Plan]) -> float:
    """No inner step is shorter, s.

    Args:
        setting: sites at work with their shares.
        alone: each site's best plan for the whole batch.
    """
    workers = setting.workers
    if len({one.sequences for one in workers}) == 1:
        return max(float(one.plan.solution["bound"]) for one in workers)
    return 1.0 / sum(1.0 / float(one.solution["bound"]) for one in alone)


def least_mean_step_s(setting: Setting, way: PricedWay, inner_step_s: float) -> float | None:
    """No mean step of a way is shorter, s; None of a way that cannot be.

    Args:
        setting: sites, ring and what was pinned.
        way: priced, whether or not its states fit beside the sites' plans.
        inner_step_s: no inner step is shorter.
    """
    exchange = way.exchange
    if exchange is None:
        return None
    if way.way in LOCAL_UPDATES and (way.way != DILOCO or setting.asked.sync_steps is None):
        return inner_step_s
    least = replace(exchange, compute_s=0.0)
    if way.way == POWERSGD:
        whole = payloads.low_rank(setting.problem.shape, setting.asked.powersgd_rank, 1)
        if whole is not None:
            least = replace(least, fragment_bytes=(whole.numbers * payloads.gradient_bytes(setting.problem),))
    return least.mean_step_s(inner_step_s, setting.ring)
