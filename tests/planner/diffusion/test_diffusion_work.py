"""Tokens, weights, time and memory of diffusion transformers against published sizes and plain properties."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from meshplan.catalogs.constants.diffusion import DiffusionConstants, diffusion_calibration
from meshplan.catalogs.database.repository import Catalog
from meshplan.catalogs.errors import UnknownEntryError
from meshplan.catalogs.hardware import Cluster, NodeGroup
from meshplan.catalogs.models.diffusion import diffusion_model, diffusion_models
from meshplan.planner.cluster.machine import Machine, machine_of
from meshplan.planner.diffusion.estimator.blocks import pass_work
from meshplan.planner.diffusion.estimator.demand import demand
from meshplan.planner.diffusion.estimator.latency import latency
from meshplan.planner.diffusion.estimator.memory import ACTIVATION_MARGIN, memory
from meshplan.planner.diffusion.estimator.power import power_share
from meshplan.planner.diffusion.problem.degrees import DiffusionConfig, degrees_of
from meshplan.planner.diffusion.problem.job import Job

ONE, SPLIT = DiffusionConfig(), DiffusionConfig(ulysses=4, ring=2)


def usual(slug: str, **more: int) -> Job:
    """What the publisher's pipeline makes."""
    model = diffusion_model(slug)
    sizes = {name: getattr(model.defaults, name) for name in ("height", "width", "frames", "steps")}
    return Job(model=model, **{**sizes, **more})


def machine(catalog: Catalog, node: str = "dgx-h100") -> Machine:
    return machine_of(Cluster(name=node, groups=(NodeGroup(node=catalog.node_type(node), count=1),)))


# Transformer tokens as the pipelines compute them: pictures of 1,024 pixels, videos of the models' own sizes.
@pytest.mark.parametrize(
    ("slug", "tokens"),
    [
        ("sana-1.5-1.6b", 1024),
        ("pixart-sigma", 4096),
        ("flux.1-dev", 4096),
        ("wan2.1-t2v-1.3b", 32760),
        ("hunyuanvideo", 118800),
        ("cogvideox-2b", 17550),
    ],
)
def test_tokens_of_an_item(slug: str, tokens: int) -> None:
    assert usual(slug).image_tokens == tokens


@pytest.mark.parametrize("slug", list(diffusion_models()))
def test_blocks_hold_the_published_parameters(slug: str) -> None:
    """Weights of the counted products are most of the transformer; modulation and embeddings are the rest."""
    job = usual(slug)
    model, weights = job.model, 0.0
    for product in pass_work(job).products:
        weights += product.inner * product.outer * product.count
    assert 0.55 * model.parameters < weights < 1.05 * model.parameters


def test_models_are_known_by_slug_and_id() -> None:
    assert diffusion_model("black-forest-labs/FLUX.1-dev") is diffusion_model("flux.1-DEV")
    with pytest.raises(UnknownEntryError, match=r"flux\.1-dev"):
        diffusion_model("flux.1-dex")


def test_latency_by_hand(catalog: Catalog) -> None:
    """One split configuration computed again with plain numbers; constants are round, products are as the surface."""
    constants = DiffusionConstants(
        gemm_efficiency=1.0,
        attention_efficiency=0.5,
        exponentials_per_flop=0.01,
        elementwise_efficiency=0.5,
        link_efficiency=0.5,
        ulysses_passes=10.0,
        ring_passes=2.0,
        merge_passes=20.0,
        launch_s=0.0,
        exchange_host_s=0.0,
        ulysses_host_s=0.0,
        hop_host_s=0.0,
        ulysses_exposed_s=1e-4,
        ring_exposed_s=2e-4,
        vae_efficiency=0.1,
        image_host_s=1e-3,
        fixed_s=0.25,
    )
    job, hardware = usual("pixart-sigma"), machine(catalog)
    asked = demand(job, hardware, degrees_of([replace(SPLIT, batch_size=2)]))
    taken = latency(asked, constants)
    layers, tokens, hidden, heads, text, passes = 28, 4096, 1152, 16, 300, 2 * 2
    peak, bandwidth, link = 989e12, 3350e9, 450e9
    pairs = layers * (tokens**2 + tokens * text) * passes / 8
    attention = 4 * pairs * hidden * (96 / 72) / (0.5 * peak) + pairs * heads / (0.01 * peak)
    small = layers * tokens * passes / 8 * (2 * 11 + 5 + 2 * 4) * hidden * 2 / (0.5 * bandwidth)
    tensor = layers * tokens * hidden * 2 * passes / 8
    ulysses = 4 * tensor * 3 / 4 / (0.5 * link) + 10 * tensor / (0.5 * bandwidth)
    hop = max(2 * tensor / (0.5 * link) - attention / 2, 0.0)
    ring = (2 + 20) * tensor / (0.5 * bandwidth) + hop
    step = float(asked.gemm_s[0]) + attention + small + ulysses + ring + layers * 3e-4
    vae = 2 * 9.35e6 * 1024**2 / (0.1 * peak)
    encoder = 2 * 4.76e9 * 300 * passes / (0.5 * peak)
    assert taken.total_s[0] == pytest.approx(20 * step + vae + encoder + 2 * 8 * 1e-3 + 0.25, rel=1e-9)
    assert sum(part[0] if np.ndim(part) else part for part in taken.parts().values()) == pytest.approx(taken.total_s[0])


