"""The emit targets: one line each. A module is imported when its target is asked for."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

from meshplan.catalogs.errors import CannotExpressError, EmitError, closest_names, did_you_mean
from meshplan.planner.emit.artifact import EmittedPlan, ParserVerified
from meshplan.planner.emit.releases import release_of
from meshplan.planner.emit.serving import benchmark
from meshplan.planner.emit.serving import readme as serving_readme
from meshplan.planner.emit.serving import script as serving_script
from meshplan.planner.emit.target import Feature
from meshplan.planner.emit.training import readme, torchrun
from meshplan.planner.emit.training.request import TrainingRequest

if TYPE_CHECKING:
    from meshplan.catalogs.hardware import Device
    from meshplan.planner.emit.serving.job import ServingJob
    from meshplan.planner.emit.serving.request import ServingRequest
    from meshplan.planner.emit.training.job import Job


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One emit target.

    The module of a framework has ``job(request) -> Job``, that of an engine ``job(request) -> ServingJob``, that of an
    orchestrator ``wrap(job) -> EmittedPlan``; all have ``features() -> tuple[Feature, ...]``.

    Args:
        name: as in ``emit --target``.
        module: where it lives.
        summary: what it writes.
        wraps: it launches a framework's job, and needs ``--framework``.
        takes_script: the training script may be the user's.
        serves: it launches serving plans, not training plans.
    """

    name: str
    module: str
    summary: str
    wraps: bool = False
    takes_script: bool = False
    serves: bool = False


TARGETS = (
    Target(
        name="megatron",
        module="meshplan.planner.emit.training.megatron.job",
        summary="Megatron-LM arguments and torchrun scripts",
    ),
    Target(
        name="torchrun",
        module="meshplan.planner.emit.training.own_script",
        summary="torchrun scripts for a training script of your own",
        takes_script=True,
    ),
    Target(
        name="torchtitan",
        module="meshplan.planner.emit.training.torchtitan",
        summary="TorchTitan arguments and torchrun scripts",
    ),
    Target(
        name="deepspeed",
        module="meshplan.planner.emit.training.deepspeed",
        summary="DeepSpeed JSON and torchrun scripts, for a training script of yours or ours",
        takes_script=True,
    ),
    Target(
        name="accelerate",
        module="meshplan.planner.emit.training.accelerate",
        summary="Accelerate FSDP2 YAML and launch scripts, for a training script of yours or ours",
        takes_script=True,
    ),
    Target(
        name="axolotl",
        module="meshplan.planner.emit.training.axolotl",
        summary="Axolotl YAML (LoRA, QLoRA, every weight) and torchrun scripts",
    ),
    Target(
        name="torchtune",
        module="meshplan.planner.emit.training.torchtune",
        summary="torchtune recipe (LoRA, QLoRA, every weight) and torchrun scripts",
    ),
    Target(
        name="slurm",
        module="meshplan.planner.emit.orchestrators.slurm",
        summary="sbatch file around a framework's job",
        wraps=True,
    ),
    Target(
        name="jobset",
        module="meshplan.planner.emit.orchestrators.jobset",
        summary="Kubernetes JobSet (v1alpha2) around a framework's job",
        wraps=True,
    ),
    Target(
        name="job",
        module="meshplan.planner.emit.orchestrators.kubernetes_job",
        summary="Kubernetes Job with a headless Service around a framework's job",
        wraps=True,
    ),
    Target(
        name="trainjob",
        module="meshplan.planner.emit.orchestrators.trainjob",
        summary="Kubeflow TrainJob (v1alpha1) around a framework's job",
        wraps=True,
    ),
    Target(
        name="skypilot",
        module="meshplan.planner.emit.orchestrators.skypilot",
        summary="SkyPilot task around a framework's job",
        wraps=True,
    ),
    Target(
        name="vllm",
        module="meshplan.planner.emit.serving.vllm",
        summary="vLLM servers and vllm-router, as scripts",
        serves=True,
    ),
    Target(
        name="sglang",
        module="meshplan.planner.emit.serving.sglang",
        summary="SGLang servers and sglang-router, as scripts",
        serves=True,
    ),
    Target(
        name="trtllm",
        module="meshplan.planner.emit.serving.trtllm",
        summary="trtllm-serve servers with their leader, as scripts",
        serves=True,
    ),
    Target(
        name="llama.cpp",
        module="meshplan.planner.emit.serving.llama_cpp",
        summary="llama-server servers and nginx, as scripts",
        serves=True,
    ),
    Target(
        name="lws",
        module="meshplan.planner.emit.orchestrators.lws",
        summary="Kubernetes LeaderWorkerSets (v1) around an engine",
        wraps=True,
        serves=True,
    ),
    Target(
        name="kserve",
        module="meshplan.planner.emit.orchestrators.kserve",
        summary="KServe LLMInferenceService (v1alpha2) around vLLM",
        wraps=True,
        serves=True,
    ),
    Target(
        name="llm-d",
        module="meshplan.planner.emit.orchestrators.llm_d",
        summary="values of llm-d's chart modelservice around vLLM",
        wraps=True,
        serves=True,
    ),
    Target(
        name="dynamo",
        module="meshplan.planner.emit.orchestrators.dynamo",
        summary="DynamoGraphDeployment (v1beta1) around an engine",
        wraps=True,
        serves=True,
    ),
    Target(
        name="ray",
        module="meshplan.planner.emit.orchestrators.ray_serve",
        summary="Ray Serve LLM configuration around vLLM",
        wraps=True,
        serves=True,
    ),
    Target(
        name="skypilot-serve",
        module="meshplan.planner.emit.orchestrators.skypilot_serve",
        summary="SkyPilot task around an engine's scripts",
        wraps=True,
        serves=True,
    ),
)


