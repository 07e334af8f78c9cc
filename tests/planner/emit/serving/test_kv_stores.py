"""Prefixes on NVMe and in other hosts' memory: flags, variables and notes of vLLM's and SGLang's stores.

The lists are what their documents name (read 2026-11-25; see the module's text), not what a parser accepts.
"""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from emit_cases import LLAMA_70B
from serving_cases import aggregated, layout, serving_request

from meshplan.planner.emit.serving import sglang, vllm
from meshplan.planner.emit.serving.tiers.kv_stores import SGLANG_BACKENDS, VLLM_CONNECTORS
from meshplan.planner.launch.registry import emit_serving
from meshplan.planner.serving.problem.config import KV_STORES, EngineLimits, KvTier

LIMITS = EngineLimits(max_num_seqs=64, prefix_caching=True)
TIER = KvTier(store="nvme", bytes_per_device=100.5 * 2.0**30, bytes_per_s_per_device=6e9)
# docs.sglang.io, advanced_features/hicache_best_practices: "Core HiCache Parameters", "storage backends".
HICACHE = {
    "--page-size",
    "--enable-hierarchical-cache",
    "--hicache-ratio",
    "--hicache-size",
    "--hicache-io-backend",
    "--hicache-write-policy",
    "--hicache-storage-backend",
    "--hicache-storage-backend-extra-config",
    "--hicache-mem-layout",
    "--hicache-storage-prefetch-policy",
}
HICACHE_BACKENDS = {"file", "mooncake", "hf3fs", "nixl", "aibrix"}
# docs.vllm.ai, features/mooncake_store_connector_usage; LMCache, docs/source/api_reference/configurations.rst.
CONNECTORS = {"LMCacheConnectorV1", "MooncakeStoreConnector"}
VARIABLES = {
    "PYTHONHASHSEED",
    "LMCACHE_CHUNK_SIZE",
    "LMCACHE_LOCAL_CPU",
    "LMCACHE_MAX_LOCAL_CPU_SIZE",
    "LMCACHE_LOCAL_DISK",
    "LMCACHE_MAX_LOCAL_DISK_SIZE",
    "MOONCAKE_CONFIG_PATH",
    "MOONCAKE_MASTER",
    "MOONCAKE_PROTOCOL",
    "MOONCAKE_GLOBAL_SEGMENT_SIZE",
    "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR",
    "SGLANG_HICACHE_FILE_BACKEND_MAX_SIZE",
}


def emitted(engine: str, store: str) -> tuple[dict[str, list[str]], dict[str, str], str]:
    """Flags of a worker, the variables of its script, and the text of all files."""
    config = aggregated(
        engine,
        layout(8),
        limits=replace(LIMITS, chunked_prefill=engine == "vllm"),
        kv_tier=replace(TIER, store=store),
    )
    request = serving_request(LLAMA_70B, config)
    written = {"vllm": vllm, "sglang": sglang}[engine].arguments(request, config.pools[0])
    text = "\n".join(artifact.content for artifact in emit_serving(engine, request).artifacts)
    exports = [line.strip().removeprefix("export ") for line in text.splitlines() if line.startswith("  export ")]
    return {flag: value for flag, *value in written}, dict(line.split("=", maxsplit=1) for line in exports), text


@pytest.mark.parametrize("store", ["nvme", "remote"])
def test_vllm_is_given_a_connector(store: str) -> None:
    flags, variables, _ = emitted("vllm", store)
    config = json.loads(flags["--kv-transfer-config"][0])
    assert config == {"kv_connector": VLLM_CONNECTORS[store], "kv_role": "kv_both"}
    assert config["kv_connector"] in CONNECTORS
    assert set(variables) & VARIABLES
    assert "PYTHONHASHSEED" in variables
    assert "--kv-offloading-size" not in flags


@pytest.mark.parametrize("store", ["nvme", "remote"])
def test_sglang_is_given_a_storage_backend(store: str) -> None:
    flags, variables, text = emitted("sglang", store)
    assert flags["--hicache-storage-backend"] == [SGLANG_BACKENDS[store]]
    assert SGLANG_BACKENDS[store] in HICACHE_BACKENDS
    assert {flag for flag in flags if "hi" in flag.split("-")[2:3] or "hicache" in flag} <= HICACHE
    assert set(variables) & VARIABLES
    assert "in host memory as well" in text


def test_sizes_are_those_of_one_rank() -> None:
    assert emitted("vllm", "nvme")[1]["LMCACHE_MAX_LOCAL_DISK_SIZE"] == "100"
    assert emitted("sglang", "nvme")[1]["SGLANG_HICACHE_FILE_BACKEND_MAX_SIZE"] == "100Gi"
    assert emitted("sglang", "remote")[1]["MOONCAKE_GLOBAL_SEGMENT_SIZE"] == str(100 * 2**30)
    assert "global_segment_size 100GB" in emitted("vllm", "remote")[2]


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_host_memory_needs_no_store(engine: str) -> None:
    flags, variables, text = emitted(engine, "host")
    assert not {"--kv-transfer-config", "--hicache-storage-backend"} & set(flags)
    assert not set(variables) & VARIABLES
    assert "Mooncake" not in text


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("store", [store for store in KV_STORES if store != "host"])
def test_the_notes_say_what_has_to_be_at_hand(engine: str, store: str) -> None:
    text = emitted(engine, store)[2]
    assert ("mount it at /mnt/nvme/kv_cache" in text) == (store == "nvme")
    assert ("mooncake_master" in text) == (store == "remote")
