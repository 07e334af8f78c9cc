"""Reading measured runs: what a row says, and that no row, however broken, raises anything but a reason."""

from __future__ import annotations

import copy
import json
import math
import statistics
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from measured_rows import TRAINING_ROW

from meshplan.catalogs.constants.training import Calibration
from meshplan.catalogs.database.repository import Catalog
from meshplan.catalogs.errors import SpecError
from meshplan.planner.training.measured.observations import ObservationReader
from meshplan.planner.training.measured.validate import validate_run
from meshplan.planner.training.problem.problem import Phase
from meshplan.planner.training.problem.switches import Launches, TrainingPractice
from meshplan.planner.validate import validate_rows
from meshplan.planner.validation.fields import UnsupportedError
from meshplan.planner.validation.machines import read_rows
from meshplan.planner.validation.summary import ValidatedRow

CONSTANTS = Calibration(framework="any", architecture="any")
ROW: dict[str, Any] = TRAINING_ROW | {
    "group": "mine|dense",
    "parallelism": TRAINING_ROW["parallelism"]
    | {
        "context_parallel": 1,
        "virtual_pipeline_stages": 2,
        "num_microbatches": 8,
        "zero_stage": 1,
        "zero1_group_size": 4,
        "activation_recompute": "selective",
        "pipeline_schedule": "interleaved",
        "layers_per_stage": [2, 2, 2, 2],
        "expert_parallel": 1,
        "expert_tensor_parallel": 1,
        "sequence_parallel": True,
    },
    "workload": {"sequence_length": 4096, "phase": "pretraining"},
    "measured": {"iteration_s": 1.5, "tokens_per_s_per_device": 5461.3, "peak_memory_bytes": 4.0e10},
    "derived": {"mfu": 0.4},
}
EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 512,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
SECTIONS = ("model", "hardware", "framework", "parallelism", "workload", "measured", "derived")
PATHS = [
    *((key,) for key in ROW),
    *((section, key) for section in SECTIONS for key in ROW[section]),
    *(("model", key) for key in (*EXPERTS, "lora", "num_parameters", "layer_type_counts", "attention_type")),
    *(("hardware", key) for key in ("slices",)),
    *(("parallelism", key) for key in ("fsdp", "fsdp_group_size", "per_device_batch_size")),
    *(("parallelism", key) for key in ("cuda_graphs", "expert_dispatcher", "expert_parallel_overlap")),
    ("measured", "oom"),
]
JUNK = [
    None, True, False, 0, 1, -1, 3, 7, 10**6, 10**30, 10**400, 0.5, 2.0, -0.0, math.nan, math.inf, -math.inf,
    "", "x", "8", "full", "fp8", "a" * 300, [], [1], [None], ["x"], [2, 2, 2, 2.5], [-1, 9], [4, 4], {}, {"name": 1},
    {"rank": "x"}, {1: 2}, [[1]], {"full_attention": 8},
]  # fmt: skip


@pytest.fixture(scope="module")
def reader(catalog: Catalog) -> ObservationReader:
    return ObservationReader(catalog)


def changed(*changes: tuple[tuple[str, ...], Any], row: dict[str, Any] = ROW) -> dict[str, Any]:
    """A copy of a row with values at paths replaced."""
    made = copy.deepcopy(row)
    for path, value in changes:
        target = made
        for key in path[:-1]:
            if not isinstance(target.get(key), dict):
                break
            target = target[key]
        else:
            target[path[-1]] = value
    return made


def test_a_row_becomes_a_problem_and_its_choices(reader: ObservationReader) -> None:
    run = reader.training_run(ROW, CONSTANTS)
    assert (run.id, run.group, run.framework, run.architecture) == ("run-1", "mine|dense", "megatron-bridge", "hopper")
    assert run.config.world_size == 16
    assert run.config.layers_per_chunk == (2, 2, 2, 2)
    assert run.config.pipeline_schedule == "interleaved"
    assert run.problem.workload.phase is Phase.PRETRAINING
    assert run.problem.machine.scale_out_bytes_per_s == pytest.approx(50e9)  # 8 × 400 Gb/s over 8 devices
    assert run.filled == ()
    assert run.measured["iteration_s"] == 1.5


