"""The training spec: every problem at once with its path, and junk never raises anything but SpecError."""

from __future__ import annotations

import copy
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshplan.catalogs.errors import SpecError, UnitError
from meshplan.catalogs.units import EXAMPLES, UNITS, Dimension, parse_quantity
from meshplan.planner.core.reading.spec_reader import spec_schema
from meshplan.planner.training.problem.spec import FixedSpec, TrainingSpec, read_training_spec

SPEC: dict[str, Any] = {
    "kind": "training",
    "model": "llama-3.1-8b",
    "cluster": {"nodes": [{"type": "dgx-h100", "count": 1}]},
    "workload": {"sequence_length": 4096, "global_batch_size": 64},
}
IN_PLACE = {
    "devices": {"type": "h100-sxm-80gb", "per_node": 8, "nodes": 2},
    "links": {
        "intra_node": {"bandwidth": "450 GB/s", "latency": "3 us"},
        "inter_node": {"bandwidth": "400 Gb/s", "latency": "5 us"},
    },
}


def changed(path: str, value: Any) -> dict[str, Any]:
    """The good spec with one entry replaced; ``...`` removes it."""
    spec = copy.deepcopy(SPEC)
    *sections, last = path.split(".")
    section = spec
    for name in sections:
        section = section.setdefault(name, {})
    if value is ...:
        section.pop(last)
    else:
        section[last] = value
    return spec


def problems(spec: Any) -> dict[str, str]:
    with pytest.raises(SpecError) as caught:
        read_training_spec(spec)
    return {problem.path: problem.message for problem in caught.value.problems}


def test_the_smallest_spec_has_plain_defaults() -> None:
    spec = read_training_spec(SPEC)
    assert (spec.workload.precision, spec.objective.value, spec.constraints.target) == (
        "bf16",
        "throughput",
        "megatron",
    )
    assert spec.fixed.pinned() == {}


def test_a_value_of_another_shape_is_named_in_the_words_of_the_file() -> None:
    found = problems({"model": ["a"], "cluster": ["dgx-h100"], "workload": 5, "fixed": [8]})
    assert found["model"] == "must be a text (given: a list)"
    assert found["cluster"] == found["fixed"] == "must be a mapping, such as {key: value} (given: a list)"
    assert found["workload"] == "must be a mapping, such as {key: value} (given: 5)"
    nodes = problems({"cluster": {"nodes": {"type": "dgx-h100"}}})["cluster.nodes"]
    assert nodes == "must be a list, such as [first, second] (given: a mapping)"


