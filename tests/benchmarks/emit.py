"""CPU milliseconds to emit one plan, and to read it back, for every training target (design: below 50 ms a plan)."""

from __future__ import annotations

import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

from emit_cases import LLAMA_70B, LLAMA_70B_ON_64, config_for, request_for
from read_back_cases import FILES, read_back

from meshplan.planner.launch.registry import TARGETS, emit

REPEATS = 50
LARGE = config_for(LLAMA_70B, tensor_parallel=8, pipeline_parallel=8, data_parallel=160)
CONFIGS = {
    "torchtitan": config_for(LLAMA_70B, tensor_parallel=8, pipeline_parallel=4, data_parallel=2, zero_stage=3),
    "deepspeed": config_for(LLAMA_70B, data_parallel=64, zero_stage=3),
    "accelerate": config_for(LLAMA_70B, data_parallel=64, zero_stage=3),
}


def main() -> None:
    for target in (target for target in TARGETS if not target.serves):
        config = CONFIGS.get(target.name, LLAMA_70B_ON_64)
        request = replace(request_for(LLAMA_70B, config, hosts=()), script="train.py" if target.takes_script else "")
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


if __name__ == "__main__":
    main()