_CUDA_OR_ROCM = ("nvidia", "amd")
_VENDORS = {"trtllm": ("nvidia",)}


def target_names() -> tuple[str, ...]:
    """Names that ``emit --target`` accepts."""
    return tuple(target.name for target in TARGETS)


def framework_names() -> tuple[str, ...]:
    """Names that ``emit --framework`` accepts."""
    return tuple(target.name for target in TARGETS if not target.wraps and not target.serves)


def engine_names() -> tuple[str, ...]:
    """Names of serving engines."""
    return tuple(target.name for target in TARGETS if not target.wraps and target.serves)


def is_orchestrator(name: str) -> bool:
    """Whether the target launches another target's job.

    Raises:
        EmitError: unknown target.
    """
    return _target(name).wraps


def emit(target: str, request: TrainingRequest, *, framework: str | None = None) -> EmittedPlan:
    """Launcher files of ``target`` for one plan.

    Args:
        target: a framework, or an orchestrator around one.
        request: the plan and what it was made for.
        framework: what an orchestrator launches.

    Raises:
        EmitError: unknown target, a framework where none belongs or none where one does, or nothing to launch.
        CannotExpressError: the target cannot express a choice of the plan.
    """
    found = _target(target)
    if found.serves:
        raise EmitError(f"target {target} launches serving plans, this one is of the kind {request.plan.kind!r}")
    started = _framework(found, framework)
    refuse_devices(started.name, (request.device,))
    release_of(started.name, request.framework_version)
    if request.script and not started.takes_script:
        raise EmitError(f"{started.name} brings its own training script; leave --script out")
    job = cast("Job", _module(started).job(request))
    if found.wraps:
        return cast(EmittedPlan, _module(found).wrap(job))
    launch = torchrun.launch_of(job)
    return EmittedPlan(
        target=target,
        artifacts=(readme.overview(launch), *job.files, *torchrun.scripts(launch)),
        parser_verified=job.verified,
        notes=job.notes,
    )


