"""Kills writing commands at random moments: what is lost, what is partial, what is left after the next command.

One warm process forks a child a command, so that a kill falls into the command and not into its imports: it loads
what a first run of the command has loaded. A file is
absent, old or new, never between; the database passes its integrity check and keeps every plan that was stored before;
the next command succeeds and leaves no temporary file.

python tests/benchmarks/command_kills.py --kills 1000 --seed 0 --commands 'picture,calibrate'
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import random
import signal
import sqlite3
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from fuzz_readers import readers

SPEC = """\
kind: training
model: llama-3.1-8b
cluster: {nodes: [{type: dgx-h100, count: 1}]}
workload: {sequence_length: 4096, global_batch_size: 64}
fixed: {tensor_parallel: 8}
"""
SERVING = """\
kind: serving
model: llama-3.1-8b
cluster: {nodes: [{type: dgx-h100, count: 1}]}
workload: {input_length: 256, output_length: 32, concurrency: 4, num_requests: 200}
fixed: {tensor_parallel: 1, num_workers: 1}
"""


@dataclass(frozen=True)
class Case:
    """One writing command.

    Args:
        name: what is printed.
        words: of the command; ``{n}`` is the number of the attempt.
        file: what it writes beside the database; empty for nothing.
        is_whole: whether a file is complete.
    """

    name: str
    words: tuple[str, ...]
    file: str = ""
    is_whole: Callable[[str], bool] = bool


CASES = (
    Case("plan", ("plan", "spec.yaml", "--tag", "tag{n}")),
    Case("plans tag", ("plans", "tag", "latest", "other{n}")),
    Case("plans record", ("plans", "record", "measured", "--from", "log.txt")),
    Case("catalog import", ("catalog", "import", "entries.yaml")),
    Case(
        "catalog export",
        ("catalog", "export", "-o", "out.yaml", "--force"),
        "out.yaml",
        lambda text: text.endswith("\n"),
    ),
    Case(
        "picture",
        ("explain", "served", "--pareto", "page.html", "--force"),
        "page.html",
        lambda text: text.rstrip().endswith("</html>"),
    ),
    Case("calibrate", ("calibrate", "--recorded")),
)  # fmt: skip - a command with its words on one line


LOADED = Path("modules.txt")


def in_child(words: Sequence[str]) -> int:
    """Begin a command in a fork; its process id."""
    child = os.fork()
    if child:
        return child
    from meshplan.cli.main import run

    with Path("said").open("w") as said:
        os.dup2(said.fileno(), 1)
        os.dup2(said.fileno(), 2)
        code = 0
        try:
            run(list(words))
        except SystemExit as exit_:
            code = int(exit_.code or 0)
        sys.stdout.flush()
        LOADED.write_text("\n".join(sys.modules))
        os._exit(code)


def done(words: Sequence[str]) -> tuple[int, float]:
    """(exit code, seconds) of a command that nobody kills."""
    started = time.monotonic()
    _, status = os.waitpid(in_child(words), 0)
    return os.waitstatus_to_exitcode(status), time.monotonic() - started


def load_what_it_loaded() -> None:
    """Modules of the child that ended last, for those that come."""
    for name in LOADED.read_text().split():
        if name.startswith(("meshplan.", "numpy.", "scipy.", "sqlalchemy.", "rich.", "yaml.")):
            with contextlib.suppress(ImportError):
                importlib.import_module(name)


def wrong_of_store(known: set[str]) -> Iterator[str]:
    """What the database lost; ``known`` grows by the plans that are there."""
    with sqlite3.connect("catalog.sqlite") as connection:
        if connection.execute("pragma integrity_check").fetchone() != ("ok",):
            yield "damaged"
        there = {row[0] for row in connection.execute("select plan_id from plans")}
    if known - there:
        yield "lost"
    known |= there


def attack(case: Case, kills: int, draw: random.Random) -> Counter[str]:
    """Kill the command until it was killed often enough."""
    counts: Counter[str] = Counter()
    known: set[str] = set()
    for attempt in ("first", "again"):  # the second has its modules: as long as those that are killed
        code, seconds = done([word.format(n=attempt) for word in case.words])
        if code:
            raise SystemExit(f"{case.name}: exit {code}\n{Path('said').read_text()}")
        load_what_it_loaded()
    number = 0
    while counts["killed"] < kills:
        number += 1
        child = in_child([word.format(n=number) for word in case.words])
        time.sleep(draw.random() * seconds)
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        counts["killed" if os.WIFSIGNALED(status) else "was faster"] += 1
        counts.update(wrong_of_store(known))
        if case.file and Path(case.file).exists() and not case.is_whole(Path(case.file).read_text()):
            counts["partial"] += 1
        if case.file and not Path(case.file).exists():
            counts["lost"] += 1
    code, _ = done([word.format(n="last") for word in case.words])
    counts["next command fails"] += code != 0
    counts["temporaries"] += sum(".meshplan-" in path.name or path.name.endswith(".tmp") for path in Path().iterdir())
    return +counts


def main() -> None:
    """A line a command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=1000, help="of all commands together")
    parser.add_argument("--seed", type=int, default=0)
    names = [case.name for case in CASES]
    parser.add_argument("--commands", default=",".join(names), help="with commas between them; else all")
    options = parser.parse_args()
    chosen = [case for case in CASES if case.name in options.commands.split(",")]
    if len(chosen) != len(options.commands.split(",")):
        parser.error(f"--commands are of {names}")
    draw = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as name:
        os.chdir(name)
        os.environ["MESHPLAN_DB"] = f"{name}/catalog.sqlite"
        os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")
        texts = {reader.name: reader.text for reader in readers()}
        files = {"entries.yaml": texts["catalog"], "log.txt": texts["training log"]}
        for file, text in {"spec.yaml": SPEC, "serving.yaml": SERVING, **files}.items():
            Path(file).write_text(text)
        import meshplan.planner.service  # noqa: F401 - the children have it loaded

        pinned = ("plan", "spec.yaml", "--set")
        for words in (
            (*pinned, "fixed.tensor_parallel=4", "--tag", "measured"),
            ("plan", "serving.yaml", "--tag", "served"),
            (*pinned, "fixed.tensor_parallel=2"),  # the latest, which is renamed
        ):
            if code := done(words)[0]:
                raise SystemExit(f"exit {code}\n{Path('said').read_text()}")
        for case in chosen:
            print(f"{case.name:15} {dict(attack(case, -(-options.kills // len(chosen)), draw))}", flush=True)


if __name__ == "__main__":
    main()
