"""A service under load: estimates of many clients at once, and questions of which each must be answered once.

Starts `meshplan serve` on a free port with a database of its own. Prints requests, errors, seconds for each, and how
many plans and jobs the questions left behind; then for each page the service's time and, with a Chromium and
playwright, the time until the first paint.

    python tests/benchmarks/service.py --clients 64 --requests 50 --questions 8
    python tests/benchmarks/service.py --pages-only
"""

from __future__ import annotations

import argparse
import http.client
import importlib.util
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

SPEC: dict[str, Any] = {
    "kind": "training",
    "model": "llama-3.1-8b",
    "cluster": {"nodes": [{"type": "dgx-h100", "count": 1}]},
    "workload": {"sequence_length": 4096, "global_batch_size": 64},
    "fixed": {"pipeline_parallel": 1, "context_parallel": 1},
}
HEADERS = {"content-type": "application/json"}


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


class Client:
    """One connection that is kept open."""

    def __init__(self, port: int) -> None:
        self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)

    def ask(self, method: str, path: str, document: Any = None) -> tuple[int, Any]:
        body = None if document is None else json.dumps(document)
        self.connection.request(method, path, body, HEADERS)
        response = self.connection.getresponse()
        return response.status, json.loads(response.read())


def started(port: int) -> None:
    for _ in range(3000):
        try:
            if Client(port).ask("GET", "/healthz")[0] == 200:
                return
        except OSError:
            time.sleep(0.1)
    raise SystemExit("the service does not answer")


def processor_s(pid: int) -> float:
    """Processor seconds that a process has used, without its children; 0 where the system does not tell."""
    file = Path(f"/proc/{pid}/stat")
    if not file.exists():
        return 0.0
    user, system = file.read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def estimates(port: int, clients: int, requests: int, *, pid: int, different: bool = False) -> None:
    """Estimates, of four questions or each of another one."""
    seconds: list[float] = []
    statuses: Counter[int] = Counter()

    def work(number: int) -> None:
        client = Client(port)
        for request in range(requests):
            degrees = {**SPEC["fixed"], "tensor_parallel": 2 ** ((number + request) % 4)}
            spec = {**SPEC, "fixed": degrees}
            if different:
                spec["workload"] = {**SPEC["workload"], "global_batch_size": 64 * (1 + number * requests + request)}
            began = time.perf_counter()
            status, _ = client.ask("POST", "/api/v1/estimate", spec)
            seconds.append(time.perf_counter() - began)
            statuses[status] += 1

    began, service_s, own_s = time.perf_counter(), processor_s(pid), time.process_time()
    run_all(work, clients)
    took = time.perf_counter() - began
    used_s, clients_s = processor_s(pid) - service_s, time.process_time() - own_s
    cuts = statistics.quantiles(seconds, n=100)
    print(
        f"estimates, {'all of another question' if different else 'of four questions'}: {len(seconds)} of "
        f"{clients} clients in {took:.1f} s ({len(seconds) / took:.0f}/s), statuses "
        f"{dict(statuses)}, p50 {cuts[49] * 1e3:.0f} ms, p95 {cuts[94] * 1e3:.0f} ms, p99 {cuts[98] * 1e3:.0f} ms; "
        f"processor: the service's main process {used_s:.2f} s, the clients {clients_s:.2f} s"
    )


def questions(port: int, clients: int, number: int) -> None:
    """Every client asks every question; each is searched once."""
    plans: list[str] = []

    def work(_: int) -> None:
        client = Client(port)
        for seed in range(number):
            status, found = client.ask("POST", f"/api/v1/plans?seed={seed}", SPEC)
            while status != 200 or "spec" not in found:
                if status == 202 or found.get("state") in ("queued", "running"):
                    time.sleep(0.2)
                    status, found = client.ask("GET", f"/api/v1/jobs/{found['job_id']}")
                elif found.get("state") == "done":
                    status, found = client.ask("GET", found["plan"])
                else:
                    raise SystemExit(f"{status}: {found}")
            plans.append(found["plan_id"])

    began = time.perf_counter()
    run_all(work, clients)
    jobs = Client(port).ask("GET", "/healthz")[1]["jobs"]
    stored = Client(port).ask("GET", "/api/v1/plans")[1]["total"]
    print(
        f"questions: {number} of {clients} clients each in {time.perf_counter() - began:.1f} s: {len(plans)} answers, "
        f"{len(set(plans))} plans, {stored} stored, jobs {jobs}"
    )


