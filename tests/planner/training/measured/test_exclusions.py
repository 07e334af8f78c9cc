"""A row that contradicts itself is set aside, whatever is predicted for it."""

from __future__ import annotations

from dataclasses import replace

from core_cases import DENSE, configured, machine_with, problem_of
from measured_rows import TRAINING_ROW

from meshplan.catalogs.constants.training import Calibration
from meshplan.catalogs.database.repository import Catalog
from meshplan.planner.training.estimator.flops import forward_flops_per_token
from meshplan.planner.training.estimator.operators.products import peak_flops_per_s
from meshplan.planner.training.estimator.priced import price
from meshplan.planner.training.measured.exclusions import exclusion
from meshplan.planner.training.measured.observations import ObservationReader, ObservedRun
from meshplan.planner.training.measured.validate import validate_run
from meshplan.planner.training.problem.problem import Phase


def run_of(share_of_peak: float, recompute: str) -> ObservedRun:
    """A run whose model FLOPs take ``share_of_peak``."""
    problem = problem_of(DENSE, num_devices=8, global_batch_size=64, machine=machine_with(8))
    config = configured(problem, data_parallel=8, activation_recompute=recompute)
    peak = 8 * peak_flops_per_s(problem.machine.device, problem.workload.precision)
    return ObservedRun(
        id="run",
        group="source|dense|h100",
        problem=problem,
        config=config,
        framework="megatron",
        measured={"iteration_s": price(problem, config).model_flops / (share_of_peak * peak)},
        derived={},
        filled=(),
        expects_oom=False,
    )


def excluded(run: ObservedRun) -> str | None:
    return exclusion(run.problem, run.config, run.measured)


def test_beyond_the_peak_nothing_was_measured() -> None:
    assert excluded(run_of(0.9, "none")) is None
    assert excluded(run_of(0.7, "full")) is None
    reason = excluded(run_of(0.9, "full"))  # a third more with recompute
    assert reason is not None
    assert "peak" in reason
    validated = validate_run(run_of(0.9, "full"))
    assert (validated.status, validated.reason) == ("excluded", reason)


def test_a_peak_of_experts_that_a_solver_placed_is_not_compared(catalog: Catalog) -> None:
    """Alpa's solver puts experts on devices, and its table does not say how many share them."""

    def compared(caveats: list[str], **experts: int) -> str:
        model = TRAINING_ROW["model"] | {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 512}
        row = TRAINING_ROW | {"model": model, "measured": {"peak_memory_bytes": 70e9}, "caveats": caveats}
        row["parallelism"] = TRAINING_ROW["parallelism"] | experts
        calibration = Calibration(framework="any", architecture="any")
        return ObservationReader(catalog).training_run(row, calibration).peak_left_out

    placed = ["with such a mesh the solver places experts over the devices"]
    assert "places experts" in compared(placed)
    assert compared([]) == compared(placed, expert_parallel=1) == ""


def test_without_a_step_time_there_is_nothing_to_say() -> None:
    assert excluded(replace(run_of(2.0, "none"), measured={})) is None


def test_a_run_that_counts_no_weight_gradients_is_one_with_adapters() -> None:
    run = run_of(0.3, "none")
    problem = run.problem
    matrix = forward_flops_per_token(problem.shape, problem.workload.sequence_length).matrix

    def counted(passes: float, phase: Phase = Phase.PRETRAINING) -> str | None:
        workload = replace(problem.workload, phase=phase, lora_rank=16 if phase.has_adapters else 0)
        measured = {
            **run.measured,
            "model_flops_per_s_per_device": passes * matrix * 1e3,
            "tokens_per_s_per_device": 1e3,
        }
        return excluded(replace(run, problem=replace(problem, workload=workload), measured=measured))

    assert counted(3.0) is None
    assert counted(2.0, Phase.LORA) is None
    reason = counted(2.1)
    assert reason is not None
    assert "adapters" in reason
