"""An imported configuration as a spec: ``fixed`` holds its choices, so that it can be priced and compared."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshplan.catalogs.errors import SpecError, closest_names
from meshplan.catalogs.hardware import NodeType
from meshplan.planner.emit.serving.terms import POOLED
from meshplan.planner.emit.training.megatron.hybrid import letters
from meshplan.planner.emit.training.terms import ALL_LAYERS_AWAY
from meshplan.planner.imports import models
from meshplan.planner.imports.completion import complete_training
from meshplan.planner.imports.engine_memory import take_memory_share
from meshplan.planner.imports.reading import OUR_FILE, Assumption, Reading
from meshplan.planner.serving.problem.pins import ServingFixedSpec
from meshplan.planner.serving.problem.problem import ServingObjective
from meshplan.planner.serving.problem.spec import read_serving_spec
from meshplan.planner.training.problem.layers import layers_by_weights
from meshplan.planner.training.problem.precisions import PRECISIONS
from meshplan.planner.training.problem.problem import OFFLOADED_LAYERS
from meshplan.planner.training.problem.schedules import SCHEDULES
from meshplan.planner.training.problem.spec import FixedSpec, read_training_spec

if TYPE_CHECKING:
    from meshplan.catalogs.database.repository import Catalog
    from meshplan.catalogs.models.shapes import ModelShape

_AS_STATED = ("kv_cache", "mig", "mps", "power_caps_w")
_SERVING_WORKLOAD = ("input_length", "output_length", "concurrency")
_LENGTHS = ("input_length", "output_length")
# What says the same as each of these keys of a workload.
_SAYS_AS_WELL = {
    "input_length": ("input_length", "input_lengths", "prefix_tokens", "num_prefixes"),
    "output_length": ("output_length", "output_lengths"),
    "concurrency": ("concurrency", "request_rate_per_s", "arrival", "burstiness", "num_requests"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """What a command line cannot state, or states wrongly: the user's answers take precedence.

    Args:
        model: catalog name, or path of a config.json.
        device: catalog device.
        node_type: catalog node type.
        nodes: how many.
        sequence_length: tokens.
        global_batch_size: sequences of one step.
        micro_batch_size: sequences of one forward pass.
        input_length: prompt tokens of a request (serving).
        output_length: generated tokens of a request (serving).
        concurrency: requests in flight (serving).
    """

    model: str | None = None
    device: str | None = None
    node_type: str | None = None
    nodes: int | None = None
    sequence_length: int | None = None
    global_batch_size: int | None = None
    micro_batch_size: int | None = None
    input_length: int | None = None
    output_length: int | None = None
    concurrency: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """The outcome of an import.

    Args:
        source: name in the registry.
        spec: plain data, ready to be written.
        source_flags: by term, the flags that state it.
        assumed: values that nothing states.
        left_out: understood, but a spec has no field for it.
        unread: flags that no table knows.
        idle: flags on which no plan depends.
    """

    source: str
    spec: Mapping[str, Any]
    source_flags: Mapping[str, str]
    assumed: tuple[Assumption, ...]
    left_out: tuple[str, ...] = ()
    unread: tuple[str, ...] = field(default=())
    idle: tuple[str, ...] = ()

    def to_document(self) -> dict[str, Any]:
        """As plain JSON."""
        return {
            "source": self.source,
            "spec": dict(self.spec),
            "said_by": dict(self.source_flags),
            "assumed": [{"term": one.term, "value": one.value, "why": one.why} for one in self.assumed],
            "left_out": list(self.left_out),
            "unread": list(self.unread),
            "idle": list(self.idle),
        }


def complete(reading: Reading, answers: Answers, catalog: Catalog) -> Imported:
    """Complete a reading into a spec.

    Raises:
        SpecError: something is missing, contradicts itself or has no name in the catalog; every problem at once.
    """
    # What is said of the nodes takes the place of a number of hosts that only a shell knows.
    reading.problems += [
        one for one in reading.launch.problems if answers.nodes is None or "--nodes" not in one.message
    ]
    _take_answers(reading, answers)
    nodes = _node_type(reading, answers, catalog)
    _whole_hosts(reading, nodes)
    num_devices = _num_devices(reading, answers, nodes)
    model = _model(reading, answers, catalog)
    if reading.kind == "training":
        _complete_training(reading, num_devices)
    else:
        _complete_serving(reading, answers, model, catalog)
    if reading.problems or nodes is None or model is None:
        raise SpecError(reading.problems, of="what is imported")
    spec: dict[str, Any] = {
        "kind": reading.kind,
        "model": model,
        "cluster": _cluster(reading, answers, nodes, num_devices),
    }
    if reading.kind == "training":
        _training_part(reading, spec, nodes, catalog)
    else:
        _serving_part(reading, answers, spec, nodes, catalog)
    return Imported(
        source=reading.source,
        spec=spec,
        source_flags=reading.source_flags,
        assumed=tuple(reading.assumed),
        left_out=tuple(reading.left_out),
        unread=tuple(dict.fromkeys(reading.unread)),
        idle=tuple(dict.fromkeys(reading.idle)),
    )


def _complete_training(reading: Reading, num_devices: int | None) -> None:
    """Degrees and precision that the command leaves to defaults; what has none is a problem."""
    complete_training(reading, num_devices)
    _precision(reading)
    for name in ("sequence_length", "global_batch_size"):
        if name not in reading.values and not reading.problems:
            reading.report(f"workload.{name}", f"the command does not state it: give --{name.replace('_', '-')}")


def _complete_serving(reading: Reading, answers: Answers, model: str | None, catalog: Catalog) -> None:
    """What the checkpoint is for; the load is a problem where neither a benchmark nor an answer states it."""
    _task(reading, model, catalog)
    _answered_load(reading, answers)
    for name in _workload_of(reading):
        if not any(key in reading.workload for key in _SAYS_AS_WELL[name]):
            reading.report(f"workload.{name}", f"no command line states it: give --{name.replace('_', '-')}")


def _answered_load(reading: Reading, answers: Answers) -> None:
    """The user's answers in place of what a benchmark states."""
    for name, others in _SAYS_AS_WELL.items():
        value = getattr(answers, name)
        if value is None or (name == "output_length" and "task" in reading.values):
            continue
        for other in others:
            reading.workload.pop(other, None)
            reading.source_flags.pop(f"workload.{other}", None)
        reading.workload[name] = value
    if reading.workload.get("arrival") == "gamma" and "request_rate_per_s" not in reading.workload:
        del reading.workload["arrival"]


