"""The serving estimator's named constants: what an engine does on a hardware generation that no kernel table says.

The equations of :mod:`meshplan.planner.serving.estimator` are fixed; these constants are fitted to published runs per
engine and hardware generation (``meshplan calibrate``), or to one run of a user's own. A constant has one physical
meaning and one unit; there is no constant for a single run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingConstants:
    """Constants of an engine's iterations and of its first token.

    Args:
        decode_factor: measured over priced device time where few tokens share an iteration (memory-bound).
        prefill_factor: the same where thousands do (compute-bound), attention over prompts included.
        host_step_s: time of an iteration in which the device waits for the scheduler, s.
        host_s_per_seq: growth of that time with each running request (sampling, detokenisation), s.
        launch_s_per_layer: time to launch one layer kernel by kernel, s: iterations with prompt tokens are not replayed
            from a graph, so they last no less than this times the layers. Of layers with keys and values of their own.
        launch_s_per_latent_layer: the same of layers with latent attention (DeepSeek, Kimi), s. For prompts they expand
            keys and values and join them to rotated ones: some 16 kernels by their equations; a dense layer has 9. A
            prompt of one token took 83 ms launched so and 23 from a graph (sgl-project/sglang, pull request 12160, of
            a model with latent attention): 0.97 ms for each of DeepSeek-V3's 61 layers besides their experts.
        launch_s_of_experts: what routed experts add to the launch of a layer, s: router, top-k, tokens sorted by
            expert, two grouped products, activation and the sum over copies, called from Python even where the rest is
            compiled. A layer of Qwen3-30B without graphs took the host 1.06 ms (vLLM 0.26 on an H200 of ours); layers
            that are compiled are launched a fifth faster there, those without experts in 0.48 ms.
        launch_s_per_prompt_kernel: time to launch a kernel that recurrent layers add to an iteration with prompts, s,
            Triton's from Python. On B200 hosts the gated delta rule of a layer takes 0.91 to 1.28 ms for 2,048, 4,096
            and 8,192 tokens alike (lightseekorg/tokenspeed, pull request 331): 114 µs at least for each of its eight
            kernels (two norms, sums of decays, K·Kᵀ, its inverse, W and U, states, outputs). A Triton kernel takes
            49 µs (triton-lang/triton, pull request 3638) without the library's checks. A decode of 1,024 requests of
            Qwen3-Next takes 74 ms on four B200 launched so, 49 from graphs (vllm-project/vllm, issue 27222).
        first_token_steps: iterations that pass before one can hold a request that has arrived, of engines that prepare
            them ahead (``prepares_ahead`` of their release). They prepare one, which fits to published runs keep; a
            server of one's own may wait for more.
        first_token_offset_s: time of a request outside the engine (HTTP, processes), s, fixed under open arrivals; a
            closed loop's next request comes as late on average. Tokenizing its prompt comes on top.
    """

    decode_factor: float = 1.0
    prefill_factor: float = 1.0
    host_step_s: float = 1e-3
    host_s_per_seq: float = 10e-6
    launch_s_per_layer: float = 0.3e-3
    launch_s_per_latent_layer: float = 0.97e-3
    launch_s_of_experts: float = 0.4e-3
    launch_s_per_prompt_kernel: float = 114e-6
    first_token_steps: float = 1.0
    first_token_offset_s: float = 20e-3


NEXT_TO_NOTHING_S = 1e-12  # launches that a set does not state: fits take logarithms


class OwnLoad(NamedTuple):
    """What plans share with own runs, besides the engine and the devices: a model, and lengths of its requests.

    Args:
        model: slug.
        lengths: tokens of a prompt and of an answer, powers of two about their means; None for any.
    """

    model: str
    lengths: tuple[int, int] | None = None

    @property
    def name(self) -> str:
        """What the set calls it.

        >>> OwnLoad("qwen3-32b", (4096, 512)).name, OwnLoad("qwen3-32b").name
        ('qwen3-32b 4096+512', 'qwen3-32b')
        """
        return self.model if self.lengths is None else f"{self.model} {self.lengths[0]}+{self.lengths[1]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingCalibration:
    """One set of constants, for an engine on a hardware generation.

    Args:
        engine: ``vllm``, ``sglang``, ``trtllm`` …; ``any`` for the global set.
        architecture: hardware generation, such as ``hopper``; ``any`` for the global set; of a set of one cluster
            ``hopper@CLUSTER`` (:mod:`meshplan.catalogs.constants.own`).
        constants: see :class:`ServingConstants`.
        model_constants: of a set with own runs, :class:`OwnLoad` by name → the same for plans of that model, and for
            plans of it with such lengths.
        error_p90: metric (``ttft``, ``tpot``, ``throughput``) → 90th percentile of |log(measured/predicted)| on runs
            held out; the half-width of intervals, in the logarithm.
        start_error_p90: of a set of one cluster, what ``error_p90`` was before its own runs; empty elsewhere.
        basis: metric → the runs that its error was taken on: an engine on a generation, an engine, all engines.
        num_runs: runs behind the fit; 0 where nothing was fitted.
        source: which observations, with their version.
        date: day of the fit, ISO 8601.
    """

    engine: str
    architecture: str
    constants: ServingConstants = field(default_factory=ServingConstants)
    model_constants: Mapping[str, ServingConstants] = field(default_factory=dict)
    error_p90: Mapping[str, float] = field(default_factory=lambda: {"ttft": 1.0, "tpot": 0.45, "throughput": 0.45})
    start_error_p90: Mapping[str, float] = field(default_factory=dict)
    basis: Mapping[str, str] = field(default_factory=dict)
    num_runs: int = 0
    source: str = ""
    date: str = ""

    def for_load(self, load: OwnLoad) -> ServingCalibration:
        """The set as plans of a model with such lengths use it: nearer where own runs are of them."""
        names = (load.name, OwnLoad(load.model).name)
        known = [self.model_constants[name] for name in names if name in self.model_constants]
        return replace(self, constants=known[0]) if known else self

    def to_document(self) -> dict[str, Any]:
        """Plain JSON, all constants by name; what only sets with own runs have is left out elsewhere."""
        of_some = ("model_constants", "start_error_p90")
        return {key: value for key, value in asdict(self).items() if value or key not in of_some}

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> ServingCalibration:
        """Read back what :meth:`to_document` wrote; a missing constant takes its default, see :func:`_as_fitted`."""
        constants = _as_fitted(document.get("constants", {}))
        near = {name: _as_fitted(values) for name, values in document.get("model_constants", {}).items()}
        return cls(**{**document, "constants": constants, "model_constants": near})


def _as_fitted(written: Mapping[str, float]) -> ServingConstants:
    """Constants as the set that states them was fitted: those it lacks take their defaults, launches apart.

    The time to launch a layer was one constant, then one of layers with latent attention was split off it (2026-11-26),
    then one of routed experts (2026-11-27) and one of kernels of recurrent layers (2026-11-28). A set from before has
    their launches in those that it states.
    """
    launch = written.get("launch_s_per_layer")
    if launch is None and "launch_s_per_latent_layer" not in written:
        return ServingConstants(**written)
    before = dict.fromkeys(("launch_s_of_experts", "launch_s_per_prompt_kernel"), NEXT_TO_NOTHING_S) | (
        {} if launch is None else {"launch_s_per_latent_layer": launch}
    )
    return ServingConstants(**{**before, **written})
