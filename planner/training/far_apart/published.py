"""What was published about the loss of each way: no figure of a plan, but what a user's own number may start from.

Losses were compared after the same tokens. None of them says how many tokens more reach the same loss: that depends on
the model, the data and the tuning, so ``more_tokens`` is the user's.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshplan.planner.training.problem.far_apart import (
    ASYNC_PIPELINE,
    DATA_PARALLEL,
    DILOCO,
    EIGHT_BIT,
    ONE_BIT,
    POWERSGD,
    STREAMING,
    TOP_K,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """What is known of a way's loss.

    Args:
        loss: after the same tokens, against synchronous training, and of which runs.
        source: where it stands.
        least_steps: least H of those runs; 1 for an exchange in every step.
        most_steps: largest H of those runs.
    """

    loss: str
    source: str
    least_steps: int = 1
    most_steps: int = 1


PUBLISHED = {
    DATA_PARALLEL: Published(loss="the same: it is synchronous training", source=""),
    DILOCO: Published(
        loss="loss −0.2 to +0.3 % on 2 and 4 sites, 4B and 10B models, H = 30; it rises with H, less in larger models "
        "(H = 1 to 300)",
        source="arXiv:2503.09799, table 4 and E.1; H = 500 on 8 sites: arXiv:2311.08105",
        most_steps=500,
    ),
    STREAMING: Published(
        loss="similar quality at billions of parameters, outer gradients in 4 bits",
        source="arXiv:2501.18512, abstract",
        most_steps=500,
    ),
    POWERSGD: Published(
        loss="as SGD on image models and LSTMs at ranks 1 to 4; nothing stored for LLMs",
        source="arXiv:1905.13727",
    ),
    TOP_K: Published(
        loss="no loss of accuracy on image models and LSTMs with 0.1 % sent; nothing stored for LLMs",
        source="arXiv:1712.01887, abstract",
    ),
    EIGHT_BIT: Published(loss="nothing stored for LLMs", source=""),
    ONE_BIT: Published(
        loss="Adam's convergence on BERT after a warm-up that sends whole gradients",
        source="arXiv:2102.02888, abstract",
    ),
    # Of gradients one step late, up to 10B (abstract). The first paper found similar accuracy of GPT and BERT
    # (arXiv:2006.09503, abstract); with Nesterov's look-ahead training up to 1B is no worse (arXiv:2505.01099).
    ASYNC_PIPELINE: Published(
        loss="AdamW degrades, Muon hardly",
        source="arXiv:2606.30634",
    ),
}
