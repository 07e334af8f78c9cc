"""QLoRA against the paper's own figures, and what four-bit weights cost (arXiv:2305.14314)."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from core_cases import DENSE, configured, machine_with, problem_of
from hypothesis import given, settings
from hypothesis import strategies as st

from meshplan.catalogs.constants.training import Calibration, FrameworkRecipe
from meshplan.catalogs.database.repository import Catalog
from meshplan.catalogs.errors import CannotExpressError, SpecError
from meshplan.catalogs.models.shapes import ModelShape
from meshplan.planner.service import emit_plan, make_plan
from meshplan.planner.training.estimator.priced import Priced, price
from meshplan.planner.training.estimator.states import DEQUANTISE_BYTES, GPTQ_UNPACK_BYTES, NF4_BYTES
from meshplan.planner.training.problem.frameworks.table import FRAMEWORKS
from meshplan.planner.training.problem.problem import Phase, TrainingProblem
from meshplan.planner.training.search.degrees import search_degrees
from meshplan.planner.training.unvalidated import unconfirmed

GB, GIB = 1e9, 2.0**30
# The paper trains 16-bit adapters of rank 64 on every linear layer with 32-bit Adam (appendix B), no master copy.
PAPER = Calibration(
    framework="any", architecture="any", recipe=FrameworkRecipe(gradient_bytes=2.0, optimizer_bytes=8.0)
)
PAPER_RANK, PAPER_SEQUENCE = 64, 512


def llama(layers: int, hidden: int, width: int, heads: int) -> ModelShape:
    """LLaMA of 2023 (arXiv:2302.13971, table 2)."""
    return replace(
        DENSE,
        slug=f"llama-{layers}",
        num_hidden_layers=layers,
        hidden_size=hidden,
        intermediate_size=width,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=hidden // heads,
    )


# Name → (model, memory of the four-bit model with its adapters, bytes: Guanaco in table 1 of the paper).
PUBLISHED = {
    "7B": (llama(32, 4096, 11008, 32), 6 * GB),
    "13B": (llama(40, 5120, 13824, 40), 10 * GB),
    "33B": (llama(60, 6656, 17920, 52), 21 * GB),
    "65B": (llama(80, 8192, 22016, 64), 41 * GB),
}


def qlora(shape: ModelShape = DENSE, *, rank: int = 16, phase: Phase = Phase.QLORA, **fields: Any) -> TrainingProblem:
    problem = problem_of(shape, phase=phase, **fields)
    return replace(problem, workload=replace(problem.workload, lora_rank=rank))


def trained(shape: ModelShape) -> Priced:
    """One sequence of 512 tokens on one device, checkpointed, as the paper measures."""
    problem = qlora(
        shape,
        rank=PAPER_RANK,
        num_devices=1,
        global_batch_size=1,
        sequence_length=PAPER_SEQUENCE,
        calibration=PAPER,
        machine=machine_with(1),
    )
    return price(problem, configured(problem, zero_stage=0, activation_recompute="full", quantised_weights=True))


def test_bits_of_a_weight() -> None:
    """Four, and 0.127 for the constants instead of 0.5 without double quantisation (section 3)."""
    assert pytest.approx(4.127, abs=5e-4) == 8 * NF4_BYTES


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_model_takes_what_the_paper_says(name: str) -> None:
    """Published figures include what a process has besides the model: they lie between without and with it."""
    shape, published = PUBLISHED[name]
    components = trained(shape).worst_stage.components
    assert components["weights"] < published < components["weights"] + components["fixed"] + 0.02 * published


@pytest.mark.parametrize(("name", "device_bytes"), [("33B", 24 * GIB), ("65B", 48 * GIB)])
def test_fits_the_device_of_the_paper_with_paged_optimizer_states(name: str, device_bytes: float) -> None:
    """The paper needs paged optimizers for 33B on 24 GB and 65B on 48 GB (section 4); they are not modelled."""
    stage = trained(PUBLISHED[name][0]).worst_stage
    assert stage.typical_bytes - stage.components["optimizer"] <= device_bytes


def test_sixty_five_billion_need_several_times_more_without_quantisation() -> None:
    shape, _ = PUBLISHED["65B"]
    four_bits = trained(shape).typical_bytes
    problem = replace(qlora(shape, num_devices=1, calibration=PAPER), fixed={})
    whole = replace(problem, workload=replace(problem.workload, phase=Phase.FINE_TUNING, lora_rank=0))
    full = price(whole, configured(whole, zero_stage=0, micro_batch_size=1, activation_recompute="full"))
    assert full.typical_bytes > 750 * GB  # "more than 780 GB" with 16-bit weights, gradients and 32-bit Adam (abstract)
    assert four_bits < 52 * GB


@settings(max_examples=25, deadline=None)
@given(
    data=st.sampled_from((1, 2, 8)),
    zero=st.sampled_from((0, 2, 3)),
    recompute=st.sampled_from(("none", "full")),
    rank=st.integers(1, 128),
)
def test_less_memory_and_never_faster_than_lora(data: int, zero: int, recompute: str, rank: int) -> None:
    """The same adapters on the same model: four bits save memory and cost time."""
    packed, wide = (qlora(rank=rank, phase=phase) for phase in (Phase.QLORA, Phase.LORA))
    choices: dict[str, Any] = {"data_parallel": data, "zero_stage": zero, "activation_recompute": recompute}
    four = price(packed, configured(packed, quantised_weights=True, **choices))
    sixteen = price(wide, configured(wide, **choices))
    if zero < 3:
        assert four.worst_stage.components["weights"] < sixteen.worst_stage.components["weights"]
        assert four.breakdown_s["matrix products"] > sixteen.breakdown_s["matrix products"]
    assert four.model_flops == sixteen.model_flops


def test_gptq_weights_are_unpacked_once_a_forward_pass() -> None:
    """Recompute repeats it; the backward pass uses what the forward pass has unpacked."""
    nf4 = qlora()
    gptq = replace(nf4, workload=replace(nf4.workload, frozen_weights="gptq"))
    weights = DENSE.num_hidden_layers * (DENSE.attention_parameters + DENSE.dense_mlp_parameters)
    rate = nf4.machine.device.memory_bandwidth_bytes_per_s * nf4.calibration.time.memory_op_efficiency
    micro_batches = nf4.workload.global_batch_size // 8
    for recompute, forwards in (("none", 1), ("full", 2)):
        choices: dict[str, Any] = {"data_parallel": 8, "quantised_weights": True, "activation_recompute": recompute}
        slow, fast = (price(problem, configured(problem, **choices)).breakdown_s for problem in (gptq, nf4))
        added = sum(slow[part] - fast[part] for part in ("matrix products", "recompute"))
        nf4_passes = forwards + 1  # and the backward pass
        moved = forwards * GPTQ_UNPACK_BYTES - nf4_passes * DEQUANTISE_BYTES
        assert added == pytest.approx(micro_batches * weights * moved / rate)


def test_dequantisation_by_hand() -> None:
    """Every block weight is read in four bits and written in sixteen, forward and backward, each micro-batch."""
    packed, wide = qlora(), qlora(phase=Phase.LORA)
    added = (
        price(packed, configured(packed, data_parallel=8, quantised_weights=True)).breakdown_s["matrix products"]
        - price(wide, configured(wide, data_parallel=8)).breakdown_s["matrix products"]
    )
    weights = DENSE.num_hidden_layers * (DENSE.attention_parameters + DENSE.dense_mlp_parameters)
    rate = packed.machine.device.memory_bandwidth_bytes_per_s * packed.calibration.time.memory_op_efficiency
    micro_batches = packed.workload.global_batch_size // 8
    assert added == pytest.approx(2 * micro_batches * weights * DEQUANTISE_BYTES / rate)


def test_the_search_splits_no_quantised_matrix() -> None:
    problem = qlora(rules=FRAMEWORKS["any"])
    _, search = search_degrees(problem)
    assert search.best
    assert {scored.config.tensor_parallel for scored in search.best} == {1}
    assert all(scored.config.quantised_weights for scored in search.best)
    (entry,) = unconfirmed(problem, price(problem, search.best[0].config))
    assert "QLoRA: no measured run" in entry.what
    assert entry.share > 0


# --- from a spec to files ---

SPEC: dict[str, Any] = {
    "kind": "training",
    "model": "llama-3.1-70b",
    "cluster": {"nodes": [{"type": "dgx-h100", "count": 1}]},
    "workload": {"sequence_length": 4096, "global_batch_size": 16, "phase": "qlora", "lora_rank": 64},
    "constraints": {"target": "accelerate"},
}


@pytest.mark.parametrize(("phase", "modules"), [("qlora", "all-linear"), ("lora", "q_proj")])
def test_the_script_is_told(catalog: Catalog, phase: str, modules: str) -> None:
    plan = make_plan({**SPEC, "workload": {**SPEC["workload"], "phase": phase}}, catalog)
    assert plan.solution["status"] == "optimal"
    files = {str(file.path): file.content for file in emit_plan(plan, "accelerate", catalog, script="t.py").artifacts}
    handed = json.loads(files["training_config.json"])["adapters"]
    assert (handed["phase"], handed["lora_rank"]) == (phase, 64)
    assert modules in str(handed["target_modules"])
    assert "PEFT" in files["README.md"]
    assert ("BitsAndBytesConfig" in files["README.md"]) is (phase == "qlora")
    assert plan.config.get("quantised_weights", False) is (phase == "qlora")


def test_a_trainer_without_adapters_says_so(catalog: Catalog) -> None:
    spec = {**SPEC, "workload": {**SPEC["workload"], "phase": "lora"}, "constraints": {"target": "megatron"}}
    plan = make_plan(spec, catalog)
    with pytest.raises(CannotExpressError, match=r"trains every weight\. Nearest it can: target axolotl or torchtune"):
        emit_plan(plan, "megatron", catalog)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"constraints": {"target": "megatron"}},
            "no weights in four bits; constraints.target: accelerate, axolotl",
        ),
        ({"model": "mixtral-8x7b"}, "modelled for dense models"),
        ({"workload": {**SPEC["workload"], "lora_rank": None}}, "phase 'qlora', lora_rank not said: add lora_rank: 16"),
        ({"workload": {**SPEC["workload"], "precision": "fp8"}, "constraints": {"target": "any"}}, "in bf16 or fp16"),
    ],
)
def test_what_cannot_be_is_refused(catalog: Catalog, change: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        make_plan({**SPEC, **change}, catalog)


@pytest.mark.parametrize("target", ["megatron", "torchtitan", "deepspeed"])
def test_other_frameworks_do_not_offer_it(target: str) -> None:
    rules = FRAMEWORKS[target]
    assert not rules.quantised_weights
    names = {rule.name for rule in rules.broken(DENSE, configured(qlora(), quantised_weights=True))}
    assert f"{target}_has_no_quantised_weights" in names


def test_frozen_weights_stay_in_16_bits_where_trained_ones_are_kept_in_32() -> None:
    """Accelerate casts only parameters with gradients: 2 bytes a frozen one, 4 an adapter's."""
    recipe = FrameworkRecipe(weight_bytes=4.0, gradient_bytes=4.0, optimizer_bytes=8.0)
    wide = Calibration(framework="any", architecture="any", recipe=recipe)
    narrow = replace(wide, recipe=replace(recipe, weight_bytes=2.0))
    problems = [
        qlora(phase=Phase.LORA, num_devices=1, machine=machine_with(1), global_batch_size=1, calibration=constants)
        for constants in (wide, narrow)
    ]
    cast, uncast = (price(problem, configured(problem, zero_stage=0)).worst_stage.components for problem in problems)
    adapters = cast["optimizer"] / recipe.optimizer_bytes
    assert cast["weights"] - uncast["weights"] == pytest.approx(2.0 * adapters)
    assert cast["gradients"] == pytest.approx(4.0 * adapters)
