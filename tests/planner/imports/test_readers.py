"""Scripts, command lines and configurations as people have them: what is read, what is refused, what is never run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from meshplan.catalogs.database.repository import Catalog
from meshplan.catalogs.errors import SpecError
from meshplan.planner.imports.command import read_inputs
from meshplan.planner.imports.launchers import read_launch
from meshplan.planner.imports.reading import Reading
from meshplan.planner.imports.spec import Answers, complete
from meshplan.planner.service import emit_plan, estimate_plan

MEGATRON = """#!/bin/bash
#SBATCH --nodes=4
export CUDA_DEVICE_MAX_CONNECTIONS=1
GPUS_PER_NODE=8
NUM_NODES=${NUM_NODES:-4}
WORLD_SIZE=$(($GPUS_PER_NODE*$NUM_NODES))
DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE   # all of them
    --nnodes $NUM_NODES
)
TRAINING="--micro-batch-size 1 --global-batch-size $((WORLD_SIZE * 4)) --bf16 \\
  --use-distributed-optimizer"
if [ -n "$1" ]; then
  EXTRA="--load $1"
fi
cat <<TEXT
torchrun --nnodes 99 pretrain_gpt.py --tensor-model-parallel-size 1
TEXT
torchrun "${DISTRIBUTED_ARGS[@]}" pretrain_gpt.py $TRAINING --num-layers 32 --hidden-size 4096 \\
    --num-attention-heads 32 --seq-length 4096 --tensor-model-parallel-size 4 --sequence-parallel \\
    --new-flag "a b" ${EXTRA} > log.txt 2>&1
