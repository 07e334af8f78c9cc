"""The run in a plan's JSON as it may come from anybody; see :mod:`meshplan.planner.core.plan_document`."""

from __future__ import annotations

from typing import Any

from meshplan.planner.core.plan_document import Closed, Count, Number, Positive, Share, Text


class RateDocument(Closed):
    """Interruptions of one node in a day, with their interval."""

    value: Share
    low: Share
    high: Share
    source: Text


class CheckpointDocument(Closed):
    """What a checkpoint costs, and how often one is taken."""

    bytes: Positive
    interval_s: Positive
    is_pinned: bool
    block_s: Share
    durable_s: Share
    young_s: Share | None
    daly_s: Number | None


class SpareDocument(Closed):
    """What a number of spares comes to."""

    spare_nodes: Count
    waiting_share: Share
    hours_saved: Number | None


class AvailabilityDocument(Closed):
    """What came of nodes that come and go."""

    traces: Count
    days: Positive
    mean_nodes: Share
    progress_share: Positive
    hindsight_share: Positive
    every_node_share: Share
    interruptions_per_day: Share
    changes_per_day: Share
    usd_per_day: Share | None
    regret: Number


class NodesDocument(Closed):
    """The best plan for a number of nodes."""

    nodes: Count
    tokens_per_s: Positive
    time_share: Share
    config: dict[str, Any]


class CopiesDocument(Closed):
    """What copies that restart apart come to."""

    count: Count
    batch_share: Share


class RunDocument(Closed):
    """What :func:`meshplan.planner.goodput.report.run_document` wrote."""

    effective_training_time_ratio: Share
    training_s: Positive
    interruptions: Share
    mean_time_between_interruptions_s: Positive | None
    failures_per_node_day: RateDocument
    restart_s: Share
    checkpoint: CheckpointDocument
    waiting_share: Share
    spare_nodes: Count
    spares: list[SpareDocument]
    finish_by_s: Positive | None
    finish_by_probability: Share | None
    assumed: list[Text]
    copies: CopiesDocument | None = None
    availability: AvailabilityDocument | None = None
    by_nodes: tuple[NodesDocument, ...] = ()
