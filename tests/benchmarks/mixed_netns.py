"""Training on hosts of two types in network namespaces: python tests/benchmarks/mixed_netns.py [SCENARIO ...]

Prints, for each scenario of ``tests/support/mixed_netns.py``, steps predicted and measured of the chosen plan and eight
others, Spearman's rank correlation and the regret of the chosen plan. Needs root, ip, tc, control groups and torch;
about five minutes a scenario, and a quiet machine: steps are the shortest of a few.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from cpu_shares import missing_shares
from mixed_netns import SCENARIOS, measured, table
from netns import missing_requirement


def main() -> None:
    """Print a table for each scenario."""
    reason = missing_requirement() or missing_shares()
    if reason is not None:
        sys.exit(reason)
    asked = sys.argv[1:] or [scenario.name for scenario in SCENARIOS]
    for scenario in SCENARIOS:
        if scenario.name in asked:
            with tempfile.TemporaryDirectory() as folder:
                print(f"{scenario.name}\n\n{table(measured(scenario, Path(folder)))}\n", flush=True)


if __name__ == "__main__":
    main()