"""


def read(text: str, folder: Path, name: str = "train.sh", **options: Any) -> Reading:
    (folder / name).write_text(text)
    return read_inputs([str(folder / name)], **options)


def test_a_megatron_script(tmp_path: Path) -> None:
    found = read(MEGATRON, tmp_path)
    assert (found.source, found.target) == ("megatron", "megatron")
    assert (found.launch.num_hosts, found.launch.devices_per_host, found.launch.num_devices) == (4, 8, 32)
    assert found.values["tensor_parallel"] == 4
    assert found.values["global_batch_size"] == 128
    assert found.values["zero_stage"] == 1
    assert found.model_arguments["--new-flag"] == "a b"
    assert "$1" in " ".join(found.unread)
    assert ("$NUM_NODES", "4") in {(one.term, one.value) for one in found.assumed}
    assert read(MEGATRON, tmp_path, variables={"NUM_NODES": "2"}).launch.num_devices == 16
    assert found.source_flags["tensor_parallel"] == "--tensor-model-parallel-size 4"
    assert found.problems == []


@pytest.mark.parametrize(
    ("command", "hosts", "per_host", "total"),
    [
        ("torchrun --nnodes=2 --nproc_per_node=8 a.py", 2, 8, 16),
        ("torchrun --nproc-per-node 4 a.py", 1, 4, 4),
        ("python -m torch.distributed.run --nnodes 3 --nproc-per-node 8 a.py --x", 3, 8, 24),
        ("deepspeed --num_gpus 8 --num_nodes 2 a.py --deepspeed d.json", 2, 8, 16),
        ("accelerate launch --num_processes 16 --num_machines 2 a.py", 2, 8, 16),
        ("srun -N 4 --ntasks-per-node=1 torchrun --nnodes 4 --nproc-per-node 8 a.py", 4, 8, 32),
        ("srun --nodes=4 --ntasks-per-node=8 python a.py", 4, 8, 32),
        ("python a.py", None, None, None),
    ],
)
def test_launchers_state_hosts_and_devices(
    command: str, hosts: int | None, per_host: int | None, total: int | None
) -> None:
    found = read_launch(command.split())
    assert (found.num_hosts, found.devices_per_host, found.num_devices) == (hosts, per_host, total)
    assert found.program[0] == "a.py"
    assert found.problems == ()


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("torchrun --nnodes 1:4 --nproc-per-node 8 a.py", "1:4"),
        ("torchrun --nnodes $N --nproc-per-node 8 a.py", "--env"),
        ("accelerate launch --num_processes 12 --num_machines 2 --gpus-per-node 8 a.py", "12"),
    ],
)
def test_launchers_that_contradict(command: str, message: str) -> None:
    assert message in " ".join(str(problem) for problem in read_launch(command.split()).problems)


def test_batch_options_count_where_the_command_says_nothing() -> None:
    found = read_launch(["srun", "python", "a.py"], ["--nodes=2", "--ntasks-per-node=8"])
    assert found.num_devices == 16
    other = read_launch(["torchrun", "--nnodes", "4", "--nproc-per-node", "8", "a.py"], ["--nodes=2"])
    assert "#SBATCH asks for 2 nodes" in str(other.problems[0])


@pytest.mark.parametrize(
    ("flags", "terms"),
    [
        ("--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params", {"zero_stage": 3}),
        ("--use-torch-fsdp2", {"zero_stage": 3}),
        ("--recompute-activations", {"activation_recompute": "selective"}),
        (
            "--recompute-granularity full --recompute-method block --recompute-num-layers 3",
            {"activation_recompute": "block", "recompute_num_layers": 3},
        ),
        (
            "--num-layers 32 --pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 2",
            {"virtual_pipeline_stages": 4, "pipeline_schedule": "interleaved"},
        ),
        ("--num-experts 8 --tensor-model-parallel-size 4", {"expert_tensor_parallel": 4}),
        ("--fp8-format hybrid --bf16", {"precision": "fp8"}),
    ],
)
def test_other_flags_of_megatron(flags: str, terms: dict[str, Any]) -> None:
    found = read_inputs(["torchrun", "pretrain_gpt.py", *flags.split()])
    assert {name: found.values[name] for name in terms} == terms


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--compile.enable", []),
        ("--compile.enable --compile.no-enable-async-tensor-parallel", []),
        ("", ["no --compile.enable"]),
        ("--compile.enable --compile.enable-async-tensor-parallel", ["--compile.enable-async-tensor-parallel"]),
    ],
)
def test_what_torchtitan_compiles_is_compared_with_what_is_priced(flags: str, said: list[str]) -> None:
    command = "torchrun -m torchtitan.train --module llama3 --config llama3_8b --parallelism.tensor-parallel-degree 2"
    found = read_inputs([*command.split(), *flags.split()])
    assert [line.split(":")[0] for line in found.left_out] == said
    assert not [word for word in found.unread if "compile" in word]


@pytest.mark.parametrize(
    ("flags", "chunks", "layers"),
    [
        ("--parallelism.pipeline-parallel-layers-per-stage 16", 1, (15, *[16] * 6, 15)),
        ("", 1, (15, *[16] * 6, 15)),
        ("--parallelism.pipeline-parallel-schedule Interleaved1F1B", 2, (7, *[8] * 14, 7)),
        ("--parallelism.pipeline-parallel-last-stage-less-layers 3", 1, (16, 17, *[16] * 5, 13)),
    ],
)
def test_torchtitans_weights_become_layers_of_each_chunk(
    flags: str, chunks: int, layers: tuple[int, ...], database: Path
) -> None:
    """Of 126 layers on 8 stages; where nothing is said, each end counts as a layer."""
    command = (
        "torchrun --nnodes 64 --nproc-per-node 8 -m torchtitan.train --module llama3 --config llama3_405b "
        "--compile.enable --parallelism.tensor-parallel-degree 8 --parallelism.pipeline-parallel-degree 8 "
        "--parallelism.data-parallel-shard-degree 8 --training.local-batch-size 16 --training.seq-len 8192 "
        "--parallelism.pipeline-parallel-microbatch-size 1 --training.global-batch-size 128"
    )
    reading = read_inputs([*command.split(), *flags.split()])
    spec = complete(reading, Answers(node_type="dgx-h100"), Catalog.open(str(database))).spec
    assert spec["fixed"].get("virtual_pipeline_stages", 1) == chunks
    assert tuple(spec["fixed"]["layers_per_chunk"]) == layers


def test_older_torchtitan_toml(tmp_path: Path) -> None:
    text = """
