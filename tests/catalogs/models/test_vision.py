"""Vision towers: parameters as the published checkpoints hold them, tokens of an image, sections that are wrong."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import TypeAdapter

from meshplan.catalogs.database.seeds import seed_model_shape
from meshplan.catalogs.errors import ModelConfigError
from meshplan.catalogs.models.config import shape_from_config
from meshplan.planner.core.plan import shape_document, shape_from_document
from meshplan.planner.core.plan_document import Model

# Parameters of the whole checkpoint, as the hub counts them in its safetensors files.
PUBLISHED = {
    "gemma-3-4b": 4_300_079_472,
    "gemma-3-12b": 12_187_325_040,
    "gemma-3-27b": 27_432_406_640,
    "llama-4-scout": 108_641_793_536,
    "qwen2.5-vl-3b": 3_754_622_976,
    "qwen2.5-vl-7b": 8_292_166_656,
    "qwen3-vl-8b": 8_767_123_696,
    "qwen3-vl-30b-a3b": 31_070_754_032,
}
TEXT = {
    "model_type": "qwen2_5_vl",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "vocab_size": 100,
}


@pytest.mark.parametrize("slug", sorted(PUBLISHED))
def test_tower_and_language_model_are_the_checkpoint(slug: str) -> None:
    shape = seed_model_shape(slug)
    assert shape.vision is not None
    assert shape.num_parameters + shape.vision.parameters == PUBLISHED[slug]
    assert shape_from_document(shape_document(shape)) == shape


@pytest.mark.parametrize(
    ("slug", "size", "tokens"),
    [
        ("qwen2.5-vl-7b", (1280, 720), 46 * 26),  # sides in multiples of 28, rounded
        ("qwen2.5-vl-7b", (28, 28), 4),  # enlarged to 56 × 56
        ("qwen3-vl-8b", (1280, 720), 40 * 22),  # multiples of 32; 22.5 is rounded to even
        ("gemma-3-27b", (1280, 720), 256),
        ("gemma-3-27b", (64, 64), 256),
        # Tiles of 336 × 336, 144 tokens each, as transformers 5.16.1 chooses them (3,000 random sizes agree), and the
        # whole image where there are several.
        ("llama-4-scout", (336, 336), 144),
        ("llama-4-scout", (300, 200), 144),
        ("llama-4-scout", (1280, 720), (4 * 3 + 1) * 144),
        ("llama-4-scout", (4000, 300), (12 + 1) * 144),
    ],
)
def test_tokens_of_an_image(slug: str, size: tuple[int, int], tokens: int) -> None:
    tower = seed_model_shape(slug).vision
    assert tower is not None
    assert tower.tokens(*size) == tokens


@pytest.mark.parametrize("slug", ["qwen2.5-vl-7b", "qwen3-vl-8b"])
def test_the_area_stays_within_its_limits(slug: str) -> None:
    tower = seed_model_shape(slug).vision
    assert tower is not None
    unit = (tower.patch_size * tower.merged) ** 2
    for side in (1, 10, 500, 3_000, 20_000, 65_536):
        for other in (side, max(side // 3, 1)):
            assert tower.tokens(side, other) == tower.tokens(other, side)
            area = tower.tokens(side, other) * unit
            assert tower.least_pixels <= area <= tower.most_pixels


def test_every_problem_of_a_section_at_once() -> None:
    wrong: dict[str, Any] = {"model_type": "qwen2_5_vl", "depth": 0, "hidden_size": "x", "patch_size": True}
    with pytest.raises(ModelConfigError) as raised:
        shape_from_config(TEXT | {"vision_config": wrong}, slug="wrong")
    for path in ("depth", "hidden_size", "patch_size"):
        assert f"vision_config.{path}: must be a whole number from 1 to 1000000" in str(raised.value)


def test_a_tower_that_is_not_believed() -> None:
    with pytest.raises(ModelConfigError, match=r"its sizes make [\d,]+ parameters, more than the 1,000,000,000"):
        shape_from_config(TEXT | {"vision_config": {"depth": 900}}, slug="huge")
    document = shape_document(seed_model_shape("qwen3-vl-8b"))
    for change, message in (
        ({"patch_size": 0}, "patches must be above 0"),
        ({"parameters": -1}, "vision.parameters is -1"),
        ({"merged": "<b>"}, "valid integer"),
    ):
        with pytest.raises(ValueError, match=message):
            TypeAdapter(Model).validate_python({**document, "vision": {**document["vision"], **change}})


def test_a_tower_of_another_family_is_not_guessed() -> None:
    assert (
        shape_from_config(TEXT | {"vision_config": {"model_type": "pixtral", "depth": 2}}, slug="other").vision is None
    )
    assert shape_from_config(TEXT | {"vision_config": "none"}, slug="other").vision is None
    assert shape_from_config(TEXT | {"vision_config": {}}, slug="same").vision is not None


def test_a_tile_attends_to_itself() -> None:
    tower = seed_model_shape("llama-4-scout").vision
    assert tower is not None
    assert tower.attended_pairs(13 * 576) == 34 * 13 * 576**2
