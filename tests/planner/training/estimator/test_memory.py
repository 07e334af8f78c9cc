"""Memory of a rank: published activations, ZeRO by hand, monotony."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from core_cases import DENSE, LATENT, MOE, SMALL_SHAPES, configured, problem_of, questions
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from meshplan.catalogs.constants.framework_recipes import recipe_named
from meshplan.catalogs.constants.training import Calibration, MemoryConstants
from meshplan.catalogs.models.shapes import ModelShape
from meshplan.planner.training.estimator.memory import COMPONENTS
from meshplan.planner.training.estimator.priced import price
from meshplan.planner.training.problem.problem import Phase, TrainingConfig, TrainingProblem, TrainingWorkload

BARE = MemoryConstants(fixed_bytes=0.0, logits_bytes_per_entry=0.0, safe_factor=1.0, safe_fixed_bytes=0.0)


def bare(framework: str = "megatron") -> Calibration:
    return Calibration(framework=framework, architecture="any", memory=BARE, recipe=recipe_named(framework).recipe)


# --- activations of Korthikanti et al. 2022 (arXiv:2205.05198): Table 3 (models) and equations 1 to 4 ---

# name → (heads, hidden size, layers, tensor parallel, pipeline parallel, chunks a stage, micro-batch)
MODELS = {
    "22B": (64, 6144, 48, 8, 1, 1, 4),
    "175B": (96, 12288, 96, 8, 8, 3, 1),
    "530B": (128, 20480, 105, 8, 35, 3, 1),
    "1T": (160, 25600, 128, 8, 64, 1, 1),
}
# Figure 1 of the paper, bytes of activations of the first stage without recompute and sequence parallelism, and with
# selective recompute and sequence parallelism, as transcribed in calculon (github.com/calculon-ai/calculon,
# calculon/llm/validation.py at caa4b11, Apache-2.0).
FIGURE_1 = {
    "22B": (63_619_200_000.0, 10_267_660_000.0),
    "175B": (71_772_930_000.0, 13_262_390_000.0),
    "530B": (122_431_700_000.0, 24_777_850_000.0),
    "1T": (140_928_600_000.0, 28_521_270_000.0),
}


def gpt(heads: int, hidden: int, layers: int) -> ModelShape:
    return ModelShape(
        slug="gpt",
        name="GPT",
        family="gpt2",
        num_hidden_layers=layers,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        gated_mlp=False,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=hidden // heads,
        vocab_size=51200,
        tie_word_embeddings=True,
        num_position_embeddings=2048,
    )


def activations(name: str, **choices: Any) -> float:
    """Bytes of activations of the first stage."""
    heads, hidden, layers, tensor, stages, chunks, micro = MODELS[name]
    problem = replace(
        problem_of(gpt(heads, hidden, layers), calibration=bare("megatron-2022")),
        workload=TrainingWorkload(sequence_length=2048, global_batch_size=64 * micro, precision="fp16"),
    )
    config = configured(
        problem,
        tensor_parallel=tensor,
        pipeline_parallel=stages,
        virtual_pipeline_stages=chunks,
        micro_batch_size=micro,
        zero_stage=0,
        **choices,
    )
    return price(problem, config).stages[0].components["activations"]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_activations_follow_the_equations(name: str, sequence_parallel: bool, recompute: str) -> None:
    """Per layer sbh(10 + 24/t + 5as/ht), all ÷t with sequence parallelism; selective recompute drops 5as/ht; full keeps
    2sbh (÷t). The first stage keeps L layers of it, L·(1 + (p − 1)/pv) when interleaved (§4.2.3).
    Ours may add the embedding's output and the layer that is being recomputed.
    """
    heads, hidden, layers, t, p, v, micro = MODELS[name]
    sbh = 2048 * micro * hidden
    outside = 10 / t if sequence_parallel else 10
    scores = 5 * heads * 2048 / (hidden * t)
    kept = {
        "none": outside + 24 / t + scores,
        "selective": outside + 24 / t,
        "full": 2 / (t if sequence_parallel else 1),
    }
    in_flight = 1.0 if v == 1 else 1.0 + (p - 1) / (p * v)
    paper = sbh * kept[recompute] * layers * in_flight
    ours = activations(name, sequence_parallel=sequence_parallel, activation_recompute=recompute)
    embedded = 2 * sbh * p * in_flight / (t if sequence_parallel else 1)
    recomputed = sbh * (kept["none"] - kept[recompute])
    assert ours == pytest.approx(paper + embedded + recomputed, rel=1e-6)


@pytest.mark.parametrize("name", MODELS)
def test_activations_agree_with_figure_1(name: str) -> None:
    """The figure counts the layers alone; ours adds the embedding's output and the layer that is recomputed."""
    plain, selective = FIGURE_1[name]
    assert activations(name, sequence_parallel=False) == pytest.approx(plain, rel=0.07)
    found = activations(name, sequence_parallel=True, activation_recompute="selective")
    assert found == pytest.approx(selective, rel=0.07)


