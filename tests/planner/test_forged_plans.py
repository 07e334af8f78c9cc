"""Plan files that somebody forged: refused, or harmless in every file and page that is made of them."""

from __future__ import annotations

import json
import random
import subprocess
from collections.abc import Mapping
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml
from hostile import CANARY, HOSTILE_TEXTS, forged, leaves, random_forgery, signed, without

from meshplan.catalogs.database.repository import Catalog
from meshplan.catalogs.errors import MeshplanError
from meshplan.cli.reports.plan import report_of
from meshplan.cli.reports.screens.first_screen import first_screen, ticket
from meshplan.planner.core.kinds import KINDS
from meshplan.planner.core.plan import Plan
from meshplan.planner.launch.registry import TARGETS
from meshplan.planner.service import emit_plan, make_plan
from meshplan.planner.store import plan_from_document

TRAINING = {
    "kind": "training",
    "model": "llama-3.1-8b",
    "cluster": {"nodes": [{"type": "dgx-h100", "count": 1}]},
    "workload": {"sequence_length": 4096, "global_batch_size": 64},
}
SERVING = {
    "kind": "serving",
    "model": "llama-3.1-8b",
    "cluster": {"nodes": [{"type": "dgx-h100", "count": 1}]},
    "workload": {"input_length": 512, "output_length": 64, "request_rate_per_s": 2},
    "slo": {"ttft_p99_s": 2.0, "tpot_p95_s": 0.05},
}
DIFFUSION = {
    "kind": "diffusion",
    "model": "flux.1-dev",
    "cluster": {"nodes": [{"type": "dgx-h100", "count": 1}]},
    "workload": {"request_rate_per_s": 0.2},
}
EDGE = {
    "kind": "edge",
    "model": "llama-2-13b",
    "devices": [{"type": "raspberry-pi-4b", "count": 4}],
    "links": {"bandwidth": "1 Gb/s", "latency": "0.1 ms"},
}
QUESTIONS = {"training": TRAINING, "serving": SERVING, "diffusion": DIFFUSION, "edge": EDGE}
# Kinds whose files are of one target of their own.
OWN_TARGETS = {"diffusion": "xdit", "edge": "distributed-llama"}
SAMPLE = 60  # forged plans of each kind in the suite; tests/benchmarks/fuzz.py makes thousands


@pytest.fixture(scope="module", params=list(QUESTIONS))
def document(request: pytest.FixtureRequest, catalog: Catalog) -> dict[str, Any]:
    made = make_plan(QUESTIONS[request.param], catalog)
    found: dict[str, Any] = json.loads(json.dumps(made.to_document(clocks=False)))
    return signed(found | {name: shortened(found[name]) for name in ("alternatives", "answer") if name in found})