[model]
name = "llama3"
flavor = "8B"
[training]
batch_size = 2
seq_len = 8192
[parallelism]
data_parallel_shard_degree = -1
tensor_parallel_degree = 2
[activation_checkpoint]
mode = "selective"
[metrics]
log_freq = 1
"""
    found = read(text, tmp_path, "train.toml")
    assert found.source == "torchtitan"
    assert (found.values["tensor_parallel"], found.values["micro_batch_size"]) == (2, 2)
    assert (found.values["zero_stage"], found.values["activation_recompute"]) == (3, "selective")
    assert found.model == "llama-3-8b"
    assert found.unread == ["--metrics.log-freq 1"]


def test_deepspeed_with_a_trainer_script(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(
        '{"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "bf16": {"enabled": true},'
        ' "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}'
    )
    command = f"deepspeed --num_gpus 8 train.py --deepspeed {tmp_path}/ds.json --per_device_train_batch_size 4"
    found = read_inputs([*command.split(), "--gradient_checkpointing", "--max_length", "4096"])
    assert found.source == "deepspeed"
    assert (found.values["zero_stage"], found.values["micro_batch_size"]) == (2, 4)
    assert (found.values["activation_recompute"], found.values["sequence_length"]) == ("full", 4096)
    assert found.values["optimizer_offload"] is True


def test_accelerate_of_both_fsdp_versions(tmp_path: Path) -> None:
    text = "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nnum_machines: 2\nnum_processes: 16\n"
    older = read(text + "fsdp_config: {fsdp_sharding_strategy: SHARD_GRAD_OP}\n", tmp_path, "a.yaml")
    assert older.values["zero_stage"] == 2
    assert (older.launch.num_devices, older.launch.devices_per_host) == (16, 8)
    newer = read(text + "fsdp_config: {fsdp_version: 2, fsdp_reshard_after_forward: true}\n", tmp_path, "b.yaml")
    assert newer.values["zero_stage"] == 3
    unknown = read(text + "fsdp_config: {fsdp_version: 9}\n", tmp_path, "d.yaml")
    assert "no version of FSDP" in str(unknown.problems[0])
    plain = read(text.replace("FSDP", "MULTI_GPU"), tmp_path, "c.yaml")
    assert (plain.target, plain.values["zero_stage"]) == ("any", 0)


@pytest.mark.parametrize(
    ("command", "values"),
    [
        (
            "vllm serve meta-llama/Llama-3.1-70B -tp 8 -dp 2 --enable-expert-parallel --max-num-seqs 64",
            {"tensor_parallel": 8, "attention_data_parallel": 2, "expert_parallel": 16, "max_num_seqs": 128},
        ),
        (
            "python -m sglang.launch_server --model-path meta-llama/Llama-3.1-70B --tp 4 --dp 2",
            {"tensor_parallel": 4, "attention_data_parallel": 1, "num_workers": 2},
        ),
        (
            "python -m sglang.launch_server --model-path meta-llama/Llama-3.1-70B --tp 8 --dp 4 --enable-dp-attention",
            {"tensor_parallel": 2, "attention_data_parallel": 4, "num_workers": 1},
        ),
    ],
)
def test_engines_state_values_and_what_is_not_read(command: str, values: dict[str, int]) -> None:
    found = read_inputs([command])
    assert (found.kind, found.model) == ("serving", "meta-llama/Llama-3.1-70B")
    assert {name: found.values[name] for name in values} == values
    assert "--weird 1" in read_inputs([f"{command} --weird 1"]).unread
    assert "'x' is not a whole number" in str(
        read_inputs([f"{command} --pp-size x --pipeline-parallel-size x"]).problems
    )


def test_limits_of_an_engine_that_a_spec_has_no_field_for_are_listed() -> None:
    found = read_inputs(["vllm serve a/model -tp 2 --enforce-eager --gpu-memory-utilization 0.9"])
    assert found.left_out == ["--enforce-eager"]
    assert found.values["memory_fraction"] == 0.9
    assert found.source_flags["tensor_parallel"] == "-tp 2"


def test_ranks_inside_a_stage_that_exceed_it_are_a_problem() -> None:
    for command in ("vllm serve a/model -tp 2 -dcp 4", "python -m sglang.launch_server --tp 2 --attn-dp-size 4"):
        (problem,) = read_inputs([command]).problems
        assert "2 is less than the 4 ranks" in problem.message


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--tensor-model-parallel-size eight", "'eight' is not a whole number"),
        ("--tensor-model-parallel-size 0", "'0' is not a whole number"),
        ("--tensor-model-parallel-size 99999999999999999999", "is not a whole number"),
        ("--tensor-model-parallel-size 2 --bf16 --fp16", "exclude each other"),
        ("--tensor-model-parallel-size 2 --recompute-granularity some", "selective or full"),
        ("--tensor-model-parallel-size 2 --pipeline-model-parallel-layout E|x|L", "signs other than"),
        (
            "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et|t|tL",
            "3 chunks for 2 stages",
        ),
    ],
)
def test_values_that_cannot_be_meant(flags: str, message: str) -> None:
    found = read_inputs(["torchrun", "pretrain_gpt.py", *flags.split()])
    assert message in " ".join(str(problem) for problem in found.problems)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ([], "give a file"),
        (["no-such-file.sh"], "no file 'no-such-file.sh'"),
        (["make", "coffee"], "make coffee is nothing that is known"),
        (["accelerate", "launch", "--config_file", "/nowhere/a.yaml", "train.py"], "not here"),
    ],
)
def test_inputs_that_say_nothing(inputs: list[str], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        read_inputs(inputs)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.sh", b"\xff\xfe\x00", "cannot read"),
        ("a.sh", b"echo hello\nls\n", "none of the 2 commands"),
        ("a.json", b'{"train_batch_size": 1, "train_batch_size": 2}', "appears twice"),
        ("a.yaml", b"a: &x [1]\nb: !!python/object:os.system x\n", "is not YAML"),
        ("a.toml", b"[model\n", "is no TOML"),
        ("a.sh", b"x" * (2**20 + 1), "at most"),
    ],
)
def test_files_that_cannot_be_read(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(SpecError, match=message):
        read_inputs([str(tmp_path / name)])


def test_unknown_sources_are_named() -> None:
    with pytest.raises(SpecError, match="did you mean 'megatron'"):
        read_inputs(["torchrun a.py --x 1"], source="megatorn")


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("run.sh", "set -e\ntorchrun --nproc_per_node 8 \\\n  mine.py --lr 1\n", "line 2: torchrun"),
        ("one.sh", "torchrun --nproc_per_node 8 \\\n  mine.py --lr 1\n", "mine.py .*line 2: --lr"),
        ("a.yaml", "apiVersion: v1\nkind: Pod\nspec: {containers: [{image: a/b}]}\n", r"\(a/b\)"),
    ],
)
def test_what_is_not_known_is_told_by_its_line_or_image(tmp_path: Path, name: str, text: str, said: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(SpecError, match=said):
        read_inputs([str(tmp_path / name)])


AXOLOTL = """
base_model: meta-llama/Llama-3.3-70B-Instruct
adapter: lora
lora_r: 16
sequence_len: 65536
micro_batch_size: 1
gradient_accumulation_steps: 8
context_parallel_size: 4
flash_attention: true
fsdp_version: 2
fsdp_config:
  fsdp_reshard_after_forward: true
  fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer
  fsdp_state_dict_type: FULL_STATE_DICT
  cpu_ram_efficient_loading: true
