"""A plan of machines at home as shell scripts: what to start on the root, and what on every other machine.

Sources of the arguments, read 2026-11-26: distributed-llama, README.md and src/app.cpp; llama.cpp, tools/rpc/README.md
and tools/server/README.md; TPI-LLM, README.md. No parser that could check them runs without the compiled programs.
distributed-llama counts prompt and answer in ``--steps``; its ``--workers`` reads until the next word with a dash, so
that it stands last. Of a pipeline ``--tensor-split`` lists remote machines first, then the main host's own card.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from meshplan.catalogs.untrusted.quoting import shell_word
from meshplan.planner.core.plan import Plan
from meshplan.planner.core.text import counted
from meshplan.planner.edge.spec import EdgeWorkloadSpec
from meshplan.planner.emit.artifact import Artifact, EmittedPlan, commented, stamp
from meshplan.planner.emit.text import MANIFEST_CHECK, README_FILE, plain

DLLAMA_PORT, RPC_PORT = 9999, 50052
KVSTORE_PORT = 29500  # TPI-LLM's, as its README has it
ALL_LAYERS = 999  # --gpu-layers: more than any model has
TARGETS: Mapping[str, str] = {
    "distributed-llama": "dllama on the root and on every worker",
    "llama.cpp-rpc": "llama-server on the main host, rpc-server on the others",
    "llama.cpp": "llama-server on one machine",
    "tpi-llm": "TPI-LLM's master, workers and key-value server",
}


def emit(plan: Plan, model_path: str = "") -> EmittedPlan:
    """The files of a plan with a configuration."""
    engine = str(plan.config["engine"])
    scripts = _SCRIPTS[engine](plan)
    files = [
        Artifact(path=PurePosixPath(name), content=_script(plan, name, body, model_path), executable=True)
        for name, body in scripts.items()
    ]
    return EmittedPlan(
        target=engine,
        artifacts=(Artifact(path=README_FILE, content=_readme(plan, tuple(scripts))), *files),
        parser_verified=None,
        notes=tuple(_notes(plan)),
    )


def _script(plan: Plan, name: str, body: str, model_path: str) -> str:
    model = f"MODEL=${{MODEL:-{shell_word(model_path)}}}\n" if model_path else ""
    return (
        "#!/usr/bin/env bash\n"
        + commented(stamp(plan, None))
        + f"""set -euo pipefail
