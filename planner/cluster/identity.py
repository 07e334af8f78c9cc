"""Which cluster a plan is for: what own runs on it may say something about.

Own runs carry over to plans on the same cluster and to no other. What tells clusters apart is what a spec *states*, not
what the catalog knows of it, so that newer numbers of a node type do not make a stranger of the cluster:

- with ``cluster.name``: the name and the node type. Whoever gives a name vouches for the links, which he may state
  better from one spec to the next;
- without: the node type (device, devices per host, catalog links), the links that the spec states in place of the
  catalog's, and the profile of measured links.

How many nodes a plan takes is no part of it: a run on two nodes says something about sixteen. Framework or engine and
hardware generation stand beside it in the name of a set of constants (:mod:`meshplan.catalogs.constants.own`).
"""

from __future__ import annotations

from typing import Any

from meshplan.planner.cluster.spec import ClusterSpec
from meshplan.planner.core.plan import digest

DIGITS = 8  # of the digest of stated links, hexadecimal: nobody's clusters share them by chance


def cluster_identity(spec: ClusterSpec, node_type: str) -> str:
    """A short text that is the same for specs of one cluster.

    Args:
        spec: the hardware part of a spec.
        node_type: slug of the node type that it means.

    >>> from meshplan.planner.cluster.spec import NodesSpec
    >>> nodes = [NodesSpec(type="dgx-h100", count=2)]
    >>> cluster_identity(ClusterSpec(nodes=nodes), "dgx-h100")
    'dgx-h100'
    >>> cluster_identity(ClusterSpec(nodes=nodes, name="lab"), "dgx-h100")
    'lab:dgx-h100'
    """
    if spec.name is not None:
        return f"{spec.name}:{node_type}"
    stated = [node_type]
    if spec.links is not None:
        stated.append(f"links-{digest(_rounded(spec.links.model_dump(mode='json', exclude_defaults=True)))[:DIGITS]}")
    if spec.profile is not None:
        stated.append(f"profile-{spec.profile}")
    return "+".join(stated)


def _rounded(value: Any) -> Any:
    """Plain JSON with numbers to nine digits, so that 5 us and 5e-6 s are the same."""
    if isinstance(value, float):
        return float(f"{value:.9g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list) else value
