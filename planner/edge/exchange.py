"""What the exchanges of one token cost: all-reduces without NCCL, and the hops of a pipeline.

An all-reduce of a vector of M bytes among n machines, each on a link of bandwidth W with latency ℓ, and c the cost of a
message to a machine that handles it. A *star* (distributed-llama 0.7 to 0.10; TPI-LLM, arXiv:2410.00531) goes through
its root, which receives n − 1 vectors and sends the sum n − 1 times, 2(n − 1) messages over its link::

    star     = 2 (ℓ + (n − 1) (c + M/W))

*Everyone to everyone* (distributed-llama from 0.12 on: ``SYNC_NODE_SLICES`` of nn-network.cpp gives every vector to
every machine, which adds up by itself) has one latency; a machine sends and receives n − 1 vectors at once::

    everyone = ℓ + (n − 1) (2c + M/W)

A ring would have 2(n − 1) latencies, which is why none of these engines has one. On Wi-Fi the bandwidth is one for all
and each message passes the air twice: 2·M/W for each of the 2(n − 1) messages of a star, and of the n(n − 1) of
everyone to everyone.

Assumes: nothing hides an exchange; machines arrive at it together.
"""

from __future__ import annotations

from meshplan.planner.edge.problem import Network

PASSES_OF_AIR = 2.0


def star_s(network: Network, machines: int, vector_bytes: float, message_s: float) -> float:
    """One all-reduce through a root, seconds."""
    others = machines - 1
    if not others:
        return 0.0
    sent = 2.0 * others * vector_bytes * _crossings(network) / network.bytes_per_s
    return 2.0 * (network.latency_s + others * message_s) + sent


def everyone_s(network: Network, machines: int, vector_bytes: float, message_s: float) -> float:
    """One all-reduce in which every machine sends its vector to every other, seconds."""
    others = machines - 1
    if not others:
        return 0.0
    messages = others * machines if network.shared_air else others
    sent = messages * vector_bytes * _crossings(network) / network.bytes_per_s
    return network.latency_s + 2.0 * others * message_s + sent


def transfer_s(network: Network, sent_bytes: float, message_s: float) -> float:
    """One message from a machine to another, seconds."""
    return network.latency_s + message_s + sent_s(network, sent_bytes)


def sent_s(network: Network, sent_bytes: float) -> float:
    """What bytes more in a message to another machine add to its time, seconds."""
    return sent_bytes * _crossings(network) / network.bytes_per_s


def _crossings(network: Network) -> float:
    """How often a byte takes its share of the bandwidth."""
    return PASSES_OF_AIR if network.shared_air else 1.0
