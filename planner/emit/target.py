"""What an emit target states about itself."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Feature:
    """One row of the support matrix.

    Args:
        name: a term of the plan, such as ``tensor_parallel``.
        expressed_by: flags or files that carry it; empty where the target cannot.
        verified_by: how it is known that the target understands it.
    """

    name: str
    expressed_by: str
    verified_by: str
