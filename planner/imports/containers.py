"""Commands inside containers: ``docker run``, docker compose files and Kubernetes manifests, as plain command lines.

Nothing is run or fetched: of an image only its name is looked at, for the entry point that its publisher states.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from meshplan.planner.imports.shell_words import MAX_WORD_LENGTH

MAX_DEPTH = 24  # of a manifest; pods lie about six levels deep
# Entry points (docs.vllm.ai "Using Docker"); other images run what follows their name.
_ENTRY_POINTS = {"vllm-openai": ("vllm", "serve"), "vllm-openai-rocm": ("vllm", "serve")}
_OWN_VARIABLE = re.compile(
    r"\$\((?P<pod>\w+)\)|\$\{(?P<braced>\w+)(?::?-(?P<default>[^{}]*))?\}|\$(?P<bare>[A-Za-z_]\w*)"
)
_RUNTIMES = ("docker", "podman", "nerdctl")
# Options of "docker run" without a value (docs.docker.com, docker container run).
_SWITCHES = frozenset(
    {"--detach", "--init", "--interactive", "--privileged", "--publish-all", "--quiet", "--read-only", "--rm"}
    | {"--tty", "--no-healthcheck", "--oom-kill-disable"}
)
_SHORT_SWITCHES = frozenset("ditPq")


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """What one container runs.

    Args:
        words: the command line.
        num_hosts: pods of a group that run it together.
        num_replicas: groups.
    """

    words: tuple[str, ...]
    num_hosts: int = 1
    num_replicas: int = 1


def inside_docker(words: Sequence[str]) -> tuple[str, ...] | None:
    """The command of ``docker run``; None where ``words`` are something else.

    >>> inside_docker("docker run --gpus all -p 8000:8000 vllm/vllm-openai:latest --model a/b".split())
    ('vllm', 'serve', '--model', 'a/b')
    """
    places = [place for place, word in enumerate(words) if word.rsplit("/", 1)[-1] in _RUNTIMES]
    if not places or "run" not in words[places[0] + 1 : places[0] + 3]:
        return None
    place = words.index("run", places[0]) + 1
    entry = ""
    while place < len(words) and words[place].startswith("-"):
        word = words[place]
        is_switch = word in _SWITCHES or (not word.startswith("--") and set(word[1:]) <= _SHORT_SWITCHES)
        if word.startswith("--entrypoint"):
            entry = word.partition("=")[2] or "".join(words[place + 1 : place + 2])
        place += 1 if is_switch or ("=" in word and word.startswith("--")) else 2
    if place >= len(words):
        return None
    return _command(words[place], [entry] if entry else [], words[place + 1 :])


def inside_image_file(words: Sequence[str]) -> tuple[str, ...] | None:
    """The arguments of ``apptainer run`` for the image's own program; None where ``words`` are something else.

    >>> inside_image_file("singularity run --nv vllm-openai_v0.8.3.sif --model a/b".split())
    ('vllm', 'serve', '--model', 'a/b')
    """
    place = next((place for place, word in enumerate(words) if word.endswith(".sif")), None)
    if place is None or "run" not in words[:place]:
        return None
    name = words[place].rsplit("/", 1)[-1].removesuffix(".sif").partition("_")[0]
    return (*_ENTRY_POINTS[name], *words[place + 1 :]) if name in _ENTRY_POINTS else None


def _command(image: str, entry: Sequence[str], arguments: Sequence[str]) -> tuple[str, ...]:
    name = image.rsplit("/", 1)[-1].partition(":")[0].partition("@")[0]
    return (*(entry or _ENTRY_POINTS.get(name, ())), *arguments)


def task_of(document: Mapping[str, Any]) -> tuple[str, dict[str, str]] | None:
    """Script and variables of a SkyPilot task; None where the document is none."""
    script, resources = document.get("run"), document.get("resources")
    if not isinstance(script, str) or not isinstance(resources, Mapping):
        return None
    asked = resources.get("accelerators")
    named = next(iter(asked.items()), ("", 1)) if isinstance(asked, Mapping) else str(asked).partition(":")[::2]
    variables = {"SKYPILOT_NUM_GPUS_PER_NODE": str(named[1] or 1)}
    return script, {**variables, "SKYPILOT_NUM_NODES": str(_count(document.get("num_nodes"), 1))}


def _interpolated(words: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """Words with the container's own variables: ``$(NAME)`` in Kubernetes, ``${NAME:-default}`` in compose files.

    Of a script (a word with blanks) only the container's variables are replaced: the rest is the shell's.
    """

    def value(found: re.Match[str]) -> str:
        name = found["pod"] or found["braced"] or found["bare"]
        known = environment.get(name, None if " " in found.string else found["default"])
        return found[0] if known is None else known

    replaced = []
    for word in words:
        longest = max((len(value) for value in environment.values()), default=0)
        is_small = len(word) + word.count("$") * longest <= MAX_WORD_LENGTH
        replaced.append(_OWN_VARIABLE.sub(value, word) if is_small else word)
    return replaced


def _environment(container: Mapping[str, Any]) -> dict[str, str]:
    """Variables of a container, as Kubernetes and compose files list them."""
    written = container.get("env", container.get("environment"))
    if isinstance(written, Mapping):
        return {str(name): str(value) for name, value in written.items() if isinstance(value, str | int | float)}
    found = {}
    for entry in written if isinstance(written, list) else ():
        if isinstance(entry, str) and "=" in entry:
            name, _, found[name] = entry.partition("=")
        elif isinstance(entry, Mapping) and isinstance(entry.get("value"), str | int | float):
            found[str(entry.get("name"))] = str(entry["value"])
    return found


def is_manifest(document: Mapping[str, Any]) -> bool:
    """Whether a document is a compose file or a Kubernetes object."""
    return isinstance(document.get("services"), Mapping) or {"apiVersion", "kind"} <= document.keys()


def commands_of(document: Mapping[str, Any], variables: Mapping[str, str]) -> tuple[Command, ...]:
    """What the containers of a compose file or of a Kubernetes object run."""
    if isinstance(document.get("services"), Mapping):
        return tuple(_composed(document["services"], variables))
    return tuple(_deployed(document, 0, (1, 1), variables))


def _composed(services: Mapping[str, Any], variables: Mapping[str, str]) -> Iterator[Command]:
    for service in services.values():
        if isinstance(service, Mapping) and isinstance(service.get("image", ""), str):
            environment = {**_environment(service), **variables}
            entry, arguments = (
                _interpolated(_words(service.get(name)), environment) for name in ("entrypoint", "command")
            )
            yield Command(words=_command(service.get("image", ""), entry, arguments))


def _deployed(node: Any, depth: int, sizes: tuple[int, int], variables: Mapping[str, str]) -> Iterator[Command]:
    """Containers of a pod's template, however deep it lies, inside (pods of a group, groups)."""
    if depth > MAX_DEPTH:
        return
    if isinstance(node, list):
        for item in node:
            yield from _deployed(item, depth + 1, sizes, variables)
    if not isinstance(node, Mapping):
        return
    if isinstance(node.get("modelFormat"), Mapping):
        yield Command(words=_kserve(node), num_replicas=sizes[1])
    hosts, replicas = _count(node.get("size"), sizes[0]), _count(node.get("replicas"), sizes[1])
    if isinstance(node.get("leaderWorkerTemplate"), Mapping):
        hosts = _count(node["leaderWorkerTemplate"].get("size"), hosts)
    for container in node.get("containers", ()) if isinstance(node.get("containers"), list) else ():
        if isinstance(container, Mapping):
            environment = {**_environment(container), **variables}
            entry, arguments = (_interpolated(_words(container.get(name)), environment) for name in ("command", "args"))
            words = _command(str(container.get("image", "")), entry, arguments)
            if words:
                yield Command(words=words, num_hosts=hosts, num_replicas=replicas)
    for key, value in node.items():
        if key != "containers":
            yield from _deployed(value, depth + 1, (hosts, replicas), variables)