def shortened(value: Any) -> Any:
    """Two of each list of rows: the others look alike, and every page would be printed with all of them."""
    if isinstance(value, dict):
        return {key: shortened(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [shortened(inner) for inner in (value[:2] if value and isinstance(value[0], dict) else value)]
    return value


class Scripts(HTMLParser):
    """Elements of a page that a browser would run."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in {"script", "img", "iframe"} or any(name.startswith("on") for name, _ in attrs):
            self.found.append(tag)


def pages(plan: Plan) -> list[str]:
    """The report, and the page where the kind has one."""
    made = [f"{report_of(plan.kind).report(plan, width=80)}{first_screen(plan, width=80)}{ticket(plan)}"]
    page = KINDS[plan.kind].offers("pareto_page")
    return [*made, page(plan)] if page is not None and plan.answer else made


def launcher_files(plan: Plan, catalog: Catalog, target: str) -> Mapping[str, str]:
    options = {"image": "registry/image:1", "script": "train.py"}
    for given in (options, {"script": "train.py"}, {"image": "registry/image:1"}, {}):
        try:
            return {str(file.path): file.content for file in emit_plan(plan, target, catalog, **given).artifacts}
        except MeshplanError:
            continue
    return {}


def check_files(files: Mapping[str, str], folder: Path) -> None:
    """Shell is read by a shell, YAML by a YAML reader, a page by an HTML reader; nothing is run, nothing is left."""
    for number, (name, content) in enumerate(files.items()):
        if name.endswith((".sh", ".sbatch")):
            subprocess.run(["bash", "-n"], input=content, text=True, check=True, cwd=folder)
        elif name.endswith((".yaml", ".yml")):
            list(yaml.safe_load_all(content))
        elif name.endswith(".json"):
            json.loads(content)
        if name.endswith("launch.sh"):
            # Without a host number each script stops after its first lines; all that stands above has been run.
            path = folder / f"{number}.sh"
            path.write_text(content)
            subprocess.run(["bash", str(path)], cwd=folder, capture_output=True, check=False, timeout=20)
    assert not (folder / CANARY).exists()


def read(document: dict[str, Any]) -> Plan | None:
    """The plan as the store reads it; None where it is refused."""
    try:
        return plan_from_document(document, name="a file")
    except MeshplanError:
        return None


def test_every_field_of_a_plan_may_be_hostile(document: dict[str, Any], catalog: Catalog, tmp_path: Path) -> None:
    """Each text and number of the plan with a hostile text; then the files of one target after the other."""
    targets = [target.name for target in TARGETS]
    accepted = 0
    for number, path in enumerate(leaves(document)):
        if path == ("plan_id",):
            continue
        plan = read(forged(document, path, HOSTILE_TEXTS[(number + 7) % 18]))
        if plan is None:
            continue
        accepted += 1
        for page in pages(plan)[1:]:
            parser = Scripts()
            parser.feed(page)
            assert parser.found == [], path
        target = OWN_TARGETS.get(plan.kind, targets[accepted % len(targets)])
        check_files(launcher_files(plan, catalog, target), tmp_path)
    assert accepted > 10


_POOL = ("config", "pools", 0)


@pytest.mark.parametrize(
    "part",
    [("predicted",), ("provenance", "model"), *((*_POOL, name) for name in ("quantization", "limits", "layout"))],
)
def test_a_plan_without_a_figure_or_a_size_is_refused_or_shown(
    part: tuple[Any, ...], document: dict[str, Any], catalog: Catalog
) -> None:
    """Whatever is missing: the first screen, the ticket and the files need it no more than the reader does."""
    inner: Any = document
    for name in part:
        if isinstance(inner, dict) and name not in inner:
            pytest.skip("other kinds have no pools")
        inner = inner[name]
    plans = [read(without(document, (*part, key))) for key in inner]
    for plan in filter(None, plans):
        pages(plan)
        launcher_files(plan, catalog, "vllm" if plan.kind == "serving" else "megatron")


def test_no_forged_plan_is_a_bug_of_meshplan(document: dict[str, Any], catalog: Catalog) -> None:
    random_ = random.Random(8)
    for _ in range(SAMPLE):
        plan = read(random_forgery(document, random_))
        if plan is None:
            continue
        pages(plan)
        for target in ("torchrun", "vllm", "kubernetes", *OWN_TARGETS.values()):
            launcher_files(plan, catalog, target)


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("provenance", "model", "vocab_size"), "1 $(touch x)", "provenance.model"),
        (("rank_table", 0), ["0\ntouch x", 0], "rank_table"),
        (("rank_table", 0), [0, "0; touch x"], r"rank_table\[0\]\[1\]: Input should be a valid integer"),
        (("solution", "status"), "best", "solution.status"),
        (("kind",), "other", "kind"),
        (("predicted", "x\x1b"), {"value": 1, "low": 1, "high": 1}, "control character"),
    ],
)
def test_a_refusal_names_the_field(path: tuple[Any, ...], value: Any, words: str, document: dict[str, Any]) -> None:
    if document["kind"] == "diffusion" and path[0] in ("rank_table", "provenance"):
        path, value, words = ("provenance", "model", "source"), "https://evil.example/$(touch x)", "provenance.model"
    if document["kind"] == "edge" and path[0] == "rank_table":
        path, value, words = ("config", "machines", 1, "address"), "10.0.0.1; touch x", r"config.machines\[1\].address"
    with pytest.raises(MeshplanError, match=words):
        plan_from_document(forged(document, path, value), name="a file")


def test_a_plan_that_found_nothing_is_accepted(catalog: Catalog) -> None:
    made = make_plan({**TRAINING, "constraints": {"max_step_time": "1 ms"}}, catalog)
    assert made.solution["status"] == "infeasible"
    document = json.loads(json.dumps(made.to_document(clocks=False)))
    plan = plan_from_document(document, name="a file")
    assert pages(plan)


def test_the_plan_itself_is_accepted(document: dict[str, Any]) -> None:
    assert plan_from_document(signed(document), name="a file").plan_id == document["plan_id"]
