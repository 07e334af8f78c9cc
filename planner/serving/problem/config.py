"""The choices of a serving plan as the plain JSON that a plan stores, and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from meshplan.catalogs.errors import EmitError
from meshplan.planner.serving.problem.quantization import Quantization
from meshplan.planner.serving.problem.requests import (
    EngineLimits,
    KvTier,
    Layout,
    Pool,
    Role,
    Router,
    ServingConfig,
    Speculation,
)


def serving_config_document(config: ServingConfig) -> dict[str, Any]:
    """The choices as plain JSON; ``num_devices`` of each pool and of all beside them."""
    return {
        "engine": config.engine,
        "num_devices": config.num_devices,
        "pools": [_pool_document(pool) for pool in config.pools],
        "router": config.router.value,
        "speculation": None if config.speculation is None else asdict(config.speculation),
    }


def serving_config_from_document(document: Mapping[str, Any]) -> ServingConfig:
    """Read back what :func:`serving_config_document` wrote.

    Raises:
        EmitError: fields are missing or unknown, values have no meaning, or the counts of devices contradict.
    """
    try:
        config = ServingConfig(
            engine=str(document["engine"]),
            pools=tuple(_pool_from(pool) for pool in document["pools"]),
            router=Router(document["router"]),
            speculation=None if document["speculation"] is None else Speculation(**document["speculation"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        what = f"field {error} is missing" if isinstance(error, KeyError) else str(error)
        raise EmitError(f"this is no serving configuration: {what}; plan again with this version") from error
    said = document.get("num_devices", config.num_devices)
    if said != config.num_devices:
        raise EmitError(f"the configuration says {said} devices, its pools make {config.num_devices}; plan again")
    return config


def _pool_document(pool: Pool) -> dict[str, Any]:
    limits = asdict(pool.limits)
    del limits["admission"]  # no choice of a plan
    tier = {} if pool.kv_tier is None else {"kv_tier": asdict(pool.kv_tier)}
    return {
        "role": pool.role.value,
        "layout": asdict(pool.layout),
        "num_workers": pool.num_workers,
        "num_devices": pool.num_devices,
        "limits": limits,
        "quantization": asdict(pool.quantization),
        "node_type": pool.node_type,
        **tier,
    }


def _pool_from(document: Mapping[str, Any]) -> Pool:
    return Pool(
        role=Role(document["role"]),
        layout=Layout(**document["layout"]),
        num_workers=int(document["num_workers"]),
        limits=EngineLimits(**document["limits"]),
        quantization=Quantization(**document["quantization"]),
        node_type=str(document["node_type"]),
        kv_tier=KvTier(**document["kv_tier"]) if "kv_tier" in document else None,
    )
