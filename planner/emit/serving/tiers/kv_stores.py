"""A second tier of prefix cache that is not host memory: flags and variables of vLLM's and SGLang's stores.

- vLLM, NVMe: LMCache's connector (``LMCACHE_*`` as in LMCache's docs/source/api_reference/configurations.rst; sizes are
  GiB of one rank: local_disk_backend.py multiplies by 1024³, and issue 2901 of LMCache says of which).
- vLLM, memory of other hosts: Mooncake's store (docs.vllm.ai, features/mooncake_store_connector_usage). Its sizes and
  the address of its master are in a file that ``MOONCAKE_CONFIG_PATH`` names, which is the user's: the notes say how.
- SGLang: the storage backend of its hierarchical cache, a file or Mooncake (docs.sglang.io,
  advanced_features/hicache_best_practices; ``SGLANG_HICACHE_FILE_BACKEND_*``: environ.py and hicache_storage.py).

Read 2026-11-25. The parsers of both engines take the flags and know the connectors and backends; the variables are as
the documents have them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from meshplan.catalogs.units import format_bytes
from meshplan.planner.emit.serving.request import ServingRequest
from meshplan.planner.serving.problem.config import Pool

# Where drives are mounted: an assumption that the notes name.
CACHE_FOLDER = "/mnt/nvme/kv_cache"
_GIB = 2.0**30
# Chunks and pages in which prefixes are stored: LMCache's default, and SGLang's recommendation beside a backend.
_CHUNK_TOKENS, _PAGE_TOKENS = 256, 64
# SGLang keeps a pool in host memory between devices and backend, of so many times the devices' cache: its default.
_HOST_RATIO = 2
_MOONCAKE = (
    "Prefixes are kept in Mooncake's store: install mooncake-transfer-engine, start `mooncake_master --port 50051` on "
    "one host"
)

VLLM_CONNECTORS: Mapping[str, str] = {"nvme": "LMCacheConnectorV1", "remote": "MooncakeStoreConnector"}
SGLANG_BACKENDS: Mapping[str, str] = {"nvme": "file", "remote": "mooncake"}


def vllm_flags(pool: Pool) -> dict[str, str]:
    """The connector of a store that is not host memory."""
    if pool.kv_tier is None or pool.kv_tier.store not in VLLM_CONNECTORS:
        return {}
    config = {"kv_connector": VLLM_CONNECTORS[pool.kv_tier.store], "kv_role": "kv_both"}
    return {"--kv-transfer-config": json.dumps(config, separators=(",", ":"))}


def vllm_environment(pool: Pool) -> dict[str, str]:
    """Variables of the connector; block hashes must be the same in every process of a worker and of others."""
    tier = pool.kv_tier
    if tier is None or tier.store not in VLLM_CONNECTORS:
        return {}
    if tier.store == "remote":
        return {"PYTHONHASHSEED": "0"}
    return {
        "PYTHONHASHSEED": "0",
        "LMCACHE_CHUNK_SIZE": str(_CHUNK_TOKENS),
        "LMCACHE_LOCAL_CPU": "False",
        "LMCACHE_LOCAL_DISK": f"file://{CACHE_FOLDER}",
        "LMCACHE_MAX_LOCAL_DISK_SIZE": str(_gib(pool)),
    }


def sglang_flags(pool: Pool) -> dict[str, str]:
    """The storage backend of a store that is not host memory."""
    if pool.kv_tier is None or pool.kv_tier.store not in SGLANG_BACKENDS:
        return {}
    return {
        "--enable-hierarchical-cache": "",
        "--hicache-ratio": str(_HOST_RATIO),
        "--page-size": str(_PAGE_TOKENS),
        "--hicache-write-policy": "write_through",
        "--hicache-storage-backend": SGLANG_BACKENDS[pool.kv_tier.store],
    }


def sglang_environment(pool: Pool) -> dict[str, str]:
    """Where the backend stores, and how much of one rank."""
    tier = pool.kv_tier
    if tier is None or tier.store not in SGLANG_BACKENDS:
        return {}
    if tier.store == "remote":
        return {"MOONCAKE_PROTOCOL": "rdma", "MOONCAKE_GLOBAL_SEGMENT_SIZE": str(_gib(pool) * int(_GIB))}
    return {
        "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": CACHE_FOLDER,
        "SGLANG_HICACHE_FILE_BACKEND_MAX_SIZE": f"{_gib(pool)}Gi",
    }


def notes(request: ServingRequest) -> list[str]:
    """What has to be at hand before the engine starts."""
    found = []
    for pool in request.config.pools:
        tier = pool.kv_tier
        if tier is None or tier.store == "host":
            continue
        is_vllm = request.config.engine == "vllm"
        each = f"{_gib(pool)} GiB for each device"
        if tier.store == "nvme":
            package = " vLLM needs the package lmcache." if is_vllm else ""
            found.append(f"Prefixes are kept on NVMe, {each}: mount it at {CACHE_FOLDER} of every host.{package}")
        elif is_vllm:
            found.append(
                f"{_MOONCAKE}, and export MOONCAKE_CONFIG_PATH, the path of a JSON file with mode embedded, "
                f"metadata_server P2PHANDSHAKE, master_server_address HOST:50051, global_segment_size {_gib(pool)}GB "
                f"({each}), local_buffer_size 4GB, protocol rdma and an empty device_name."
            )
        else:
            found.append(f"{_MOONCAKE}, and export MOONCAKE_MASTER=HOST:50051; each device's process gives {each}.")
        if not is_vllm:
            found.append(
                f"SGLang keeps {_HOST_RATIO} times the devices' KV cache in host memory as well (--hicache-ratio): "
                f"the tier below holds {format_bytes(tier.bytes_per_device)}."
            )
    return found


def _gib(pool: Pool) -> int:
    """Whole GiB of one rank, at least one."""
    return 1 if pool.kv_tier is None else max(int(pool.kv_tier.bytes_per_device / _GIB), 1)
