"""Reading measured serving runs: no row, however broken, raises anything but a reason."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from meshplan.catalogs.database.repository import Catalog
from meshplan.planner.serving.measured.exclusions import exclusions
from meshplan.planner.serving.measured.observations import served_run
from meshplan.planner.serving.measured.workloads import recorded_traces
from meshplan.planner.validation.fields import UnsupportedError
from meshplan.planner.validation.machines import MachineReader, read_rows

ROWS = list(read_rows(Path(__file__).parents[3] / "validation" / "serving-observations.jsonl"))
JUNK = (None, True, 0, 10**400, float("nan"), "x", [None], {"x": {}})


def rows_by_arrival() -> list[Mapping[str, Any]]:
    """The first row of every way in which requests arrive, and the first with pools of its own."""
    kinds = {(row["workload"]["arrival"], bool(row["workload"].get("disaggregated"))): row for row in reversed(ROWS)}
    return list(kinds.values())


def paths(value: Mapping[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, item in value.items():
        yield (*above, key)
        if isinstance(item, Mapping):
            yield from paths(item, (*above, key))


def with_value(row: Mapping[str, Any], path: tuple[str, ...], value: object) -> dict[str, Any]:
    changed = copy.deepcopy(dict(row))
    *above, last = path
    inner = changed
    for key in above:
        inner = inner[key]
    inner[last] = value
    return changed


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> MachineReader:
    return MachineReader(Catalog.open(str(tmp_path_factory.mktemp("catalog") / "catalog.sqlite")))


@pytest.mark.parametrize("row", rows_by_arrival(), ids=lambda row: row["id"])
def test_every_key_takes_every_kind_of_junk(row: Mapping[str, Any], reader: MachineReader, tmp_path: Path) -> None:
    for path in [*paths(row), ("caveats",), ("workload", "quantization"), ("workload", "trace_type")]:
        for value in JUNK:
            broken = with_value(row, path, value)
            exclusions([broken])
            recorded_traces([broken], tmp_path)
            with suppress(UnsupportedError):
                assert served_run(broken, reader).config.num_devices >= 1


def test_what_a_row_leaves_out_is_listed(reader: MachineReader) -> None:
    row = next(row for row in ROWS if row["workload"].get("concurrency"))
    assert {"max_num_seqs", "max_batched_tokens"} <= set(served_run(row, reader).filled)


def test_limits_that_a_row_states_are_those_that_are_simulated(reader: MachineReader) -> None:
    row = next(row for row in ROWS if row["workload"].get("concurrency") and not row["workload"].get("disaggregated"))
    stated = with_value(with_value(row, ("workload", "max_num_seqs"), 3), ("workload", "max_num_batched_tokens"), 512)
    run = served_run(stated, reader)
    limits = run.config.pools[0].limits
    assert (limits.max_num_seqs, limits.max_batched_tokens) == (3, 512)
    assert not {"max_num_seqs", "max_batched_tokens"} & set(run.filled)
    named = served_run(with_value(row, ("workload", "temperature"), 0.7), reader)
    assert "temperature" in named.unused