QWEN = changed(
    (("framework", "version"), "26.08"),
    (("model", "name"), "Qwen3_235B_a22B"),
    (("hardware", "device"), "gb200"),
    (("precision",), "mxfp8"),
)


def test_switches_that_only_the_scripts_of_a_benchmark_tell_are_filled_and_named(reader: ObservationReader) -> None:
    run = reader.training_run(QWEN, CONSTANTS)
    assert run.problem.workload.practice == TrainingPractice(
        launches=Launches.GRAPHED, fused_dispatch=True, overlaps_experts=True
    )
    assert set(run.filled) == {"cuda_graphs", "expert_dispatcher", "expert_parallel_overlap"}


@pytest.mark.parametrize(
    ("model", "stated", "trained"), [("DeepSeek-V3", 1, 0), ("Nemotron_3_Ultra", 1, 2), ("mine", 1, 1)]
)
def test_scripts_tell_how_many_tokens_ahead_were_trained(
    reader: ObservationReader, model: str, stated: int, trained: int
) -> None:
    """AutoModel's DeepSeek-V3 is its layers and one head; its Nemotron 3 Ultra runs its one further layer twice."""
    row = changed(
        (("framework",), {"name": "NeMo AutoModel (PyTorch FSDP2)"}),
        (("model", "name"), model),
        (("model", "num_nextn_predict_layers"), stated),
    )
    run = reader.training_run(row, CONSTANTS)
    assert run.problem.shape.num_nextn_predict_layers == trained
    assert ("multi_token_prediction" in run.filled) == (stated != trained)
    own = changed((("parallelism", "multi_token_prediction"), 3), row=row)
    assert reader.training_run(own, CONSTANTS).problem.shape.num_nextn_predict_layers == 3


def test_a_local_batch_is_what_a_pipeline_runs_before_it_is_flushed(reader: ObservationReader) -> None:
    own = changed((("parallelism", "local_batch_size"), 8), (("parallelism", "micro_batch_size"), 2), row=ROW)
    assert reader.training_run(own, CONSTANTS).problem.workload.practice.local_microbatches == 4
    assert reader.training_run(ROW, CONSTANTS).problem.workload.practice.local_microbatches == 0


def test_what_a_row_says_of_its_switches_comes_first(reader: ObservationReader) -> None:
    said = (("cuda_graphs", "none"), ("expert_dispatcher", "alltoall"), ("expert_parallel_overlap", False))
    row = changed(*(((("parallelism", key), value)) for key, value in said), row=QWEN)
    run = reader.training_run(row, CONSTANTS)
    assert run.problem.workload.practice == TrainingPractice()
    assert run.filled == ()


@pytest.mark.parametrize("key", ["cuda_graphs", "expert_dispatcher"])
def test_a_word_that_is_no_switch_is_refused_with_those_that_are(reader: ObservationReader, key: str) -> None:
    with pytest.raises(UnsupportedError, match=r"one of (none, partial, full|alltoall, deepep, hybridep)"):
        reader.training_run(changed((("parallelism", key), "best")), CONSTANTS)


