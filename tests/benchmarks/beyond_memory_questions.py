"""Models larger than their devices asked as a user would, beside published rates; and what tiers cost who has none.

    python tests/benchmarks/beyond_memory_questions.py

Each question of ``tests/data/published/beyond_memory_questions.yaml``: CPU seconds, the plan, the flags that say what
lies where, tokens/s with their interval; then each published figure, with what its source says of the machine.
Nothing is fitted to a figure unless it says so.

At last questions whose models fit, asked without hosts and with hosts and a drive stated that are of no use, in turn:
the CPU seconds of each way are the least of all rounds, because other work only adds to them. The first way never calls
anything of the tiers, so the difference is all that they cost; a profile says how much of it is spent inside them.
"""

from __future__ import annotations

import cProfile
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from meshplan.catalogs.database.opening import open_database
from meshplan.catalogs.database.repository import Catalog
from meshplan.catalogs.errors import EmitError
from meshplan.planner.core.plan import Interval, Plan
from meshplan.planner.service import emit_plan, make_plan

QUESTIONS = Path(__file__).parents[1] / "data" / "published" / "beyond_memory_questions.yaml"
TIERS = "meshplan.planner.serving.tiers"
FOLDER = str(Path("serving") / "tiers")
ROUNDS = 5
# Flags of the three engines that say what lies where.
SHOWN = (
    "--kt-",
    "--cpu-offload",
    "--n-cpu-moe",
    "--gpu-layers",
    "--n-gpu-layers",
    "--tensor-parallel-size",
    "--tp-size",
    "--split-mode",
)


def asked(spec: Mapping[str, Any], catalog: Catalog) -> tuple[Plan, float]:
    """The plan of a question, and its CPU seconds."""
    start = time.process_time()
    plan = make_plan({"kind": "serving", **spec}, catalog)
    return plan, time.process_time() - start


def tokens_per_s(plan: Plan) -> Interval:
    """Tokens/s of one request while it is answered: 1/TPOT."""
    tpot = plan.predicted["tpot_mean_s"]
    return Interval(value=1.0 / tpot.value, low=1.0 / tpot.high, high=1.0 / tpot.low)


def flags(plan: Plan, checkpoint: str, catalog: Catalog) -> str:
    """The flags of the server that say what lies where."""
    engine = str(plan.config["engine"])
    options = {"model_path": checkpoint} if checkpoint else {}
    try:
        files = emit_plan(plan, engine, catalog, **options).artifacts
    except EmitError as error:
        return str(error)
    lines = next(each.content for each in files if each.path.name.endswith("_args.txt")).splitlines()
    return " ".join(line for line in lines if line.startswith(SHOWN))


def answer(question: Mapping[str, Any], catalog: Catalog) -> None:
    """One question with its figures."""
    plan, seconds = asked(question["spec"], catalog)
    print(f"{question['name']}: {seconds:.2f} s of CPU")
    if not plan.config:
        print("  no plan")
        return
    rate = tokens_per_s(plan)
    print(f"  {rate.value:.3g} tokens/s ({rate.low:.3g} to {rate.high:.3g})")
    print(f"  {flags(plan, question['checkpoint'], catalog)}")
    for figure in question["figures"]:
        other, _ = asked({**question["spec"], **figure["spec"]}, catalog)
        found, (low, high) = tokens_per_s(other), figure["tokens_per_s"]
        nearest = min(max(found.value, low), high)
        inside = "inside the interval" if found.low <= high and low <= found.high else "OUTSIDE THE INTERVAL"
        published = f"{low:g}" if low == high else f"{low:g} to {high:g}"
        print(f"  {figure['source']}")
        print(f"    published {published}, predicted {found.value:.3g} ({found.value / nearest - 1.0:+.0%}), {inside}")


def cost_of_tiers(document: Mapping[str, Any], catalog: Catalog) -> None:
    """CPU seconds of questions that have no use for tiers, without and with a host."""
    without: list[float] = []
    with_host: list[float] = []
    for spec in document["ordinary"]:
        stated = {**spec, "cluster": {**spec["cluster"], **document["useless_hosts"]}}
        times: dict[str, list[float]] = {"without": [], "with": []}
        for _ in range(ROUNDS):
            first, seconds = asked(spec, catalog)
            times["without"].append(seconds)
            second, seconds = asked(stated, catalog)
            times["with"].append(seconds)
        profile = cProfile.Profile()
        profile.runcall(asked, stated, catalog)
        every = profile.getstats()
        tiers = [each for each in every if FOLDER in getattr(each.code, "co_filename", "")]
        calls, own = sum(each.callcount for each in tiers), sum(each.inlinetime for each in tiers)
        total = sum(each.inlinetime for each in every)
        same = "the same plan" if first.config == second.config else "ANOTHER PLAN"
        without.append(min(times["without"]))
        with_host.append(min(times["with"]))
        print(
            f"  {spec['model']}: {without[-1]:.3f} s, with a host {with_host[-1]:.3f} s "
            f"({with_host[-1] / without[-1] - 1.0:+.1%}); {calls} calls in tiers, {own / total:.2%} of the time; {same}"
        )
    print(f"  all: {sum(without):.3f} and {sum(with_host):.3f} s ({sum(with_host) / sum(without) - 1.0:+.1%})")


def main() -> None:
    document = yaml.safe_load(QUESTIONS.read_text())
    catalog = Catalog(open_database())
    for spec in document["ordinary"]:
        asked(spec, catalog)
    loaded = [name for name in sys.modules if name.startswith(TIERS)]
    print(f"modules of tiers that {len(document['ordinary'])} questions without hosts load: {len(loaded)}")
    cost_of_tiers(document, catalog)
    for question in document["questions"]:
        answer(question, catalog)


if __name__ == "__main__":
    main()