def test_every_problem_is_reported_at_once_with_its_path() -> None:
    found = problems(
        {
            "kind": "training",
            "modell": "llama",
            "cluster": {"nodes": [{"type": "dgx-h100", "count": 0}, {"type": "dgx-h100"}], "host_memory": 512},
            "workload": {"sequence_length": -1, "global_batch_size": 0, "precision": "int4"},
            "constraints": {"memory_headroom": "4 Gb", "max_devices": 0},
            "fixed": {"tensor_paralel": 2, "pipeline_parallel": 0, "cp_size": 2, "ep": 2},
        }
    )
    assert set(found) == {
        "model",
        "modell",
        "cluster.nodes[0].count",
        "cluster.nodes[1].count",
        "cluster.host_memory",
        "workload.sequence_length",
        "workload.global_batch_size",
        "workload.precision",
        "constraints.memory_headroom",
        "constraints.max_devices",
        "fixed.tensor_paralel",
        "fixed.pipeline_parallel",
        "fixed.cp_size",
        "fixed.ep",
    }
    assert "did you mean 'model'" in found["modell"]
    assert "did you mean 'tensor_parallel'" in found["fixed.tensor_paralel"]
    assert found["fixed.cp_size"] == "unknown key; did you mean 'context_parallel'?"
    assert found["fixed.ep"] == "unknown key; did you mean 'expert_parallel'?"
    assert "no unit" in found["cluster.host_memory"]
    assert "counts bits" in found["constraints.memory_headroom"]


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("precision", "unknown key here: write workload.precision"),
        ("tp", "unknown key here: write fixed.tensor_parallel"),
        ("workload.max_devices", "unknown key here: write constraints.max_devices"),
        ("fixed.framework", "unknown key here: write constraints.target"),
        ("workload.adapter", "unknown key; did you mean 'phase' or 'lora_rank'?"),  # of this section
        ("bandwidth", "unknown key"),  # several sections have one
    ],
)
def test_a_key_of_another_section_is_told_its_section(key: str, words: str) -> None:
    assert problems(changed(key, 8))[key] == words


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("model", "", "must not be empty"),
        ("model", 8, "must be a text"),
        ("cluster", ..., "required"),
        ("cluster", {}, "either 'nodes'"),
        ("cluster", {**IN_PLACE, "nodes": [{"type": "dgx-h100", "count": 1}]}, "not both"),
        ("cluster", {"devices": IN_PLACE["devices"]}, "needs 'links'"),
        ("cluster.nodes", [], "must not be empty"),
        ("cluster.nodes", [{"type": "dgx-h100", "count": 8.0}], "whole number"),
        ("cluster.nodes", [{"type": "dgx-h100", "count": True}], "whole number"),
        ("cluster.nodes", [{"type": "dgx-h100", "count": 10**9}], "at most 1,000,000"),
        ("cluster.name", "my cluster", "without spaces, the first a letter or a digit, such as my-cluster"),
        ("cluster.usd_per_hour_per_node", -1, "above 0"),
        ("workload.sequence_length", "4096 GB", "whole number of tokens"),
        ("workload.global_batch_size", ..., "either global_batch_size"),
        ("workload.global_batch_tokens", 4096, "either global_batch_size"),
        ("workload.num_training_tokens", 0, "must be at least 1"),
        ("workload.num_training_tokens", float("inf"), "finite"),
        ("workload.phase", "lora", "lora_rank not said: add lora_rank: 16"),
        ("workload.lora_rank", 8, "phase 'pretraining', lora_rank 8: add phase: lora"),
        ("workload.frozen_weights", "gptq", "goes with phase 'qlora'"),
        ("workload.trains_vocabulary", True, "goes with phase 'lora'"),
        ("workload.lora_targets", "attention", "goes with phase 'lora'"),
        ("fixed.recompute_modules", ["moe_act"], "goes with activation_recompute: selective"),
        ("fixed.recompute_modules", ["softmax"], "core_attn"),
        ("objective", "fastest", "must be one of throughput"),
        ("objective", "usd_per_run", "needs workload.num_training_tokens"),
        ("constraints.max_usd_per_run", 1000, "needs workload.num_training_tokens"),
        ("constraints.memory_headroom_fraction", 1, "must be below 1"),
        ("constraints.max_step_time", 30, "no unit"),
        ("constraints.max_step_time", "30 GB", "bytes"),
        ("constraints.memory_headroom", "-1 GiB", "at least 0"),
        ("constraints.memory_headroom", "4 GB/s", "bandwidth"),
        ("constraints.max_step_time", "0 s", "above 0"),
        ("constraints.max_usd_per_hour", 1e300, "must be at most"),
        ("workload.num_training_tokens", 1e300, "must be at most"),
        ("workload.num_training_tokens", 1e-300, "must be at least 1"),
        ("fixed.zero_stage", 4, "at most 3"),
        ("fixed.tensor_parallel", 10**30, "at most 1,000,000"),
        ("fixed.sequence_parallel", 1, "true or false"),
        ("fixed.activation_recompute", "some", "must be one of none"),
        ("fixed.optimizer_offload", 1, "true or false"),
        ("fixed.parameter_offload", "yes", "true or false"),
        ("constraints.offload", ["weights"], "must be one of optimizer, parameters, activations"),
        ("constraints.optimizer_offload", True, "unknown key"),
        ("constraints.offload_to", "nvme", "add optimizer or parameters"),
        ("constraints.nvme_bandwidth", "12 GB/s", "goes with constraints.offload_to: nvme"),
        ("fixed.recompute_num_layers", 2, "goes with activation_recompute: block"),
        ("kind", "serving", "must be 'training'"),
    ],
)
def test_one_bad_entry_says_what_is_wrong(path: str, value: Any, words: str) -> None:
    found = problems(changed(path, value))
    assert any(words in message for message in found.values()), found