def test_what_a_row_leaves_out_is_filled_and_named(reader: ObservationReader) -> None:
    row = copy.deepcopy(ROW)
    for key in ("zero_stage", "activation_recompute", "micro_batch_size", "zero1_group_size"):
        del row["parallelism"][key]
    run = reader.training_run(row, CONSTANTS)
    assert set(run.filled) == {"zero_stage", "activation_recompute", "micro_batch_size"}
    assert run.config.zero_stage == 1
    assert run.config.data_parallel_shard == 4


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("hardware", "device"), "h1000", "unknown device"),
        (("hardware", "num_devices"), 12, "not the 12 devices"),
        (("hardware", "num_devices"), "many", "hardware.num_devices"),
        (("hardware", "slices"), 64, "slices"),
        (("precision",), None, "precision"),
        (("precision",), "int8", "int8"),
        (("workload", "sequence_length"), -4096, "workload.sequence_length"),
        (("workload", "phase"), "dreaming", "workload.phase"),
        (("parallelism", "activation_recompute"), "sometimes", "sometimes"),
        (("parallelism", "pipeline_schedule"), "dualpipe", "dualpipe"),
        (("parallelism", "layers_per_stage"), [8], "layers_per_stage"),
        (("parallelism", "zero_stage"), 4, "zero_stage"),
        (("parallelism", "torch_compile"), "yes", "parallelism.torch_compile"),
        (("parallelism", "async_tensor_parallel"), 1, "parallelism.async_tensor_parallel"),
        (("float8_scaling",), "columns", "float8_scaling"),
        (("parallelism", "zero1_group_size"), 3, "zero1_group_size"),
        (("parallelism", "tensor_parallel"), 1.5, "parallelism.tensor_parallel"),
        (("measured", "iteration_s"), -1.0, "measured.iteration_s"),
        (("measured", "iteration_s"), math.nan, "measured.iteration_s"),
        (("model", "lora"), [16], "lora must be an object"),
        (("model",), "llama", "model"),
    ],
)
def test_the_reason_names_what_is_wrong(
    reader: ObservationReader, path: tuple[str, ...], value: Any, words: str
) -> None:
    with pytest.raises(UnsupportedError, match=words):
        reader.training_run(changed((path, value)), CONSTANTS)


def test_a_missing_section_is_named(reader: ObservationReader) -> None:
    for section in ("model", "hardware", "framework", "parallelism", "workload", "id"):
        row = {key: value for key, value in ROW.items() if key != section}
        with pytest.raises(UnsupportedError, match=section):
            reader.training_run(row, CONSTANTS)


def test_a_run_says_how_its_kernels_ran(reader: ObservationReader) -> None:
    usual = reader.training_run(ROW, CONSTANTS).problem.workload
    assert (usual.is_eager, usual.scales_rows, usual.overlaps_tensor_parallel) == (False, False, None)
    torchtitan = (("framework",), {"name": "torchtitan", "version": "2025-06"})
    assert reader.training_run(changed(torchtitan), CONSTANTS).problem.workload.is_eager
    compiled = changed(torchtitan, (("parallelism", "torch_compile"), True))
    assert not reader.training_run(compiled, CONSTANTS).problem.workload.is_eager
    for key in ("async_tensor_parallel", "tensor_parallel_comm_overlap"):
        for said in (True, False):
            run = reader.training_run(changed((("parallelism", key), said)), CONSTANTS)
            assert run.problem.workload.overlaps_tensor_parallel is said
    for name, value in (
        ("float8_scaling", "rowwise"),
        ("caveats", ["float8 linear layers, bf16 attention: float8 rowwise"]),
    ):
        run = reader.training_run(changed((("precision",), "fp8"), ((name,), value)), CONSTANTS)
        assert run.problem.workload.scales_rows


def test_every_second_layer_recomputed_is_half_of_each_chunk(reader: ObservationReader) -> None:
    run = reader.training_run(changed((("parallelism", "activation_recompute"), "selective layer")), CONSTANTS)
    assert (run.config.activation_recompute, run.config.recompute_num_layers) == ("block", 1)


def test_an_unnamed_network_is_the_median_of_the_node_types(reader: ObservationReader, catalog: Catalog) -> None:
    """Not the first by name: p4de's 50 Gb/s a device would stand for every A100."""
    hardware = {"device": "a100-sxm-80gb", "num_devices": 16, "devices_per_node": 8}
    machine = reader.training_run(changed((("hardware",), hardware)), CONSTANTS).problem.machine
    offered = [
        node.scale_out_bytes_per_s_per_device
        for node in catalog.node_types()
        if (node.device.slug, node.devices_per_host) == ("a100-sxm-80gb", 8) and node.scale_out_bytes_per_s_per_device
    ]
    assert machine.scale_out_bytes_per_s == statistics.median_high(offered)


