"""Forged plans and mutated inputs over every reader: how many are bugs, slow, large, or leave something behind.

One warm process forks children with limits on time and memory, fifty inputs each, so that an input costs what its
commands cost; an input that ends its child or hangs costs only itself. Prints a line a reader: the exit codes, and the
inputs of more than 10 s of CPU, of more than 2 GiB, that hang (60 s), that end by a signal, or with a payload in
any output. What an input did when it hung stands under its line. A long run can be cut into readers.

    python tests/benchmarks/fuzz.py --forged 2000 --mutated 20000 --seed 0
    python tests/benchmarks/fuzz.py --mutated 20000 --readers 'spec,import script'
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import functools
import gc
import itertools
import json
import os
import random
import re
import resource
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from fuzz_readers import SERVING, TRAINING, Reader, mutated, readers, reshaped
from hostile import CANARY, HOSTILE_TEXTS, forged, places, random_forgery

ROOT = Path(__file__).parents[2]
MOST_S, MOST_BYTES, HANGS_S = 10.0, 2 * 2**30, 60.0
TARGETS = ("torchrun", "slurm", "kubernetes", "megatron", "torchtitan", "skypilot", "vllm", "sglang", "trtllm",
           "dynamo", "kserve", "lws", "ray", "llm-d")  # fmt: skip
BAD = ("slow", "large", "payload", "hangs", "signals")
BATCH = 50  # inputs of one child
EXIT_BUG = 1
_STEERING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")
# What a child does with one input; its exit codes come back.
Job = Callable[[], list[int]]


def run_one(arguments: Sequence[str]) -> int:
    """One command in this process, its streams in the files ``out`` and ``err``; its exit code."""
    from meshplan.cli.main import run

    with Path("out").open("a", encoding="utf-8") as stdout, Path("err").open("a", encoding="utf-8") as stderr:
        before = sys.stdout, sys.stderr
        sys.stdout, sys.stderr = stdout, stderr
        try:
            run(list(arguments))
        except SystemExit as exit_:
            return int(exit_.code or 0)
        finally:
            sys.stdout, sys.stderr = before
    return 0


def run_body(reader: Reader) -> int:
    """A body of the HTTP API; a refusal in words is what a client may get."""
    from meshplan.catalogs.errors import MeshplanError

    if reader.body is None:
        raise ValueError(reader.name)
    try:
        reader.body(Path(reader.file).read_bytes())
    except MeshplanError as error:
        return error.exit_code
    except Exception as error:  # noqa: BLE001 - what the service would answer with 500
        Path("err").write_text(f"{type(error).__name__}: {error}\n")
        return EXIT_BUG
    return 0


def payload(folder: Path) -> bool:
    """Whether an output steers a terminal, a page runs a script, or a canary was made."""
    texts = [(folder / name).read_text(encoding="utf-8", errors="replace") for name in ("out", "err")
             if (folder / name).exists()]  # fmt: skip
    pages = [path.read_text(encoding="utf-8", errors="replace") for path in folder.rglob("*.html")]
    return (
        any(_STEERING.search(text) for text in texts)
        or any("<script" in page for page in pages)
        or any(folder.rglob(CANARY))
    )


def broken_scripts(folder: Path) -> bool:
    """Whether an emitted shell script is none; and what its first lines do, which stop without a host's number."""
    for path in (*folder.glob("files/**/*.sh"), *folder.glob("others/**/*.sh")):
        if subprocess.run(["bash", "-n", path], capture_output=True, check=False).returncode:
            return True
        if path.name == "launch.sh":
            subprocess.run(["bash", path], cwd=path.parent, capture_output=True, check=False, timeout=20,
                           env={"PATH": "/usr/bin:/bin"})  # fmt: skip
    return False


