"""Plans with weights on the host as launcher files: flags of the documented argument lists, and refusals."""

from __future__ import annotations

from typing import Any

import pytest
from tier_questions import question

from meshplan.catalogs.database.repository import Catalog
from meshplan.catalogs.errors import CannotExpressError
from meshplan.planner.emit.serving.tiers.weight_tiers import KT_FLAGS
from meshplan.planner.service import emit_plan, make_plan

# KTransformers, kt-kernel_intro.md and experts-sched-Tutorial.md (read 2026-11-24): the flags that there are.
DOCUMENTED = {
    *("--kt-method", "--kt-weight-path", "--kt-cpuinfer", "--kt-threadpool-count", "--kt-num-gpu-experts"),
    *("--kt-max-deferred-experts-per-token", "--kt-gpu-prefill-token-threshold", "--kt-gpu-experts-ratio"),
    *("--kt-expert-placement-strategy", "--kt-enable-dynamic-expert-update"),
}
METHODS = {"AMXINT4", "AMXINT8", "RAWINT4", "FP8", "FP8_PERCHANNEL", "BF16", "LLAMAFILE"}


def emitted(asked: dict[str, Any], catalog: Catalog, target: str, model_path: str = "") -> dict[str, str]:
    plan = make_plan(asked, catalog)
    files = emit_plan(plan, target, catalog, model_path=model_path)
    return {str(file.path): file.content for file in files.artifacts}


def flags(text: str) -> dict[str, str]:
    words = [line.split(maxsplit=1) for line in text.splitlines() if line.startswith("--")]
    return {word[0]: word[1] if len(word) > 1 else "" for word in words}


def test_experts_on_the_host_by_ktransformers_own_words(catalog: Catalog) -> None:
    files = emitted(
        question("qwen3-235b-a22b", "rtx-4090", 4, "fp8", objective="max_request_rate"),
        catalog,
        "sglang",
        "org/Qwen3-235B-FP8",
    )
    written = flags(files["mixed_args.txt"])
    ours = {flag for flag in written if flag.startswith("--kt-")}
    assert ours <= DOCUMENTED
    assert set(KT_FLAGS) <= DOCUMENTED
    assert written["--kt-method"] == "FP8_PERCHANNEL"
    assert written["--kt-method"] in METHODS
    assert (written["--kt-cpuinfer"], written["--kt-threadpool-count"]) == ("64", "2")
    assert 0 <= int(written["--kt-num-gpu-experts"]) < 128
    assert int(written["--kt-gpu-prefill-token-threshold"]) > 0
    assert "--kt-weight-path org/Qwen3-235B-FP8" in files["launch.sh"]


def test_converted_weights_lie_beside_the_files_and_the_notes_say_how(catalog: Catalog) -> None:
    files = emitted(question("deepseek-v3", "rtx-4090", 1, "w4a16"), catalog, "sglang", "org/DeepSeek-V3-AWQ")
    assert flags(files["mixed_args.txt"])["--kt-method"] == "AMXINT4"
    assert '--kt-weight-path "$here/kt_weights"' in files["launch.sh"]
    assert "convert_cpu_weights.py --quant-method int4" in " ".join(files["README.md"].split())


def test_streamed_weights_are_what_the_plan_frees(catalog: Catalog) -> None:
    asked = question("llama-3.1-70b", "t4", 8, "bf16")
    plan = make_plan(asked, catalog)
    files = {str(one.path): one.content for one in emit_plan(plan, "vllm", catalog).artifacts}
    freed = float(flags(files["mixed_args.txt"])["--cpu-offload-gb"]) * 2**30
    assert freed == pytest.approx(plan.config["pools"][0]["weight_tiers"]["streamed_bytes_per_device"], rel=0.02)


def test_other_engines_refuse(catalog: Catalog) -> None:
    asked = question("llama-3.1-70b", "t4", 8, "bf16")
    with pytest.raises(CannotExpressError, match="plan for vllm"):
        emit_plan(make_plan(asked, catalog), "trtllm", catalog)
    found = make_plan({**asked, "constraints": {"target": "trtllm"}}, catalog)
    assert any("no flag keeps weights in host memory" in row["reason"] for row in found.rejected)
