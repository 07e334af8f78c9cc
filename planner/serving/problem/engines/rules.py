"""What a serving engine accepts: rules over layouts, formats, limits and pools, and its default limits."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from meshplan.catalogs.hardware import Device
from meshplan.catalogs.models.shapes import ModelShape
from meshplan.planner.core.rules import LegalityRule
from meshplan.planner.serving.problem.config import EngineLimits, KvConnector, Layout, Pool, Role, Router, ServingConfig
from meshplan.planner.serving.problem.engines import layouts
from meshplan.planner.serving.problem.quantization import NO_PADDING, ExpertPadding, Quantization

STAGES_WITH_DRAFTS = "speculation needs pipeline_parallel = 1"


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitTier:
    """Default limits of an engine on devices of at least some memory size.

    Args:
        memory_bytes: least device memory.
        limits: its defaults.
        not_on: parts of device slugs that use the next tier.
    """

    memory_bytes: float
    limits: EngineLimits
    not_on: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRules:
    """Rules and defaults of one serving engine.

    Args:
        name: as in ``ServingConfig.engine``.
        version: the release whose sources were read and whose parser was run.
        rules: over one layout, or columns of layouts.
        scheme_rules: further rules over the layout where a scheme is used.
        schemes: weight formats that it serves, from a checkpoint or by :attr:`online` quantisation.
        online: schemes to which it quantises a 16-bit checkpoint on loading.
        kv_caches: dtypes of the KV cache.
        tiers: limits by device memory, the largest first, the last for any.
        most_running: requests of an attention data-parallel rank that plans run on any device, where a tier's default
            is lower; 0: no more than that.
        most_sent: tokens of an attention data-parallel rank that decode at once where tokens are sent to whole experts,
            at most; 0: any number.
        limits_source: source of the tiers.
        block_size: tokens of one block of the KV cache (the engine may choose another for some kernels).
        prefix_caching_on_decode: decode workers keep a prefix cache under prefill/decode disaggregation.
        pipeline_on_decode: pipeline degrees that a decode worker may have: ``one``, ``any``, or ``one_or_prefill``.
        whole_context_on_transfer: pools that transfer their cache must split tokens over the whole attention group or
            not at all: tensor_parallel or context_parallel is 1.
        speculation_with_stages: speculative decoding runs with several pipeline stages.
        kv_stores: stores of a second KV cache tier for which the engine has flags, on mixed workers.
        kv_connectors: what moves caches between workers that prefill and that decode.
        disaggregates: it has workers that prefill or decode only.
        one_prefill_stage: connectors by which a decode worker reads the cache of one stage of a prefill worker alone.
        decode_reads_prompt: a disaggregated request goes as text first to the prefill and then to the decode server,
            which tokenizes it again before it asks for the cache.
        prefill_holds_slots: a prefilled request counts as running at its prefill worker until its cache has arrived.
        one_host: a worker is one process, on one host.
        streams_in_intervals: the engine has a flag for how many tokens it sends to a client at once.
        routes_by_prefix: its router can send a request to the worker that holds most of its prompt.
        scales_api_servers: the engine has a flag for how many API servers a worker has.
        weight_ways: ways to serve weights in host memory (:class:`Way`) for which the engine has flags.
        schemes_not_on: generation of devices → schemes for which the engine has no kernels there.
        mxfp4_padding: generation of devices → how experts in mxfp4 are padded there.
    """

    name: str
    version: str
    rules: tuple[LegalityRule, ...]
    schemes: tuple[str, ...]
    online: tuple[str, ...]
    kv_caches: tuple[str, ...]
    tiers: tuple[LimitTier, ...]
    limits_source: str
    block_size: int
    pipeline_on_decode: str
    scheme_rules: Mapping[str, tuple[LegalityRule, ...]] = field(default_factory=dict)
    prefix_caching_on_decode: bool = True
    whole_context_on_transfer: bool = False
    speculation_with_stages: bool = False
    kv_stores: tuple[str, ...] = ("host",)
    kv_connectors: tuple[KvConnector, ...] = (KvConnector.NIXL,)
    one_prefill_stage: tuple[KvConnector, ...] = ()
    disaggregates: bool = True
    decode_reads_prompt: bool = False
    prefill_holds_slots: bool = False
    one_host: bool = False
    streams_in_intervals: bool = True
    routes_by_prefix: bool = False
    scales_api_servers: bool = False
    weight_ways: tuple[str, ...] = ()
    most_running: int = 0
    most_sent: int = 0
    schemes_not_on: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    mxfp4_padding: Mapping[str, ExpertPadding] = field(default_factory=dict)

    def layout_rules(self, quantization: Quantization | None = None) -> tuple[LegalityRule, ...]:
        """The rules over a layout, including those of the formats in use."""
        used = () if quantization is None else dict.fromkeys(_schemes(quantization))
        return (*self.rules, *(one for scheme in used for one in self.scheme_rules.get(scheme, ())))

    def without_kernels(self, quantization: Quantization, device: Device) -> tuple[str, ...]:
        """Schemes of a model that the engine does not multiply on a device."""
        missing = self.schemes_not_on.get(device.architecture, ())
        return tuple(scheme for scheme in dict.fromkeys(_schemes(quantization)) if scheme in missing)

    def expert_padding(self, quantization: Quantization, device: Device) -> ExpertPadding:
        """How the engine pads a model's experts on a device."""
        padding = self.mxfp4_padding.get(device.architecture, NO_PADDING)
        return padding if quantization.experts == "mxfp4" else NO_PADDING

    def broken_pool(self, shape: ModelShape, pool: Pool) -> tuple[str, ...]:
        """Violated conditions of one pool with their sources; empty if the engine accepts it."""
        wrong = [
            f"{one.message} ({one.source})"
            for one in self.layout_rules(pool.quantization)
            if not one.holds(shape, pool.layout)
        ]
        wrong += [
            f"no flag for weights in {scheme}: give one of {', '.join(self.schemes)}"
            for scheme in dict.fromkeys(_schemes(pool.quantization))
            if scheme not in self.schemes
        ]
        if pool.quantization.kv_cache not in self.kv_caches:
            wrong.append(
                f"no flag for a KV cache in {pool.quantization.kv_cache}: give one of {', '.join(self.kv_caches)}"
            )
        if pool.limits.max_num_seqs > (most := self.most_decoding(pool.layout, pool.role)):
            wrong.append(
                f"max_num_seqs {pool.limits.max_num_seqs} must be at most {most:g}: tokens are sent to whole experts, "
                f"{self.most_sent} of an attention data-parallel rank at once"
            )
        if pool.limits.stream_interval > 1 and not self.streams_in_intervals:
            wrong.append(f"no flag for stream_interval {pool.limits.stream_interval}: every token is sent by itself")
        if pool.limits.api_servers and not self.scales_api_servers:
            wrong.append(f"no flag for api_servers {pool.limits.api_servers}")
        if pool.kv_tier is not None and pool.kv_tier.store not in self.kv_stores:
            wrong.append(f"no flag for a KV tier on {pool.kv_tier.store}: give one of {', '.join(self.kv_stores)}")
        if pool.weight_tiers is not None and pool.weight_tiers.way.value not in self.weight_ways:
            ways = ", ".join(self.weight_ways) or "none"
            wrong.append(f"no flag for weights in host memory, {pool.weight_tiers.way.value} (it has {ways})")
        return (*wrong, *_broken_limits(pool), *_broken_tier(pool))

    def most_decoding(self, layout: Layout, role: Role, *, verified_tokens: int = 1) -> float:
        """Most requests of a worker that the engine decodes at once, so many tokens verified for each."""
        ranks = layout.attention_data_parallel
        sends = ranks > 1 and layout.expert_parallel == layout.devices_per_stage
        if role is Role.PREFILL or not self.most_sent or not sends:
            return math.inf
        return float(max(self.most_sent // verified_tokens, 1) * ranks)

    def may_split(self, shape: ModelShape, tensor_parallel: int) -> bool:
        """Whether a worker of one stage may have so many tensor-parallel devices, its experts split or spread."""
        if shape.moe is None:
            ways = [Layout(tensor_parallel=tensor_parallel)]
        else:
            spread, split = {"expert_parallel": tensor_parallel}, {"expert_tensor_parallel": tensor_parallel}
            ways = [Layout(tensor_parallel=tensor_parallel, **experts) for experts in (spread, split)]
        return any(all(one.holds(shape, layout) for one in self.rules) for layout in ways)

    def takes_drafts(self, layout: Layout) -> bool:
        """Speculative decoding runs with such a layout."""
        return self.speculation_with_stages or layout.pipeline_parallel == 1

    def broken(self, shape: ModelShape, config: ServingConfig) -> tuple[str, ...]:
        """Violated conditions of a whole configuration, within pools and between them."""
        wrong = [f"{pool.role.value}: {text}" for pool in config.pools for text in self.broken_pool(shape, pool)]
        if config.speculation is not None:
            wrong += [
                f"{pool.role.value}: {STAGES_WITH_DRAFTS}"
                for pool in config.pools
                if not self.takes_drafts(pool.layout)
            ]
        if (config.router is Router.LEAST_CONNECTIONS) != (len(config.pools) > 1 and not config.is_disaggregated):
            wrong.append("router: least_connections weighs kinds of mixed workers, and only it does")
        if config.is_disaggregated and not self.disaggregates:
            wrong.append(f"{self.name} has no flag for workers that prefill or decode only")
        elif config.is_disaggregated:
            if config.kv_connector not in self.kv_connectors:
                wrong.append(self.no_connector(config.kv_connector))
            prefill, decode = config.pool(Role.PREFILL), config.pool(Role.DECODE)
            if config.kv_connector in self.one_prefill_stage and prefill.layout.pipeline_parallel > 1:
                wrong.append(self._one_stage(config.kv_connector))
            wrong += self._broken_pair(prefill, decode)
        return tuple(wrong)

    def _one_stage(self, connector: KvConnector) -> str:
        others = " or ".join(one.value for one in self.kv_connectors if one not in self.one_prefill_stage)
        return (
            f"prefill: pipeline_parallel must be 1 where {connector.value} moves the cache: a decode worker reads one "
            f"stage alone (kv_connector: {others} reads all)"
        )

    def no_connector(self, connector: KvConnector) -> str:
        """Why the engine's caches are not moved by one."""
        known = ", ".join(one.value for one in self.kv_connectors)
        return f"{self.name} has no flag for caches moved by {connector.value} (it has {known})"

    def _broken_pair(self, prefill: Pool, decode: Pool) -> list[str]:
        wrong = []
        first, second = layouts.group(prefill.layout), layouts.group(decode.layout)
        if first % second and second % first:
            wrong.append(
                f"tensor_parallel × context_parallel of prefill ({first}) and decode ({second}) must divide one another"
            )
        own, other = decode.layout.pipeline_parallel, prefill.layout.pipeline_parallel
        allowed = {"one": {1}, "one_or_prefill": {1, other}, "any": {own}}[self.pipeline_on_decode]
        if own not in allowed:
            wrong.append(f"decode: pipeline_parallel must be {' or '.join(map(str, sorted(allowed)))}, not {own}")
        if prefill.layout.context_parallel not in {1, decode.layout.context_parallel}:
            wrong.append("prefill: context_parallel must be 1 or that of decode")
        wrong += [
            f"{pool.role.value}: tensor_parallel or context_parallel must be 1 where the cache is transferred "
            f"({self.name} {self.version}: NIXL transfer parallel size)"
            for pool in (prefill, decode)
            if self.whole_context_on_transfer and min(pool.layout.tensor_parallel, pool.layout.context_parallel) > 1
        ]
        if prefill.quantization.kv_cache != decode.quantization.kv_cache:
            wrong.append("prefill and decode must keep the KV cache in one dtype: blocks are copied as they are")
        if decode.limits.prefix_caching and not self.prefix_caching_on_decode:
            wrong.append("decode: prefix_caching is switched off by the engine")
        return wrong

    def default_limits(self, device: Device | None) -> EngineLimits:
        """The engine's own defaults on a device (:attr:`limits_source`)."""
        for tier in self.tiers[:-1]:
            excepted = device is None or any(part in device.slug for part in tier.not_on)
            if device is not None and not excepted and device.memory_bytes >= tier.memory_bytes:
                return tier.limits
        return self.tiers[-1].limits


def _schemes(quantization: Quantization) -> tuple[str, str, str]:
    return quantization.attention, quantization.mlp, quantization.experts


def _broken_limits(pool: Pool) -> tuple[str, ...]:
    """Limits that no engine can express; all of them count requests per attention data-parallel rank."""
    limits, ranks = pool.limits, pool.layout.attention_data_parallel
    wrong = []
    if limits.max_num_seqs < ranks or limits.max_num_seqs % ranks:
        nearest = max(1, round(limits.max_num_seqs / ranks)) * ranks
        wrong.append(
            f"max_num_seqs {limits.max_num_seqs} must be a multiple of attention_data_parallel {ranks} "
            f"(nearest: {nearest})"
        )
    if not 0.0 < limits.memory_fraction <= 1.0:
        wrong.append(f"memory_fraction {limits.memory_fraction} must lie in (0, 1]")
    if limits.max_batched_tokens < limits.max_num_seqs // ranks:
        wrong.append(
            f"max_batched_tokens {limits.max_batched_tokens} must be at least the requests of one rank, "
            f"{limits.max_num_seqs // ranks}"
        )
    return tuple(wrong)


def _broken_tier(pool: Pool) -> tuple[str, ...]:
    """Violated conditions of a second KV cache tier."""
    tier, wrong = pool.kv_tier, []
    if tier is None:
        return ()
    if pool.role is not Role.MIXED:
        wrong.append("kv_tier: of mixed workers only: the connector that transfers the cache would have to store it")
    if not pool.limits.prefix_caching:
        wrong.append("kv_tier stores prefixes: it needs prefix_caching")
    if not (tier.bytes_per_device > 0.0 and tier.bytes_per_s_per_device > 0.0):
        wrong.append("kv_tier: bytes_per_device and bytes_per_s_per_device must be above 0")
    return tuple(wrong)
