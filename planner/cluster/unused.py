"""Fields of ``cluster`` that a question has no use for: named with their path, since ignored looks like answered."""

from __future__ import annotations

from collections.abc import Sequence

from meshplan.catalogs.hardware import NodeType
from meshplan.planner.cluster.lookup import node_price
from meshplan.planner.cluster.spec import ClusterSpec, PriceSpec
from meshplan.planner.core.problems import Problems

# How fast hosts compute, read their memory and their drives: of weights and caches beyond the devices, when served.
OF_SERVING_HOSTS = ("host_memory_bandwidth", "host_processor", "host_sockets", "drive", "drives_per_host")


def check_training_only(cluster: ClusterSpec, problems: Problems) -> None:
    """Which nodes are used, and over which links, is chosen for training jobs alone."""
    if cluster.profile is not None:
        problems.say("cluster.profile", "measured links affect training plans only; leave it out")
    if cluster.exclude is not None or cluster.spare_nodes:
        problems.say("cluster", "excluded and spare nodes belong to training plans: give the remaining nodes")
    if cluster.links is not None and cluster.links.describes_unevenness:
        problems.say("cluster.links", "uneven links affect training plans only; give intra_node and inter_node")


def check_serving_only(cluster: ClusterSpec, fix: str, problems: Problems) -> None:
    """What hosts read and compute with is priced for serving alone.

    Args:
        cluster: of a question that serves nothing.
        fix: what to say in place of it.
        problems: grows by one for each field that is stated.
    """
    for name in OF_SERVING_HOSTS:
        if getattr(cluster, name) is not None:
            problems.say(f"cluster.{name}", f"affects serving plans only; {fix}")


def check_several_types(cluster: ClusterSpec, problems: Problems) -> None:
    """Networks between node types are read where one training job spans several; this is another question."""
    if cluster.links is not None and cluster.links.between_types is not None:
        problems.say(
            "cluster.links.between_types",
            "is read where one training job spans several node types, and here none does: leave it out",
        )


def check_price_filter(cluster: ClusterSpec, wanted: PriceSpec, nodes: Sequence[NodeType], problems: Problems) -> None:
    """A filter that every price of the cluster fails leaves a plan without its costs.

    Args:
        cluster: whose own price, where it states one, overrides the catalog's.
        wanted: provider, region and terms.
        nodes: the types of the cluster.
        problems: grows.
    """
    asked = wanted.model_dump(exclude_none=True)
    if not asked or cluster.usd_per_hour_per_node is not None:
        return
    if any(node_price(node, cluster, wanted) is not None for node in nodes):
        return
    known = [f"{one.provider} {one.region} {one.terms}" for node in nodes for one in node.prices]
    names, filters = " or ".join(node.slug for node in nodes), ", ".join(f"{k} {v}" for k, v in asked.items())
    problems.say(
        "constraints.price",
        f"no price of {names} has {filters} (known: {', '.join(dict.fromkeys(known)) or 'none'}); leave it out, or "
        "give cluster.usd_per_hour_per_node",
    )
