"""Text of the files that a plan becomes: names, sizes and sentences that are safe in any of them."""

from __future__ import annotations

import re
from pathlib import PurePosixPath

README_FILE = PurePosixPath("README.md")
# Digest of every emitted file, in the format of sha256sum.
MANIFEST = PurePosixPath("SHA256SUMS")
# Bash that stops where a file of the folder $here differs from the manifest; it may use ``fail``.
MANIFEST_CHECK = rf"""if [[ -f $here/{MANIFEST} && ${{MESHPLAN_SKIP_CHECKS:-0}} != 1 ]]; then
  changed=$(cd -- "$here" && sha256sum --check --quiet {MANIFEST} 2>&1) || fail \
    "files differ from what meshplan wrote: $changed; emit them again, or set MESHPLAN_SKIP_CHECKS=1"
fi
"""


_PUBLISHED = re.compile(r"huggingface\.co/([\w.-]+/[\w.-]+)")
_NOT_PLAIN = re.compile(r"[^\w .,:()+/-]")


def published_name(source: str) -> str:
    """Hugging Face name of a model out of the address where it was found; empty where there is none."""
    found = _PUBLISHED.search(source)
    return found.group(1) if found else ""


def plain(text: str) -> str:
    """``text`` on one line, without signs that Markdown or a shell would take for more."""
    return _NOT_PLAIN.sub("", " ".join(text.split())) or "unnamed"


# Which published checkpoint answers instructions: the catalog knows models by their base, clients want the other.
# Publishers name both after one pattern a family (their pages at huggingface.co); shapes are the same. Qwen3, DeepSeek
# and gpt-oss publish the one that answers under the plain name.
_ANSWERING = (
    (r"(meta-llama/(?:Meta-)?Llama-[34][\w.-]*?)", r"\1-Instruct"),
    (r"(meta-llama/Llama-2-\w+)-hf", r"\1-chat-hf"),
    (r"(mistralai/Mi[sx]tral-\w+)-(v[\d.]+)", r"\1-Instruct-\2"),
    (r"(mistralai/Mistral-(?:Nemo|Small-\w+))-Base-(\d+)", r"\1-Instruct-\2"),
    (r"(Qwen/Qwen1\.5-[\w.-]+)", r"\1-Chat"),
    (r"(Qwen/Qwen2(?:\.5)?-[\w.-]+)", r"\1-Instruct"),
    (r"(google/gemma-3-\w+)-pt", r"\1-it"),
    (r"(google/gemma(?:-2)?-\d+b)", r"\1-it"),
)
_ANSWERS = re.compile(r"-(instruct|chat|it)\b", re.IGNORECASE)


def answering(name: str) -> str:
    """The checkpoint that answers instructions; ``name`` itself where it does, or where none is known.

    >>> answering("meta-llama/Llama-3.1-70B")
    'meta-llama/Llama-3.1-70B-Instruct'
    >>> answering("mistralai/Mixtral-8x7B-v0.1"), answering("google/gemma-3-27b-pt")
    ('mistralai/Mixtral-8x7B-Instruct-v0.1', 'google/gemma-3-27b-it')
    >>> answering("Qwen/Qwen3-32B"), answering("deepseek-ai/DeepSeek-V3")
    ('Qwen/Qwen3-32B', 'deepseek-ai/DeepSeek-V3')
    """
    if _ANSWERS.search(name):
        return name
    return next((re.sub(f"^{rule}$", to, name) for rule, to in _ANSWERING if re.fullmatch(rule, name)), name)