@pytest.mark.parametrize(
    ("path", "written", "value"),
    [
        ("workload.sequence_length", "8k", 8192),
        ("workload.sequence_length", "128K", 131072),
        ("workload.sequence_length", "4096", 4096),
        ("workload.num_training_tokens", "15T", 15e12),
        ("workload.num_training_tokens", "1e12", 1e12),
        ("fixed.tensor_parallel", "4", 4),
        ("constraints.max_step_time", "2 minutes", 120.0),
    ],
)
def test_numbers_are_read_as_people_write_them(path: str, written: str, value: float) -> None:
    at: Any = read_training_spec(changed(path, written))
    for part in path.split("."):
        at = getattr(at, part)
    assert at == value
    assert VALIDATOR.is_valid(changed(path, written))


def test_a_batch_in_tokens_takes_a_prefix() -> None:
    document = changed("workload.global_batch_tokens", "4M")
    del document["workload"]["global_batch_size"]
    assert read_training_spec(document).workload.num_sequences == 4 * 2**20 // document["workload"]["sequence_length"]


@pytest.mark.parametrize(("unit", "factor"), [("GB", 10**9), ("GiB", 2**30), ("TB", 10**12), ("TiB", 2**40)])
def test_decimal_and_binary_prefixes_stay_apart(unit: str, factor: int) -> None:
    assert read_training_spec(changed("cluster.host_memory", f"2 {unit}")).cluster.host_memory == 2 * factor


def test_bits_are_an_eighth_of_bytes() -> None:
    cluster = read_training_spec(changed("cluster", IN_PLACE)).cluster
    assert cluster.links is not None
    assert cluster.links.inter_node is not None
    assert cluster.links.inter_node.bandwidth == 50e9


@pytest.mark.parametrize(
    ("bandwidth", "latency", "words"),
    [
        ("1e-300 GB/s", "3 us", "within 1.0 kB/s"),
        ("1e290 GB/s", "3 us", "1.0 PB/s"),
        ("0 GB/s", "0 s", "within"),
        ("1 GB/s", "1e300 s", "at most 60.00 s"),
    ],
)
def test_links_that_cannot_exist_are_refused(bandwidth: str, latency: str, words: str) -> None:
    links = {**IN_PLACE["links"], "inter_node": {"bandwidth": bandwidth, "latency": latency}}
    assert words in "".join(problems(changed("cluster", {**IN_PLACE, "links": links})).values())


def test_two_nodes_in_place_need_a_link_between_them() -> None:
    one_link = {**IN_PLACE, "links": {"intra_node": IN_PLACE["links"]["intra_node"]}}
    assert "links.inter_node" in "".join(problems(changed("cluster", one_link)).values())


def test_a_batch_in_tokens_is_whole_sequences() -> None:
    workload = {"sequence_length": 4096, "global_batch_tokens": 4096 * 48}
    assert read_training_spec(changed("workload", workload)).workload.num_sequences == 48
    found = problems(changed("workload", {**workload, "global_batch_tokens": 10_000}))
    assert "nearest: 8192 or 12288" in found["workload"]
    too_many = problems(changed("workload", {**workload, "global_batch_tokens": 4096 * 10**7}))
    assert "at most" in too_many["workload"]


# --- the JSON Schema says the same as the models -------------------------------------------------------------------

VALIDATOR = jsonschema.Draft202012Validator(spec_schema(TrainingSpec))


