"""What stages send each other, counted by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from core_cases import DENSE, configured, machine_with, problem_of

from meshplan.catalogs.constants.training import FrameworkRecipe
from meshplan.planner.training.estimator.exchange.boundaries import message_bytes, tied_gradient_bytes
from meshplan.planner.training.estimator.priced import price
from meshplan.planner.training.problem.problem import Phase

MIB = 2**20
MESSAGES = "stage-to-stage messages"


def test_deepspeed_of_2021_sends_a_mask_forward_and_whole_gradients_backward() -> None:
    # 1,024 tokens of 1,024 fp16 elements over two ranks: 1 MiB and a mask of 2 MiB forward, 2 MiB backward.
    workload = replace(problem_of().workload, sequence_length=1024)
    recipe = FrameworkRecipe(sends_whole_gradients=True, sends_attention_mask=True)
    assert message_bytes(1.0 * MIB, 2, recipe, workload) == (1 + 2 + 2) / 2 * MIB
    assert message_bytes(1.0 * MIB, 2, FrameworkRecipe(), workload) == MIB


def test_messages_in_turn_take_longer_than_both_ways_at_once_only_after_the_first() -> None:
    def messages_s(rounds: int, recipe: FrameworkRecipe) -> float:
        problem = problem_of(num_devices=16, global_batch_size=8 * rounds, machine=machine_with(16))
        problem = replace(problem, calibration=replace(problem.calibration, recipe=recipe))
        config = configured(problem, pipeline_parallel=2, data_parallel=8, layers_per_chunk=(3, 3))
        return price(problem, config).breakdown_s[MESSAGES]

    at_once, in_turn = (FrameworkRecipe(overlaps_pipeline=False, sends_in_turn=turn) for turn in (False, True))
    one, nine = messages_s(1, at_once), messages_s(9, at_once)
    assert messages_s(1, in_turn) == pytest.approx(one)
    assert messages_s(9, in_turn) - one == pytest.approx(2.0 * (nine - one))


@pytest.mark.parametrize("data", [1, 8])
def test_a_tied_embedding_is_reduced_between_the_ends_of_a_pipeline(data: int) -> None:
    machine = machine_with(2 * data)

    def messages_s(tied: bool, stages: int = 2) -> float:
        shape = replace(DENSE, tie_word_embeddings=tied)
        problem = problem_of(shape, num_devices=stages * data, global_batch_size=8 * data, machine=machine)
        layers = (DENSE.num_hidden_layers // stages,) * stages
        config = configured(problem, pipeline_parallel=stages, data_parallel=data, layers_per_chunk=layers)
        return price(problem, config).breakdown_s[MESSAGES]

    reduced = tied_gradient_bytes(replace(DENSE, tie_word_embeddings=True), problem_of().workload, FrameworkRecipe())
    assert reduced == DENSE.vocab_size * DENSE.hidden_size * 4.0
    calibration = problem_of().calibration.time
    near = machine.scale_up_bytes_per_s * calibration.scale_up_efficiency, machine.scale_up_latency_s
    far = machine.scale_out_bytes_per_s * calibration.network_efficiency, machine.scale_out_latency_s
    rate, latency = far if data > 1 else near
    assert messages_s(tied=True) - messages_s(tied=False) == pytest.approx(reduced / rate + 2.0 * latency)
    assert messages_s(tied=True, stages=1) == messages_s(tied=False, stages=1) == 0.0


def test_frozen_embeddings_have_no_gradient() -> None:
    tied = replace(DENSE, tie_word_embeddings=True)
    assert tied_gradient_bytes(tied, problem_of(phase=Phase.LORA).workload, FrameworkRecipe()) == 0.0