def clean(folder: Path) -> None:
    """Nothing of the input before is left."""
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def answer(job: Job, folder: Path) -> dict[str, Any]:
    """Run one input in this process: exit codes, what is wrong, the message of a bug."""
    from meshplan.planner.core import budget

    clean(folder)
    budget._STAT, budget._LOADED = folder / "none", time.monotonic()  # each input's time limit begins with it
    started = time.process_time()
    codes = job()
    return {
        "codes": codes,
        "slow": time.process_time() - started > MOST_S,
        "large": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 > MOST_BYTES,
        "payload": payload(folder) or broken_scripts(folder),
        "bug": (folder / "err").read_text(errors="replace")[:400] if EXIT_BUG in codes else "",
    }


def where(child: int, folder: Path) -> str:
    """What a child that hangs does at this moment: its stack, innermost call first."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, signal.SIGUSR1)
    time.sleep(1)
    return Path(f"{folder}.stack").read_text(errors="replace")[:2000]


def in_child(jobs: Sequence[Job], folder: Path) -> Iterator[dict[str, Any]]:
    """Run inputs in a child, one after the other, until it has done all, hangs or ends by a signal."""
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        os.close(receive)
        os.chdir(folder)
        resource.setrlimit(resource.RLIMIT_AS, (3 * MOST_BYTES, 3 * MOST_BYTES))
        with Path(f"{folder}.stack").open("w") as stack:
            faulthandler.register(signal.SIGUSR1, stack)
            for job in jobs:
                os.write(send, json.dumps(answer(job, folder)).encode() + b"\n")
        os._exit(0)
    os.close(send)
    with os.fdopen(receive, "rb", buffering=0) as lines:
        for _ in jobs:
            is_there, _, _ = select.select([lines], [], [], HANGS_S)
            line = lines.readline() if is_there else b""
            if not line:
                bad, bug = ("signals", "") if is_there else ("hangs", where(child, folder))
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child, signal.SIGKILL)
                yield {"codes": [], bad: True, "bug": bug}
                break
            yield json.loads(line)
    os.waitpid(child, 0)


def at(document: Any, path: Sequence[Any]) -> Any:
    """The value of a field."""
    for part in path:
        document = document[part]
    return document


def forged_jobs(documents: Sequence[dict[str, Any]], random_: random.Random) -> Iterator[tuple[bytes, Job]]:
    """Forged plan files, shown, explained, emitted and drawn."""
    while True:
        document = random_.choice(documents)
        texts = [path for path in places(document) if isinstance(at(document, path), str) and path != ("plan_id",)]
        content = json.dumps(
            forged(document, random_.choice(texts), random_.choice(HOSTILE_TEXTS))  # a text for a text may be read
            if random_.random() < 0.5
            else random_forgery(document, random_)
        ).encode()
        where = ("--target", random_.choice(TARGETS), "--script", "train.py", "--image", "registry/image:1")
        file = "./plan.json"
        lines = (
            ("plans", "show", file),
            ("explain", file),
            ("emit", file, "--out", "files"),
            ("emit", file, "--out", "others", *where[: random_.choice((2, 4, 6))]),
            ("explain", file, "--pareto", "page.html"),
            ("plans", "show", file, "-f", "csv"),
            ("plans", "show", file, "-f", "markdown"),
        )

        def job(content: bytes = content, lines: Sequence[Sequence[str]] = lines) -> list[int]:
            Path("plan.json").write_bytes(content)
            return [run_one(line) for line in lines]

        yield content, job


def mutated_jobs(reader: Reader, random_: random.Random) -> Iterator[tuple[bytes, Job]]:
    """One edited text after the other: as text, and in turn as a document whose values have other shapes."""
    for edit in itertools.cycle((mutated, reshaped)):
        content = edit(reader.text, random_)

        def job(content: bytes = content) -> list[int]:
            reader.write(Path(), content)
            return [run_body(reader)] if reader.body is not None else [run_one(line) for line in reader.commands]

        yield content, job


def warm(folder: Path, database: Path, chosen: Sequence[Reader]) -> list[dict[str, Any]]:
    """Answer every sound text in this process: modules and tables are there for the children. Plans of each kind.

    Raises:
        SystemExit: a sound text is refused; its mutations would test little.
    """
    os.environ["MESHPLAN_DB"] = f"{database}"
    os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")  # a process with threads is not one to fork
    os.chdir(folder)
    import typer.main

    typer.main.get_command = functools.cache(typer.main.get_command)  # a third of what a small command costs
    for text, tag in ((TRAINING, "base"), (SERVING, "served")):
        Path("base.yaml").write_text(text)
        run_one(("plan", "base.yaml", "--tag", tag))
    documents = []
    for name in ("example", "serving", "allocation"):
        Path("out").unlink(missing_ok=True)
        run_one(("plan", str(ROOT / f"{name}.yaml"), "--no-store", "--format", "json"))
        documents.append(json.loads(Path("out").read_text()))
    for reader in chosen:
        reader.write(folder, reader.text.encode())
        for line in reader.commands:
            # A time limit counts from the start of the process, which this one's children begin anew.
            Path("err").unlink(missing_ok=True)
            if code := run_one([word if word != "5" else "3600" for word in line]):
                raise SystemExit(f"{reader.name}: {' '.join(line)}: exit {code}\n{Path('err').read_text()}")
    return documents


def answers(jobs: Sequence[tuple[bytes, Job]], folder: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Inputs with what they did; after one that ended its child the rest run in a new one."""
    done = 0
    while done < len(jobs):
        batch = jobs[done : done + BATCH]
        for found in in_child([job for _, job in batch], folder):
            yield jobs[done][0], found
            done += 1


