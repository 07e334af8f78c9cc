"""What a source reports as its peak, over what its run needed.

PyTorch's allocator keeps blocks that tensors have given back. Where every batch is padded to a length of its own,
blocks of earlier lengths lie beside those of the longest. With W the bytes of activations and logits, N those that the
run needs and R what lies beside them over W, a source that reports the reserve reports

    max(N, min(N + R·W, device memory)),

because an allocation that fails gives the unused blocks back and is tried again (release_cached_blocks in PyTorch's
c10/cuda/CUDACachingAllocator.cpp). So the reserve stops no plan, and no estimate of a plan has it.

R is not fitted. Of lengths that differ 1, the blocks of one other length, and 2 in the bound, are assumed. Of sequences
of one length it is 0.1 and 0.33: of the trainings on an H100 in tests/data/h100_runs.jsonl half reserved less than a
tenth of W beside what tensors held, and all but one (0.34, DeepSpeed) less than a third. GMLake (arXiv:2401.08156,
abstract) found 15 % of all reserved memory unused, at most 33 %; states, which are allocated once, are no part of that.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from meshplan.catalogs.constants.framework_recipes import recipe_named
from meshplan.planner.training.measured.observations import ObservedRun

OTHER_LENGTHS, MOST_OTHER_LENGTHS = 1.0, 2.0
ONE_LENGTH, MOST_ONE_LENGTH = 0.1, 0.33


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserve:
    """What lies beside activations and logits in a reported peak.

    Args:
        typical: over their bytes.
        most: the same in the safe bound.
        memory_bytes: of the device.
    """

    typical: float
    most: float
    memory_bytes: float

    def reported_bytes(self, needed_bytes: float, work_bytes: float, *, most: bool = False) -> float:
        """What is reported of a run that needs so much, ``work_bytes`` of it activations and logits."""
        beside = work_bytes * (self.most if most else self.typical)
        return max(needed_bytes, min(needed_bytes + beside, self.memory_bytes))


NO_RESERVE = Reserve(typical=0.0, most=0.0, memory_bytes=math.inf)


def reserve_of(run: ObservedRun) -> Reserve:
    """The reserve in the peak of a run; none where its source reports what tensors took."""
    reported = recipe_named(run.framework).unstated
    if reported.peak_is_reserved:
        typical, most = OTHER_LENGTHS, MOST_OTHER_LENGTHS
    elif reported.peak_has_cache:
        typical, most = ONE_LENGTH, MOST_ONE_LENGTH
    else:
        return NO_RESERVE
    return Reserve(typical=typical, most=most, memory_bytes=run.problem.limits.memory_bytes)
