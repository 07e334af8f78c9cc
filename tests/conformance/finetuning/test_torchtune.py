"""torchtune's own reading of the YAML that we emit. On demand: ``make test-launchers`` (it needs torch).

Its components are looked up and bound to their arguments, models and adapters are built without memory (the meta
device) and their parameters counted, and the keys that a recipe reads are found in its source.
"""

from __future__ import annotations

import ast
import importlib.metadata
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from emit_cases import config_for
from finetuning_cases import ALONE, SHARDED, random_tuning, tuning

from meshplan.catalogs.database.seeds import seed_model_shape
from meshplan.planner.emit.training import torchtune as emitter
from meshplan.planner.emit.training.request import TrainingRequest
from meshplan.planner.training.problem.frameworks.torchtune import TORCHTUNE, TORCHTUNE_BUILDERS

pytestmark = pytest.mark.launchers

NUM_RANDOM_PLANS = 200
OF_ALL_LINEAR = 64  # rank


class Judge:
    """torchtune, imported once."""

    def __init__(self) -> None:
        import torch
        import torchtune
        from omegaconf import OmegaConf
        from torchtune import config, training
        from torchtune.config._errors import ConfigError
        from torchtune.modules.peft import get_adapter_params

        self.torch, self.config, self.training, self.error = torch, config, training, ConfigError
        self.load, self.adapters = OmegaConf.load, get_adapter_params
        self.recipes = Path(torchtune.__file__).parent.parent / "recipes"

    def read(self, text: str, folder: Path) -> Any:
        """The configuration, its components looked up and bound."""
        path = folder / "torchtune.yaml"
        path.write_text(text)
        found = self.load(path)
        self.config.validate(found)
        return found

    def parameters(self, found: Any) -> tuple[int, int]:
        """(of the model without adapters, of the adapters)."""
        with self.training.set_default_dtype(self.torch.bfloat16), self.torch.device("meta"):
            model = self.config.instantiate(found.model)
        adapters = sum(one.numel() for one in self.adapters(model).values())
        return sum(one.numel() for one in model.parameters()) - adapters, adapters

    def keys_read(self, recipe: str) -> set[str]:
        """Keys without which the recipe stops: ``cfg.key``, not ``cfg.get("key")``."""
        tree = ast.parse((self.recipes / f"{recipe}.py").read_text())
        names = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
        return {node.attr for node in names if isinstance(node.value, ast.Name) and node.value.id == "cfg"} - {"get"}


@pytest.fixture(scope="module")
def judge() -> Judge:
    return Judge()


def text_of(request: TrainingRequest) -> str:
    return next(file.content for file in emitter.job(request).files if file.path == emitter.CONFIG_FILE)


def test_version_is_the_one_that_the_rules_name() -> None:
    assert importlib.metadata.version("torchtune") == TORCHTUNE.version == emitter.VERIFIED.version


def test_random_legal_plans_are_accepted(judge: Judge, tmp_path: Path) -> None:
    draw = random.Random(3)
    for _ in range(NUM_RANDOM_PLANS):
        request = random_tuning(draw, "torchtune")
        found = judge.read(text_of(request), tmp_path)
        assert (found.batch_size, found.gradient_accumulation_steps) == (
            request.config.micro_batch_size,
            request.config.num_microbatches,
        )
        assert judge.training.get_dtype(found.dtype, device=judge.torch.device("cpu")) == judge.torch.bfloat16
        assert found.checkpointer.model_type in judge.training.ModelType.__members__


@pytest.mark.parametrize("slug", TORCHTUNE_BUILDERS)
def test_a_model_has_the_parameters_that_the_plan_counts(judge: Judge, tmp_path: Path, slug: str) -> None:
    shape = seed_model_shape(slug)
    config = config_for(shape, data_parallel=8, zero_stage=3)
    whole, none = judge.parameters(judge.read(text_of(tuning(config, shape=shape, phase="sft")), tmp_path))
    assert (whole, none) == (shape.num_parameters, 0)


@pytest.mark.parametrize("phase", ["lora", "qlora"])
def test_adapters_have_the_parameters_that_the_plan_counts(judge: Judge, tmp_path: Path, phase: str) -> None:
    """Rank × (inputs + outputs) of each projection: of attention, or of every linear layer but the LM head."""
    shape = replace(seed_model_shape("llama-3.2-1b"), slug="llama-3.2-1b")
    config = config_for(shape, zero_stage=0)
    request = tuning(config, shape=shape, phase=phase, precision="bf16", lora_rank=OF_ALL_LINEAR)
    _, adapters = judge.parameters(judge.read(text_of(request), tmp_path))
    hidden, heads = shape.hidden_size, shape.num_attention_heads * shape.head_dim
    grouped = shape.num_key_value_heads * shape.head_dim
    sums = 2 * (hidden + heads) + 2 * (hidden + grouped)
    if phase == "qlora":
        sums += 3 * (hidden + shape.intermediate_size)
    assert adapters == OF_ALL_LINEAR * sums * shape.num_hidden_layers


@pytest.mark.parametrize("config", [SHARDED, ALONE])
@pytest.mark.parametrize("phase", ["lora", "sft"])
def test_every_key_that_a_recipe_needs_is_there(judge: Judge, tmp_path: Path, config: Any, phase: str) -> None:
    request = tuning(config, phase=phase)
    missing = judge.keys_read(emitter.recipe_of(request)) - judge.read(text_of(request), tmp_path).keys()
    assert missing <= {"optimizer_in_bwd"}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("lora_llama3_1_70b", "lora_llama3_1_71b"),
        ("lora_rank: 16", "lora_ranks: 16"),
        ("llama3_tokenizer", "llama3_tokenisers"),
        ("fused: true", "fuzed: true"),
        ("model_type: LLAMA3", "model_typ: LLAMA3"),
    ],
)
def test_mutations_are_refused(judge: Judge, tmp_path: Path, old: str, new: str) -> None:
    text = text_of(tuning())
    judge.read(text, tmp_path)
    assert old in text
    with pytest.raises((judge.error, judge.config._errors.InstantiationError, TypeError)):
        judge.read(text.replace(old, new), tmp_path)


def test_launch_arguments_override_the_file(judge: Judge, tmp_path: Path) -> None:
    """As launch.sh gives them: the checkpoint's files as a list, paths of the tokenizer."""
    path = tmp_path / "torchtune.yaml"
    path.write_text(text_of(tuning()))
    parser = judge.config._parse.TuneRecipeArgumentParser("recipe")
    files = "checkpointer.checkpoint_files=[model-00001-of-00002.safetensors,model-00002-of-00002.safetensors]"
    given, changed = parser.parse_known_args(["--config", str(path), "checkpointer.checkpoint_dir=/w", files])
    merged = judge.config._utils._merge_yaml_and_cli_args(given, changed)
    assert list(merged.checkpointer.checkpoint_files) == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]
    assert merged.checkpointer.checkpoint_dir == "/w"