def test_the_schema_is_one() -> None:
    jsonschema.Draft202012Validator.check_schema(spec_schema(TrainingSpec))
    VALIDATOR.validate(SPEC)
    VALIDATOR.validate(changed("cluster", IN_PLACE))


@pytest.mark.parametrize("dimension", [Dimension.BYTES, Dimension.BYTES_PER_S, Dimension.S])
def test_the_schema_reads_every_unit_that_the_parser_reads(dimension: Dimension) -> None:
    where = {
        Dimension.BYTES: lambda text: changed("cluster.host_memory", text),
        Dimension.S: lambda text: changed("constraints.max_step_time", text),
        Dimension.BYTES_PER_S: lambda text: changed(
            "cluster",
            {**IN_PLACE, "links": {**IN_PLACE["links"], "inter_node": {"bandwidth": text, "latency": "1 us"}}},
        ),
    }[dimension]
    for text in (
        EXAMPLES[dimension],
        *(f"2.5 {unit}" for unit in UNITS[dimension]),
        "1e3 " + next(iter(UNITS[dimension])),
    ):
        assert VALIDATOR.is_valid(where(text)), text
    for text in (5, "5", "5 parsecs", "GiB", "-1 GiB", ""):
        assert not VALIDATOR.is_valid(where(text)), text


@given(st.from_regex(r"\s?[+-]?[0-9.]{1,5}(e[0-9])?\s?(GiB|GB|Gb|B|s|)\s?", fullmatch=True))
@settings(max_examples=200, deadline=None)
def test_the_schema_and_the_parser_agree_on_bytes(text: str) -> None:
    try:
        # Zero is a quantity, but no memory: the spec refuses it beyond what a pattern can say.
        parses = parse_quantity(text, Dimension.BYTES) >= 0
    except UnitError:
        parses = False
    if parses and text.lstrip().startswith("-"):
        return  # minus zero
    assert VALIDATOR.is_valid(changed("cluster.host_memory", text)) == parses


def test_the_schema_refuses_what_the_models_refuse() -> None:
    for path, value in (("modell", "x"), ("model", ""), ("workload.sequence_length", 0), ("fixed.zero_stage", 4)):
        assert not VALIDATOR.is_valid(changed(path, value)), path


# --- junk ----------------------------------------------------------------------------------------------------------

KEYS = st.sampled_from(
    [*TrainingSpec.model_fields, *FixedSpec.model_fields, "nodes", "devices", "links", "type", "count", "intra_node"]
) | st.text(max_size=5)
JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.just("training")
    | st.just(10**400),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=5),
    max_leaves=15,
)


def answered(document: dict[str, Any]) -> bool:
    """Read, or refused with problems."""
    try:
        read_training_spec(document)
    except SpecError as error:
        return bool(error.problems)
    return True


@given(st.dictionaries(KEYS, JUNK, max_size=6))
@settings(max_examples=300, deadline=None)
def test_junk_documents_raise_spec_errors_only(document: dict[str, Any]) -> None:
    assert answered(document)


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_a_good_spec_with_one_junk_entry_raises_spec_errors_only(data: st.DataObject) -> None:
    section = data.draw(st.sampled_from(["cluster", "workload", "constraints", "fixed"]))
    field = data.draw(
        KEYS | st.sampled_from(["host_memory", "lora_rank", "num_training_tokens", "max_devices", "price"])
    )
    assert answered(changed(f"{section}.{field}".replace("..", "."), data.draw(JUNK)))


def test_a_noise_scale_beside_a_stated_batch_is_named() -> None:
    assert "this one is stated" in problems(changed("workload.gradient_noise_scale", {"tokens": "4M"}))["workload"]


def test_no_headroom_may_be_said() -> None:
    """As the share of 0 may: whoever writes it asks for what leaving it out gives."""
    assert read_training_spec(changed("constraints.memory_headroom", "0 GiB")).constraints.memory_headroom == 0.0