def _training_part(reading: Reading, spec: dict[str, Any], nodes: NodeType, catalog: Catalog) -> None:
    """Adds workload, constraints and pinned choices of training to a spec."""
    values = reading.values
    constraints: dict[str, Any] = {"target": reading.target}
    used = _devices(reading)
    if used < nodes.num_devices * spec["cluster"]["nodes"][0]["count"]:
        constraints["max_devices"] = used
    _layers(reading, spec["model"], catalog)
    if "offload_to" in values:
        constraints["offload_to"] = values["offload_to"]
    spec["workload"] = {name: values[name] for name in ("sequence_length", "global_batch_size", "precision")}
    optional = ("phase", "lora_rank", "lora_targets", "expert_capacity_factor")
    spec["workload"] |= {name: values[name] for name in optional if name in values}
    spec["constraints"] = constraints
    spec["fixed"] = {name: values[name] for name in FixedSpec.model_fields if name in values}
    read_training_spec(spec)


def _serving_part(reading: Reading, answers: Answers, spec: dict[str, Any], nodes: NodeType, catalog: Catalog) -> None:
    """Adds workload, formats, objective and pinned choices of serving to a spec."""
    shape, longest = _known_shape(spec["model"], catalog), sum(_longest(reading.workload, name) for name in _LENGTHS)
    take_memory_share(reading, shape, nodes.device, context=longest)
    if nodes.prices:
        _objective(reading, spec)
    spec["workload"] = dict(reading.workload)
    if "task" in reading.values:
        spec["workload"] = {"task": reading.values["task"], **spec["workload"]}
    if "quantization" in reading.values:
        spec["quantization"] = [reading.values["quantization"]]
    spec |= {name: reading.values[name] for name in _AS_STATED if name in reading.values}
    spec["constraints"] = {"target": reading.target}
    spec["fixed"] = {name: value for name, value in reading.values.items() if name in ServingFixedSpec.model_fields}
    read_serving_spec(spec)


