"""Time outside the engines: it grows with the text of a prompt, and static batches have none."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from planted_serving import PLANTED, prepared

from meshplan.catalogs.database.repository import Catalog
from meshplan.planner.serving.measured.prediction import PreparedRun
from meshplan.planner.serving.problem.requests import Arrival, Images
from meshplan.planner.serving.search.deployment import TOKENIZE_S_PER_TOKEN, outside_s, tokenize_s
from meshplan.planner.validation.machines import MachineReader


@pytest.fixture(scope="module")
def loop(tmp_path_factory: pytest.TempPathFactory) -> PreparedRun:
    """A closed loop of one server."""
    reader = MachineReader(Catalog.open(str(tmp_path_factory.mktemp("catalog") / "catalog.sqlite")))
    return prepared(reader, (2,), "a")[0]


def test_prompts_are_tokenized_and_a_static_batch_is_not(loop: PreparedRun) -> None:
    run = loop.run
    prompts = np.array([0, 1_000, 37_000])
    site = replace(loop.site, constants=dict.fromkeys(loop.site.constants, PLANTED))
    found = outside_s(site, run.config, run.workload, prompts)
    assert found - PLANTED.first_token_offset_s == pytest.approx([0.0, 1_000 * TOKENIZE_S_PER_TOKEN, 0.164])
    static = replace(run.workload, arrival=Arrival.STATIC_BATCH)
    assert not outside_s(site, run.config, static, prompts).any()


def test_tokens_of_images_are_not_text(loop: PreparedRun) -> None:
    pictures = replace(loop.run.workload, images=Images(per_request=2, patches=1_024, tokens=256))
    assert tokenize_s(pictures, np.array([512, 1_512])) == pytest.approx([0.0, 1_000 * TOKENIZE_S_PER_TOKEN])


def test_clients_see_every_token_later_by_it(loop: PreparedRun) -> None:
    """The time per token is the engine's: first and last token are as late."""
    free = replace(PLANTED, first_token_offset_s=0.0)
    slow, fast = (loop.predicted(constants) for constants in (PLANTED, free))
    assert slow["ttft_s"] - fast["ttft_s"] == pytest.approx(PLANTED.first_token_offset_s)
    assert slow["tpot_s"] == pytest.approx(fast["tpot_s"])
