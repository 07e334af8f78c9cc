"""torchrun, deepspeed, accelerate, srun, python: how many processes a command starts, and which program."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from meshplan.catalogs.errors import Problem
from meshplan.planner.emit.terms import Arguments, count
from meshplan.planner.emit.training.torchtitan import SUBCOMMAND
from meshplan.planner.imports.reading import Launch

# Options of the launchers by what they set, the nearest to the program first: srun starts torchrun, not the reverse.
_HOSTS = ("--nnodes", "--num-nodes", "--num-machines", "--nodes", "-N")
_PER_HOST = ("--nproc-per-node", "--num-gpus", "--gpus-per-node", "--ntasks-per-node")
_ALL = ("--num-processes",)
_TASKS = ("--ntasks",)
_TORCHRUN = ("torchrun", "torch.distributed.run", "torch.distributed.launch")
# Programs that are started by their name.
_PROGRAMS = frozenset(
    {"vllm", "sglang", "trtllm-serve", "llama-server", "axolotl", "tune", "llamafactory-cli", "swift"}
)
_LAUNCHERS = ("torchrun", "deepspeed", "accelerate")
_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")
_SHORT = {"-n": "--ntasks", "-np": "--ntasks", "--np": "--ntasks", "-H": "--hostfile"}


def split_options(words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Flags with their values (``""`` for a switch), and the words of the command that belong to no flag.

    Args:
        words: arguments of a program. A flag given twice keeps its last value, as in argparse.

    >>> split_options(["--lr", "1e-4", "--bf16", "--data=a b", "extra"])
    ({'--lr': '1e-4', '--bf16': '', '--data': 'a b extra'}, [])
    """
    options: dict[str, str] = {}
    loose: list[str] = []
    flag = ""
    values: list[str] = []
    for word in words:
        if _is_flag(word) or word.startswith(SUBCOMMAND):
            if flag:
                options[flag] = " ".join(values)
            name, sign, value = word.partition("=")
            flag, values = (name, [value]) if sign else (word, [])
        elif flag:
            values.append(word)
        else:
            loose.append(word)
    if flag:
        options[flag] = " ".join(values)
    return options, loose


def repeated_flags(words: Iterable[str]) -> list[str]:
    """Flags that stand there more than once."""
    seen: set[str] = set()
    found = []
    for word in words:
        name = word.partition("=")[0]
        if _is_flag(word) and name in seen and name not in found:
            found.append(name)
        seen.add(name)
    return found


def read_launch(words: Sequence[str], batch_options: Sequence[str] = ()) -> Launch:
    """Where the program begins, and how many processes run it.

    Args:
        words: one command.
        batch_options: of ``#SBATCH`` lines: the defaults of what the command leaves out.
    """
    start = _program_start(words)
    head, program = words[:start], tuple(words[start:])
    own, _ = split_options(_dashed(head))
    batch, _ = split_options(_dashed(batch_options))
    problems: list[Problem] = []
    hosts = _number(own, _HOSTS, problems)
    takes_all = _takes_all(own)
    per_host = None if takes_all else _number(own, _PER_HOST, problems)
    total = _number(own, _ALL, problems)
    is_torchrun = any(word.rsplit("/", 1)[-1] in _TORCHRUN for word in head)
    if total is None and not is_torchrun:  # a task is an agent there, and a rank elsewhere
        total = _number(own, _TASKS, problems)
    batch_hosts = _number(batch, _HOSTS, problems)
    if hosts is None:
        # torchrun's default; deepspeed's where no hostfile names others.
        is_local = is_torchrun or (any(word.rsplit("/", 1)[-1] == "deepspeed" for word in head) and not _hostfile(own))
        is_stated = any(name in own for name in _HOSTS)  # by a number that only a shell knows
        hosts = batch_hosts if batch_hosts is not None else 1 if is_local and not is_stated else None
    elif batch_hosts is not None and hosts != batch_hosts:
        problems.append(Problem(path="cluster", message=f"#SBATCH asks for {batch_hosts} nodes, the launcher {hosts}"))
    if per_host is None:
        per_host = _number(batch, _PER_HOST, problems)
    if per_host is None and is_torchrun and not takes_all:
        per_host = 1
    if total is None and hosts is not None and per_host is not None:
        total = hosts * per_host
    elif total is not None and hosts and per_host is None:
        per_host = total // hosts
    if total is not None and hosts is not None and per_host is not None and total != hosts * per_host:
        problems.append(
            Problem(path="cluster", message=f"{hosts} hosts × {per_host} processes are not the {total} that are named")
        )
    return Launch(
        program=program,
        options=own,
        launcher=next((name for name in map(_base, head) if name in _LAUNCHERS), ""),
        num_hosts=hosts,
        devices_per_host=per_host,
        takes_all=takes_all,
        num_devices=total,
        problems=tuple(problems),
    )


def _takes_all(options: Arguments) -> bool:
    """Whether a host starts a process per device: torchrun's words, or a count of ``nvidia-smi``'s lines."""
    values = [str(options[name]) for name in _PER_HOST if name in options]
    return any(value in {"gpu", "auto"} or value.startswith(("$(", "`")) for value in values)


def _hostfile(options: Arguments) -> bool:
    """Whether deepspeed is told of other hosts."""
    return any(name in options for name in ("--hostfile", "--include", "-i"))


def _program_start(words: Sequence[str]) -> int:
    """Index of the script or module that is started; 0 where no launcher stands before it."""
    for place, word in enumerate(words):
        is_module = word in {"-m", "--module"} and place + 1 < len(words)
        if is_module and words[place + 1].startswith("-"):  # a switch of accelerate's; the module comes later
            return next((at for at in range(place, len(words)) if _is_module(words[at])), place + 1)
        if is_module and not words[place + 1].startswith(_TORCHRUN[1:]):
            return place + 1
        if word.endswith(".py") or _base(word) in _PROGRAMS:
            return place
    return 0


def _is_module(word: str) -> bool:
    """Whether a word is a module's dotted name, and not an address or a file."""
    return _MODULE.fullmatch(word) is not None and not word.endswith((".yaml", ".yml", ".json"))


def _base(word: str) -> str:
    """A program's name without its folder."""
    return word.rsplit("/", 1)[-1]


def _is_flag(word: str) -> bool:
    """A dash and a letter: ``-1`` is a value."""
    return len(word) > 1 and word[0] == "-" and not word[1].isdigit() and word[1] != "."


def _dashed(words: Sequence[str]) -> list[str]:
    """Both spellings of a launcher's options as one."""
    dashed = []
    for word in words:
        name, sign, value = word.partition("=")
        known = _SHORT.get(name, name.replace("_", "-") if name.startswith("--") else name)
        dashed.append(known + sign + value)
    return dashed


def _number(options: Arguments, names: Sequence[str], problems: list[Problem]) -> int | None:
    """The number behind one of ``names``: that of the launcher nearest to the program."""
    present = [name for name in options if name in names]
    if not present:
        return None
    # A task a host is how srun starts torchrun: the number of processes is torchrun's.
    name = min(present, key=names.index)
    words = str(options[name]).split()
    try:
        return count({name: words[0] if words else ""}, name)
    except ValueError as error:
        problems.append(Problem(path="cluster", message=f"{error}; give --nodes, or --env NAME=VALUE"))
        return None
