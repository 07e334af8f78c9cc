"""Which published checkpoint answers instructions: the catalog knows models by their base, clients want the other.

Publishers name both after one pattern a family (their pages at huggingface.co); shapes are the same. Qwen3, DeepSeek
and gpt-oss publish the one that answers under the plain name.
"""

from __future__ import annotations

import re

_RULES = (
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
    return next((re.sub(f"^{rule}$", to, name) for rule, to in _RULES if re.fullmatch(rule, name)), name)
