"""A question from a few options: ``--model Qwen/Qwen3-32B --gpus 16xH100 --slo ttft_p99=2s --rate 5`` → a spec.

What the options leave open takes a default that is named here with its source and printed as an assumption; the spec
that comes out is the one that a file would hold (``meshplan init`` writes it).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshplan.catalogs.errors import Problem, SpecError, UnitError
from meshplan.cli.completion import complete_gpus, complete_model

if TYPE_CHECKING:
    from meshplan.catalogs.database.repository import Catalog
    from meshplan.catalogs.hardware import NodeType

# Prompt and answer of the first of the three scenarios of InferenceX (SemiAnalysis): 1k / 1k.
ASSUMED_LENGTHS = "1024/1024"
# Llama 3 began its pre-training with 4,096 tokens a sequence and 4M tokens a step (arXiv:2407.21783, section 3.4.1).
ASSUMED_SEQUENCE, ASSUMED_BATCH = "4096", "4M"

ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="MODEL",
        help="Catalog name, Hugging Face id or config.json.",
        show_default=False,
        autocompletion=complete_model,
    ),
]
GpusOption = Annotated[
    str | None,
    typer.Option(
        "--gpus",
        metavar="NxGPU",
        help="16xH100, 2xdgx-h100, 8xH100,8xA100: GPUs or nodes.",
        show_default=False,
        autocompletion=complete_gpus,
    ),
]
LengthsOption = Annotated[
    str | None,
    typer.Option(
        "--lengths", metavar="IN/OUT", help="Serving: tokens of a prompt and an answer, 4000/1000.", show_default=False
    ),
]
RateOption = Annotated[
    float | None, typer.Option("--rate", metavar="R", help="Serving: requests/s that arrive.", show_default=False)
]
ConcurrencyOption = Annotated[
    int | None, typer.Option("--concurrency", metavar="N", help="Serving: requests in flight.", show_default=False)
]
SloOption = Annotated[
    str | None,
    typer.Option("--slo", metavar="SLO", help="Serving: ttft_p99=2s,tpot_p95=50ms.", show_default=False),
]
SequenceOption = Annotated[
    str | None,
    typer.Option("--sequence-length", metavar="N", help="Training: tokens of a sequence, 8k.", show_default=False),
]
BatchOption = Annotated[
    str | None,
    typer.Option("--batch", metavar="N", help="Training: sequences of a step, or 4M tokens.", show_default=False),
]
TokensOption = Annotated[
    str | None,
    typer.Option("--tokens", metavar="N", help="Training: tokens of the whole run, 15T.", show_default=False),
]
ObjectiveOption = Annotated[
    str | None, typer.Option("--objective", help="What the plan is best at; default throughput.", show_default=False)
]
TargetOption = Annotated[
    str | None, typer.Option("--target", help="Framework or engine; default megatron, vllm.", show_default=False)
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Override a key of the spec: workload.sequence_length=16k.",
        show_default=False,
    ),
]

_GROUP = re.compile(
    r"\s*(?P<count>\d{1,7})\s*[xX×*]\s*(?P<name>[\w. -]+?)\s*|"
    r"\s*(?P<name2>[\w. -]+?)\s*[xX×*]\s*(?P<count2>\d{1,7})\s*"
)
_DECIMAL_COMMA = re.compile(r"(?P<key>\w+)\s*=\s*(?P<whole>\d+),(?P<rest>\d[^,]*)")
_SLO = re.compile(r"\s*(?P<key>[a-z0-9_]+?)(?P<unit>_s)?\s*=\s*(?P<limit>[^=]+?)\s*")
# Makers' own node types come before those of one cloud, and boards with the fastest links before PCIe cards.
_PREFERRED = ("dgx-", "hgx-", "gb200-", "gb300-", "hls-")


@dataclass(slots=True, kw_only=True)
class Asked:
    """A question as options give it; None where an option was not given."""

    model: str | None = None
    gpus: str | None = None
    lengths: str | None = None
    rate: float | None = None
    concurrency: int | None = None
    slo: str | None = None
    sequence_length: str | None = None
    batch: str | None = None
    tokens: str | None = None
    objective: str | None = None
    target: str | None = None
    assumed: list[str] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        """No option of a question was given."""
        return not any(getattr(self, name) is not None for name in self.__dataclass_fields__ if name != "assumed")

    @property
    def says_serving(self) -> bool:
        """An option that only serving has was given."""
        return any(one is not None for one in (self.lengths, self.rate, self.concurrency, self.slo))

    @property
    def says_training(self) -> bool:
        """An option that only training has was given."""
        return any(one is not None for one in (self.sequence_length, self.batch, self.tokens))

    def kind(self) -> str:
        """``training`` or ``serving``, by the options that only one of them has.

        Raises:
            SpecError: they say both, or nothing.
        """
        from meshplan.planner.serving.problem.engines import ENGINES  # start-up: --help must not load the planner

        serving = self.says_serving or self.target in ENGINES
        training = self.says_training or (self.target is not None and self.target not in ENGINES)
        if serving == training:
            model, gpus = self.model or "Qwen/Qwen3-32B", self.gpus or "16xH100"
            what = "both training and serving" if serving else "neither training nor serving"
            raise _problem(
                "",
                f"the options ask for {what}. To serve: --model {model} --gpus {gpus} --rate 5 --slo ttft_p99=2s. "
                f"To train: --model {model} --gpus {gpus} --sequence-length 8k --batch 4M",
            )
        return "serving" if serving else "training"

    def document(self, catalog: Catalog) -> dict[str, Any]:
        """The spec; what was assumed is listed in ``assumed``.

        Raises:
            SpecError: an option is missing or cannot be read.
        """
        missing = [f"--{name}" for name in ("model", "gpus") if getattr(self, name) is None]
        if missing:
            raise _problem("", f"a question without a spec file needs {' and '.join(missing)}")
        kind = self.kind()
        cluster, most = cluster_of(str(self.gpus), catalog)
        constraints: dict[str, Any] = {"target": self.target} if self.target else {}
        if most is not None:
            constraints["max_devices"] = most
        return {
            "kind": kind,
            "model": self.model,
            "cluster": cluster,
            **(self._serving() if kind == "serving" else self._training()),
            **({"objective": self.objective} if self.objective else {}),
            **({"constraints": constraints} if constraints else {}),
        }

    def _serving(self) -> dict[str, Any]:
        lengths = self.lengths
        if lengths is None:
            lengths = ASSUMED_LENGTHS
            self.assumed.append(f"{lengths} tokens in and out (--lengths IN/OUT)")
        prompt, _, output = lengths.partition("/")
        if not prompt.strip() or not output.strip():
            raise _problem("--lengths", f"{lengths!r} is not read; write tokens of a prompt and an answer: 4000/1000")
        workload: dict[str, Any] = {"input_length": _number(prompt), "output_length": _number(output)}
        if self.rate is not None:
            workload["request_rate_per_s"] = self.rate
        if self.concurrency is not None:
            workload["concurrency"] = self.concurrency
        section: dict[str, Any] = {"workload": workload}
        if self.slo is not None:
            section["slo"] = slo_of(self.slo)
        return section

    def _training(self) -> dict[str, Any]:
        sequence, batch = self.sequence_length, self.batch
        if sequence is None:
            sequence = ASSUMED_SEQUENCE
            self.assumed.append(f"sequences of {sequence} tokens (--sequence-length)")
        if batch is None:
            batch = ASSUMED_BATCH
            self.assumed.append(f"{batch} tokens in one step (--batch)")
        key = "global_batch_size" if batch.strip().isdigit() else "global_batch_tokens"
        workload = {"sequence_length": _number(sequence), key: _number(batch)}
        if self.tokens is not None:
            workload["num_training_tokens"] = self.tokens
        return {"workload": workload}


def question(spec: Path | None, asked: Asked, settings: Sequence[str], catalog: Catalog) -> tuple[dict[str, Any], Path]:
    """The spec from a file, from standard input (``-``) or from options, with ``--set`` applied; and its folder.

    Raises:
        SpecError: neither or both were given, or one cannot be read.
    """
    from meshplan.planner.core.reading.documents import parse_document, read_question  # start-up: --help needs no YAML

    if (spec is None) == asked.is_empty:
        what = "give a spec file or --model and --gpus" + ("" if spec is None else ", not both; --set overrides a file")
        raise _problem("", what)
    base = Path()
    if spec is None:
        document = asked.document(catalog)
        for assumption in asked.assumed:
            sys.stderr.write(f"assumed: {assumption}\n")
    elif str(spec) == "-":
        document = parse_document(sys.stdin.read(), name="standard input")
    else:
        document, base = read_question(spec), spec.parent
    return with_settings(document, settings), base


def cluster_of(text: str, catalog: Catalog) -> tuple[dict[str, Any], int | None]:
    """The cluster that ``16xH100`` or ``2xdgx-h100,8xA100`` means, and the most devices where a node is not full.

    GPUs stand in the maker's own nodes (H100 → dgx-h100), as many as are needed.

    Raises:
        SpecError: a group cannot be read, or names nothing in the catalog.
    """
    groups: dict[str, int] = {}
    most, there = 0, 0
    for part in text.split(","):
        match = _GROUP.fullmatch(part)
        if match is None:
            raise _problem("--gpus", f"{part.strip()!r} is not read; write 16xH100, or 2xdgx-h100 for whole nodes")
        count, name = int(match["count"] or match["count2"]), str(match["name"] or match["name2"])
        node, devices = _node_of(name, count, catalog)
        nodes = -(-devices // node.num_devices)
        groups[node.slug] = groups.get(node.slug, 0) + nodes
        most, there = most + devices, there + nodes * node.num_devices
    return {"nodes": [{"type": slug, "count": count} for slug, count in groups.items()]}, (
        most if most < there else None
    )


def _node_of(name: str, count: int, catalog: Catalog) -> tuple[NodeType, int]:
    """The node type in which ``count`` GPUs or nodes of that name stand, and the number of GPUs."""
    from meshplan.catalogs.errors import UnknownEntryError, closest_names, did_you_mean

    if count < 1:
        raise _problem("--gpus", f"{count} of {name}: at least 1")
    try:
        node = catalog.node_type(name)
    except UnknownEntryError:
        pass
    else:
        return node, count * node.num_devices
    try:
        device = catalog.device(name)
    except UnknownEntryError:
        known = [one.slug for one in catalog.devices()] + [one.slug for one in catalog.node_types()]
        hint = did_you_mean(closest_names(name, known))
        raise _problem("--gpus", f"no GPU and no node type is called {name!r}{hint}") from None
    nodes = [node for node in catalog.node_types() if node.device.slug == device.slug]
    if not nodes:
        raise _problem(
            "--gpus", f"no node type of the catalog holds {device.slug}: describe it in a spec (cluster.devices)"
        )
    return min(nodes, key=lambda node: _preference(node, count)), count


def _preference(node: NodeType, count: int) -> tuple[bool, bool, bool, str]:
    """Small is better: nodes with a network where several are needed, the makers' own, then those of no cloud."""
    joined = node.scale_out_link is not None or count <= node.num_devices
    clouds = ("aws-", "azure-", "gcp-", "lambda-", "coreweave-", "oci-")
    return not joined, not node.slug.startswith(_PREFERRED), node.slug.startswith(clouds), node.slug


