"""Flags of engines for weights in host memory, and what has to be at hand before a server starts with them.

Source: KTransformers' argument list (doc/en/kt-kernel/kt-kernel_intro.md, Native-Precision-Tutorial.md and
experts-sched-Tutorial.md of github.com/kvcache-ai/ktransformers, read 2026-11-24); ``--cpu-offload-gb`` of vLLM and
SGLang (GiB of each device). The flags ``--kt-…`` are those of SGLang with kt-kernel installed (``pip install
sglang-kt``).
"""

from __future__ import annotations

from collections.abc import Sequence

from meshplan.catalogs.errors import CannotExpressError
from meshplan.planner.emit.serving.job import Argument, Template
from meshplan.planner.emit.serving.request import ServingRequest
from meshplan.planner.emit.terms import Arguments
from meshplan.planner.serving.problem.config import Pool
from meshplan.planner.serving.problem.weight_tiers import Way

GIB = 2.0**30
# Kernels that read the checkpoint itself; the others need weights that are converted first.
NATIVE = ("FP8", "FP8_PERCHANNEL", "BF16")
CONVERTED = {"AMXINT4": "int4", "AMXINT8": "int8"}
CONVERTED_FOLDER = "kt_weights"
KT_FLAGS = (
    *("--kt-method", "--kt-num-gpu-experts", "--kt-expert-placement-strategy", "--kt-cpuinfer"),
    *("--kt-threadpool-count", "--kt-gpu-prefill-token-threshold", "--kt-weight-path"),
)
OFFLOAD = "--cpu-offload-gb"


def offload_flags(_: ServingRequest, pool: Pool) -> Arguments:
    """Weights of each device that it reads from the host, GiB."""
    tiers = pool.weight_tiers
    if tiers is None or tiers.way is not Way.STREAMED:
        return {}
    return {OFFLOAD: f"{tiers.streamed_bytes_per_device / GIB:.1f}"}


def expert_flags(request: ServingRequest, pool: Pool) -> Arguments:
    """Experts on the host with KTransformers' kernels, or the other way.

    Raises:
        CannotExpressError: the plan names no kernel.
    """
    tiers = pool.weight_tiers
    if tiers is None or tiers.way is not Way.EXPERTS_ON_HOST:
        return offload_flags(request, pool)
    if not tiers.kernel:
        raise CannotExpressError("sglang", "experts on the host without a kernel", "a plan of this version")
    arguments = {
        "--kt-method": tiers.kernel,
        "--kt-num-gpu-experts": str(tiers.device_experts),
        "--kt-expert-placement-strategy": "frequency" if tiers.by_popularity else "uniform",
    }
    if tiers.threads:
        arguments["--kt-cpuinfer"] = str(tiers.threads)
        arguments["--kt-threadpool-count"] = str(tiers.numa_nodes)
    if tiers.device_prefill_tokens:
        arguments["--kt-gpu-prefill-token-threshold"] = str(tiers.device_prefill_tokens)
    return arguments


def weight_path(request: ServingRequest, pool: Pool) -> tuple[Argument, ...]:
    """Where the host's experts are read from: the checkpoint, or a folder beside the files."""
    tiers = pool.weight_tiers
    if tiers is None or tiers.way is not Way.EXPERTS_ON_HOST:
        return ()
    path: Argument = request.model if tiers.kernel in NATIVE else Template(text=f"{{files}}/{CONVERTED_FOLDER}")
    return ("--kt-weight-path", path)


def notes(request: ServingRequest) -> Sequence[str]:
    """What has to be done before, and what the plan assumed."""
    found: list[str] = []
    for pool in request.config.pools:
        tiers = pool.weight_tiers
        if tiers is None:
            continue
        found.append(f"{tiers.host_bytes / GIB:.0f} GiB of weights lie in host memory: leave it to them.")
        if tiers.way is Way.STREAMED:
            continue
        found.append(
            "The server is SGLang with kt-kernel: pip install sglang-kt kt-kernel. Its --kt- flags are those of "
            "KTransformers' argument list of 2026-11-24; no parser has seen them."
        )
        beside = f"The host's experts are read from {CONVERTED_FOLDER} beside these files"
        if tiers.kernel in CONVERTED:
            found.append(
                f"{beside}. Make it with kt-kernel's scripts/convert_cpu_weights.py --quant-method "
                f"{CONVERTED[tiers.kernel]} from a checkpoint in 8 or 16 bits."
            )
        elif tiers.kernel not in NATIVE:
            found.append(f"{beside}: a GGUF of the model.")
        if tiers.by_popularity:
            found.append(
                "The most popular experts stay on the devices: append --init-expert-location FILE with counts recorded "
                "by --expert-distribution-recorder-mode stat; without it choose --kt-expert-placement-strategy uniform."
            )
        if not tiers.threads:
            found.append("Say --kt-cpuinfer (physical cores) and --kt-threadpool-count (NUMA nodes) of the host.")
    return found
