"""Choices of a serving spec that no search can make legal: reported with the field's path, all at once."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from meshplan.catalogs.constants.machines.device_shares import USUAL_REPLICAS, DeviceShare, MpsShare
from meshplan.catalogs.constants.machines.mig_profiles import MigProfile, mig_profiles
from meshplan.catalogs.hardware import Price
from meshplan.catalogs.models.pooling import Pooling
from meshplan.catalogs.models.shapes import ModelShape
from meshplan.planner.cluster.machine import Machine
from meshplan.planner.core.problems import Problems
from meshplan.planner.serving.estimator.encoders.sound import frames
from meshplan.planner.serving.estimator.power.cap import CAPPED_VENDOR, LEAST_CAP_SHARE
from meshplan.planner.serving.problem.engines.rules import EngineRules
from meshplan.planner.serving.problem.engines.table import ENGINES, POOLING_ENGINES, SOUND_ENGINES
from meshplan.planner.serving.problem.pins import LayoutSpec, ServingFixedSpec
from meshplan.planner.serving.problem.problem import ServingObjective
from meshplan.planner.serving.problem.quantization import Quantization
from meshplan.planner.serving.problem.requests import Arrival
from meshplan.planner.serving.problem.spec import GIB, ServingSpec


def served_shape(spec: ServingSpec, shape: ModelShape, problems: Problems) -> ModelShape:
    """The model as the task uses it: without its LM head where it answers with a vector or a score.

    A decoder that embeds yields its last hidden state; one that reranks yields one score, of a classifier or of the LM
    head's rows for "yes" and "no" (Qwen3-Reranker).
    """
    task = spec.workload.task
    if spec.workload.audio is not None or shape.encoder is not None:
        _check_sound(spec, shape, problems)
        return shape
    if task == "generate":
        if shape.bidirectional or shape.pooling is not None:
            what = "its tokens attend to those after them" if shape.bidirectional else "it has no LM head"
            problems.say("workload.task", f"{shape.name} generates no tokens ({what}): say embed or rerank")
        return shape
    _check_pooled_question(spec, shape, problems)
    if shape.pooling is not None and task == "rerank" and not shape.pooling.num_labels:
        problems.say(
            "workload.task",
            f"rerank: {shape.name} has no classifier: name a model whose config.json lists an architecture "
            "...ForSequenceClassification, or say embed",
        )
    return replace(shape, pooling=shape.pooling or Pooling(num_labels=int(task == "rerank"), bias=False))


def _check_sound(spec: ServingSpec, shape: ModelShape, problems: Problems) -> None:
    """What a question about sound may not say; encoder–decoders of text, which no engine here serves."""
    entry = None if shape.encoder is None else shape.encoder.audio
    if entry is None:
        heard = spec.workload.audio is not None
        why = "reads no sound: leave audio out" if heard else "is an encoder–decoder of text, which no engine here has "
        more = "" if heard else "(vLLM 0.33.0 and SGLang 0.5.23 list Whisper, and BART as a plug-in): train it alone"
        problems.say("workload.audio" if heard else "model", f"{shape.name} {why}{more}")
        return
    if spec.workload.audio is None:
        problems.say("workload.audio", f"{shape.name} reads sound: say audio: {{seconds: {entry.window_s:g}}}")
    elif spec.workload.audio.seconds > entry.window_s:
        windows = math.ceil(spec.workload.audio.seconds / entry.window_s)
        problems.say(
            "workload.audio.seconds",
            f"{spec.workload.audio.seconds:g} s are {windows} windows of {entry.window_s:g} s, each of which vLLM "
            f"serves as a request of its own: say {entry.window_s:g}, {windows} times the requests, and the "
            "output_length of a window",
        )
    if spec.constraints.target not in SOUND_ENGINES:
        known = ", ".join(SOUND_ENGINES)
        problems.say("constraints.target", f"{spec.constraints.target}: {shape.name} is planned for {known} only")
    budget, read = spec.fixed.max_batched_tokens, frames(shape)
    if budget is not None and budget < read:
        problems.say("fixed.max_batched_tokens", f"{budget}: vLLM takes a window whole, which has {read:,} frames")
    _refuse_asked(
        spec,
        "a model with an encoder",
        problems,
        {
            "speculation": (spec.speculation is not None, "drafts of it are not priced"),
            "kv_tier": (spec.kv_tier is not None, "what an encoder read is cached on the devices alone"),
            "fixed.mode": (spec.fixed.is_disaggregated is True, "vLLM moves no cache of cross-attention"),
        },
    )


def _refuse_asked(spec: ServingSpec, what: str, problems: Problems, more: Mapping[str, tuple[bool, str]]) -> None:
    """Fields without a meaning where all workers are alike and weights stay on the devices; ``more``: (asked, why)."""
    common = {
        "fixed.prefill": (spec.fixed.prefill.pins_something, "all workers are alike: pin under fixed"),
        "fixed.decode": (spec.fixed.decode.pins_something, "all workers are alike: pin under fixed"),
        "cluster.host_memory": (spec.cluster.host_memory is not None, "weights stay on the devices"),
        "kv_connector": (spec.kv_connector is not None, "all workers are alike: no cache is moved"),
    }
    for path, (is_asked, why) in {**more, **common}.items():
        if is_asked:
            problems.say(path, f"not with {what}: {why}")


def _check_pooled_question(spec: ServingSpec, shape: ModelShape, problems: Problems) -> None:
    """What a question about embeddings or scores may not say: there is no decode, and no cache that is kept."""
    task, target = spec.workload.task, spec.constraints.target
    if target not in POOLING_ENGINES:
        known = " or ".join(POOLING_ENGINES)
        problems.say("constraints.target", f"{target}: {task} is planned for {known} only")
    if target == "sglang" and task == "rerank" and not shape.bidirectional:
        problems.say(
            "workload.task",
            "rerank: SGLang scores with a decoder by generating one token: say generate and "
            "output_length 1, or target vllm",
        )
    _refuse_asked(
        spec,
        f"task: {task}",
        problems,
        {
            "speculation": (spec.speculation is not None, "drafts speed up generation"),
            "kv_tier": (spec.kv_tier is not None, "no KV cache is kept"),
            "fixed.mode": (spec.fixed.is_disaggregated is True, "there is nothing to decode"),
        },
    )
    if other := [slo.key for slo in spec.slos if slo.metric != "e2e"]:
        problems.say("slo", f"{', '.join(other)}: {task} has no tokens to wait for; limit e2e_p99_s and the like")
    budget, length = spec.fixed.max_batched_tokens, spec.workload.prompt_length or 0
    if shape.bidirectional and budget is not None and budget < length:
        problems.say(
            "fixed.max_batched_tokens", f"{budget}: {shape.name} takes whole texts, which have {length} tokens"
        )
    if shape.bidirectional and (spec.workload.prefix_hit_rate or spec.workload.prefix_tokens):
        problems.say("workload.prefix_hit_rate", f"{shape.name} reads both ways: no prefix is the same twice")


def check_formats(
    spec: ServingSpec, formats: Sequence[Quantization], machines: Mapping[str, Machine], problems: Problems
) -> None:
    """Report formats that the engine or every device lacks."""
    rules = ENGINES[spec.constraints.target]
    for quantization in formats:
        unknown = [scheme for scheme in quantization.schemes if scheme not in rules.schemes]
        missing = [quantization.missing_on(machine.device) for machine in machines.values()]
        if unknown:
            known = ", ".join(rules.schemes)
            problems.say("quantization", f"{rules.name} does not serve {', '.join(unknown)} (it has {known})")
        elif all(missing):
            names = ", ".join(machine.device.name for machine in machines.values())
            problems.say("quantization", f"{', '.join(missing[0])} needs units that {names} lacks")
    if spec.kv_cache not in rules.kv_caches:
        problems.say("kv_cache", f"{rules.name} has no {spec.kv_cache} cache (it has {', '.join(rules.kv_caches)})")


def check_choices(
    spec: ServingSpec,
    shape: ModelShape,
    machines: Mapping[str, Machine],
    prices: Mapping[str, Price],
    problems: Problems,
    *,
    finds_what_is_held: bool,
) -> None:
    """Report choices that no search can make legal.

    Args:
        spec: the question.
        shape: the model.
        machines: node type → its devices.
        prices: node type → its price.
        problems: added to.
        finds_what_is_held: prefixes are found only where a worker still holds them.
    """
    tensor = spec.fixed.tensor_parallel
    if tensor is not None and shape.num_attention_heads % tensor:
        heads = shape.num_attention_heads
        legal = [t for t in range(1, heads + 1) if heads % t == 0]
        problems.say("fixed.tensor_parallel", f"{tensor} does not divide {heads} heads; legal: {legal}")
    if shape.moe is None:
        _check_no_experts(spec.fixed, problems)
    if spec.kv_tier is not None and not finds_what_is_held:
        message = "has no effect where every prefix is always found: give workload.num_prefixes"
        problems.say("kv_tier", f"{message}, sessions, or a trace with a column prefix or hash_ids")
    _check_tier(spec, machines, ENGINES[spec.constraints.target], problems)
    _check_connector(spec, ENGINES[spec.constraints.target], problems)
    _check_caps(spec, machines, problems)
    _check_separation(spec, shape, problems)
    _check_arrivals(spec, problems)
    _check_streaming(spec, ENGINES[spec.constraints.target], problems)
    _check_api_servers(spec, ENGINES[spec.constraints.target], problems)
    needs_rate = spec.objective is ServingObjective.NUM_DEVICES and not _has_load(spec)
    if needs_rate:
        problems.say("objective", "num_devices needs workload.request_rate_per_s or workload.concurrency")
    unpowered = [name for name, machine in machines.items() if machine.device.tdp_w is None]
    needs_power = spec.objective is ServingObjective.ENERGY or spec.constraints.max_power_w is not None
    if needs_power and unpowered:
        problems.say("cluster", f"no source gives the board power of {', '.join(unpowered)}, which energy depends on")
    wants_price = spec.objective is ServingObjective.USD_PER_MILLION_TOKENS
    if (wants_price or spec.constraints.max_usd_per_hour is not None) and not prices:
        names = ", ".join(machines)
        problems.say("cluster", f"no price is known for {names}; give cluster.usd_per_hour_per_node")
    length = spec.workload.longest
    if shape.max_sequence_length is not None and length > shape.max_sequence_length:
        problems.say(
            "workload", f"{length} tokens per request; {shape.name} was trained for {shape.max_sequence_length}"
        )


def _check_arrivals(spec: ServingSpec, problems: Problems) -> None:
    """Gaps between arrivals need a rate, which is given or which the plan finds, and a rate needs two requests."""
    workload = spec.workload
    finds_rate = not _has_load(spec) and any(slo.metric in ("ttft", "e2e") for slo in spec.slos)
    if workload.burstiness > 1.0 and not _has_load(spec) and not finds_rate:
        problems.say(
            "workload.burstiness",
            f"{workload.burstiness:g} is of gaps between arrivals: give request_rate_per_s, or an slo on ttft or "
            "e2e, for which the plan finds the highest rate",
        )
    at_rate = workload.process in (Arrival.POISSON, Arrival.GAMMA, Arrival.TRACE)
    if workload.num_requests == 1 and (at_rate or (workload.process is None and finds_rate)):
        problems.say("workload.num_requests", "1: a rate is one over the gaps between arrivals: give at least 2")


def _pinned(fixed: ServingFixedSpec) -> tuple[tuple[str, LayoutSpec], ...]:
    """Path in the spec and pins of all workers, and of those of each role."""
    return ("fixed", fixed), ("fixed.prefill", fixed.prefill), ("fixed.decode", fixed.decode)


def _check_streaming(spec: ServingSpec, rules: EngineRules, problems: Problems) -> None:
    """Tokens that are sent together, where the engine has no flag for it or something asks for each by itself."""
    gaps = ", ".join(slo.key for slo in spec.slos if slo.metric == "itl")
    for path, interval in ((f"{name}.stream_interval", part.stream_interval) for name, part in _pinned(spec.fixed)):
        if interval is None or interval == 1:
            continue
        if not rules.streams_in_intervals:
            problems.say(path, f"{interval}: {rules.name} has no flag for it and sends every token by itself")
        elif spec.workload.task != "generate":
            problems.say(path, f"{interval}: {spec.workload.task} streams no tokens")
        elif gaps:
            problems.say(path, f"{interval}: clients see {interval} tokens at once, so {gaps} has no meaning: say 1")


def _check_api_servers(spec: ServingSpec, rules: EngineRules, problems: Problems) -> None:
    """Several API servers, where the engine has no flag for them."""
    for name, part in _pinned(spec.fixed):
        if part.api_servers is not None and not rules.scales_api_servers:
            problems.say(f"{name}.api_servers", f"{part.api_servers}: {rules.name} has no flag for it")


def _check_no_experts(fixed: ServingFixedSpec, problems: Problems) -> None:
    """Experts that are spread or cut, of all workers or of those of one role, need a model that has some."""
    for path, layout in _pinned(fixed):
        for name in ("expert_parallel", "expert_tensor_parallel"):
            degree = getattr(layout, name) or 1
            if degree > 1:
                problems.say(f"{path}.{name}", f"{degree}: a dense model has no experts")


def _check_caps(spec: ServingSpec, machines: Mapping[str, Machine], problems: Problems) -> None:
    """Power limits need boards whose own is known, and lie where the law of clocks was held against runs."""
    if not spec.power_caps_w:
        return
    lowest = min(spec.power_caps_w)
    for device in {machine.device.slug: machine.device for machine in machines.values()}.values():
        if device.tdp_w is None:
            problems.say("power_caps_w", f"no source gives the board power of {device.slug}: leave it out")
        elif device.vendor != CAPPED_VENDOR:
            problems.say("power_caps_w", f"{device.slug}: only {CAPPED_VENDOR} devices were measured under limits")
        elif lowest < LEAST_CAP_SHARE * device.tdp_w:
            least = LEAST_CAP_SHARE * device.tdp_w
            problems.say(
                "power_caps_w",
                f"{lowest:g} W is below {least:g} W, half of the limit of {device.slug}: how much slower a device is "
                "below that is not known",
            )


def share_options(spec: ServingSpec, machines: Mapping[str, Machine], problems: Problems) -> tuple[DeviceShare, ...]:
    """The ways to share devices that the plan may choose from."""
    return (*_mig_options(spec, machines, problems), *_mps_options(spec, machines, problems))


def _mps_options(spec: ServingSpec, machines: Mapping[str, Machine], problems: Problems) -> tuple[MpsShare, ...]:
    """Numbers of replicas of a device; a problem where nobody launches them or they were not priced."""
    if spec.mps is None:
        return ()
    devices = {machine.device.slug: machine.device for machine in machines.values()}
    asked = {
        "constraints.target": (
            spec.constraints.target != "vllm",
            "vllm alone takes its memory as a part of the device's",
        ),
        "cluster": (
            len(devices) > 1 or any(device.vendor != "nvidia" for device in devices.values()),
            f"one type of NVIDIA's devices, not {', '.join(devices)}",
        ),
        "cluster.host_memory": (
            spec.cluster.host_memory is not None,
            "weights in host memory were not priced for replicas",
        ),
        "power_caps_w": (bool(spec.power_caps_w), "power limits were not priced for replicas"),
    }
    for path, (is_asked, why) in asked.items():
        if is_asked:
            problems.say("mps", f"{path}: {why}; or leave mps out")
    problems.check()
    memory = next(iter(devices.values())).memory_bytes
    return tuple(MpsShare.of(memory, count) for count in (USUAL_REPLICAS if spec.mps == "choose" else spec.mps))


def _mig_options(spec: ServingSpec, machines: Mapping[str, Machine], problems: Problems) -> tuple[MigProfile, ...]:
    """The MIG profiles that the plan may choose from; a problem where a device has none of that name."""
    if spec.mig is None:
        return ()
    known = mig_profiles()
    devices = dict.fromkeys(machine.device.slug for machine in machines.values())
    if len(devices) > 1 or next(iter(devices)) not in known:
        problems.say("mig", f"one of {', '.join(known)} alone, not {', '.join(devices)}: no source says its profiles")
        problems.check()
    profiles = known[next(iter(devices))]
    if spec.cluster.host_memory is not None or spec.power_caps_w:
        problems.say("mig", "neither weights in host memory nor power limits were priced for instances: leave them out")
    wanted = list(profiles) if spec.mig == "choose" else spec.mig
    for name in wanted:
        if name not in profiles:
            problems.say("mig", f"{name}: {next(iter(devices))} has {', '.join(profiles)}")
    problems.check()
    return tuple(profiles[name] for name in wanted)


def _check_separation(spec: ServingSpec, shape: ModelShape, problems: Problems) -> None:
    """Report what was not priced for workers with attention and FFN on different devices."""
    if spec.attention_ffn is None:
        return
    workload = spec.workload
    asked = {
        "model": (
            shape.blocks is not None,
            f"{shape.name} has layers that are not attention and then an MLP",
        ),
        "workload.task": (workload.task != "generate", "nothing is decoded"),
        "workload.audio": (workload.audio is not None, "attention to what an encoder read was not priced for it"),
        "workload.arrival": (workload.arrival == "all_at_once", "prefill has workers of its own: give a rate"),
        "fixed.mode": (spec.fixed.mode == "aggregated", "prefill has workers of its own: say disaggregated"),
        "objective": (spec.objective is ServingObjective.ENERGY, "energy: no run tells the watts of FFN devices"),
        "constraints.max_power_w": (spec.constraints.max_power_w is not None, "no run tells the watts of FFN devices"),
        "speculation": (spec.speculation is not None, "drafts beside FFN devices were not priced"),
        "experts": (spec.experts is not None, "recorded routing beside FFN devices was not priced"),
        "power_caps_w": (bool(spec.power_caps_w), "power limits beside FFN devices were not priced"),
        "mig": (spec.mig is not None, "no link joins MIG instances"),
        "mps": (spec.mps is not None, "replicas on one device were not priced for it"),
        "cluster.host_memory": (
            spec.cluster.host_memory is not None and spec.fixed.device_experts is not None,
            "weights lie on FFN devices or on the host, not on both",
        ),
    }
    for path, (is_asked, why) in asked.items():
        if is_asked:
            problems.say(path, f"not with attention_ffn: {why}; or leave attention_ffn out")


def _check_connector(spec: ServingSpec, rules: EngineRules, problems: Problems) -> None:
    """What moves caches needs caches that move, and a flag of the engine."""
    if spec.kv_connector is None:
        return
    if spec.fixed.is_disaggregated is False or not rules.disaggregates:
        why = "fixed.mode is aggregated" if rules.disaggregates else f"{rules.name} has no such workers"
        problems.say("kv_connector", f"moves caches from workers that prefill to others that decode; {why}: drop it")
    elif spec.kv_connector not in rules.kv_connectors:
        problems.say("kv_connector", rules.no_connector(spec.kv_connector))


def _check_tier(spec: ServingSpec, machines: Mapping[str, Machine], rules: EngineRules, problems: Problems) -> None:
    """A second KV cache tier needs a flag of the engine, prefixes to store, and host memory."""
    if spec.kv_tier is None:
        return
    tier = spec.kv_tier.value
    for store in spec.kv_tier.choose or [spec.kv_tier.store]:
        if store not in rules.kv_stores:
            known = ", ".join(rules.kv_stores)
            message = f"{rules.name} has no flag for {store} (it has {known}); see what_if of a plan without"
            problems.say("kv_tier.store" if tier else "kv_tier.choose", message)
    if spec.fixed.is_disaggregated:
        problems.say(
            "kv_tier",
            "needs workers that prefill and decode: with disaggregation the transfer connector owns the caches",
        )
    for name, machine in machines.items():
        has = machine.host_memory_bytes
        if tier is None:
            if has is None and {"host", "remote"} & set(spec.kv_tier.choose or ()):
                problems.say("kv_tier.choose", f"the memory of a host of {name} is not known: say cluster.host_memory")
            continue
        needed = tier.bytes_per_device * machine.devices_per_host
        if tier.store != "nvme" and has is not None and needed > has:
            problems.say(
                "kv_tier.gib_per_device", f"{needed / GIB:.0f} GiB per host of {name}, which has {has / GIB:.0f}"
            )


def _has_load(spec: ServingSpec) -> bool:
    workload = spec.workload
    loads = (workload.request_rate_per_s, workload.concurrency, workload.trace, workload.stages)
    return any(part is not None for part in loads)
