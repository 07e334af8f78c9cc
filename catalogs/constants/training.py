"""The estimator's named constants: what hardware and framework do that no datasheet says.

The equations of :mod:`meshplan.planner.training.estimator` are fixed; these constants are not. They are fitted to
published runs per framework and hardware generation (``meshplan calibrate``), stored in the catalog with their
provenance, and every estimate names the set it rests on. A constant has one physical meaning and one unit; there is no
constant for a single run. Values may be arrays that broadcast against the candidates, which is how a fit takes its
derivatives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

Constant = float | NDArray[Any]


# Kinds of work whose errors differ: pre-training and full fine-tuning of a dense model, adapters on frozen weights,
# mixtures of experts.
DENSE, ADAPTERS, EXPERTS = "dense", "adapters", "experts"
KINDS_OF_WORK = (DENSE, ADAPTERS, EXPERTS)
# Half-widths of intervals where nothing was fitted.
ASSUMED_ERRORS: Mapping[str, float] = {DENSE: 0.35, ADAPTERS: 0.5, EXPERTS: 0.55}


# Stands for every kind of kernels that no run of a fit has.
OTHER_KERNELS = "other"


class Basis(StrEnum):
    """What a set of constants was fitted to, the nearest to its user first."""

    CLUSTER = "own runs"
    FRAMEWORK = "framework and generation"
    RELATED = "related framework"
    ANY = "all frameworks"
    UNSEEN = "other generations"
    KERNELS = "other kernels"
    LITERATURE = "literature"


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeConstants:
    """Constants of the step time. Efficiencies are fractions of the rate they multiply.

    Args:
        gemm_efficiency: fraction of the device's GEMM curve, inside a training step.
        low_precision_efficiency: further factor on the curve of fp8 and narrower GEMMs, quantisation included; above 1
            where a step does better than the published kernels.
        expert_gemm_efficiency: further factor for grouped expert GEMMs (permutation and padding included).
        attention_kernel_efficiency: fused attention inside a step, over the rate of its kernels alone
            (:mod:`~meshplan.catalogs.constants.attention_kernels`); above 1 where a release has better ones.
        memory_op_efficiency: fraction of the device memory bandwidth, for norms, activations, residuals, losses.
        optimizer_efficiency: fraction of the device memory bandwidth, for the optimizer step.
        scale_up_efficiency: fraction of the scale-up link (NVLink, xGMI, PCIe), for collectives.
        network_efficiency: fraction of the bandwidth of the host's NICs, for collectives.
        tensor_parallel_overlap: share of tensor-parallel communication hidden behind compute.
        data_parallel_window: share of the last micro-batch's time that hides gradient and parameter collectives.
        fully_sharded_overlap: share of ZeRO-3 gathers and scatters that compute can hide.
        expert_parallel_overlap: share of the expert all-to-all over the network that is hidden behind compute where the
            run overlaps them at all.
        expert_parallel_overlap_inside: the same where the group lies inside one scale-up domain.
        expert_product_s: fixed time of one expert's matrix product (each local expert is a launch of its own), s.
        context_parallel_overlap: share of attention time that hides ring exchange.
        host_s_per_layer: host time to launch one dense layer forward and backward, s.
        host_s_per_moe_layer: the same for a layer with experts, s.
        graphed_host_share: share of a layer's host time that is left where parts of it are launched from CUDA graphs.
        step_overhead_s: fixed time of a step outside the layers (data, logging, host synchronisation), s.
        data_parallel_s_per_rank: growth of a step's cost with the ranks that share one copy of the states, over data
            and context parallelism (bookkeeping, stragglers), s.
    """

    gemm_efficiency: Constant = 0.9
    low_precision_efficiency: Constant = 0.95
    expert_gemm_efficiency: Constant = 0.7
    attention_kernel_efficiency: Constant = 0.9
    memory_op_efficiency: Constant = 0.7
    optimizer_efficiency: Constant = 0.7
    scale_up_efficiency: Constant = 0.75
    network_efficiency: Constant = 0.68
    tensor_parallel_overlap: Constant = 0.2
    data_parallel_window: Constant = 0.66
    fully_sharded_overlap: Constant = 0.65
    expert_parallel_overlap: Constant = 0.3
    expert_parallel_overlap_inside: Constant = 0.6
    expert_product_s: Constant = 10e-6
    context_parallel_overlap: Constant = 0.8
    host_s_per_layer: Constant = 0.6e-3
    host_s_per_moe_layer: Constant = 4e-3
    graphed_host_share: Constant = 0.4
    step_overhead_s: Constant = 10e-3
    data_parallel_s_per_rank: Constant = 0.05e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryConstants:
    """Constants of the memory of a rank.

    Args:
        fixed_bytes: device context, workspace and allocator reserve of one process.
        communication_bytes: the communication library and its buffers, where a job has several devices; 0 where
            ``fixed_bytes`` counts them.
        extra_bytes_per_parameter: what the framework holds in addition to the optimizer states of each trained
            parameter, and shards like them (flat fp32 buffers, bucket padding).
        activation_factor: resident over counted activations.
        logits_bytes_per_entry: bytes held per logit on the rank that computes the loss, copies included.
        safe_factor: safe bound over typical for weights, gradients and optimizer states, and what goes with them.
        activation_safe_factor: the same for activations and logits; None: as ``safe_factor``.
        safe_fixed_bytes: added to the safe bound.
    """

    fixed_bytes: Constant = 4.0e9
    communication_bytes: Constant = 0.0
    extra_bytes_per_parameter: Constant = 0.0
    activation_factor: Constant = 1.0
    logits_bytes_per_entry: Constant = 12.0
    safe_factor: float = 1.10
    activation_safe_factor: float | None = None
    safe_fixed_bytes: float = 1.0e9

    @property
    def safe_activation_factor(self) -> float:
        """Safe bound over typical for activations and logits."""
        return self.safe_factor if self.activation_safe_factor is None else self.activation_safe_factor

    def safe_bytes(self, components: Mapping[str, NDArray[Any]]) -> NDArray[Any]:
        """Upper bound of the bytes that a rank needs, [n].

        Args:
            components: name → expected bytes, [n] each; ``activations`` and ``logits`` count as work, ``fixed`` by
                itself, all others as states.
        """
        work = components["activations"] + components["logits"]
        apart = ("activations", "logits", "fixed")
        states = sum((held for name, held in components.items() if name not in apart), np.zeros_like(work))
        scaled = states * self.safe_factor + work * self.safe_activation_factor
        return np.asarray(components["fixed"] + self.safe_fixed_bytes + scaled)


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameworkRecipe:
    """How a framework lays out a step: documented behaviour, not fitted.

    Args:
        flash_attention: attention scores never leave the chip; otherwise they are stored (5·a·s²·b bytes a layer).
        attention_library: whose kernels fuse attention, a name of
            :func:`~meshplan.catalogs.constants.attention_kernels.attention_libraries`.
        masks_windows: PyTorch's attention gets windows of the model as masks, which no flash kernel takes.
        fused_softmax: where scores are stored, one kernel scales, masks, normalises and drops them.
        dropout_masks: dropout after attention and MLP keeps its masks.
        weight_bytes: size of one parameter as used in compute.
        gradient_bytes: size of one resident gradient.
        optimizer_bytes: size of one parameter's optimizer states, master copy included.
        master_bytes: of these, the fp32 copy of a weight that is computed with in 16 bits.
        optimizer_step_bytes: what else an owned parameter takes while the optimizer steps: a gradient cast to fp32, or
            a temporary of its moments.
        gradient_reduce_bytes: size of one gradient on the wire.
        parameter_gather_bytes: size of one parameter on the wire.
        overlaps_data_parallel: gradient and parameter collectives run behind compute.
        schedules_by_profile: the compiler places gathers and scatters of sharded parameters behind the layers around
            them by times that it measured (XLA's latency-hiding scheduler with profile-guided estimates and
            double-buffered loops), so that what is longer than the work stays exposed, and the first and last ones.
        overlaps_pipeline: messages of a schedule that can hide them run behind compute.
        sends_whole_gradients: every tensor-parallel rank of a stage sends the whole gradient of its input to the stage
            before, not its part.
        sends_attention_mask: the mask of a micro-batch passes from stage to stage with its activations.
        sends_in_turn: a stage receives and sends one message after the other, so that activations one way and
            gradients the other way never pass at once.
        broadcasts_parameters: under ZeRO-1 and 2 each rank broadcasts the parameters that it has updated, one rank
            after the other; otherwise one all-gather collects them.
        balances_context_parallel: causal work is spread evenly over the context-parallel ranks (zig-zag).
        selective_kept_share: share of the activations that selective recompute keeps once the attention core's are
            dropped; below 1 where it also recomputes some of the matrix products.
        overlaps_tensor_parallel: tensor-parallel collectives overlap with the products that they feed unless the run
            states that they do not; otherwise only where it states that they do.
        restacks_sequences: gathers and scatters of a split sequence copy what they move once more, because the sequence
            is not the tensor's first dimension; half of it where they overlap with the products.
        hooks_s_per_layer: host time of the hooks that gather and release the parameters of one layer's modules, forward
            and backward, where parameters are sharded (ZeRO-3), s.
        joins_projections: queries, keys and values are one matrix, and so are the MLP's first two; an adapter on them
            is one too.
        gathers_fp8: tensor-parallel gathers carry fp8 where the products are fp8 with one scale per tensor.
        recomputes_only_needed: a second forward pass leaves out what the backward pass does not read, such as the last
            product of a layer: PyTorch's checkpoint without reentry stops there ("stops recomputation as soon as all
            needed intermediate activations have been recomputed", torch.utils.checkpoint, 2.1 and later), JAX drops it
            as dead code. Megatron-LM's and PyTorch's reentrant checkpoint run the layer to its end.
        full_recompute_keeps_input_sharded: the kept layer inputs are split over the tensor-parallel ranks.
        overlaps_activation_offload: inputs of recomputed layers go to the host and come back on streams of their own,
            behind the passes of the other layers.
        logits_share: bytes of a logit over those of an eager loss in fp32: below 1 where the loss is fused.
        keeps_outputs: the pipeline's engine holds the fp32 logits of its last two micro-batches until their buffers are
            used again, and the loss works in place on those of the running one; in place of ``logits_share``.
        frees_gradients: gradients are allocated by the backward pass and freed by the step, so that where one
            micro-batch is a step they and the logits are never held at once.
        keeps_last_graph: the loss of a micro-batch is referenced until the next one has its own, and with it what
            functions of autograd hold as attributes: bitsandbytes' 4-bit products their inputs.
        upcasts_unquantised: what is not quantised beside NF4 weights is kept in fp32 (PEFT), not in 16 bits.
        loads_whole: while a checkpoint is loaded every fully sharded rank holds all weights beside its shard.
        is_fsdp: PyTorch's fully sharded data parallelism. ZeRO-2 keeps gathered copies of the parameters beside the
            shards; a pipeline stage leaves parameters gathered after a backward pass and accumulates whole gradients
            until its last micro-batch (torch.distributed.pipelining, stage.py, backward_maybe_with_nosync).
        accumulates_whole: FSDP synchronises after the last micro-batch of a step only (``no_sync``), so that gradients
            are whole until then; counted where ``frees_gradients``.
        reduces_after_backward: gradients are reduced together once the last backward pass has ended, so that a rank
            holds whole ones though ZeRO gives it a shard.
        recomputes_halves: full recompute repeats the attention and the MLP of a layer one after the other, and keeps
            the input of each.
        shards_embedding: under FSDP the embedding is a unit of its own, resharded once it has run; otherwise it stays
            gathered with the LM head.
        source: citation.
    """

    flash_attention: bool = True
    attention_library: str = "transformer-engine"
    masks_windows: bool = False
    fused_softmax: bool = False
    dropout_masks: bool = False
    weight_bytes: float = 2.0
    gradient_bytes: float = 4.0
    optimizer_bytes: float = 12.0
    master_bytes: float = 4.0
    optimizer_step_bytes: float = 0.0
    gradient_reduce_bytes: float = 4.0
    parameter_gather_bytes: float = 2.0
    overlaps_data_parallel: bool = True
    schedules_by_profile: bool = False
    overlaps_pipeline: bool = True
    sends_whole_gradients: bool = False
    sends_attention_mask: bool = False
    sends_in_turn: bool = False
    broadcasts_parameters: bool = False
    balances_context_parallel: bool = True
    selective_kept_share: float = 1.0
    overlaps_tensor_parallel: bool = True
    restacks_sequences: bool = False
    hooks_s_per_layer: float = 0.0
    joins_projections: bool = False
    gathers_fp8: bool = False
    recomputes_only_needed: bool = False
    full_recompute_keeps_input_sharded: bool = False
    overlaps_activation_offload: bool = False
    logits_share: float = 1.0
    keeps_outputs: bool = False
    frees_gradients: bool = False
    keeps_last_graph: bool = False
    upcasts_unquantised: bool = True
    loads_whole: bool = False
    is_fsdp: bool = False
    accumulates_whole: bool = False
    reduces_after_backward: bool = False
    recomputes_halves: bool = False
    shards_embedding: bool = False
    source: str = ""


# Constants that stored sets may still have and no estimate reads: attention over the device's peak, whatever its
# kernels (until 2026-11-26). The one that took its place starts from the literature.
RETIRED = frozenset({"attention_efficiency"})


def _time_constants(**stored: Any) -> TimeConstants:
    return TimeConstants(**{name: value for name, value in stored.items() if name not in RETIRED})


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """One set of constants, for a framework on a hardware generation.

    Args:
        framework: such as ``megatron``; ``any`` for the global set.
        architecture: hardware generation, such as ``hopper``; ``any`` for the global set; of a set of one cluster
            ``hopper@CLUSTER`` (:mod:`meshplan.catalogs.constants.own`).
        time: constants of the step time.
        model_time: of a set of one cluster, model → the same for a model that own runs are of.
        memory: constants of the memory.
        recipe: documented behaviour of the framework.
        error_p90: kind of work → half-width of the interval of a step time on a cluster whose runs nobody knows: the
            interval is [predicted / (1 + w), predicted · (1 + w)] and holds 90 % of the runs of *sources held out
            whole*.
        error_basis: kind of work → which sources that is expected from, in words.
        related_error_p90: the same where the set stands in for a related framework.
        related_error_basis: its sources.
        unseen_error_p90: the same on a hardware generation that no run is from.
        unseen_error_basis: its sources.
        by_kernels: kind of kernels that runs of the fit have → those of the four above that differ there, by their
            names; :data:`OTHER_KERNELS` → ``error_p90`` and ``error_basis`` for kernels that no run of the fit has.
        cluster_error_p90: the same on a cluster that runs of other models are known from.
        model_error_p90: of a set of one cluster, kind of work → model → the same for a model that own runs are of.
        way_error_p90: of a set of one cluster, kind of work → model, empty for the others → way that own runs work in
            (:mod:`meshplan.planner.training.problem.ways`) → the same for plans that work in it, too.
        start_error_p90: of a set of one cluster, what ``error_p90`` was before its own runs; empty elsewhere.
        basis: what the set was fitted to, as seen from whoever uses it: a :class:`Basis`.
        memory_basis: what the safe bound of the memory rests on, in words.
        generations: hardware generations that the runs are from.
        num_runs: published runs behind the fit; 0 where nothing was fitted.
        source: which observations, with their version.
        date: day of the fit, ISO 8601.
    """

    framework: str
    architecture: str
    time: TimeConstants = field(default_factory=TimeConstants)
    model_time: Mapping[str, TimeConstants] = field(default_factory=dict)
    memory: MemoryConstants = field(default_factory=MemoryConstants)
    recipe: FrameworkRecipe = field(default_factory=FrameworkRecipe)
    error_p90: Mapping[str, float] = field(default_factory=lambda: ASSUMED_ERRORS)
    error_basis: Mapping[str, str] = field(default_factory=dict)
    related_error_p90: Mapping[str, float] = field(default_factory=lambda: ASSUMED_ERRORS)
    related_error_basis: Mapping[str, str] = field(default_factory=dict)
    unseen_error_p90: Mapping[str, float] = field(default_factory=lambda: ASSUMED_ERRORS)
    unseen_error_basis: Mapping[str, str] = field(default_factory=dict)
    by_kernels: Mapping[str, Mapping[str, Mapping[str, Any]]] = field(default_factory=dict)
    cluster_error_p90: Mapping[str, float] = field(default_factory=lambda: ASSUMED_ERRORS)
    model_error_p90: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    way_error_p90: Mapping[str, Mapping[str, Mapping[str, float]]] = field(default_factory=dict)
    start_error_p90: Mapping[str, float] = field(default_factory=dict)
    basis: str = Basis.LITERATURE.value
    memory_basis: str = ""
    generations: Sequence[str] = ()
    num_runs: int = 0
    source: str = ""
    date: str = ""

    def for_a_relative(self, shared: Calibration | None) -> Calibration:
        """The set as a framework uses it that has no runs on this generation.

        Args:
            shared: the set of all frameworks, None where there is none. What models of one cluster differ by is taken
                from it: this set's own says how alike the models of *its* framework are.
        """
        return replace(
            self,
            error_p90=self.related_error_p90,
            error_basis=self.related_error_basis,
            cluster_error_p90=ASSUMED_ERRORS if shared is None else shared.cluster_error_p90,
            basis=Basis.RELATED.value,
        )

    def for_generation(self, architecture: str) -> Calibration:
        """The set of all frameworks as it is used on a hardware generation, which it may not have seen."""
        if architecture in self.generations:
            return self
        return replace(
            self,
            error_p90=self.unseen_error_p90,
            error_basis=self.unseen_error_basis,
            basis=Basis.UNSEEN.value,
        )

    def for_kernels(self, kernels: str) -> Calibration:
        """The set as runs with such kernels use it; one's own cluster's sets and unseen generations know none."""
        if not self.by_kernels or self.basis not in (Basis.FRAMEWORK, Basis.RELATED, Basis.ANY):
            return self
        known = self.by_kernels.get(kernels)
        widths = self.by_kernels[OTHER_KERNELS] if known is None else known
        side = "related_" if known is not None and self.basis == Basis.RELATED else ""
        return replace(
            self,
            error_p90={**self.error_p90, **widths.get(f"{side}error_p90", {})},
            error_basis={**self.error_basis, **widths.get(f"{side}error_basis", {})},
            basis=Basis.KERNELS.value if known is None else self.basis,
        )

    def for_model(self, model: str) -> Calibration:
        """The set as plans of a model use it: nearer and narrower where own runs are of that model.

        Args:
            model: slug of the model.
        """
        known = {kind: by_model[model] for kind, by_model in self.model_error_p90.items() if model in by_model}
        if not known and model not in self.model_time and not self.way_error_p90:
            return self
        ways = {kind: {"": by_model.get(model, by_model.get("", {}))} for kind, by_model in self.way_error_p90.items()}
        time = self.model_time.get(model, self.time)
        return replace(self, time=time, error_p90={**self.error_p90, **known}, way_error_p90=ways)

    def half_width(self, kind: str, way: str) -> float:
        """Half-width of the interval of a step time; of the model that :meth:`for_model` named, where it did.

        Args:
            kind: of work.
            way: that the plan works in.
        """
        return self.way_error_p90.get(kind, {}).get("", {}).get(way, self.error_p90[kind])

    def to_document(self) -> dict[str, Any]:
        """Plain JSON, all constants by name; what only some sets have is left out elsewhere."""
        of_some = ("by_kernels", "model_time", "model_error_p90", "way_error_p90", "start_error_p90")
        return {key: value for key, value in asdict(self).items() if value or key not in of_some}

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Calibration:
        """Read back what :meth:`to_document` wrote; a missing constant takes its default."""
        parts: Mapping[str, Callable[..., Any]] = {
            "time": _time_constants,
            "memory": MemoryConstants,
            "recipe": FrameworkRecipe,
        }
        values = {key: value for key, value in document.items() if key not in (*parts, "model_time")}
        by_model = {model: _time_constants(**time) for model, time in document.get("model_time", {}).items()}
        sections = {part: make(**document.get(part, {})) for part, make in parts.items()}
        return cls(**values, **sections, model_time=by_model)