def attack(name: str, jobs: Iterator[tuple[bytes, Job]], count: int, folder: Path, keep: Path | None) -> None:
    """``count`` inputs of one reader; prints its line, and each message of a bug once."""
    total: Counter[str] = Counter()
    bugs: Counter[str] = Counter()
    started, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    for number, (content, found) in enumerate(answers(list(itertools.islice(jobs, count)), folder)):
        total.update(f"exit {code}" for code in found["codes"])
        bad = [what for what in BAD if found.get(what)]
        total.update(bad)
        bugs.update([found["bug"]] if found["bug"] else [])
        if keep is not None and (bad or bugs[found["bug"]] == 1):
            (keep / f"{name.replace(' ', '-')}-{number}").write_bytes(content)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    exits = ", ".join(f"{key}: {value}" for key, value in sorted(total.items()) if key.startswith("exit"))
    took = f"{cpu_s:.0f} CPU-s, {time.monotonic() - started:.0f} s"
    print(f"{name:13} {count} inputs; {exits}; { {what: total[what] for what in BAD} }; {took}", flush=True)
    for text, times in sorted(bugs.items())[:10]:
        print(f"    {times} × {text.strip()}", flush=True)


def main() -> None:
    """Forge, mutate, count."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--forged", type=int, default=2000)
    parser.add_argument("--mutated", type=int, default=20_000, help="of all readers together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--readers", default="", help="names with commas between them, `plan` for the forged; else all")
    parser.add_argument("--keep", type=Path, help="folder for the inputs that did harm")
    options = parser.parse_args()
    every = readers()
    names = {"plan", *(reader.name for reader in every)}
    wanted = set(filter(None, options.readers.split(","))) or names
    if wanted - names:
        parser.error(f"no reader {sorted(wanted - names)}; there are {sorted(names)}")
    chosen = [reader for reader in every if reader.name in wanted]
    keep = None if options.keep is None else options.keep.resolve()
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        folder, database = Path(name) / "work", Path(name) / "catalog.sqlite"
        folder.mkdir()
        documents = warm(folder, database, chosen)
        threads = len(list(Path("/proc/self/task").iterdir()))
        print(f"{len(chosen)} readers; {threads} thread in the process that forks", flush=True)
        gc.collect()
        gc.freeze()
        if "plan" in wanted:
            attack("plan", forged_jobs(documents, random.Random(options.seed)), options.forged, folder, keep)
        for place, reader in enumerate(every):
            if reader in chosen:
                jobs = mutated_jobs(reader, random.Random(options.seed * 1_000_003 + place))
                attack(reader.name, jobs, -(-options.mutated // len(every)), folder, keep)


if __name__ == "__main__":
    main()
