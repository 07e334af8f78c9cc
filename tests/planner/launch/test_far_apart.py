"""Files of a way over sites: TorchTitan's for every site, and refusals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from replica_plans import far_apart

from meshplan.catalogs.database.repository import Catalog
from meshplan.catalogs.errors import CannotExpressError
from meshplan.planner.core.plan import Plan
from meshplan.planner.emit.artifact import EmitOptions
from meshplan.planner.launch.training import files


@pytest.fixture(scope="module")
def over_sites(catalog: Catalog) -> Plan:
    return far_apart(catalog)


def written(plan: Plan, catalog: Catalog, target: str = "torchtitan") -> dict[str, str]:
    emitted = files(plan, target, catalog, EmitOptions())
    return {str(one.path): one.content for one in emitted.artifacts}


def changed(plan: Plan, **row: Any) -> Plan:
    """The plan with another row of the chosen way."""
    assert plan.far_apart is not None
    chosen = plan.far_apart["chosen"]
    ways = [{**one, **row} if one["name"] == chosen else one for one in plan.far_apart["ways"]]
    return replace(plan, far_apart={**plan.far_apart, "ways": ways})


def test_every_site_runs_the_same_job(over_sites: Plan, catalog: Catalog) -> None:
    found = written(over_sites, catalog)
    flags = dict(line.partition(" ")[::2] for line in found["torchtitan_args.txt"].splitlines() if line[0] != "#")
    assert (flags["--module"], flags["--config"]) == ("meshplan_torchft", "job")
    assert flags["--training.global-batch-size"] == "32"
    assert flags["--fault-tolerance.group-size"] == "2"
    assert flags["--fault-tolerance.sync-steps"] == "30"
    assert flags["--fault-tolerance.num-fragments"] == "3"
    assert int(flags["--fault-tolerance.fragment-sync-delay"]) < 30 // 3
    assert "--fault-tolerance.should-quantize" in flags
    assert flags["--fault-tolerance.process-group"] == "nccl"
    assert list(flags)[-1].startswith("activation-checkpoint:")
    # torchft gives an exchange up after 10 s by default: 8 GB over 1 Gb/s take longer.
    assert int(flags["--fault-tolerance.process-group-timeout-ms"]) > 64_000
    compile(found["meshplan_torchft.py"], "meshplan_torchft.py", "exec")
    assert "llama3_8b" in found["meshplan_torchft.py"]
    assert "--min_replicas 2" in found["lighthouse.sh"]
    assert "SITE" in found["launch.sh"]


def test_what_torchft_has_not_is_refused(over_sites: Plan, catalog: Catalog) -> None:
    for target in ("megatron", "slurm"):
        with pytest.raises(CannotExpressError, match="over sites"):
            written(over_sites, catalog, target)
    with pytest.raises(CannotExpressError, match="4 bits"):
        written(changed(over_sites, bits=4), catalog)
    with pytest.raises(CannotExpressError, match="powersgd"):
        written(changed(over_sites, way="powersgd"), catalog)
    with pytest.raises(CannotExpressError, match="30 steps for 4 fragments"):
        written(changed(over_sites, fragments=4), catalog)