datasets: [{path: mine, type: alpaca}]
plugins: [cut_cross_entropy]
"""


def test_an_axolotl_recipe_splits_sequences_and_says_what_decides_nothing(tmp_path: Path) -> None:
    """How layers are wrapped and states saved stands in every published recipe; a loss of a plug-in does decide."""
    found = read(AXOLOTL, tmp_path, "tune.yaml")
    assert (found.target, found.values["context_parallel"]) == ("axolotl", 4)
    assert found.values["context_parallel_style"] == "ring-plain"
    assert found.values["zero_stage"] == 3
    assert [text.partition(":")[0] for text in found.unread] == ["plugins"]
    even = read(AXOLOTL + "ring_attn_func: batch_zigzag\n", tmp_path, "even.yaml")
    assert "context_parallel_style" not in even.values


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attn_implementation", "eager"),
        ("flash_attention", "false"),
        ("optimizer", "adamw_bnb_8bit"),
        ("sample_packing", "false"),
        ("pad_to_sequence_len", "false"),
    ],
)
def test_what_no_plan_of_axolotl_prices_is_told(tmp_path: Path, key: str, value: str) -> None:
    text = AXOLOTL.replace("flash_attention: true", f"{key}: {value}")
    assert {said.partition(":")[0] for said in read(text, tmp_path, "tune.yaml").unread} == {key, "plugins"}


@pytest.mark.parametrize(
    ("told", "line"),
    [
        (["optimizer._component_"], "optimizer: {_component_: bitsandbytes.optim.PagedAdamW8bit}"),
        (["compile"], "compile: false"),
        (["dataset.packed"], "dataset: {packed: false}"),
        ([], "compile: true"),
    ],
)
def test_what_no_plan_of_torchtune_prices_is_told(tmp_path: Path, told: list[str], line: str) -> None:
    recipe = "model: {_component_: torchtune.models.llama3_2.lora_llama3_2_1b, lora_rank: 8}\nbatch_size: 2\n"
    found = read(f"{recipe}{line}\n", tmp_path, "recipe.yaml")
    assert [said.partition(":")[0] for said in found.unread] == told


def test_a_recipe_of_axolotl_without_packing_is_taken_as_packed_and_says_so(tmp_path: Path) -> None:
    """By itself Axolotl pads each text to its own length; a plan prices full sequences."""
    assumed = {one.term: one.value for one in read(AXOLOTL, tmp_path, "a.yaml").assumed}
    assert assumed["sample_packing"] is True
    stated = read(AXOLOTL + "sample_packing: true\n", tmp_path, "b.yaml")
    assert "sample_packing" not in {one.term for one in stated.assumed}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("zero_optimization: {stage: 2, overlap_comm: false}", ["zero_optimization.overlap_comm"]),
        ("zero_optimization: {stage: 2, overlap_comm: true, contiguous_gradients: false}", []),
        ("distributed_type: FSDP\nuse_cpu: true", ["use_cpu"]),
        (
            "distributed_type: FSDP\nfsdp_config: {fsdp_auto_wrap_policy: NO_WRAP}",
            ["fsdp_config.fsdp_auto_wrap_policy"],
        ),
        ("distributed_type: FSDP\nuse_cpu: false\nfsdp_config: {fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP}", []),
        ("distributed_type: DEEPSPEED\nuse_cpu: true\ndeepspeed_config: {zero_stage: 2}", ["use_cpu"]),
    ],
)
def test_what_no_plan_of_deepspeed_or_accelerate_prices_is_told(tmp_path: Path, text: str, told: list[str]) -> None:
    head = "num_processes: 8\n" if "distributed_type" in text else "train_micro_batch_size_per_gpu: 1\n"
    found = read(f"{head}{text}\n", tmp_path, "config.yaml")
    assert [said.partition(":")[0] for said in found.unread] == told


def test_an_adapter_of_another_type_is_none(tmp_path: Path) -> None:
    (tmp_path / "tune.yaml").write_text("base_model: a/b\nadapter: [{type: alpaca}]\nsequence_len: 4096\nlora_r: 8\n")
    assert "lora_rank" not in read_inputs([str(tmp_path / "tune.yaml")]).values


@pytest.mark.parametrize(("node_type", "stage"), [("dgx-h100", 3), ("rtx-4090-pcie-1", 0)])
def test_a_torchtune_recipe_shards_over_all_devices_of_the_node(
    catalog: Catalog, tmp_path: Path, node_type: str, stage: int
) -> None:
    recipe = "model: {_component_: torchtune.models.llama3_2.lora_llama3_2_1b, lora_rank: 8}\nbatch_size: 2\n"
    (tmp_path / "recipe.yaml").write_text(recipe)
    answers = Answers(node_type=node_type, nodes=1, sequence_length=2048)
    spec = complete(read_inputs([str(tmp_path / "recipe.yaml")]), answers, catalog).spec
    assert spec["fixed"]["zero_stage"] == stage
    assert estimate_plan(spec, catalog).config["zero_stage"] == stage


def test_the_choices_that_a_plan_hands_to_a_script_come_back_without_the_command(
    catalog: Catalog, tmp_path: Path
) -> None:
    spec = {
        "kind": "training",
        "model": "llama-3.1-8b",
        "cluster": {"nodes": [{"type": "dgx-h100", "count": 1}]},
        "workload": {"sequence_length": 2048, "global_batch_size": 8, "precision": "bf16"},
        "constraints": {"target": "any", "max_devices": 4},
        "fixed": {"data_parallel": 4, "zero_stage": 3, "micro_batch_size": 2},
    }
    plan = estimate_plan(spec, catalog)
    file = next(
        one for one in emit_plan(plan, "torchrun", catalog, script="mine.py").artifacts if "config" in str(one.path)
    )
    (tmp_path / "training_config.json").write_text(file.content)
    answers = Answers(model="llama-3.1-8b", node_type="dgx-h100", nodes=1)
    again = complete(read_inputs([str(tmp_path / "training_config.json")]), answers, catalog).spec
    assert estimate_plan(again, catalog).config == plan.config