def _number(text: str) -> int | str:
    """Digits as a number; what has a prefix (8k) stays as it is written."""
    return int(text) if text.strip().isdigit() else text.strip()


def slo_of(text: str) -> dict[str, float]:
    """``ttft_p99=2s,tpot_p95=50ms`` as a spec's ``slo``.

    Raises:
        SpecError: a limit is not a time with a unit.
    """
    from meshplan.catalogs.units import Dimension, parse_quantity, parse_seconds

    limits = {}
    if comma := _DECIMAL_COMMA.search(text):
        raise _problem(
            "--slo", f"{comma['key']}: decimals have a point ({comma['whole']}.{comma['rest']}); commas part SLOs"
        )
    for part in text.split(","):
        match = _SLO.fullmatch(part)
        if match is None:
            raise _problem("--slo", f"{part.strip()!r} is not read; write ttft_p99=2s,tpot_p95=50ms")
        try:
            # A key that names its unit is read as in a spec.
            is_named = match["unit"] is not None
            if f"{match['key']}_s" in limits:
                raise _problem("--slo", f"{match['key']} is limited twice; keep one")
            limits[f"{match['key']}_s"] = (
                parse_seconds(match["limit"]) if is_named else parse_quantity(match["limit"], Dimension.S)
            )
        except UnitError as error:
            raise _problem("--slo", f"{match['key']}: {error}") from None
    return limits


def with_settings(document: Mapping[str, Any], settings: Sequence[str]) -> dict[str, Any]:
    """The spec with keys overridden: ``workload.sequence_length=16k``, ``cluster.nodes.0.count=4``.

    Values are read as in YAML. Missing sections are made.

    Raises:
        SpecError: an override has no ``=``, or walks through what is no section.
    """
    import copy

    from meshplan.planner.core.reading.settings import put  # start-up: as above

    changed = copy.deepcopy(dict(document))
    for setting in settings:
        path, equals, text = setting.partition("=")
        if not equals or not path.strip():
            raise _problem("--set", f"{setting!r} is not KEY=VALUE, such as workload.sequence_length=16k")
        put(changed, path, _value(text))
    return changed


def _value(text: str) -> Any:
    from meshplan.planner.core.reading.documents import parse_document  # start-up: YAML is loaded for questions only

    return parse_document(f"value: {text}", name=f"--set …={text}")["value"]


def _problem(path: str, message: str) -> SpecError:
    return SpecError([Problem(path=path, message=message)], of="the question")