def _longest(workload: Mapping[str, Any], name: str) -> int:
    """Tokens of the longest prompt or answer; 0 where nothing states it."""
    return int(workload.get(name) or workload.get(f"{name}s", {}).get("max") or 0)


def _known_shape(model: str | None, catalog: Catalog) -> ModelShape | None:
    """The shape of a model of the catalog; None for a path."""
    return catalog.model_shape(model) if model in {str(row["slug"]) for row in catalog.models()} else None


def _objective(reading: Reading, spec: dict[str, Any]) -> None:
    """The nodes run and are paid: a proposal that leaves GPUs of theirs idle and answers later would be no better."""
    spec["objective"] = ServingObjective.USD_PER_MILLION_TOKENS.value
    why = "the nodes that run now are paid as a whole"
    reading.assumed.append(Assumption(term="objective", value=spec["objective"], why=why))


def _workload_of(reading: Reading) -> tuple[str, ...]:
    """What a serving spec must state of requests: vectors and scores have no length."""
    return tuple(name for name in _SERVING_WORKLOAD if name != "output_length" or "task" not in reading.values)


def _task(reading: Reading, model: str | None, catalog: Catalog) -> None:
    """Vectors or scores, where the command leaves it to the checkpoint."""
    if reading.values.get("task") != POOLED:
        return
    shape = _known_shape(model, catalog)
    is_classifier = shape is not None and shape.pooling is not None and shape.pooling.num_labels
    reading.values["task"] = "rerank" if is_classifier else "embed"
    has = "a classifier" if reading.values["task"] == "rerank" else "no classifier that is known"
    reading.assumed.append(
        Assumption(term="workload.task", value=reading.values["task"], why=f"the checkpoint has {has}")
    )


def _take_answers(reading: Reading, answers: Answers) -> None:
    for name in ("sequence_length", "global_batch_size", "micro_batch_size"):
        value = getattr(answers, name)
        if value is None:
            continue
        before = reading.values.get(name)
        if before not in {None, value} and name in reading.source_flags:
            reading.report(
                name, f"{reading.source_flags[name]} says {before}, --{name.replace('_', '-')} says {value}; keep one"
            )
        reading.values[name] = value
        reading.source_flags[name] = f"--{name.replace('_', '-')}"
        reading.assumed = [one for one in reading.assumed if one.term != name]


def _node_type(reading: Reading, answers: Answers, catalog: Catalog) -> NodeType | None:
    if answers.node_type is not None:
        node = catalog.node_type(answers.node_type)
        if answers.device not in {None, node.device.slug}:
            reading.report("cluster", f"--node-type {node.slug} has {node.device.slug}, --device says {answers.device}")
        return node
    per_host = reading.launch.devices_per_host
    if answers.device is not None:
        device = catalog.device(answers.device).slug
        fitting = [
            node
            for node in catalog.node_types()
            if node.device.slug == device and node.num_hosts == 1 and node.devices_per_host >= (per_host or 1)
        ]
        # The vendor's own box first: it has the network that the device is sold with.
        fitting.sort(key=lambda node: (node.devices_per_host, not node.slug.startswith(("dgx", "hgx")), node.slug))
        if fitting:
            others = ", ".join(node.slug for node in fitting[1:4])
            hint = f"; others: {others} (--node-type)" if others else ""
            reading.assumed.append(
                Assumption(term="cluster.nodes.type", value=fitting[0].slug, why=f"has {device}{hint}")
            )
            return fitting[0]
        reading.report(
            "cluster", f"no node type of the catalog has {per_host or 1} {device} or more in a host: --node-type"
        )
        return None
    reading.report("cluster", "the command does not state which accelerators it runs on: give --node-type or --device")
    return None


def _whole_hosts(reading: Reading, node: NodeType | None) -> None:
    """A launcher that starts a process for each device of its host: as many as the node type has."""
    launch = reading.launch
    if node is None or not launch.takes_all:
        return
    hosts, per_host = launch.num_hosts, node.devices_per_host
    reading.launch = replace(launch, devices_per_host=per_host, num_devices=None if hosts is None else hosts * per_host)
    reading.assumed.append(Assumption(term="processes per host", value=per_host, why=f"every device of {node.slug}"))


