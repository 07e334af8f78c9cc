"""Block-scaled precisions: which devices have them, what Megatron-LM is told, what a plan says of its evidence."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from core_cases import DENSE, MOE, configured, machine_with, problem_of

from meshplan.catalogs.database.repository import Catalog
from meshplan.catalogs.errors import SpecError
from meshplan.planner.imports.reading import Given
from meshplan.planner.imports.sources.megatron import read
from meshplan.planner.service import make_plan
from meshplan.planner.training.estimator.memory import MemoryModel
from meshplan.planner.training.estimator.priced import candidates_of, price
from meshplan.planner.training.problem.precisions import PRECISIONS, WEIGHT_COPY_BYTES, missing_units
from meshplan.planner.training.unvalidated import PRODUCTS, unconfirmed, unmeasured_share

SPEC: dict[str, Any] = {
    "kind": "training",
    "model": "llama-3.1-8b",
    "cluster": {"nodes": [{"type": "dgx-b200", "count": 1}]},
    "workload": {"sequence_length": 4096, "global_batch_size": 32},
}


def asked(precision: str, *, node: str = "dgx-b200", target: str = "megatron") -> dict[str, Any]:
    return {
        **SPEC,
        "cluster": {"nodes": [{"type": node, "count": 1}]},
        "workload": {**SPEC["workload"], "precision": precision},
        "constraints": {"target": target},
    }


@pytest.mark.parametrize(
    ("device", "precision", "words"),
    [
        ("h100-sxm-80gb", "mxfp8", "block-scaled"),
        ("h100-sxm-80gb", "nvfp4", "block-scaled"),
        ("h100-sxm-80gb", "fp8", None),
        ("mi355x", "nvfp4", "block-scaled"),
        ("rtx-pro-6000", "mxfp8", "12.0"),
        ("rtx-pro-6000", "fp8", None),
        ("a100-sxm-80gb", "fp8", "has no fp8 units"),
        ("b200-sxm-180gb", "mxfp8", None),
        ("gb200", "nvfp4", None),
    ],
)
def test_which_device_has_it(catalog: Catalog, device: str, precision: str, words: str | None) -> None:
    found = missing_units(catalog.device(device), precision)
    assert (found is None) == (words is None)
    assert words is None or words in (found or "")


def test_every_device_has_what_its_generation_has(catalog: Catalog) -> None:
    """No device can do the narrow format and not the wide one."""
    for row in catalog.devices():
        device = catalog.device(row["slug"]) if isinstance(row, dict) else row
        if missing_units(device, "nvfp4") is None:
            assert missing_units(device, "mxfp8") is None
        if missing_units(device, "mxfp8") is None:
            assert missing_units(device, "fp8") is None


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (asked("mxfp8", node="dgx-h100"), "block-scaled tensor cores"),
        (asked("nvfp4", target="torchtitan"), "torchtitan is planned in bf16, fp8, not nvfp4"),
        (asked("mxfp8", target="deepspeed"), "deepspeed is planned in bf16, fp16, not mxfp8"),
    ],
)
def test_what_cannot_run_is_refused(catalog: Catalog, spec: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        make_plan(spec, catalog)


def test_narrower_is_faster_and_says_what_it_rests_on(catalog: Catalog) -> None:
    plans = {precision: make_plan(asked(precision), catalog) for precision in ("bf16", "mxfp8", "nvfp4")}
    times = {precision: plan.predicted["iteration_s"] for precision, plan in plans.items()}
    assert times["mxfp8"].value < times["bf16"].value
    assert "not_validated" not in plans["bf16"].provenance
    for precision in ("mxfp8", "nvfp4"):
        said = " ".join(plans[precision].provenance["not_validated"])
        assert precision in said
        assert "product rates fitted" in said
        assert "not measured" in said
    width = {precision: interval.high / interval.value for precision, interval in times.items()}
    # Kernels of each width have an interval of their own, from the same sources and written with four digits.
    assert width["mxfp8"] == pytest.approx(width["bf16"], abs=1e-3)
    assert width["nvfp4"] > width["mxfp8"]


def test_a_device_without_curves_says_that_its_rates_are_assumed() -> None:
    bare = replace(machine_with(8).device, gemm_curves={})
    problem = problem_of(precision="mxfp8", machine=machine_with(8, device=bare))
    (entry,) = unconfirmed(problem, price(problem, configured(problem, data_parallel=8)))
    assert "assumed from the datasheet" in entry.what
    assert "efficiency assumed" in entry.what


def test_the_interval_of_nvfp4_grows_by_its_products() -> None:
    problem = problem_of(MOE, precision="nvfp4")
    priced = price(problem, configured(problem, data_parallel=8))
    products = sum(priced.breakdown_s[name] for name in PRODUCTS) / priced.step_s
    assert unmeasured_share(problem, priced) == pytest.approx(products)
    assert products > 0


@pytest.mark.parametrize("precision", ["mxfp8", "nvfp4"])
def test_copies_of_the_weights_are_counted(precision: str) -> None:
    """Two copies of each weight of a rank, elements and block scales, over fp8's memory."""
    problem, fp8 = problem_of(DENSE, precision=precision), problem_of(DENSE, precision="fp8")
    config = configured(problem, data_parallel=8)
    narrow, wide = price(problem, config).worst_stage, price(fp8, replace(config, precision="fp8")).worst_stage
    model = MemoryModel(
        shape=DENSE,
        workload=problem.workload,
        candidates=candidates_of(problem, config),
        calibration=problem.calibration,
    )
    (stage,) = model.candidates.split.classes
    parameters = float(model.states.dense_parameters(stage)[0])
    added = narrow.components["weights"] - wide.components["weights"]
    assert added == pytest.approx(parameters * WEIGHT_COPY_BYTES[precision])


@pytest.mark.parametrize(
    ("words", "precision"),
    [
        ({"--bf16": "", "--fp8-format": "e4m3", "--fp8-recipe": "mxfp8"}, "mxfp8"),
        ({"--bf16": "", "--fp8-format": "hybrid", "--fp8-recipe": "tensorwise"}, "fp8"),
        ({"--bf16": "", "--fp8-format": "hybrid"}, "fp8"),
        ({"--bf16": "", "--fp4-format": "e2m1"}, "nvfp4"),
    ],
)
def test_megatron_words_are_read(words: dict[str, str], precision: str) -> None:
    assert read(Given(arguments=words)).values["precision"] == precision
    assert precision in PRECISIONS


def test_an_unknown_recipe_is_a_problem() -> None:
    found = read(Given(arguments={"--bf16": "", "--fp8-format": "e4m3", "--fp8-recipe": "custom"}))
    assert "not modelled" in " ".join(problem.message for problem in found.problems)