here=$(cd -- "$(dirname -- "${{BASH_SOURCE[0]}}")" && pwd)
fail() {{ echo "{name}: $*" >&2; exit 1; }}
{MANIFEST_CHECK}{model}{body}"""
    )


def _others(plan: Plan, variable: str) -> str:
    """Bash that fills the array ``others`` with the machines beside the root: stated, or read from a variable."""
    machines = plan.config["machines"][1:]
    if all(machine["address"] for machine in machines):
        return f"others=({' '.join(shell_word(machine['address']) for machine in machines)})\n"
    asked = f"addresses of {counted(len(machines), 'machine')}, separated by spaces"
    return (
        f'read -r -a others <<< "${{{variable}:?{asked}}}"\n'
        f'(( ${{#others[@]}} == {len(machines)} )) || fail "{variable} must hold {asked}"\n'
    )


def _workload(plan: Plan) -> EdgeWorkloadSpec:
    return EdgeWorkloadSpec.model_validate(plan.spec.get("workload") or {})


def _context(plan: Plan) -> int:
    """Tokens of a prompt and its answer."""
    asked = _workload(plan)
    return asked.prompt_tokens + asked.generated_tokens


def _need(name: str, what: str) -> str:
    return f': "${{{name}:?{what}}}"\n'


def _distributed_llama(plan: Plan) -> dict[str, str]:
    workers = len(plan.config["machines"]) - 1
    buffer = "q80" if plan.config["weights"] == "q4_0" else "f32"
    tokens = _context(plan)
    root = _need("MODEL", "the .m file, as python launch.py of distributed-llama downloads it")
    root += _need("TOKENIZER", "the .t file beside it")
    root += _others(plan, "WORKERS") if workers else ""
    root += f"""exec "${{DLLAMA:-./dllama}}" "${{MODE:-inference}}" --model "$MODEL" --tokenizer "$TOKENIZER" \\
  --buffer-float-type {buffer} --max-seq-len {tokens} --nthreads "$(nproc)" \\
  --prompt "${{1:-Hello world}}" --steps {tokens}"""
    root += f' \\\n  --workers "${{others[@]/%/:{DLLAMA_PORT}}}"\n' if workers else "\n"
    worker = f'exec "${{DLLAMA:-./dllama}}" worker --port {DLLAMA_PORT} --nthreads "$(nproc)"\n'
    return {"root.sh": root, "worker.sh": worker} if workers else {"root.sh": root}


def _server(plan: Plan, words: Sequence[str]) -> str:
    return (
        _need("MODEL", f"a GGUF file of the model in {plan.config['weights']}")
        + (_others(plan, "SERVERS") if len(plan.config["machines"]) > 1 else "")
        + f'exec "${{LLAMA_SERVER:-llama-server}}" --model "$MODEL" --ctx-size {_context(plan)} --parallel 1 \\\n  '
        + " ".join(words)
        + ' "$@"\n'
    )


def _alone(plan: Plan) -> dict[str, str]:
    (machine,) = plan.config["machines"]
    words = [f"--gpu-layers {ALL_LAYERS}"] if machine["is_accelerator"] else ['--threads "$(nproc)"']
    return {"serve.sh": _server(plan, words)}


def _pipeline(plan: Plan) -> dict[str, str]:
    main, *remote = plan.config["machines"]
    shares = [machine["layers"] for machine in remote]
    offloaded = sum(shares) + 1  # llama.cpp counts the product with the vocabulary as one more
    if main["is_accelerator"]:
        shares, offloaded = [*shares, main["layers"] + 1], ALL_LAYERS
    else:
        shares[-1] += 1
    words = [
        f"--gpu-layers {offloaded}",
        f"--tensor-split {','.join(map(str, shares))}",
        f'--rpc "$(IFS=,; echo "${{others[*]/%/:{RPC_PORT}}}")"',
    ]
    server = f'exec "${{RPC_SERVER:-rpc-server}}" --host "${{LISTEN:-0.0.0.0}}" --port {RPC_PORT} -c\n'
    return {"main.sh": _server(plan, words), "server.sh": server}


def _tpi_llm(plan: Plan) -> dict[str, str]:
    number = len(plan.config["machines"])
    variables = f"DMLC_PS_ROOT_PORT={KVSTORE_PORT} DMLC_NUM_WORKER={number} DMLC_NUM_SERVER=1"
    generated = _workload(plan).generated_tokens
    need = _need("ROOT", "address of the master") + f'export DMLC_PS_ROOT_URI="$ROOT" {variables}\n'
    store = need + 'DMLC_ROLE=scheduler python -c "import mxnet" &\nDMLC_ROLE=server exec python -c "import mxnet"\n'
    run = (
        _need("RANK", f"0 on the master, 1 to {number - 1} on the others")
        + need
        + _need("MODEL", "folder of the checkpoint")
        + 'export DMLC_ROLE=worker RANK MASTER_ADDR="$ROOT"\n'
        + 'exec python examples/run_multihost.py --model_type llama --model_path "$MODEL" '
        + f'--length {generated} "$@"\n'
    )
    return {"store.sh": store, "machine.sh": run}


_SCRIPTS = {
    "distributed-llama": _distributed_llama,
    "llama.cpp-rpc": _pipeline,
    "llama.cpp": _alone,
    "tpi-llm": _tpi_llm,
}


def _notes(plan: Plan) -> list[str]:
    engine, found = plan.config["engine"], []
    if engine == "distributed-llama":
        found.append("Start worker.sh on every worker first; the root sends them their weights over the network.")
        found.append("MODE=chat ./root.sh talks; dllama-api takes the same arguments and answers HTTP.")
    if engine == "llama.cpp-rpc":
        found.append("Start server.sh on every server first. Its port answers anybody: keep it off open networks.")
        found.append(
            "llama-server --list-devices shows the order that --tensor-split counts in: remote ones come first."
        )
    if engine == "tpi-llm":
        found.append(
            "Run in a checkout of TPI-LLM: store.sh and machine.sh with RANK=0 on the master, then the others."
        )
    return found


def _readme(plan: Plan, scripts: Sequence[str]) -> str:
    token, rate = plan.predicted["time_per_token_s"], plan.predicted["tokens_per_s"]
    places = [_place(machine) for machine in plan.config["machines"]]
    lines = [
        f"# {plain(str(plan.provenance['model']['name']))} with {plan.config['engine']}",
        "",
        *(f"    {line}" for line in stamp(plan, None)),
        "",
        f"Expected: {rate.value:.3g} tokens/s ({rate.low:.3g} to {rate.high:.3g}), {token.value:.3g} s a token, one "
        f"request at a time; weights in {plan.config['weights']}.",
        "",
        *places,
        "",
        f"Scripts: {', '.join(f'`{name}`' for name in scripts)}. Their arguments were read in documentation, not run.",
        "",
        *(f"- {note}" for note in _notes(plan)),
    ]
    return "\n".join(lines) + "\n"


def _place(machine: Mapping[str, Any]) -> str:
    where = f" at {plain(machine['address'])}" if machine["address"] else ""
    layers = f", {counted(machine['layers'], 'layer')}" if machine.get("layers") else ""
    return f"- {machine['role']}: {plain(machine['type'])}{where}{layers}, {machine['memory_bytes'] / 1e9:.1f} GB"
