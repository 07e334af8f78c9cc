"""An elastic job on three hosts of two processes, whose script only says which rank of which plan it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from meshplan.catalogs.database.repository import Catalog
from meshplan.planner.core.kinds import Question
from meshplan.planner.service import emit_elastic, make_plan, write_files
from meshplan.planner.training.replanning.replan import elastic_plans
from meshplan.planner.training.service import replan

LINKS = {
    "intra_node": {"bandwidth": "450 GB/s", "latency": "3 us"},
    "inter_node": {"bandwidth": "50 GB/s", "latency": "5 us"},
}
# Says which rank of which plan it is; ends where another rank is gone, as a collective would.
SCRIPT = """
import json, os, pathlib, sys, time
config = json.load(open(os.environ["MESHPLAN_CONFIG"]))["config"]
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
beats = pathlib.Path(os.environ["BEATS"]) / f'{world}-{os.environ["TORCHELASTIC_RESTART_COUNT"]}'
beats.mkdir(parents=True, exist_ok=True)
print("rank", rank, "of", world, "plan", config["data_parallel"] * config["tensor_parallel"], flush=True)
began = time.time()
while True:
    (beats / str(rank)).touch()
    time.sleep(0.5)
    files = [beats / str(other) for other in range(world)]
    late = [path for path in files if not path.exists() or time.time() - path.stat().st_mtime > 5]
    if late and time.time() - began > 20:
        sys.exit(f"rank {late[0].name} is gone")
"""


def question(target: str = "any") -> dict[str, Any]:
    return {
        "kind": "training",
        "model": "llama-3.2-1b",
        "cluster": {"devices": {"type": "h100-sxm-80gb", "nodes": 3, "per_node": 2}, "links": LINKS},
        "workload": {"sequence_length": 4096, "global_batch_size": 480, "num_training_tokens": "300B"},
        "constraints": {"target": target},
        "run": {"failures_per_node_day": 0.5},
    }


def write_job(catalog: Catalog, out: Path) -> None:
    """Files for two and three hosts below ``out/job``, the script beside them."""
    made = make_plan(question(), catalog)
    rows = replan(Question(document=made.spec, catalog=catalog), made, fewer=1)
    (out / "train.py").write_text(SCRIPT)
    files = emit_elastic(elastic_plans(made, rows), "torchrun", catalog, "runbook", script=str(out / "train.py"))
    write_files(files, out / "job")