# --- peaks that the XLA allocator reported of Alpa (Lssyes/harp, benchmark/alpa/default.tsv), fp16, all recomputed ---

# (heads, hidden size), sequences of a micro-batch and micro-batches, pipeline and data parallel → GiB.
ALPA = [((16, 1024), (2, 512), (1, 1), 7.053), ((32, 2048), (4, 128), (2, 2), 8.371)]


@pytest.mark.parametrize(("sizes", "batch", "degrees", "gib"), ALPA)
def test_whole_gradients_and_no_process_are_what_alpa_reports(
    sizes: tuple[int, int], batch: tuple[int, int], degrees: tuple[int, int], gib: float
) -> None:
    shape = replace(gpt(sizes[0], sizes[1], 24), tie_word_embeddings=False, vocab_size=51200)
    memory = replace(BARE, logits_bytes_per_entry=12.0)
    problem = problem_of(
        shape,
        num_devices=degrees[0] * degrees[1],
        global_batch_size=batch[0] * batch[1] * degrees[1],
        sequence_length=1024,
        calibration=replace(bare("alpa"), memory=memory),
    )
    config = configured(
        problem,
        pipeline_parallel=degrees[0],
        data_parallel=degrees[1],
        micro_batch_size=batch[0],
        zero_stage=2,
        activation_recompute="full",
    )
    priced = price(problem, config)
    assert priced.typical_bytes == pytest.approx(gib * 2**30, rel=0.02)
    last = priced.stages[-1].components
    assert last["gradients"] == pytest.approx(last["weights"])


def test_halves_of_a_layer_keep_two_inputs_and_repeat_less_at_once() -> None:
    def activations(framework: str, micro_batches: int) -> float:
        problem = problem_of(
            gpt(16, 1536, 24), num_devices=2, global_batch_size=micro_batches, calibration=bare(framework)
        )
        config = configured(problem, pipeline_parallel=2, zero_stage=0, activation_recompute="full")
        return price(problem, config).stages[0].components["activations"]

    kept = {name: activations(name, 2) - activations(name, 1) for name in ("alpa", "harp")}
    # A micro-batch more is held: 12 inputs of layers, or 24 of halves, and what was embedded.
    assert kept["harp"] / kept["alpa"] == pytest.approx((24 + 1) / (12 + 1))
    running = {name: activations(name, 1) - kept[name] for name in kept}
    assert 0.0 < running["harp"] < running["alpa"]


# --- states ---


def states(shape: ModelShape, zero: int, **choices: Any) -> dict[str, float]:
    problem = problem_of(shape, calibration=bare(), global_batch_size=64)
    (stage,) = price(problem, configured(problem, zero_stage=zero, **choices)).stages
    return dict(stage.components)


def test_zero_stages_shard_states_as_by_hand() -> None:
    """16 + 2 bytes a parameter (2 weight, 4 gradient, 12 optimizer), ZeRO §5 (arXiv:1910.02054) with d = 8."""
    parameters = DENSE.num_parameters - DENSE.norm_parameters * DENSE.num_outer_norms
    layer = parameters / DENSE.num_hidden_layers
    for zero, weights, gradients, optimizer in (
        (0, 2.0, 4.0, 12.0),
        (1, 2.0, 4.0, 12.0 / 8),
        (2, 2.0, 4.0 / 8, 12.0 / 8),
        (3, 2.0 / 8, 4.0 / 8, 12.0 / 8),
    ):
        found = states(DENSE, zero, data_parallel=8)
        gathered = layer * (2 * 2.0 + 4.0) if zero == 3 else 0.0  # two layers in 16 bits, one's gradients in 32
        assert found["weights"] == pytest.approx(parameters * weights + gathered)
        assert found["gradients"] == pytest.approx(parameters * gradients)
        assert found["optimizer"] == pytest.approx(parameters * optimizer)


def test_shards_smaller_than_the_data_parallel_group() -> None:
    whole, half = (states(DENSE, 1, data_parallel=8, data_parallel_shard=s)["optimizer"] for s in (8, 4))
    assert half == pytest.approx(2 * whole)


def test_context_parallel_ranks_share_states() -> None:
    data, both = states(DENSE, 1, data_parallel=4), states(DENSE, 1, data_parallel=4, context_parallel=2)
    assert both["optimizer"] == pytest.approx(data["optimizer"] / 2)


