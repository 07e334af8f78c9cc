"""Reads the tables of fused expert layers in the wheel of ``aiconfigurator-core``, and leaves out what cannot be.

``num_tokens`` counts the tokens of the whole expert-parallel group; a row times the fullest device. Not every row keeps
to that:

* *unsplit*: the collector of SGLang before 0.5.14 (and rows that 0.5.14 carried over) ran every token that reaches the
  device with all its k choices there, so that up to k devices take as long as one. Other kernels ignore the degree.
* *not balanced*: DeepSeek-V3's router (8 groups of 32 experts, the best 4 chosen) breaks the ties of the balanced
  scores in favour of the first groups and experts: half of all choices fall on 4 of 256 experts. Shares of
  (4 + 8/ep)/8 explain the times of vLLM 0.24 and SGLang 0.5.14 on every device within a few per cent.

Both are found by physics, not by name: :func:`unsplit` and :func:`slower_when_balanced`. A model is taken from the
newest version that has it; older ones, of other kernels, do not fill what was left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshplan.catalogs.importers.perf_tables import SYSTEMS, Columns, all_versions, read_perf_table
from meshplan.catalogs.surfaces.experts import (
    ELEMENT_BYTES,
    GATED_PRODUCTS,
    PLAIN_PRODUCTS,
    ExpertFeatures,
    ExpertShape,
    expert_features,
)
from meshplan.catalogs.surfaces.files import FRAMEWORKS
from meshplan.catalogs.surfaces.grid import FloatArray

COUNTS = ("num_tokens", "hidden_size", "inter_size", "topk", "num_experts", "moe_tp_size", "moe_ep_size")
TEXTS = ("moe_dtype", "kernel_source", "distribution")
# Not balanced, and perhaps faster than memory: 4 tokens with 2 choices of 8 experts of 6144 × 16384 take 46.4 µs on a
# B200; all 8, which balanced routing reads, are 1.36 GB: 29 TB/s, where the device has 8. Two experts would be 7.3.
IMPOSSIBLE = "moe_torch_flow_min_latency"
POWER_LAW = "power_law_"
# Tables of vLLM's releases of 2025: (folder of the older wheel, the oldest version there) → device.
OLDER_TABLES: Mapping[tuple[str, str], str] = {
    ("h100_sxm", "0.12.0"): "h100-sxm-80gb",
    ("h200_sxm", "0.12.0"): "h200-sxm-141gb",
    ("b200_sxm", "0.14.1"): "b200-sxm-180gb",
}
# What was run by vLLM's own Triton kernels; nvfp4 was FlashInfer's CUTLASS, as in newer tables.
OLDER_KINDS = {"float16": "bfloat16", "fp8": "fp8", "fp8_block": "fp8_block"}
# Fewer measurements are one model's; a surface of them would be asked for others.
MIN_SAMPLES = 1100
# Layers this long are bound by their products, so that half the work takes about half the time.
LONG_TOKENS = 4096
# Share of the time on the fewest devices that is left on as many as a token has choices (never more than half of it
# where work splits and the launch is cheap), and on twice as many.
_UNSPLIT, _UNSPLIT_TWICE = 0.8, 0.4
# Share of the time with the mildest skew: more is beyond the spread of two runs of one kernel.
_NOT_BALANCED = 1.05
_MILDEST = 1.01


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertSamples:
    """Measured layers of one device, quantization and framework.

    Args:
        tokens: [n].
        shapes: (H, I, k, E, ep, products), [n, 6].
        skew: exponents, 0 where balanced, [n].
        time_s: [n].
        kernel: framework and versions.
    """

    tokens: FloatArray
    shapes: FloatArray
    skew: FloatArray
    time_s: FloatArray
    kernel: str

    def __len__(self) -> int:
        return len(self.time_s)

    def where(self, mask: NDArray[np.bool_]) -> ExpertSamples:
        """The samples under a mask."""
        return replace(self, **{name: getattr(self, name)[mask] for name in ("tokens", "shapes", "skew", "time_s")})

    def features(self) -> ExpertFeatures:
        """What formula and grid are functions of."""
        return expert_features(self.tokens, tuple(self.shapes.T), self.skew)

    def shape_index(self) -> tuple[list[ExpertShape], NDArray[np.intp]]:
        """The distinct shapes, and the one of each sample."""
        distinct, index = np.unique(self.shapes, axis=0, return_inverse=True)
        return [ExpertShape(*(int(size) for size in row)) for row in distinct], index.ravel()


class Row(NamedTuple):
    """What one row of a table measured, without its time."""

    tokens: float
    hidden: float
    expert_size: float
    top_k: float
    experts: float
    devices: float
    skew: float


Times = dict[Row, float]
# Quantization, kernel, and the model: hidden size, top-k, experts. Its rows have all sizes of its experts.
Kernel = tuple[str, str, float, float, float]


def expert_samples(folder: Path, systems: Mapping[str, str] = SYSTEMS) -> Iterator[tuple[str, str, str, ExpertSamples]]:
    """(device, framework, quantization, samples) for all that were measured often enough."""
    for system, device in sorted(systems.items()):
        for framework in FRAMEWORKS:
            samples = _read(folder, system, framework)
            for quantization in ELEMENT_BYTES:
                found = samples.get(quantization)
                if found is not None and len(found) >= MIN_SAMPLES:
                    yield device, framework, quantization, found


def older_expert_samples(folder: Path) -> Iterator[tuple[str, str, ExpertSamples]]:
    """(device, quantization, samples) of vLLM's kernels of 2025, from the wheel of ``aiconfigurator`` 0.7.0.

    They lie in ``systems/data/SYSTEM/vllm/VERSION/moe_perf.txt``. All routing is skewed.
    """
    for (system, version), device in OLDER_TABLES.items():
        columns = read_perf_table(folder / system / "vllm" / version / "moe_perf.txt", texts=TEXTS, counts=COUNTS)
        found: dict[str, Times] = {}
        for (kind, *_), times in plausible(_by_kernel(columns)).items():
            found.setdefault(OLDER_KINDS.get(kind, ""), {}).update(times)
        for quantization in ELEMENT_BYTES:
            if len(found.get(quantization, ())) >= MIN_SAMPLES:
                yield device, quantization, _samples(found[quantization], set(), f"vllm {version}")


def unsplit(times: Times) -> bool:
    """Whether ``times`` of one model (balanced, of one kernel) say that devices did not share its work.

    >>> unsplit({Row(8192, 4096, 1536, 8, 128, devices, 0.0): s for devices, s in ((1, 9.2), (8, 8.7), (16, 4.4))})
    True
    >>> unsplit({Row(8192, 4096, 1536, 8, 128, devices, 0.0): s for devices, s in ((1, 5.0), (8, 0.7), (16, 0.4))})
    False
    """
    shares, twice = [], []
    for row, by_degree in _long_balanced(times).items():
        first, last = min(by_degree), max((degree for degree in by_degree if degree <= row.top_k), default=0.0)
        if last > first:
            shares.append(by_degree[last] / by_degree[first])
            twice += [by_degree[2 * last] / by_degree[first]] if 2 * last in by_degree else []
    if not shares or np.median(shares) <= _UNSPLIT:
        return False
    return not twice or bool(np.median(twice) > _UNSPLIT_TWICE)


def _long_balanced(times: Times) -> dict[Row, dict[float, float]]:
    """Long balanced rows, their degree set to 1 → degree → time."""
    found: dict[Row, dict[float, float]] = {}
    for row, time_s in times.items():
        if row.tokens >= LONG_TOKENS and row.skew == 0.0:
            found.setdefault(row._replace(devices=1.0), {})[row.devices] = time_s
    return found


def slower_when_balanced(times: Times) -> bool:
    """Whether ``times`` of one model say that its balanced routing loads the fullest device more than a skewed one."""
    ratios = [
        time_s / times[skewed]
        for row, time_s in times.items()
        if row.skew == 0.0 and row.devices > 1 and row.tokens >= LONG_TOKENS
        for skewed in (row._replace(skew=_MILDEST),)
        if skewed in times
    ]
    return bool(ratios) and bool(np.median(ratios) > _NOT_BALANCED)


def plausible(tables: Mapping[Kernel, Times]) -> dict[Kernel, Times]:
    """``tables`` without rows that are not what their columns say: unshared work, balanced routing that is not.

    Where most models of a kernel are unsplit, none of its rows over several devices is believed.
    """
    verdicts = {kernel: unsplit(times) for kernel, times in tables.items()}
    kept = {}
    for kernel, times in tables.items():
        of_kernel = [verdict for other, verdict in verdicts.items() if other[:2] == kernel[:2]]
        is_unsplit = verdicts[kernel] or sum(of_kernel) > len(of_kernel) / 2
        believed = {row: time_s for row, time_s in times.items() if row.devices == 1 or not is_unsplit}
        is_skewed = slower_when_balanced(believed)
        kept[kernel] = {row: time_s for row, time_s in believed.items() if row.skew > 0.0 or not is_skewed}
    return kept


def _read(folder: Path, system: str, framework: str) -> dict[str, ExpertSamples]:
    """Quantization → samples: of several versions the newest counts, of its kernels the fastest."""
    found: dict[str, Times] = {}
    versions: dict[str, set[str]] = {}
    owner: dict[tuple[float | str, ...], str] = {}
    for path in all_versions(folder, system, "moe", framework, "moe_perf"):
        version = path.parent.name
        columns = read_perf_table(path, texts=TEXTS, counts=COUNTS)
        for (kind, _, *model), times in plausible(_by_kernel(columns)).items():
            if owner.setdefault((kind, *model), version) == version and times:
                known = found.setdefault(kind, {})
                known |= {row: min(time_s, known.get(row, np.inf)) for row, time_s in times.items()}
                versions.setdefault(kind, set()).add(version)
    plain = _plain_models(folder, system)
    return {
        kind: _samples(times, plain, f"{framework} {', '.join(sorted(versions[kind]))}")
        for kind, times in found.items()
    }


def _by_kernel(columns: Columns) -> dict[Kernel, Times]:
    tables: dict[Kernel, Times] = {}
    numbers = np.stack([columns[name] for name in COUNTS], axis=1)
    for index, (kind, kernel, distribution) in enumerate(zip(*(columns[name] for name in TEXTS), strict=True)):
        if kernel == IMPOSSIBLE:
            continue
        tokens, hidden, size, top_k, experts, tensor, devices = numbers[index]
        row = Row(tokens, hidden, size / tensor, top_k, experts, devices, _skew(distribution))
        times = tables.setdefault((kind, kernel, row.hidden, row.top_k, row.experts), {})
        times[row] = min(columns["time_s"][index], times.get(row, np.inf))
    return tables


def _plain_models(folder: Path, system: str) -> set[tuple[float, ...]]:
    """(hidden size, expert size, top-k, experts) of models without a gate, which TensorRT-LLM's tables name."""
    models: set[tuple[float, ...]] = set()
    for path in all_versions(folder, system, "moe", "trtllm", "moe_perf"):
        columns = read_perf_table(path, texts=TEXTS, counts=COUNTS)
        mask = np.array([name.endswith("nongated") for name in columns["kernel_source"]])
        sizes = columns["inter_size"] / columns["moe_tp_size"]
        listed = (columns["hidden_size"], sizes, columns["topk"], columns["num_experts"])
        models |= set(zip(*(values[mask].tolist() for values in listed), strict=True))
    return models


def _samples(times: Times, plain: set[tuple[float, ...]], kernel: str) -> ExpertSamples:
    rows = np.array(list(times))
    products = [PLAIN_PRODUCTS if row[1:5] in plain else GATED_PRODUCTS for row in times]
    return ExpertSamples(
        tokens=rows[:, 0],
        shapes=np.column_stack([rows[:, 1:6], products]),
        skew=rows[:, 6],
        time_s=np.array(list(times.values())),
        kernel=kernel,
    )


def _skew(text: str) -> float:
    return float(text.removeprefix(POWER_LAW)) if text.startswith(POWER_LAW) else 0.0
