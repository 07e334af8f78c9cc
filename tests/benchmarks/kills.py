"""Kills a command that writes a folder at random moments: how many folders are partial, mixed or lost.

python tests/benchmarks/kills.py --kills 1000 --seed 0
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SPEC = """\
kind: training
model: llama-3.1-8b
cluster: {nodes: [{type: dgx-h100, count: 1}]}
workload: {sequence_length: 4096, global_batch_size: 64}
"""
# Forks of one process that has everything imported: a kill then falls into the writing, not into the imports.
WRITER = """
import os, sys
from pathlib import Path
from meshplan.planner.service import emit_plan, load_catalog, make_plan, write_files
import yaml
plan = make_plan(yaml.safe_load(Path("spec.yaml").read_text()), load_catalog("catalog.sqlite"))
catalog = load_catalog("catalog.sqlite")
emitted = [emit_plan(plan, "torchrun", catalog, script=script) for script in ("one.py", "two.py")]
print("ready", flush=True)
for number, line in enumerate(sys.stdin):
    child = os.fork()
    if child == 0:
        write_files(emitted[number % 2], "out", force=True)
        os._exit(0)
    print(child, flush=True)
    _, status = os.waitpid(child, 0)
    print(status, flush=True)
"""


def state(folder: Path) -> str:
    """``absent``, ``complete`` (every file as the manifest says, and no other), or ``partial``."""
    if not folder.exists():
        return "absent"
    listed = {line.split("  ")[1] for line in (folder / "SHA256SUMS").read_text().splitlines()}
    there = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    check = ["sha256sum", "--check", "--quiet", "--strict", "SHA256SUMS"]
    sound = subprocess.run(check, cwd=folder, capture_output=True, check=False).returncode == 0
    return "complete" if sound and there == listed | {"SHA256SUMS"} else "partial"


def main() -> None:
    """Write, kill, look."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    random_ = random.Random(options.seed)
    counts: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "spec.yaml").write_text(SPEC)
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER], cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        if writer.stdin is None or writer.stdout is None:
            raise SystemExit("no pipes")
        writer.stdout.readline()
        killed = was_there = 0
        while killed < options.kills:
            writer.stdin.write("go\n")
            writer.stdin.flush()
            child = int(writer.stdout.readline())
            time.sleep(random_.random() * 0.03)
            subprocess.run(["kill", "-9", str(child)], check=False, capture_output=True)
            killed += int(writer.stdout.readline()) != 0
            found = state(folder / "out")
            lost = found == "absent" and was_there
            was_there = was_there or found == "complete"
            counts["lost" if lost else found] = counts.get("lost" if lost else found, 0) + 1
        writer.stdin.write("go\n")
        writer.stdin.flush()
        writer.stdout.readline(), writer.stdout.readline()
        left = [path.name for path in folder.iterdir() if ".meshplan-" in path.name]
        writer.stdin.close()
        writer.wait()
    print(f"{killed} kills: {counts}; temporaries after the next command: {len(left)}")


if __name__ == "__main__":
    main()
