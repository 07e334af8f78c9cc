"""Which release of a framework first takes a flag that an emitter writes: one table, and how it is applied.

The emitters write what the release takes whose parser the tests run. For an older one (``--framework-version``) the
table says which flags it has not, and how it spelt some of them. Every row was read in the released packages named in
its source; a release between two that were read counts as the older one, so that nothing is written which it may lack.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from meshplan.catalogs.errors import CannotExpressError, EmitError
from meshplan.planner.training.problem.frameworks.megatron import MEGATRON
from meshplan.planner.training.problem.frameworks.torchtitan import TORCHTITAN

Flag = tuple[str, ...]
_VERSION = re.compile(r"v?(\d{1,4}(?:\.\d{1,4}){1,3}(?:\.post\d{1,4})?)")
# Target → its makers' images, whose tags begin with the release: v0.33.0, v0.5.23-cu129 (docs.vllm.ai, "Using Docker";
# docs.sglang.ai, "Install SGLang"). Those of others count their own releases.
_OWN_IMAGES = {"vllm": "vllm/vllm-openai", "sglang": "lmsysorg/sglang"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Introduced:
    """A flag that older releases lack.

    Args:
        flag: as written today.
        since: the first release that takes it.
        value: part of its value that is new, where the flag itself is older; empty for the flag with any value.
        before: words in its place in older releases, ``{value}`` for its value; empty where they cannot say it.
        source: where both were read.
    """

    flag: str
    since: str
    value: str = ""
    before: str = ""
    source: str

    @property
    def text(self) -> str:
        """For the support matrix."""
        older = f" (before: {self.before})" if self.before else ""
        return f"{' '.join(filter(None, (self.flag, self.value)))} from {self.since}{older}"

    def is_written(self, flag: Flag) -> bool:
        """Whether ``flag`` is this one."""
        return flag[0] == self.flag and self.value in " ".join(flag[1:])


@dataclass(frozen=True, slots=True, kw_only=True)
class Releases:
    """What is known of a framework's releases.

    Args:
        target: emit target.
        oldest: the oldest release that was read; nothing is said of older ones.
        checked: the release whose parser the tests run.
        rows: flags that are newer than ``oldest``.
    """

    target: str
    oldest: str
    checked: str
    rows: tuple[Introduced, ...]


_CORE = "megatron-core {}: a field of transformer_config.py or distributed_data_parallel_config.py, absent in {}"
_OLDER_HYBRIDS = (
    f"megatron-core {MEGATRON.version}: training/arguments.py; flags of hybrids were not read in older ones"
)
_NOTES = "Megatron-LM, CHANGELOG.md, Megatron Core {}"
_SGLANG = "sglang {}: srt/server_args.py, absent in {}"
_VLLM = "vllm {}: engine/arg_utils.py, absent in {}"
_VLLM_VALUE = "vllm {}: config/ and model_executor/layers/quantization, absent in {}"
_ONLINE_FP8 = "; docs.vllm.ai 0.10, FP8 W8A8, online dynamic quantization"
_HOSTS = ("--nnodes", "--node-rank", "--master-addr", "--master-port")

RELEASES: Mapping[str, Releases] = {
    one.target: one
    for one in (
        Releases(
            target="megatron",
            oldest="0.12.0",
            checked=MEGATRON.version,
            rows=(
                Introduced(flag="--pipeline-model-parallel-layout", since="0.13.0", source=_NOTES.format("0.13.0")),
                Introduced(flag="--use-megatron-fsdp", since="0.14.0", source=_CORE.format("0.14.0", "0.13.0")),
                Introduced(
                    flag="--outer-dp-sharding-strategy", since="0.14.0", source=_CORE.format("0.14.0", "0.13.0")
                ),
                Introduced(
                    flag="--overlap-moe-expert-parallel-comm", since="0.14.0", source=_CORE.format("0.14.0", "0.13.0")
                ),
                Introduced(flag="--fp4-format", since="0.15.0", source=_CORE.format("0.15.0", "0.14.0")),
                Introduced(
                    flag="--moe-flex-dispatcher-backend", since="0.16.0", source=_CORE.format("0.16.0", "0.15.0")
                ),
                Introduced(
                    flag="--cuda-graph-impl",
                    value="full_iteration",
                    since="0.18.0",
                    source="megatron-core 0.18.0: transformer/cuda_graph_config.py; in 0.17.0 it was a scope",
                ),
                Introduced(flag="--cuda-graph-modules", since="0.18.0", source=_CORE.format("0.18.0", "0.17.0")),
                Introduced(flag="--hybrid-layer-pattern", since=MEGATRON.version, source=_OLDER_HYBRIDS),
                Introduced(flag="--experimental-attention-variant", since=MEGATRON.version, source=_OLDER_HYBRIDS),
                Introduced(
                    flag="--sft",
                    since="0.17.0",
                    source="megatron-core 0.17.0: training/arguments.py; older wheels have no such file to read",
                ),
                Introduced(
                    flag="--dataloader-inter-document-masking",
                    since="0.19.0",
                    source="megatron-core 0.19.0: training/arguments.py, absent in 0.18.0",
                ),
            ),
        ),
        Releases(
            target="torchtitan",
            oldest="0.1.0",
            checked=TORCHTITAN.version,
            rows=(
                Introduced(
                    flag="--module",
                    since="0.3.0",
                    source="torchtitan 0.2.2: config/manager.py reads a TOML file (--job.config_file)",
                ),
            ),
        ),
        Releases(
            target="vllm",
            oldest="0.10.0",
            checked="0.33.0",
            rows=(
                Introduced(
                    flag="--decode-context-parallel-size", since="0.10.2", source=_VLLM.format("0.10.2", "0.10.1")
                ),
                *(Introduced(flag=flag, since="0.11.1", source=_VLLM.format("0.11.1", "0.11.0")) for flag in _HOSTS),
                Introduced(flag="--kv-offloading-size", since="0.11.1", source=_VLLM.format("0.11.1", "0.11.0")),
                Introduced(
                    flag="--speculative-config",
                    value='"method":"mtp"',
                    since="0.11.0",
                    source=_VLLM_VALUE.format("0.11.0", "0.10.2"),
                ),
                Introduced(
                    flag="--quantization",
                    value="fp8_per_tensor",
                    since="0.20.0",
                    before="--quantization fp8",
                    source=_VLLM_VALUE.format("0.20.0", "0.19.0") + _ONLINE_FP8,
                ),
                *(
                    Introduced(
                        flag="--quantization",
                        value=value,
                        since="0.20.0",
                        source=_VLLM_VALUE.format("0.20.0", "0.19.0"),
                    )
                    for value in ("fp8_per_block", "int8_per_channel_weight_only")
                ),
                Introduced(
                    flag="--quantization",
                    value="mxfp8",
                    since="0.19.0",
                    source=_VLLM_VALUE.format("0.19.0", "0.18.0"),
                ),
                Introduced(
                    flag="--language-model-only",
                    since="0.17.0",
                    before='--limit-mm-per-prompt {{"image":0}}',
                    source=_VLLM.format("0.17.0", "0.16.0"),
                ),
                Introduced(
                    flag="--kv-cache-dtype",
                    value="nvfp4",
                    since="0.20.0",
                    source="vllm 0.20.0: config/cache.py, absent in 0.19.0",
                ),
            ),
        ),
        Releases(
            target="sglang",
            oldest="0.5.1.post1",
            checked="0.5.23",
            rows=(
                Introduced(
                    flag="--attn-dp-size",
                    since="0.5.22",
                    before="--dp-size {value} --enable-dp-attention",
                    source=_SGLANG.format("0.5.22", "0.5.21"),
                ),
                Introduced(
                    flag="--cuda-graph-max-bs-decode",
                    since="0.5.23",
                    before="--cuda-graph-max-bs {value}",
                    source="sglang 0.5.23, where the other is a deprecated alias; 0.5.1.post1: srt/server_args.py",
                ),
                Introduced(flag="--dcp-size", since="0.5.15", source=_SGLANG.format("0.5.15", "0.5.14")),
                Introduced(
                    flag="--speculative-algorithm",
                    value="STANDALONE",
                    since="0.5.2",
                    source=_SGLANG.format("0.5.2", "0.5.1.post3"),
                ),
                Introduced(
                    flag="--quantization", value="mxfp8", since="0.5.9", source=_SGLANG.format("0.5.9", "0.5.8")
                ),
                Introduced(
                    flag="--kv-cache-dtype", value="nvfp4", since="0.5.16", source=_SGLANG.format("0.5.16", "0.5.15")
                ),
            ),
        ),
    )
}


def _number(version: str) -> tuple[int, ...]:
    """``0.5.1.post3`` → (0, 5, 1, 3): comparable within a framework."""
    return tuple(int(part) for part in re.findall(r"\d+", version))


def release_of(target: str, version: str) -> str:
    """``version`` as a release that the table knows something of; empty for none asked.

    Raises:
        EmitError: not a version, older than what was read, or of a framework whose releases were not compared.
    """
    if not version:
        return ""
    found = _VERSION.fullmatch(version.strip())
    if found is None:
        raise EmitError(f"--framework-version {version!r} is no release: write it as 0.33.0")
    known = RELEASES.get(target)
    if known is None:
        raise EmitError(
            f"--framework-version: releases of {target} were not compared; those of {', '.join(RELEASES)} were"
        )
    if _number(found.group(1)) < _number(known.oldest):
        raise EmitError(f"--framework-version {version}: releases of {target} were compared from {known.oldest} on")
    return found.group(1)


def is_older(target: str, version: str, than: str) -> bool:
    """Whether the release that runs the files comes before ``than``; the checked one does not."""
    release = release_of(target, version)
    return bool(release) and _number(release) < _number(than)


def spelled(target: str, version: str, flags: Iterable[Flag]) -> tuple[Flag, ...]:
    """The flags as that release takes them.

    Args:
        target: emit target.
        version: of the framework; empty for the one whose parser the tests run.
        flags: as the emitter writes them.

    Raises:
        CannotExpressError: the release has no such flag; the first one that has it is named.
        EmitError: see :func:`release_of`.
    """
    release = release_of(target, version)
    if not release:
        return tuple(flags)
    written: list[Flag] = []
    for flag in flags:
        rows = (row for row in RELEASES[target].rows if row.is_written(flag))
        missing = next((row for row in rows if _number(release) < _number(row.since)), None)
        if missing is not None and not missing.before:
            raise CannotExpressError(
                f"{target} {release}",
                f"{' '.join(flag)} ({missing.source})",
                f"--framework-version {missing.since}, the first release that has it",
            )
        written += [flag] if missing is None else _older(missing, flag)
    return tuple(written)


def _older(row: Introduced, flag: Flag) -> list[Flag]:
    """The words of ``row.before``, each flag with its value."""
    words = row.before.format(value=" ".join(flag[1:])).split()
    starts = [place for place, word in enumerate(words) if word.startswith("--")]
    return [tuple(words[start:end]) for start, end in zip(starts, [*starts[1:], len(words)], strict=True)]


def release_notes(target: str, version: str) -> tuple[str, ...]:
    """What a user of another release than the checked one should know; nothing where none is asked."""
    release = release_of(target, version)
    if not release or _number(release) == _number(RELEASES[target].checked):
        return ()
    return (
        f"Written for {target} {release}: its flags were compared with a table of releases; only the parser of "
        f"{RELEASES[target].checked} was run.",
    )


def image_notes(target: str, version: str, image: str) -> tuple[str, ...]:
    """What a user should know whose image holds another release than the one that the flags are written for."""
    repository, _, tag = image.partition("@")[0].rpartition(":")
    found = _VERSION.match(tag)
    if target not in _OWN_IMAGES or not f"/{repository}".endswith(f"/{_OWN_IMAGES[target]}") or found is None:
        return ()
    written = release_of(target, version) or RELEASES[target].checked
    if _number(found.group(1)) == _number(written):
        return ()
    return (
        f"The image holds {target} {found.group(1)}, the flags are those of {written}: emit again with "
        f"--framework-version {found.group(1)}, or with an image of {written}.",
    )


def since_text(target: str, flags: str) -> str:
    """Rows of the table about one of the flags in a text of the support matrix."""
    words = set(re.findall(r"--[\w.-]+", flags))
    rows = RELEASES[target].rows if target in RELEASES else ()
    return "; ".join(row.text for row in rows if row.flag in words)
