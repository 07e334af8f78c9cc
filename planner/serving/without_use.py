"""What a question states and its plan has no use for: said in the plan, since what is ignored looks like answered."""

from __future__ import annotations

from collections.abc import Sequence

from meshplan.catalogs.constants.machines.device_shares import DeviceShare, MpsShare
from meshplan.planner.serving.estimator.memory import weights_bytes
from meshplan.planner.serving.problem.config import KvConnector, Layout, ServingConfig
from meshplan.planner.serving.problem.problem import ServingProblem

_GIB = 2.0**30


def without_use(problem: ServingProblem, config: ServingConfig) -> list[str]:
    """One sentence for each field of the spec that changed nothing in the chosen deployment.

    Args:
        problem: the question, with all that it left to choose.
        config: what was chosen.
    """
    found = []
    if problem.kv_connector is not KvConnector.NIXL and not config.is_disaggregated:
        found.append(
            f"kv_connector {problem.kv_connector.value}: every worker of this plan prefills and decodes, so no cache "
            "is moved between workers"
        )
    if all(pool.share is None for pool in config.pools):
        replicas = [share for share in problem.share_options if isinstance(share, MpsShare)]
        instances = [share for share in problem.share_options if not isinstance(share, MpsShare)]
        found += [_unshared(problem, "mig", "an instance", instances)] if instances else []
        found += [_unshared(problem, "mps", "a replica", replicas)] if replicas else []
    return found


def _unshared(problem: ServingProblem, field: str, part: str, shares: Sequence[DeviceShare]) -> str:
    """Why no worker has a part of a device: none holds the weights, or whole devices serve as well."""
    asked = f"{field} {', '.join(share.name for share in shares)}"
    most = max(share.memory_bytes for share in shares) / _GIB
    needs = min(weights_bytes(problem.shape, formats, Layout()) for formats in problem.quantizations) / _GIB
    if needs > most:
        return f"{asked}: {part} has {most:.1f} GiB at most, the weights of its worker take {needs:.1f} GiB"
    return f"{asked}: whole devices serve this question as well or better"
