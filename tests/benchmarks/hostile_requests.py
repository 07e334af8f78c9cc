"""Hostile bodies, headers, ids and query strings against a running service: what ends it, hangs, or gets too much?

Starts `meshplan serve` in an empty folder with a home and a database of its own, sends seeded requests from several
threads over raw connections, and prints the answers by status, complaints, tracebacks in the service's log, and the
files that were left anywhere but in the database.

    python tests/benchmarks/hostile_requests.py --requests 10000 --seed 0
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from hostile_requests import Outcome, asked, hostile_request
from service import SPEC, Client, free_port, processor_s, started

HOST, THREADS = "127.0.0.1", 4
MOST_SHOWN = 10


def send(port: int, seed: int, count: int) -> list[tuple[bytes, Outcome]]:
    """Requests of one seed, one after the other."""
    random_ = random.Random(seed)
    requests = (hostile_request(random_) for _ in range(count))
    return [(request, asked(HOST, port, request)) for request in requests]


def left_over(folder: Path, database: Path) -> list[str]:
    """Files below the folder that are not the database's."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != "log")
    return [str(path.relative_to(folder)) for path in files if not path.name.startswith(database.name)]


def main() -> None:
    """Ask, and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    port = free_port()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        database = folder / "catalog.sqlite"
        command = [sys.executable, "-m", "meshplan.cli.main", "serve", "--workers", "0", "--port", str(port)]
        environment = {**os.environ, "HOME": name, "TMPDIR": name, "PYTHONDONTWRITEBYTECODE": "1"}
        with (folder / "log").open("w") as log:
            service = subprocess.Popen(
                [*command, "--db", str(database)], cwd=folder, env=environment, stderr=log, stdout=log
            )
        try:
            started(port)
            Client(port).ask("POST", "/api/v1/estimate", SPEC)  # its processes load what they need
            began, before = time.monotonic(), processor_s(service.pid)
            with ThreadPoolExecutor(THREADS) as pool:
                each = given.requests // THREADS
                parts = pool.map(lambda one: send(port, given.seed * THREADS + one, each), range(THREADS))
                done = [pair for part in parts for pair in part]
            took = time.monotonic() - began
            alive = service.poll() is None
            used = processor_s(service.pid) - before if alive else 0.0
            started(port)
        finally:
            service.terminate()
            service.wait(60)
        told = (folder / "log").read_text(errors="replace")
        left = left_over(folder, database)
    complaints = [(request, found) for request, one in done if (found := one.complaint())]
    statuses = Counter(one.status or "closed" for _, one in done)
    slowest = max(one.seconds for _, one in done)
    print(f"{len(done)} requests in {took:.0f} s (main process {used:.1f} s), slowest {slowest:.2f} s")
    print(f"answers by status: {dict(sorted(statuses.items(), key=str))}")
    print(f"alive after all: {alive}; tracebacks in the log: {told.count('Traceback')}; files outside: {left}")
    print(f"complaints: {len(complaints)}")
    for request, found in complaints[:MOST_SHOWN]:
        print(f"    {request[:200]!r}\n    → {found}")
    if "Traceback" in told:
        print(told[-2000:])


if __name__ == "__main__":
    main()