def _num_devices(reading: Reading, answers: Answers, node: NodeType | None) -> int | None:
    launch = reading.launch
    if node is not None and (launch.devices_per_host or 0) > node.devices_per_host:
        reading.report(
            "cluster", f"{launch.devices_per_host} processes per host; {node.slug} has {node.devices_per_host} devices"
        )
    if answers.nodes is None:
        return launch.num_devices
    named = node is not None and launch.num_devices is not None
    per_host = launch.devices_per_host or (node.devices_per_host if node is not None else None)
    if per_host is None:
        return launch.num_devices
    hosts = answers.nodes * (node.num_hosts if node is not None else 1)
    # Our own file states every degree: a plan may use fewer devices than its nodes have.
    if launch.num_devices is None and OUR_FILE in reading.source_flags.values():
        return min(_devices(reading), hosts * per_host)
    # torchrun's --nnodes defaults to 1, so only a stated number contradicts.
    if named and "--nnodes" in launch.options and launch.num_hosts not in {None, hosts}:
        reading.report(
            "cluster", f"the launcher starts {launch.num_hosts} hosts, --nodes says {hosts} (--env sets a variable)"
        )
    return hosts * per_host


def _cluster(reading: Reading, answers: Answers, node: NodeType, num_devices: int | None) -> dict[str, Any]:
    hosts = reading.launch.num_hosts
    if answers.nodes is not None:
        count = answers.nodes
    elif hosts is not None:
        count = -(-hosts // node.num_hosts)
    else:
        per_node = reading.launch.devices_per_host or node.num_devices
        count = -(-(num_devices or _devices(reading)) // per_node)
        reading.assumed.append(Assumption(term="cluster.nodes.count", value=count, why=f"{per_node} devices per node"))
    return {"nodes": [{"type": node.slug, "count": count}]}


def _devices(reading: Reading) -> int:
    """Product of every degree that multiplies devices."""
    names = ("tensor_parallel", "pipeline_parallel", "context_parallel", "data_parallel")
    serving = ("attention_data_parallel", "num_workers")
    product = 1
    for name in (*names, *serving):
        product *= reading.values.get(name, 1)
    return int(product)


def _model(reading: Reading, answers: Answers, catalog: Catalog) -> str | None:
    """Catalog name or path of the model: as it is named, else by its sizes; None after reporting a problem."""
    written = answers.model or reading.model
    if not written:
        return _model_of_sizes(reading, catalog)
    name = catalog.model_name(written)
    if name is not None:
        if reading.model_arguments:
            for mismatch in models.mismatches(reading.model_arguments, catalog.model_shape(name.slug)):
                reading.report("model", f"{name.slug}: {mismatch}")
            _list_model_arguments(reading, name.slug, catalog)
        return name.slug
    if answers.model is not None and Path(answers.model).exists():
        return str(Path(answers.model).resolve())  # a spec may be written anywhere
    close = closest_names(written.rstrip("/").rsplit("/", 1)[-1], _slugs(catalog))
    hint = f" (close: {', '.join(close)})" if close else ""
    reading.report("model", f"{written!r} is not in the catalog{hint}: give --model NAME or --model config.json")
    return None


def _model_of_sizes(reading: Reading, catalog: Catalog) -> str | None:
    """The first model of the catalog with the sizes of the flags; the others with these are named."""
    shapes = (catalog.model_shape(slug) for slug in _slugs(catalog))
    found = models.models_of_size(reading.model_arguments, shapes, num_positions=reading.num_positions)
    if not found:
        sizes = ", ".join(
            f"{size} {reading.model_arguments[size]}" for size in models.SIZES if size in reading.model_arguments
        )
        reading.report("model", f"no model of the catalog has these sizes ({sizes or 'none given'}): give --model")
        return None
    others = ", ".join(shape.slug for shape in found[1:])
    why = "its sizes are those of the flags" + (f"; so are those of {others} (--model)" if others else "")
    reading.assumed.append(Assumption(term="model", value=found[0].slug, why=why))
    _list_model_arguments(reading, found[0].slug, catalog)
    return found[0].slug


def _slugs(catalog: Catalog) -> list[str]:
    return [str(row["slug"]) for row in catalog.models()]


def _list_model_arguments(reading: Reading, slug: str, catalog: Catalog) -> None:
    """List flags about the model that its catalog entry lacks or contradicts."""
    emitted = models.flags_of(catalog.model_shape(slug))
    for flag, value in reading.model_arguments.items():
        if emitted.get(flag) != str(value):
            theirs = f" (the catalog's {slug}: {emitted[flag]})" if flag in emitted else ""
            reading.unread.append(f"{flag} {value}".strip() + theirs)


def _precision(reading: Reading) -> None:
    name = reading.values["precision"]
    if name not in PRECISIONS:
        why = reading.source_flags.get("precision", "no precision is stated")
        reading.assumed = [one for one in reading.assumed if one.term != "precision"]
        reading.values["precision"] = "bf16"
        reading.assumed.append(
            Assumption(
                term="precision",
                value="bf16",
                why=f"{why}, which is {name}: plans are made for {', '.join(PRECISIONS)}",
            )
        )


def _layers(reading: Reading, model: str, catalog: Catalog) -> None:
    """Hold a stated split against the layers of the model; TorchTitan's layers per stage become those of chunks."""
    values = reading.values
    per_stage, ends = values.pop("layers_per_stage", None), values.pop("end_weights", None)
    blocks, all_away = values.pop("blocks_per_chunk", None), values.pop(ALL_LAYERS_AWAY, False)
    shape = _known_shape(model, catalog)
    if shape is None:
        if all_away:
            reading.left_out.append(f"activations of all layers off the device: give fixed.{OFFLOADED_LAYERS}")
        return
    layers = shape.num_hidden_layers
    if all_away:
        values[OFFLOADED_LAYERS] = layers
    if blocks is not None:
        values["layers_per_chunk"] = _layers_of_blocks(shape, blocks)
    if ends is not None:
        _weighted_layers(reading, layers, per_stage, ends)
    chunks = values.get("layers_per_chunk")
    if chunks is not None and sum(chunks) != layers:
        raise SpecError.at(
            "model", f"the layout places {sum(chunks)} layers, {model} has {layers}", of="what is imported"
        )


def _layers_of_blocks(shape: ModelShape, blocks_per_chunk: Sequence[int]) -> tuple[int, ...]:
    """Layers of each chunk, of which a hybrid's pattern gives the blocks: mixers and MLPs one by one."""
    ends, layers = list(itertools.accumulate(len(blocks) for blocks in letters(shape))), []
    for blocks in itertools.accumulate(blocks_per_chunk):
        if blocks and blocks not in ends:
            message = (
                f"the pattern ends a chunk after {blocks} blocks, within a layer of {shape.slug} or beyond its last"
            )
            raise SpecError.at("model", message, of="what is imported")
        layers.append(ends.index(blocks) + 1 if blocks else 0)
    return tuple(after - before for before, after in itertools.pairwise((0, *layers)))


def _weighted_layers(reading: Reading, layers: int, per_stage: int | None, ends: tuple[int, int]) -> None:
    """TorchTitan's split of a model: where it does not say how many layers a stage has, the schedule's usual chunks."""
    values = reading.values
    stages = values["pipeline_parallel"]
    schedule = SCHEDULES.get(str(values.get("pipeline_schedule", "1f1b")))
    usual = stages * (1 if schedule is None else min(schedule.chunks, 2))
    chunks = usual if per_stage is None else -(-(layers + sum(ends)) // per_stage)
    split = layers_by_weights(layers, chunks, *ends) if chunks % stages == 0 else None
    if split is None:
        message = f"{layers} layers in {chunks} chunks on {stages} stages, the ends counting as {ends[0]} and {ends[1]}"
        raise SpecError.at("fixed.pipeline_parallel", f"TorchTitan has no split of {message}")
    values["virtual_pipeline_stages"] = chunks // stages
    if len(set(split)) > 1:
        values["layers_per_chunk"] = list(split)
