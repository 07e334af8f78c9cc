"""Which degrees a model, an engine and a machine take together; each rule has a reason for people.

Rules of xDiT 0.4.5 and of its table of supported methods (https://github.com/xdit-project/xDiT, read 2026-11-24):

- Ulysses gives each device whole heads: the degree divides the heads; where cross-attention has heads of its own and is
  split too (SANA), theirs as well.
- The tokens of an item are split evenly by Ulysses × ring (× patches of PipeFusion).
- ``cfg_parallel`` is 1 or 2, and 2 needs two guidance passes.
- PipeFusion's stages hold whole blocks, at least one each; it needs more steps than the one that warms up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import product

from meshplan.planner.diffusion.problem.degrees import DiffusionConfig
from meshplan.planner.diffusion.problem.job import Job
from meshplan.planner.diffusion.problem.problem import DiffusionProblem

DEGREES = ("ulysses", "ring", "cfg_parallel", "pipefusion", "tensor_parallel")
# Batches that a search tries, every one: a limit on latency lies between two powers of two. Larger ones can be pinned.
BATCHES = range(1, 33)
GUIDED_PASSES = 2


def broken_rules(job: Job, config: DiffusionConfig) -> Iterator[str]:
    """Reasons why a model does not run with these degrees, whatever the machine."""
    model = job.model
    u, r, c, p, t = (getattr(config, name) for name in DEGREES)
    if model.num_attention_heads % (u * t):
        yield f"ulysses × tensor_parallel must divide the {model.num_attention_heads} attention heads"
    if model.cross_attention_heads and model.cross_attention_heads % (u * t):
        yield f"ulysses × tensor_parallel must divide the {model.cross_attention_heads} cross-attention heads"
    if job.image_tokens % (u * r * p):
        yield f"ulysses × ring × pipefusion must divide the {job.image_tokens} tokens of an item"
    if c > 1 and model.guidance_passes < GUIDED_PASSES:
        yield f"cfg_parallel needs classifier-free guidance, which {model.name} was trained to do without"
    elif c > 1 and (c != GUIDED_PASSES or not model.xdit.cfg_parallel):
        yield "cfg_parallel is 1 or 2" if c != GUIDED_PASSES else f"xDiT has no cfg_parallel for {model.name}"
    if p > 1 and not model.xdit.pipefusion:
        yield f"xDiT has no pipefusion for {model.name}"
    elif p > 1 and (p > model.num_layers or job.steps <= 1):
        yield f"pipefusion needs a block for each stage ({model.num_layers} blocks) and more than one step"
    if t > 1 and not model.xdit.tensor_parallel:
        yield f"xDiT has no tensor_parallel for {model.name}"


def misplaced(problem: DiffusionProblem, config: DiffusionConfig) -> str:
    """Why the machine has no place for a configuration; empty where it has."""
    size, machine = config.replica_devices, problem.machine
    if size > machine.joined_devices:
        return machine.no_network
    host, domain = machine.devices_per_host, machine.domain_size
    if size > host and size % host:
        return f"a replica over several hosts takes whole hosts of {host} devices"
    if size > domain and size % domain:
        return f"a replica over several nodes takes whole nodes of {domain} devices"
    return ""


def most_replicas(problem: DiffusionProblem, size: int) -> int:
    """Replicas of ``size`` devices that the cluster has room for: none is split over hosts that it could fit into."""
    machine = problem.machine
    host = machine.devices_per_host
    placed = machine.num_devices // host * (host // size) if size <= host else machine.num_devices // size
    return min(placed, problem.max_devices // size)


def candidates(problem: DiffusionProblem, rejected: Counter[str]) -> Iterator[DiffusionConfig]:
    """Every legal configuration of one replica with every batch; reasons of the others are counted.

    All divisors of a number of devices are tried, not powers of two alone: the enumeration is complete.
    """
    pinned = problem.pinned
    batches = (pinned["batch_size"],) if "batch_size" in pinned else BATCHES
    most = min(problem.max_devices, problem.machine.joined_devices)
    for degrees in product(*(_tried(problem, name, most) for name in DEGREES)):
        config = DiffusionConfig(**dict(zip(DEGREES, degrees, strict=True)))
        if config.replica_devices > most:
            continue
        reason = next(broken_rules(problem.job, config), "") or misplaced(problem, config)
        if reason:
            rejected[reason] += 1
            continue
        for batch in batches:
            yield DiffusionConfig(**dict(zip(DEGREES, degrees, strict=True)), batch_size=batch)


def _tried(problem: DiffusionProblem, name: str, most: int) -> tuple[int, ...]:
    """Values of one degree: pinned, or all that can be legal for the model."""
    if name in problem.pinned:
        return (problem.pinned[name],)
    model, job = problem.job.model, problem.job
    if name == "cfg_parallel":
        return (1, 2)
    if name == "pipefusion":
        stages = range(1, min(most, model.num_layers) + 1) if model.xdit.pipefusion else (1,)
        return tuple(p for p in stages if job.image_tokens % p == 0) if problem.stale_activations else (1,)
    if name == "tensor_parallel" and not model.xdit.tensor_parallel:
        return (1,)
    of = job.image_tokens if name == "ring" else model.num_attention_heads
    return tuple(k for k in range(1, min(most, of) + 1) if of % k == 0)
