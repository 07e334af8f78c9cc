"""KTransformers' kernels for experts on the host: which one a weight format and a processor call for.

Source: doc/en/kt-kernel/kt-kernel_intro.md and Native-Precision-Tutorial.md of github.com/kvcache-ai/ktransformers,
read 2026-11-24.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshplan.catalogs.constants.machines.host_processors import HostProcessor
from meshplan.catalogs.hardware import Device

# "CUDA GPU with compute capability 8.0+": Turing (T4) and Volta are listed as not supported.
_TOO_OLD = ("volta", "turing", "pascal")


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """One ``--kt-method``.

    Args:
        name: as the flag takes it.
        prefills_on_devices: ``--kt-gpu-prefill-token-threshold`` works with it.
        weights: where the host's weights come from, in words.
        product_bytes: of a weight as it is multiplied: fp8 is widened to 16 bits, 4 bits to 8.
    """

    name: str
    prefills_on_devices: bool
    weights: str
    product_bytes: int = 1


_GGUF = Kernel(name="LLAMAFILE", prefills_on_devices=False, weights="a GGUF file of the model in this format")
_NATIVE = {
    "fp8_block": Kernel(name="FP8", prefills_on_devices=True, weights="the checkpoint itself", product_bytes=2),
    "fp8": Kernel(name="FP8_PERCHANNEL", prefills_on_devices=True, weights="the checkpoint itself", product_bytes=2),
    "bf16": Kernel(name="BF16", prefills_on_devices=True, weights="the checkpoint itself", product_bytes=2),
}
_AMX = {
    "w4a16": Kernel(
        name="AMXINT4", prefills_on_devices=False, weights="kt-kernel's convert_cpu_weights.py --quant-method int4"
    ),
    "w8a16": Kernel(
        name="AMXINT8", prefills_on_devices=False, weights="kt-kernel's convert_cpu_weights.py --quant-method int8"
    ),
    "int8": Kernel(
        name="AMXINT8", prefills_on_devices=False, weights="kt-kernel's convert_cpu_weights.py --quant-method int8"
    ),
}
KERNELS = {kernel.name: kernel for kernel in (_GGUF, *_NATIVE.values(), *_AMX.values())}


def kernel_of(scheme: str, processor: HostProcessor) -> Kernel:
    """The kernel for experts in ``scheme`` on a processor: in their own format where it has the instructions, else by
    AMX, else from a GGUF file.
    """
    has = processor.instructions
    if scheme in _NATIVE and ("avx512" in has or "amx" in has):
        return _NATIVE[scheme]
    if scheme in _AMX and "amx" in has:
        return _AMX[scheme]
    return _GGUF


def device_misses(device: Device) -> str:
    """Why KTransformers does not run beside a device; empty where it does."""
    if device.vendor != "nvidia":
        return f"KTransformers' experts on the host need an NVIDIA device, not {device.name}"
    if device.architecture in _TOO_OLD:
        return f"KTransformers' experts on the host need compute capability 8.0, which {device.name} lacks"
    return ""
