"""A host of four dies in network namespaces: how long until the others are where they were, predicted and measured.

    python tests/benchmarks/resume.py [RUNS]

Needs root, ip, tc and torch; three minutes a run. The scenario is in ``tests/support/resumed_run.py``.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from netns import missing_requirement
from resumed_run import HOSTS, Resumed, resumed


def told(run: Resumed) -> str:
    """One run as text."""
    parts = {"meeting": run.meeting_s, "starting": run.starting_s, "loading": run.loading_s, "again": run.again_s}
    (old, new), (measured_old, measured_new) = run.steps_s, run.measured_steps_s
    return (
        f"predicted {run.predicted_s:.1f} s ({', '.join(f'{seconds:.1f} {name}' for name, seconds in parts.items())}), "
        f"measured {run.measured_s:.1f} s: {run.predicted_s / run.measured_s - 1.0:+.1%}\n"
        f"  a step on {HOSTS} hosts: {old:.2f} s, measured {measured_old:.2f} s; "
        f"on {HOSTS - 1}: {new:.2f} s, measured {measured_new:.2f} s"
    )


def main() -> None:
    reason = missing_requirement()
    if reason is not None:
        sys.exit(reason)
    for _ in range(int(sys.argv[1]) if len(sys.argv) > 1 else 1):
        with tempfile.TemporaryDirectory() as folder:
            print(told(resumed(Path(folder))), flush=True)


if __name__ == "__main__":
    main()