def stored_plan(port: int) -> str:
    """The id of a plan of the benchmark's question."""
    client = Client(port)
    status, found = client.ask("POST", "/api/v1/plans", SPEC)
    while status == 202 or found.get("state") in ("queued", "running"):
        time.sleep(0.2)
        status, found = client.ask("GET", f"/api/v1/jobs/{found['job_id']}")
    return str(found.get("plan_id"))


def pages(port: int, repeats: int) -> None:
    """Seconds of the service, and until a browser paints, for every kind of page."""
    plan_id = stored_plan(port)
    paths = (
        "/",
        f"/plans/{plan_id}",
        f"/plans/{plan_id}/what-if",
        f"/plans/{plan_id}/what-if/figures?batch=128",
        "/plans",
        "/catalog",
        "/catalog/devices/h100-sxm-80gb",
        "/runs",
    )
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    for path in paths:
        seconds, size = [], 0
        for _ in range(repeats + 1):  # the first loads what later ones find
            began = time.perf_counter()
            connection.request("GET", path, headers={"accept": "text/html"})
            response = connection.getresponse()
            size = len(response.read())
            if response.status != 200:
                raise SystemExit(f"{path}: {response.status}")
            seconds.append(time.perf_counter() - began)
        cuts = sorted(seconds[1:])
        print(f"{path}: median {statistics.median(cuts) * 1e3:.0f} ms, worst {cuts[-1] * 1e3:.0f} ms, {size:,} bytes")
    seconds = []
    for place in range(repeats):
        began = time.perf_counter()
        connection.request("GET", f"/plans/{plan_id}/what-if/figures?batch={16 * (place + 1)}")
        connection.getresponse().read()
        seconds.append(time.perf_counter() - began)
    print(
        f"a slider at a new place: median {statistics.median(seconds) * 1e3:.0f} ms, worst {max(seconds) * 1e3:.0f} ms"
    )
    paints(port, (path for path in paths if "figures" not in path), repeats)


def paints(port: int, paths: Iterable[str], repeats: int) -> None:
    """Time from a click to the first paint, in a new browser context each, so that nothing is in its cache."""
    browser_path = shutil.which("chromium")
    if browser_path is None or importlib.util.find_spec("playwright") is None:
        print("first paint: not measured, no Chromium or no playwright here")
        return
    from playwright.sync_api import sync_playwright

    first = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime"
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=browser_path, args=["--no-sandbox", "--disable-gpu"])
        for path in paths:
            found = []
            for _ in range(repeats):
                context = browser.new_context()
                page = context.new_page()
                page.goto(f"http://127.0.0.1:{port}{path}")
                page.wait_for_timeout(200)
                found.append(page.evaluate(first))
                context.close()
            known = [one for one in found if one is not None]
            print(f"{path}: first paint {statistics.median(known):.0f} ms, worst {max(known):.0f} ms")
        browser.close()


def run_all(work: Any, clients: int) -> None:
    threads = [threading.Thread(target=work, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--requests", type=int, default=50)
    parser.add_argument("--questions", type=int, default=8)
    parser.add_argument("--pages-only", action="store_true")
    parser.add_argument("--repeats", type=int, default=10)
    given = parser.parse_args()
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "meshplan.cli.main", "serve", "--port", str(port)]
        service = subprocess.Popen([*command, "--db", str(Path(folder) / "catalog.sqlite")])
        try:
            started(port)
            if not given.pages_only:
                estimates(port, 4, 8, pid=service.pid)  # its processes load what they need
                estimates(port, given.clients, given.requests, pid=service.pid)
                estimates(port, given.clients, given.requests, pid=service.pid, different=True)
                questions(port, given.clients, given.questions)
            pages(port, given.repeats)
        finally:
            service.terminate()
            service.wait(60)


if __name__ == "__main__":
    main()
