"""Names of the sets of constants that belong to one cluster: ``GENERATION@CLUSTER`` where others have ``GENERATION``.

Such a set is stored beside the others, under the framework or engine and this name, so that it is listed, exported and
removed as any other, and no other cluster finds it. The part after the sign is made by
:func:`meshplan.planner.cluster.identity.cluster_identity`.
"""

from __future__ import annotations

SIGN = "@"


def own_name(generation: str, cluster: str) -> str:
    """The name of a cluster's set; that of the generation where no cluster is given.

    >>> own_name("hopper", "lab:dgx-h100"), own_name("hopper", "")
    ('hopper@lab:dgx-h100', 'hopper')
    """
    return f"{generation}{SIGN}{cluster}" if cluster else generation