@pytest.mark.parametrize("slug", list(diffusion_models()))
def test_more_work_is_never_faster_and_less_bandwidth_neither(slug: str, catalog: Catalog) -> None:
    hardware = machine(catalog)
    constants = diffusion_calibration("hopper", "h100-sxm-80gb").constants
    degrees = degrees_of([ONE, SPLIT, DiffusionConfig(ulysses=2), DiffusionConfig(ring=2)])
    base = latency(demand(usual(slug), hardware, degrees), constants).total_s
    slow = replace(hardware, scale_up_bytes_per_s=hardware.scale_up_bytes_per_s / 8)
    assert (latency(demand(usual(slug), slow, degrees), constants).total_s >= base).all()
    longer = usual(slug, steps=2 * usual(slug).steps)
    assert (latency(demand(longer, hardware, degrees), constants).total_s > base).all()
    fuller = replace(degrees, batch_size=2 * degrees.batch_size)
    assert (latency(demand(usual(slug), hardware, fuller), constants).total_s > base).all()
    share = power_share(latency(demand(usual(slug), hardware, degrees), constants), constants)
    assert ((share > constants.waiting_share) & (share < 1.2)).all()


# Most that a forward pass holds beside its weights, GB: tensors without data through blocks of Diffusers 0.42.1 (two or
# three of each kind), each storage counted once; batch 1, or both guidance passes where the pipeline batches them.
COUNTED = {
    "flux.1-dev": ({"height": 1024, "width": 1024}, 0.491),
    "stable-diffusion-3.5-medium": ({"height": 1024, "width": 1024}, 0.365),
    "stable-diffusion-3.5-large": ({"height": 1024, "width": 1024}, 0.534),
    "pixart-sigma": ({"height": 1024, "width": 1024}, 0.233),
    "sana-1.5-1.6b": ({"height": 1024, "width": 1024}, 0.134),
    "wan2.1-t2v-1.3b": ({"height": 480, "width": 832, "frames": 81}, 1.603),
    "wan2.1-t2v-14b": ({"height": 480, "width": 832, "frames": 81}, 3.731),
    "hunyuanvideo": ({"height": 720, "width": 1280, "frames": 129}, 13.296),
    "cogvideox-2b": ({"height": 480, "width": 720, "frames": 49}, 1.648),
    "cogvideox-5b": ({"height": 480, "width": 720, "frames": 49}, 2.837),
}


@pytest.mark.parametrize("slug", COUNTED)
def test_the_bound_of_a_pass_is_above_what_its_operators_hold_and_not_far(slug: str) -> None:
    size, counted_gb = COUNTED[slug]
    vae = replace(usual(slug).model.vae, widest_channels=0)
    job = replace(usual(slug, **size), model=replace(usual(slug).model, vae=vae))
    held = memory(job, degrees_of([ONE])).activation_bytes[0]
    assert counted_gb < ACTIVATION_MARGIN * held / 1e9 < 1.5 * counted_gb


# Likewise of decoders, tiled where the pipelines decode in tiles; cuDNN's copies are not in these figures.
@pytest.mark.parametrize(
    ("slug", "counted_gb"),
    [
        ("flux.1-dev", 1.611),
        ("sana-1.5-1.6b", 1.75),
        ("wan2.1-t2v-1.3b", 0.929),
        ("hunyuanvideo", 3.57),
        ("cogvideox-2b", 4.04),
    ],
)
def test_the_bound_is_above_what_a_decoder_holds(slug: str, counted_gb: float) -> None:
    assert counted_gb < ACTIVATION_MARGIN * memory(usual(slug), degrees_of([ONE])).activation_bytes[0] / 1e9


# Most that tensors held beside the weights of transformer and VAE on one H200, bytes (tests/data/h200_runs.jsonl).
@pytest.mark.parametrize(("slug", "peak"), [("flux.1-dev", 2.598e9), ("stable-diffusion-3.5-medium", 3.057e9)])
def test_decoding_needed_no_more_than_the_bound(slug: str, peak: float) -> None:
    held = memory(usual(slug, height=1024, width=1024), degrees_of([ONE]))
    assert peak <= ACTIVATION_MARGIN * held.activation_bytes[0] <= 1.35 * peak


def test_memory_falls_with_stages_and_the_bound_is_above() -> None:
    job = usual("flux.1-dev")
    degrees = degrees_of([ONE, DiffusionConfig(pipefusion=4), DiffusionConfig(ulysses=4)])
    held = memory(job, degrees)
    assert held.transformer_bytes.tolist() == [24e9, 6e9, 24e9]
    assert (held.bound_bytes > held.typical_bytes).all()
    # 12 billion parameters and a T5 of 4.8 billion in bf16 are published to need more than 32 GB and fit 40 GB.
    assert 32e9 < held.typical_bytes[0] < 40e9