def emit_serving(target: str, request: ServingRequest) -> EmittedPlan:
    """Launcher files of ``target`` for one serving plan; the plan names its engine.

    Args:
        target: the plan's engine, or an orchestrator around it.
        request: the plan and what it was made for.

    Raises:
        EmitError: unknown target, one for training plans, or nothing to launch.
        CannotExpressError: the target cannot express a choice of the plan.
    """
    found, engine = _target(target), request.config.engine
    if not found.serves:
        known = ", ".join(one.name for one in TARGETS if one.serves)
        raise EmitError(f"target {target} launches training plans; targets for serving plans: {known}")
    started = found
    if found.wraps:
        if engine not in engine_names():
            raise EmitError(
                f"the plan is for the engine {engine!r}; engines with an emitter: {', '.join(engine_names())}"
            )
        started = _target(engine)
    refuse_devices(started.name, [host.device for host in request.host_types.values()])
    release_of(started.name, request.framework_version)
    job = cast("ServingJob", _module(started).job(request))
    if found.wraps and len({program.pool.role for program in job.programs}) < len(job.programs):
        raise CannotExpressError(target, "several kinds of workers behind one weighted router", f"target {engine}")
    if found.wraps and any(program.pool.share is not None for program in job.programs):
        raise CannotExpressError(
            target, "workers on parts of devices", f"target {engine}, or a plan without mig and mps"
        )
    measured = benchmark.benchmark_script(job)
    made = cast(EmittedPlan, _module(found).wrap(job)) if found.wraps else _serving_scripts(target, job)
    return made if measured is None else replace(made, artifacts=(*made.artifacts, measured))


def _serving_scripts(target: str, job: ServingJob) -> EmittedPlan:
    """An engine's own files, without an orchestrator."""
    launch = serving_script.launch_of(job)
    return EmittedPlan(
        target=target,
        artifacts=(
            serving_readme.serving_overview(job, num_hosts=launch.num_hosts),
            *serving_script.scripts(launch),
        ),
        parser_verified=job.verified,
        notes=job.notes,
    )


def refuse_devices(framework: str, devices: Iterable[Device | None]) -> None:
    """Stop where the files would start nothing: they are written for CUDA, and for ROCm where the framework has it.

    Raises:
        CannotExpressError: a device is of another vendor.
    """
    taken = _VENDORS.get(framework, _CUDA_OR_ROCM)
    for device in devices:
        if device is not None and device.vendor not in taken:
            raise CannotExpressError(
                framework,
                f"{device.name}: meshplan has no launcher for devices of the vendor {device.vendor}",
                f"a plan on GPUs of {' or '.join(taken)}; the plan's choices are in plans show --format json",
            )


def _framework(target: Target, framework: str | None) -> Target:
    """The target whose job is launched."""
    if not target.wraps:
        if framework not in {None, target.name}:
            raise EmitError(f"target {target.name} launches itself, not {framework!r}; leave --framework out")
        return target
    known = ", ".join(framework_names())
    if framework is None:
        raise EmitError(f"target {target.name} launches a framework: add --framework, one of {known}")
    if framework not in framework_names():
        hint = did_you_mean(closest_names(framework, framework_names()))
        raise EmitError(f"unknown framework {framework!r}{hint}; known frameworks: {known}")
    return _target(framework)


def features_of(target: Target) -> tuple[Feature, ...]:
    """What the target's module states about itself."""
    return cast("tuple[Feature, ...]", _module(target).features())


def verified_of(target: Target) -> ParserVerified | None:
    """The parser that checked the target's own files; None where the target only wraps those of another."""
    return cast("ParserVerified | None", getattr(_module(target), "VERIFIED", None))


def _module(target: Target) -> Any:
    return importlib.import_module(target.module)


# Names of what runs our targets, which are no letters away from them.
_MEANT = {
    **dict.fromkeys(("k8s", "kubernetes", "kubectl"), ("job", "jobset", "trainjob", "lws")),
    **dict.fromkeys(("sbatch", "srun"), ("slurm",)),
    **dict.fromkeys(("trt-llm", "tensorrt-llm", "tensorrt_llm"), ("trtllm",)),
}


def _target(name: str) -> Target:
    for target in TARGETS:
        if target.name == name:
            return target
    known = ", ".join(target_names())
    meant = list(_MEANT.get(name.lower(), ())) or closest_names(name, target_names())
    raise EmitError(f"unknown emit target {name!r}{did_you_mean(meant)}; known targets: {known}")
