"""CPU milliseconds to emit one plan, and to read it back, for every training target (design: below 50 ms a plan).

Then random plans to every target: how many become files, how many are refused, and what is wrong: devices other than
the plan's, refusals without reason. "legal" are plans that the framework's rules allow, none of which may be refused.
``emit.py 500`` draws 500 of each kind (the default is 100).
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

from emit_cases import LLAMA_70B, LLAMA_70B_ON_64, config_for, plan_for, request_for
from emitted import (
    Outcome,
    framework_outcomes,
    random_serving,
    random_training,
    serving_outcomes,
    training_outcomes,
)
from emitted_others import image_outcomes, random_images, random_stages, stage_outcomes
from read_back_cases import FILES, read_back

from meshplan.catalogs.database.repository import Catalog
from meshplan.planner.launch.registry import TARGETS, emit, framework_names
from meshplan.planner.service import load_catalog

REPEATS = 50
RANDOM_PLANS = 100
LARGE = config_for(LLAMA_70B, tensor_parallel=8, pipeline_parallel=8, data_parallel=160)
CONFIGS = {
    "torchtitan": config_for(LLAMA_70B, tensor_parallel=8, pipeline_parallel=4, data_parallel=2, zero_stage=3),
    "deepspeed": config_for(LLAMA_70B, data_parallel=64, zero_stage=3),
    **{
        target: config_for(LLAMA_70B, data_parallel=64, zero_stage=3)
        for target in ("accelerate", "axolotl", "torchtune")
    },
}


def main() -> None:
    for target in (target for target in TARGETS if not target.serves):
        config = CONFIGS.get(target.name, LLAMA_70B_ON_64)
        plan = plan_for(LLAMA_70B, config, spec={"kind": "training", "workload": {"phase": "sft"}})
        request = request_for(LLAMA_70B, config, plan=plan, hosts=(), script="train.py" if target.takes_script else "")
        framework = "megatron" if target.wraps else None
        started = time.process_time()
        for _ in range(REPEATS):
            emitted = emit(target.name, request, framework=framework)
        milliseconds = (time.process_time() - started) / REPEATS * 1e3
        line = f"{target.name:<12} {config.world_size:>6} devices  emit {milliseconds:6.2f} ms"
        if target.name in FILES:
            with tempfile.TemporaryDirectory() as folder:
                started = time.process_time()
                for _ in range(REPEATS):
                    read_back(target.name, emitted, Path(folder))
                line += f"  read back {(time.process_time() - started) / REPEATS * 1e3:6.2f} ms"
        print(line)
    request = request_for(LLAMA_70B, LARGE, hosts=())
    started = time.process_time()
    emit("megatron", request)
    print(f"{'megatron':<12} {LARGE.world_size:>6} devices  emit {(time.process_time() - started) * 1e3:6.2f} ms")
    random_plans(int(sys.argv[1]) if len(sys.argv) > 1 else RANDOM_PLANS)


def outcomes(num_plans: int, catalog: Catalog) -> Iterator[Outcome]:
    """What becomes of ``num_plans`` random plans of each kind, and of as many that each framework's rules allow."""
    draw = random.Random(500)
    for _ in range(num_plans):
        yield from serving_outcomes(random_serving(draw))
        yield from training_outcomes(random_training(draw))
        yield from image_outcomes(random_images(draw, catalog), catalog)
        yield from stage_outcomes(random_stages(draw, catalog), catalog)
    for framework in framework_names():
        for outcome in framework_outcomes(framework, draw, num_plans):
            yield replace(outcome, target=f"{outcome.target}, legal")


def random_plans(num_plans: int) -> None:
    """Print a line for each target."""
    emitted: Counter[str] = Counter()
    refused: Counter[str] = Counter()
    wrong: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        for outcome in outcomes(num_plans, load_catalog(str(Path(folder) / "catalog.sqlite"))):
            (emitted if outcome.is_emitted else refused)[outcome.target] += 1
            if outcome.wrong:
                wrong[f"{outcome.target}: {outcome.wrong}"] += 1
    for target in sorted(emitted.keys() | refused.keys()):
        print(f"{target:<26} {num_plans} random plans: {emitted[target]:>4} emitted, {refused[target]:>4} refused")
    print(f"wrong: {wrong.total()}", *(f"{times} × {text}" for text, times in wrong.most_common(20)), sep="\n  ")


if __name__ == "__main__":
    main()