def finite(result: ValidatedRow) -> None:
    """A validated row has a reason, or numbers and nothing but numbers."""
    if result.status == "unsupported":
        assert result.reason
        return
    assert result.status == "ok" or (result.status == "excluded" and result.reason)
    numbers = [item.value for item in result.predicted.values()] + list(result.error.values())
    assert all(math.isfinite(number) for number in numbers)
    assert all(item.low <= item.value <= item.high for item in result.predicted.values())


def answered_or_refused(row: dict[str, Any], reader: ObservationReader) -> None:
    """Reading and pricing give a finite answer or a reason; anything else is a bug."""
    try:
        run = reader.training_run(row, CONSTANTS)
    except UnsupportedError:
        return
    finite(validate_run(run))


@pytest.mark.parametrize("path", PATHS, ids=".".join)
def test_every_key_takes_every_kind_of_junk(path: tuple[str, ...], catalog: Catalog) -> None:
    rows = [changed((path, value)) for value in JUNK]
    for result in validate_rows(rows, catalog).rows:
        finite(result)


@settings(max_examples=150, deadline=None)
@given(
    changes=st.lists(
        st.tuples(
            st.sampled_from(PATHS),
            st.one_of(st.sampled_from(JUNK), st.integers(-5, 64), st.floats(), st.text(max_size=8)),
        ),
        min_size=1,
        max_size=5,
    ),
    experts=st.booleans(),
)
def test_no_row_of_junk_raises(
    reader: ObservationReader, changes: list[tuple[tuple[str, ...], Any]], experts: bool
) -> None:
    row = changed((("model",), {**ROW["model"], **EXPERTS})) if experts else ROW
    answered_or_refused(changed(*changes, row=row), reader)


@settings(max_examples=50, deadline=None)
@given(
    row=st.dictionaries(
        st.sampled_from([*ROW, "x"]),
        st.recursive(st.sampled_from(JUNK), lambda inner: st.dictionaries(st.text(max_size=4), inner, max_size=3)),
    )
)
def test_no_object_raises(reader: ObservationReader, row: dict[str, Any]) -> None:
    answered_or_refused(row, reader)


def test_other_tasks_are_refused_by_name(catalog: Catalog) -> None:
    (row,) = validate_rows([{**ROW, "task": "tuning"}], catalog).rows
    assert (row.status, "tuning" in row.reason) == ("unsupported", True)


@pytest.mark.parametrize(
    ("text", "words"), [("{", "not JSON"), ("[1]", "not a JSON object"), ("3", "not a JSON object")]
)
def test_a_broken_file_names_its_line(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "runs.jsonl"
    path.write_text(f"{json.dumps(ROW)}\n\n{text}\n")
    with pytest.raises(SpecError, match=words) as caught:
        list(read_rows(path))
    assert caught.value.problems[0].path.endswith(":3")


def test_an_unreadable_file_is_a_spec_error(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for name in ("missing", "binary"):
        with pytest.raises(SpecError, match="cannot be read"):
            list(read_rows(tmp_path / name))


@settings(max_examples=50, deadline=None)
@given(text=st.text(max_size=60))
def test_reading_any_text_gives_rows_or_a_spec_error(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = tmp_path_factory.mktemp("rows") / "runs.jsonl"
    path.write_text(text, encoding="utf-8", errors="replace")
    with suppress(SpecError):
        assert all(isinstance(row, dict) for row in read_rows(path))


def test_rows_that_cannot_be_read_are_not_called_a_spec(tmp_path: Path) -> None:
    with pytest.raises(SpecError) as missing:
        list(read_rows(tmp_path / "no.jsonl"))
    assert str(missing.value) == (
        f"1 problem in the measured rows:\n  - {tmp_path / 'no.jsonl'}: cannot be read: No such file or directory"
    )
    (tmp_path / "list.jsonl").write_text("\n[1]\n")
    with pytest.raises(SpecError, match=r"list\.jsonl:2: not a JSON object"):
        list(read_rows(tmp_path / "list.jsonl"))
