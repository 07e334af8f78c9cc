"""Does the service do what `/openapi.json` says? Schemathesis asks it everything that the document allows, and more.

Needs `pip install schemathesis`. Starts `meshplan serve` without workers on a database of its own. A question that
conforms to its schema may still be refused with 422, as the document says (a model that the catalog lacks, keys that
exclude each other), so this is no failure here; what such a refusal may never say, that something is missing or
unknown, is held by `tests/cli/web/test_openapi.py`. Events of a job, which are a stream, are left out.

    python tests/benchmarks/api_conformance.py --examples 10 --seed 1 [-- --include-path /api/v1/estimate]
"""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys
import tempfile
from pathlib import Path

from service import free_port, started

PHASES = "examples,coverage,fuzzing"
CONFIGURATION = """
[checks.positive_data_acceptance]
expected-statuses = ["2xx", "3xx", "401", "403", "404", "409", "422", "429", "5xx"]
"""


def main() -> None:
    """Print schemathesis' report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--examples", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("more", nargs="*", help="further words for schemathesis")
    given = parser.parse_args()
    if importlib.util.find_spec("schemathesis") is None:
        raise SystemExit("needs schemathesis: pip install schemathesis")
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "schemathesis.toml").write_text(CONFIGURATION)
        serve = [sys.executable, "-m", "meshplan.cli.main", "serve", "--workers", "0", "--port", str(port)]
        service = subprocess.Popen([*serve, "--db", str(Path(folder) / "catalog.sqlite")])
        words = ["run", f"http://127.0.0.1:{port}/openapi.json", "-n", given.examples, "--seed", given.seed]
        words += ["--phases", PHASES, "--exclude-path-regex", "events$", *given.more]
        try:
            started(port)
            script = "from schemathesis.cli import schemathesis; schemathesis()"
            done = subprocess.run([sys.executable, "-c", script, *map(str, words)], cwd=folder, check=False)
        finally:
            service.terminate()
            service.wait(60)
    raise SystemExit(done.returncode)


if __name__ == "__main__":
    main()
