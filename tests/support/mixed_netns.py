"""One training job on hosts of two types, near or far apart, in network namespaces: plans beside what they take.

Four hosts, two of each type. What makes types unlike is a share of a processor (:mod:`cpu_shares`): the program really
computes at that speed, messages and all, and a profile of a host finds it; a sleep after each pass gives neither. What
makes sites is a line of its own for each host (:class:`netns.Sites`). Three scenarios have both, or one of them; they
and the plans beside the chosen one were fixed before the first measurement.

Known to the planner: the links as ``meshplan profile links`` measured them inside the shares, that the program reduces
whole gradients after the last backward, which hides none of it, and of each type what micro-batches of one sequence and
of four take. The first is more than a quarter of the second, because each operator costs the processor some time
whatever its size. The device that goes into the catalog has the rate and the memory bandwidth, one factor on both, and
its constants the host time of a layer, with which the estimator says both times. The chosen plan is what
``meshplan plan`` finds; the others are pinned.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cpu_shares import cpu_shares
from netns import Network, Shaping, Sites, network
from small_llama import small_llama

from meshplan.catalogs.database.repository import Catalog
from meshplan.planner.validation.summary import spearman

ONE, TWO = "type-one", "type-two"
ARCHITECTURE = "lab"  # of a type: with its name, because each has constants of its own
NEAR, LINE = 200_000_000, 4_000_000  # bit/s
# A twentieth of a message between stages, so that the bucket does not carry it at the speed of the processor.
LINE_SHAPING = Shaping(burst="12kb", latency="400ms")
MODEL = small_llama(256)
BATCH, LENGTH, STEPS, PROFILED_MICRO_BATCHES = 16, 128, 3, (1, 4)
# Where the catalog's numbers of a device start, before its profile says how far off they are.
FLOPS_PER_S, BYTES_PER_S, MEMORY_BYTES = 1e11, 1e10, 8e9
NOMINAL_BYTES_PER_S = 1e9  # of the network; the profile replaces it
DEADLINE_S, PORT = 300, 29_717
PROGRAM = Path(__file__).parents[1] / "end_to_end" / "mixed_train.py"
# (type, layers, replicas, sequences of a replica's micro-batch) of each stage.
Stages = tuple[tuple[str, int, int, int], ...]
OTHERS: Mapping[str, Stages] = {
    "one alone, replicas": ((ONE, 8, 2, 4),),
    "one alone, pipeline": ((ONE, 4, 1, 4), (ONE, 4, 1, 4)),
    "equal layers, one first": ((ONE, 2, 1, 4), (ONE, 2, 1, 4), (TWO, 2, 1, 4), (TWO, 2, 1, 4)),
    "equal layers, in turn": ((ONE, 2, 1, 4), (TWO, 2, 1, 4), (ONE, 2, 1, 4), (TWO, 2, 1, 4)),
    "three quarters on one": ((ONE, 3, 1, 4), (ONE, 3, 1, 4), (TWO, 1, 1, 4), (TWO, 1, 1, 4)),
    "replicas, half on each": ((ONE, 4, 2, 2), (TWO, 4, 2, 2)),
    "replicas, two first": ((TWO, 2, 2, 2), (ONE, 6, 2, 2)),
    "unlike degrees": ((ONE, 3, 1, 2), (ONE, 3, 1, 2), (TWO, 2, 2, 1)),
}


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """Hosts and links.

    Args:
        name: for the table.
        shares: of a processor, of a host of each type.
        is_apart: the types are at two sites.
    """

    name: str
    shares: tuple[float, float]
    is_apart: bool


SCENARIOS = (
    Scenario(name="unlike speed", shares=(0.3, 0.1), is_apart=False),
    Scenario(name="two sites", shares=(0.2, 0.2), is_apart=True),
    Scenario(name="unlike speed at two sites", shares=(0.3, 0.1), is_apart=True),
)


@dataclass(frozen=True, kw_only=True)
class Run:
    """One plan: seconds of a step, predicted and measured."""

    name: str
    predicted_s: float
    measured_s: float
    stages: str


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """All plans of a scenario, the chosen one first."""

    runs: tuple[Run, ...]

    @property
    def regret(self) -> float:
        """How much longer a step of the chosen plan takes than of the best one."""
        return self.runs[0].measured_s / min(run.measured_s for run in self.runs) - 1.0

    @property
    def order(self) -> float:
        """Spearman's rank correlation of predicted and measured steps."""
        return spearman([run.predicted_s for run in self.runs], [run.measured_s for run in self.runs]) or 0.0


