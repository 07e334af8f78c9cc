"""Why a GPU lowered its clocks while it was measured, from ``nvidia-smi`` running in parallel.

One ``nvidia-smi`` samples the bit mask of *clock event reasons* every :data:`PERIOD_MS`; asking after a measurement
would be too late, an idle GPU has already left the state. Without the tool, or where it does not know the field
(drivers before R535 call it throttle reasons), nothing is reported and the trend of the repeats remains
(:mod:`meshplan.profiler.protocol`).

Source: NVML API reference, nvmlClocksEventReasons (bits below); ``nvidia-smi --help-query-gpu``.
"""

from __future__ import annotations

import shutil
import subprocess
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator
from typing import IO

PERIOD_MS = 100
FIELDS = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")
# Idle (1), set by the user (2, 0x100 for the display) and waiting for others in a group (0x10) are no throttling.
REASONS = {
    0x4: "software power cap",
    0x8: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
}
_KEPT_SAMPLES = 100_000  # three hours of them


class GpuWatch:
    """Samples of one GPU from the start of the object to its end.

    Args:
        uuid: the GPU's, as torch gives it: numbers differ where CUDA_VISIBLE_DEVICES hides some.
    """

    def __init__(self, uuid: str) -> None:
        self._samples: deque[tuple[float, int]] = deque(maxlen=_KEPT_SAMPLES)
        process = next(_started(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"), None)
        if process is not None and process.stdout is not None:
            threading.Thread(target=_collect, args=(process.stdout, self._samples), daemon=True).start()
            weakref.finalize(self, _stop, process)

    def throttled(self, since: float) -> str | None:
        """Reasons seen since a time of ``time.perf_counter``, and in which share of the samples; None without any."""
        masks = [mask for at, mask in tuple(self._samples) if at >= since]
        reasons = [
            f"{reason} in {sum(bool(mask & bit) for mask in masks)} of {len(masks)} samples"
            for bit, reason in REASONS.items()
            if any(mask & bit for mask in masks)
        ]
        return f"throttling: {'; '.join(reasons)}" if reasons else None


def _started(uuid: str) -> Iterator[subprocess.Popen[str]]:
    """A running ``nvidia-smi`` under the first name of the field that it knows."""
    tool = shutil.which("nvidia-smi")
    for field in FIELDS if tool else ():
        query = [str(tool), f"--query-gpu={field}", "--format=csv,noheader", f"--id={uuid}"]
        try:
            known = subprocess.run(query, capture_output=True, text=True, check=False, timeout=10.0)  # noqa: S603 - fixed arguments
            if known.returncode == 0 and _mask(known.stdout) is not None:
                yield subprocess.Popen(  # noqa: S603 - the same
                    [*query, f"--loop-ms={PERIOD_MS}"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
                )
        except (OSError, subprocess.SubprocessError):
            return


def _stop(process: subprocess.Popen[str]) -> None:
    process.terminate()
    process.wait()


def _collect(lines: IO[str], samples: deque[tuple[float, int]]) -> None:
    with lines:
        for line in lines:
            mask = _mask(line)
            if mask is not None:
                samples.append((time.perf_counter(), mask))


def _mask(text: str) -> int | None:
    try:
        return int(text.strip(), 16)
    except ValueError:
        return None