def silent_images(document: Any, depth: int = 0) -> str:
    """Images of a manifest's containers, which are named where none says what it runs.

    >>> silent_images({"spec": {"containers": [{"image": "a/b:1"}]}})
    'a/b:1'
    """
    if depth > MAX_DEPTH or not isinstance(document, Mapping | list):
        return ""
    nodes = document if isinstance(document, list) else document.values()
    own = document.get("image") if isinstance(document, Mapping) else None
    found = [own if isinstance(own, str) else "", *(silent_images(node, depth + 1) for node in nodes)]
    return ", ".join(dict.fromkeys(filter(None, found)))


def _kserve(model: Mapping[str, Any]) -> tuple[str, ...]:
    """KServe's own runtime of Hugging Face models starts vLLM (kserve.github.io, "LLM serving runtime")."""
    arguments = [part.replace("--model_id", "--model") for part in _words(model.get("args"))]
    stored = str(model.get("storageUri", ""))
    named = ["--model", stored.removeprefix("hf://")] if stored.startswith("hf://") else []
    return ("vllm", "serve", *named, *(part for part in arguments if not part.startswith("--model_name")))


def _count(value: object, default: int) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 1 else default


def _words(value: object) -> list[str]:
    """A command as a list, or as a line that a shell would split."""
    if isinstance(value, list):
        return [str(part) for part in value]
    if not isinstance(value, str):
        return []
    try:
        return shlex.split(value)
    except ValueError:
        return value.split()