def test_experts_are_spread() -> None:
    """Of 8 experts on 8 ranks each holds one; its optimizer states have one replica."""
    one, spread = states(MOE, 1, data_parallel=8), states(MOE, 1, data_parallel=8, expert_parallel=8)
    experts = 3 * 8 * MOE.expert_parameters
    assert one["weights"] - spread["weights"] == pytest.approx(2.0 * experts * 7 / 8)
    assert one["optimizer"] == pytest.approx(spread["optimizer"])  # 12/8 of all against 12 of an eighth


def test_all_stages_together_hold_the_model() -> None:
    for shape in SMALL_SHAPES:
        problem = problem_of(shape, calibration=bare(), global_batch_size=64)
        for stages in (1, 2, 3, 4):
            priced = price(problem, configured(problem, pipeline_parallel=stages, zero_stage=0))
            held = sum(stage.components["weights"] * stage.num_stages for stage in priced.stages) / 2.0
            extra = shape.num_nextn_predict_layers * shape.nextn_layer_parameters
            assert held == pytest.approx(shape.num_parameters + extra, rel=1e-4), (shape.slug, stages)


def test_lora_trains_little() -> None:
    problem = problem_of(DENSE, phase=Phase.LORA, calibration=bare())
    components = dict(price(problem, configured(problem)).stages[0].components)
    width = 4 * DENSE.hidden_size + 2 * 16 * 128 + 2 * 4 * 128  # inputs of four projections and their outputs
    adapters = DENSE.num_hidden_layers * 16 * width
    assert components["optimizer"] == pytest.approx(12.0 * adapters)
    assert components["gradients"] == pytest.approx(4.0 * adapters)


# --- properties ---


@settings(deadline=None)
@given(question=questions())
def test_every_stage_is_whole_and_safe(question: tuple[TrainingProblem, TrainingConfig]) -> None:
    priced = price(*question)
    assert sum(stage.num_stages for stage in priced.stages) == question[1].pipeline_parallel
    for stage in priced.stages:
        assert set(stage.components) == set(COMPONENTS)
        assert all(value >= 0.0 for value in stage.components.values())
        assert stage.typical_bytes == pytest.approx(sum(stage.components.values()))
        assert stage.safe_bytes >= stage.typical_bytes
    assert priced.safe_bytes == max(stage.safe_bytes for stage in priced.stages)
    assert priced.typical_bytes <= priced.safe_bytes


@settings(deadline=None)
@given(question=questions(), degree=st.sampled_from(("tensor_parallel", "context_parallel")))
def test_splitting_more_never_needs_more(question: tuple[TrainingProblem, TrainingConfig], degree: str) -> None:
    problem, config = question
    # ZeRO-3 over one rank gathers nothing; over two, the gathered layers come on top of halves of a small model.
    assume(config.zero_stage < 3 or config.context_parallel * config.data_parallel_shard > 1)
    sizes = []
    for factor in (1, 2):
        degrees = {degree: factor * getattr(config, degree)}
        sequence = degrees.get("tensor_parallel", config.tensor_parallel) > 1
        sizes.append(price(problem, replace(config, **degrees, sequence_parallel=sequence)).safe_bytes)
    assert sizes[1] <= sizes[0] * (1 + 1e-12)


@settings(deadline=None)
@given(question=questions())
def test_recompute_and_zero_never_need_more(question: tuple[TrainingProblem, TrainingConfig]) -> None:
    problem, config = question
    sizes = [
        price(problem, replace(config, activation_recompute=mode)).safe_bytes for mode in ("none", "selective", "full")
    ]
    assert sizes == sorted(sizes, reverse=True)
    stages = [
        price(problem, replace(config, zero_stage=zero, data_parallel_shard=config.data_parallel if zero else 1))
        for zero in (0, 1, 2)
    ]
    safe = [priced.safe_bytes for priced in stages]
    assert safe == sorted(safe, reverse=True)


@settings(deadline=None)
@given(question=questions())
def test_a_longer_sequence_or_a_larger_micro_batch_never_needs_less(
    question: tuple[TrainingProblem, TrainingConfig],
) -> None:
    problem, config = question
    longer = replace(problem, workload=replace(problem.workload, sequence_length=2 * problem.workload.sequence_length))
    assert price(longer, config).safe_bytes >= price(problem, config).safe_bytes
    assert price(problem, replace(config, micro_batch_size=2)).safe_bytes >= price(problem, config).safe_bytes


def test_latent_layers_keep_their_ranks() -> None:
    """What tensor parallelism cannot split: the compressed queries and keys of every token stay whole."""
    problem = problem_of(LATENT, calibration=bare())
    eight = price(problem, configured(problem, tensor_parallel=8)).stages[0].components["activations"]
    one = price(problem, configured(problem)).stages[0].components["activations"]
    assert one / 8 < eight < one