def device_and_host(of_device: Sequence[float], measured: Sequence[float]) -> tuple[float, float]:
    """How much slower a device is than the estimator says, and the host time besides, from micro-batches of two sizes.

    The estimator's time is √((f·d)² + h²) with d that of the device alone; so f² = (m₂² − m₁²)/(d₂² − d₁²), and h² is
    what is left of m₁². Where nothing is left, f is that of the larger size.

    Args:
        of_device: d of the small and of the large micro-batch, s.
        measured: m, s.
    """
    (small, large), (small_s, large_s) = of_device, measured
    squared = (large_s**2 - small_s**2) / (large**2 - small**2)
    host_squared = small_s**2 - squared * small**2
    return (squared**0.5, host_squared**0.5) if host_squared > 0.0 else (large_s / large, 0.0)


class Lab:
    """One scenario's hosts while they exist.

    Args:
        net: the hosts.
        groups: what a process of each host writes its id to.
        folder: for files.
    """

    def __init__(self, net: Network, groups: Sequence[Path], folder: Path) -> None:
        self.net, self.groups, self.folder = net, groups, folder
        (folder / "config.json").write_text(json.dumps(MODEL))

    def profile_links(self, *, quick: bool) -> None:
        """Every pair of hosts, by ``meshplan profile links``, on hosts as fast as they are when they train.

        Args:
            quick: a few messages for each pair on whole processors, minutes less; lines come out 4 to 20 % too fast.
        """
        arguments = ["profile", "links", "--name", "lab", "--rail", "eth0", "--db", str(self.folder / "catalog.sqlite")]
        arguments += ["--timeout", str(DEADLINE_S)]  # a slow host takes most of a minute to begin
        arguments += ["--quick"] if quick else []
        started = []
        for host, group in enumerate(self.groups):
            started.append(self.net.start(host, arguments, log=self.folder / f"profile{host}.log"))
            if not quick:
                group.write_text(str(started[-1].pid))
        self._ended(started, "profile0.log")

    def profile_devices(self) -> None:
        """Micro-batches on a host of each type, and the device and constants with which the estimator says as long."""
        self._store(dict.fromkeys((ONE, TWO), 1.0))
        self._store_constants(dict.fromkeys((ONE, TWO), 0.0))
        factors, host_s = {}, {}
        for name, host in ((ONE, 0), (TWO, 2)):
            of_device = [self._device_s(name, size) for size in PROFILED_MICRO_BATCHES]
            measured = [self._micro_batch_s(host, size) for size in PROFILED_MICRO_BATCHES]
            slowness, own_s = device_and_host(of_device, measured)
            factors[name], host_s[name] = 1.0 / slowness, own_s / MODEL["num_hidden_layers"]
        self._store(factors)
        self._store_constants(host_s)

    def _device_s(self, name: str, size: int) -> float:
        """What the estimator says of a micro-batch through the whole model."""
        plan = self.planned(f"profile of {name} {size}", [(name, MODEL["num_hidden_layers"], 1, size)])
        return float(plan["memory"]["stages"][0]["micro_batch_s"])

    def _store_constants(self, host_s: Mapping[str, float]) -> None:
        """The shipped constants, with each type's own host time of a layer and no window to reduce gradients behind."""
        catalog = Catalog.open(str(self.folder / "catalog.sqlite"))
        shipped = catalog.calibration("any", "any") or {}
        for name, seconds in host_s.items():
            time_s = {**shipped["time"], "data_parallel_window": 0.0, "host_s_per_layer": seconds}
            own = {**shipped, "architecture": f"{ARCHITECTURE}-{name}", "time": time_s}
            source = "the lab: mixed_train.py reduces after the last backward; its micro-batches of two sizes"
            catalog.put_calibration("any", own["architecture"], own, source=source)

    def planned(self, name: str, stages: Sequence[tuple[str, int, int, int]] | None) -> dict[str, Any]:
        """The plan of these stages, or the best one."""
        place = self.folder / name.replace(" ", "-")
        place.mkdir(exist_ok=True)
        names = ("node_type", "num_layers", "data_parallel", "micro_batch_size")
        # The program keeps all states on every replica and recomputes nothing.
        fixed: dict[str, Any] = {"zero_stage": 0}
        if stages is None:
            fixed["activation_recompute"] = "none"
        else:
            fixed["stages"] = [{**dict(zip(names, one, strict=True)), "tensor_parallel": 1} for one in stages]
        spec = {
            "kind": "training",
            "model": str(self.folder / "config.json"),
            "cluster": {"nodes": [{"type": ONE, "count": 2}, {"type": TWO, "count": 2}], "profile": "lab"},
            "workload": {"sequence_length": LENGTH, "global_batch_size": BATCH},
            "constraints": {"target": "any"},
            "fixed": fixed,
        }
        (place / "spec.json").write_text(json.dumps(spec))
        text = self._meshplan("plan", str(place / "spec.json"), "--format", "json")
        (place / "plan.json").write_text(text)
        plan: dict[str, Any] = json.loads(text)
        return plan

    def run(self, name: str, stages: Stages | None) -> Run:
        """Plan, emit for torchrun, launch on every host, and time the steps."""
        plan, place = self.planned(name, stages), self.folder / name.replace(" ", "-")
        files = ("--target", "torchrun", "--out", str(place / "out"), "--script", str(PROGRAM))
        self._meshplan("emit", str(place / "plan.json"), *files)
        hosts = [host for host, _ in plan["rank_table"]]
        variables = {
            "TORCHRUN": str(Path(sys.executable).with_name("torchrun")),
            "MASTER_ADDR": self.net.address(hosts[0]),
            "MASTER_PORT": str(PORT),
            "MESHPLAN_SKIP_CHECKS": "1",
            "GLOO_SOCKET_IFNAME": "eth0",
            "TEST_STEPS": str(STEPS),
            "TEST_RESULT": str(place / "result.json"),
        }
        started = []
        for node_rank, host in enumerate(hosts):
            script = [str(place / "out" / f"launch_host_{node_rank:03d}.sh")]
            started.append(self._inside(host, script, place / f"host{host}.log", variables))
        self._ended(started, f"{place.name}/host{hosts[0]}.log")
        parts = " ".join(
            f"{stage['node_type'].removeprefix('type-')}:{stage['num_layers']}×{stage['data_parallel']}"
            for stage in plan["config"]["stages"]
        )
        return Run(
            name=name,
            predicted_s=plan["predicted"]["iteration_s"]["value"],
            # Others on the machine only make a step longer.
            measured_s=min(json.loads((place / "result.json").read_text())["step_s"]),
            stages=f"{parts}, {plan['config']['num_microbatches']} micro-batches",
        )

    def _micro_batch_s(self, host: int, sequences: int) -> float:
        """Forward and backward of a micro-batch through the whole model on one host."""
        result = self.folder / f"device{host}.json"
        size = {"TEST_MICRO_BATCH": json.dumps([sequences, LENGTH])}
        command = [sys.executable, str(PROGRAM), str(result)]
        self._ended([self._inside(host, command, self.folder / f"device{host}.log", size)], f"device{host}.log")
        return float(json.loads(result.read_text()))

    def _store(self, factors: Mapping[str, float]) -> None:
        """Put devices, their network and their node types into the catalog."""

        def facts(**values: float) -> list[dict[str, Any]]:
            told = {"num_samples": 1, "level": "measured here", "source": "the lab", "date": time.strftime("%Y-%m-%d")}
            return [{"field": field.replace("__", "."), "value": value, **told} for field, value in values.items()]

        link = {"name": "Ethernet", "technology": "ethernet"}
        document = {
            "format": "meshplan-catalog/1",
            "links": {"lab-link": {**link, "facts": facts(bandwidth_bytes_per_s=NOMINAL_BYTES_PER_S, latency_s=1e-4)}},
            "devices": {
                f"device-{name}": {
                    "name": f"Host of {name}",
                    "vendor": "nvidia",
                    "architecture": f"{ARCHITECTURE}-{name}",
                    "facts": facts(
                        peak_flops_per_s__bf16=FLOPS_PER_S * factor,
                        memory_bandwidth_bytes_per_s=BYTES_PER_S * factor,
                        memory_bytes=MEMORY_BYTES,
                        usable_memory_bytes=MEMORY_BYTES,
                    ),
                }
                for name, factor in factors.items()
            },
            "node_types": {
                name: {
                    "name": f"Host of {name}",
                    "device": f"device-{name}",
                    "scale_up_link": "lab-link",
                    "scale_out_link": "lab-link",
                    "facts": facts(num_hosts=1, devices_per_host=1, nics_per_host=1),
                }
                for name in factors
            },
        }
        (self.folder / "lab.json").write_text(json.dumps(document))
        self._meshplan("catalog", "import", str(self.folder / "lab.json"))

    def _meshplan(self, *arguments: str) -> str:
        command = [sys.executable, "-m", "meshplan.cli.main", *arguments, "--db", str(self.folder / "catalog.sqlite")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
        if done.returncode:
            raise RuntimeError(f"meshplan {' '.join(arguments)}: {done.stderr[-2000:]}")
        return done.stdout

    def _inside(
        self, host: int, command: Sequence[str], log: Path, variables: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        own = {
            "OMP_NUM_THREADS": "1",
            "TEST_HOST": str(host),
            "TEST_GROUP": str(self.groups[host]),
            "TEST_SHAPE": json.dumps({key: value for key, value in MODEL.items() if type(value) is int}),
        }
        with log.open("wb") as file:
            return subprocess.Popen(
                ["ip", "netns", "exec", self.net.namespaces[host], *command],
                env={**os.environ, **own, **variables},
                stdout=file,
                stderr=subprocess.STDOUT,
            )

    def _ended(self, processes: Sequence[subprocess.Popen[bytes]], log: str) -> None:
        """Wait for all; what still runs at the deadline is killed."""
        deadline = time.monotonic() + DEADLINE_S
        try:
            codes = [process.wait(timeout=max(0.1, deadline - time.monotonic())) for process in processes]
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
                process.wait()
        if any(codes):
            raise RuntimeError(f"exit codes {codes}: {(self.folder / log).read_text()[-3000:]}")


def measured(
    scenario: Scenario, folder: Path, others: Mapping[str, Stages] = OTHERS, *, quick_links: bool = False
) -> Outcome:
    """Profile the hosts of a scenario, plan, and run the chosen plan and others; ``quick_links``: see :class:`Lab`."""
    first, second = scenario.shares
    lines = Sites(of_host=(0, 0, 1, 1), bits_per_s=LINE, shaping=LINE_SHAPING) if scenario.is_apart else None
    with (
        network((NEAR,) * 4, (), sites=lines) as net,
        cpu_shares(f"mp{os.getpid()}", (first, first, second, second), folder / "groups") as groups,
    ):
        lab = Lab(net, groups, folder)
        lab.profile_links(quick=quick_links)
        lab.profile_devices()
        return Outcome(runs=tuple(lab.run(name, stages) for name, stages in {"chosen": None, **others}.items()))


def table(outcome: Outcome) -> str:
    """All runs, the fastest first."""
    lines = ["| plan | stages (type:layers×replicas) | predicted s | measured s |", "|---|---|---:|---:|"]
    lines += [
        f"| {run.name} | {run.stages} | {run.predicted_s:.2f} | {run.measured_s:.2f} |"
        for run in sorted(outcome.runs, key=lambda run: run.measured_s)
    ]
    lines.append(f"\nSpearman {outcome.order:.2f}, regret of the chosen plan {outcome.regret:.1%}")
    return "\n".join(lines)
