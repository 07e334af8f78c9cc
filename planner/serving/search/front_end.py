"""What a request waits for outside the engines: the server, the network, and the tokenizing of its prompt.

A prompt of p tokens of text is seen by the engine, and its tokens by the client, later by

    c + s·p

c is fitted (:class:`~meshplan.catalogs.constants.serving.ServingConstants`): the slowest server of a role, and once for
prefill and once for decode servers, because the router sends a disaggregated request to one and then to the other.
s is published. Assumptions: prompts do not wait for each other's tokenizing, and tokens of images are not text.
"""

from __future__ import annotations

import numpy as np

from meshplan.planner.core.arrays import FloatArray, IntArray
from meshplan.planner.serving.problem.config import Role, ServingConfig
from meshplan.planner.serving.problem.problem import Site
from meshplan.planner.serving.problem.requests import ServingWorkload

# Time of a server to tokenize a prompt, s a token: 164 ms at the median of decode servers for prompts of some 37,000
# tokens (ray-project/ray, pull request 64049; vLLM's chat requests, 256 clients). A tokenizer alone takes 1.1 µs (1.1 s
# for a million tokens, charlesxu.io/parallel-tokenizer). The published time is that of a loaded server, as here.
TOKENIZE_S_PER_TOKEN = 0.164 / 37_000


def outside_s(
    site: Site, config: ServingConfig, workload: ServingWorkload, prompt_tokens: FloatArray | IntArray
) -> FloatArray:
    """Time that requests with such prompts spend outside the engines of a configuration, s, [len(prompt_tokens)]."""
    if not workload.has_front_end:
        return np.zeros(len(prompt_tokens))
    slowest = dict.fromkeys(Role, 0.0)
    for pool in config.pools:
        slowest[pool.role] = max(slowest[pool.role], site.constants[pool.node_type].first_token_offset_s)
    return sum(slowest.values()) + tokenize_s(workload, np.asarray(prompt_tokens))


def tokenize_s(workload: ServingWorkload, prompt_tokens: FloatArray | IntArray) -> FloatArray:
    """Time to tokenize prompts, s, of the shape of ``prompt_tokens``."""
    images = workload.images
    of_images = 0 if images is None else images.per_request * images.tokens
    return np.asarray(TOKENIZE_S_PER_TOKEN * np.maximum(np.asarray(prompt_tokens) - of_images, 0.0))
