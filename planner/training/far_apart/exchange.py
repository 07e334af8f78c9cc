"""What an exchange between sites costs a step: one formula for every way.

*Notation.* n sites train in lockstep; an inner step takes the slowest of them T. After H inner steps they have
exchanged every fragment f of the model once; its payload of M_f bytes takes

    X_f = 2(n − 1)/n · M_f/W + 2(n − 1) ℓ     all-reduced in a ring over sites (Patarasuk and Yuan, 2009)
    X_f = (n − 1) · M_f/W + (n − 1) ℓ         gathered, where sums of payloads are no payload (top-k)
    X_f = M_f/W + ℓ                           a hop to the next site of a pipeline, which all take at once

with W and ℓ the rate and latency of the ring's slowest link. The first τ inner steps after it has been sent hide a
fragment's exchange (Streaming DiLoCo, arXiv:2501.18512, calls them τ as well); compression and the outer optimizer
take C a round and are not hidden. A mean step takes

    T̄ = w (T + X) + (1 − w) (T + (Σ_f max(0, X_f − τT) + C)/H)

where w is the share of steps that send whole gradients (X) in every step: the warm-up of 1-bit Adam.
Synchronous data parallelism over the link is H = 1, one fragment of the whole gradient, τ = 0, C = 0, w = 0.

*A pipeline without a flush* (PipeDream-2BW, arXiv:2006.09503) is H = 1, τ = 1: sites compute and send at the same time,
no bubble waits between them, so that T̄ = T + max(0, X − T) = max(T, X), the slowest site or the slowest hop.

*Properties.* T̄ does not rise with W or H, does not fall with T or ℓ, and is never below T.

Assumes: a site's devices send their parts at the same time and share W; spreading a result inside a site is hidden
behind its arrival; an exchange starts when the slowest site has come to it. Exchanges in every step hide behind
nothing: of many micro-batches only the last one's backward pass could hide them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Ring:
    """Sites in a ring, and its slowest link.

    Args:
        num_sites: n.
        bytes_per_s: W, of all devices of a site together, in the slower direction.
        latency_s: ℓ, one way.
    """

    num_sites: int
    bytes_per_s: float
    latency_s: float

    def sent_bytes(self, payload_bytes: float, *, is_gathered: bool) -> float:
        """Bytes that a site sends in one exchange."""
        others = self.num_sites - 1
        return payload_bytes * (others if is_gathered else 2.0 * others / self.num_sites)

    def exchange_s(self, payload_bytes: float, *, is_gathered: bool = False) -> float:
        """X, duration of one exchange, s."""
        hops = (self.num_sites - 1) * (1 if is_gathered else 2)
        return self.sent_bytes(payload_bytes, is_gathered=is_gathered) / self.bytes_per_s + hops * self.latency_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """What sites exchange, and when.

    Args:
        sync_steps: H, inner steps in which every fragment is exchanged once.
        fragment_bytes: M_f, payload of each fragment as sent.
        overlap_steps: τ, inner steps that hide a fragment's exchange; below H over the number of fragments, 1 of hops.
        is_gathered: payloads are gathered, not summed on the way.
        is_hop: payloads go to the next site alone.
        compute_s: C, compression or outer optimizer of a round, s.
        whole_share: w, share of the steps that send ``whole_bytes`` instead.
        whole_bytes: a whole gradient.
    """

    sync_steps: int
    fragment_bytes: tuple[float, ...]
    overlap_steps: int = 0
    is_gathered: bool = False
    is_hop: bool = False
    compute_s: float = 0.0
    whole_share: float = 0.0
    whole_bytes: float = 0.0

    @property
    def payload_bytes(self) -> float:
        """Σ M_f."""
        return sum(self.fragment_bytes)

    def exchange_s(self, fragment_bytes: float, ring: Ring) -> float:
        """X_f, s."""
        if self.is_hop:
            return fragment_bytes / ring.bytes_per_s + ring.latency_s
        return ring.exchange_s(fragment_bytes, is_gathered=self.is_gathered)

    def _sent_bytes(self, fragment_bytes: float, ring: Ring) -> float:
        return fragment_bytes if self.is_hop else ring.sent_bytes(fragment_bytes, is_gathered=self.is_gathered)

    def exposed_s(self, inner_step_s: float, ring: Ring) -> float:
        """What a mean step waits for exchanges, compression and the outer optimizer, s.

        Args:
            inner_step_s: T.
            ring: of the sites.
        """
        hidden = self.overlap_steps * inner_step_s
        waits = [max(0.0, self.exchange_s(one, ring) - hidden) for one in self.fragment_bytes]
        compressed = (sum(waits) + self.compute_s) / self.sync_steps
        whole = ring.exchange_s(self.whole_bytes) if self.whole_share else 0.0
        return self.whole_share * whole + (1.0 - self.whole_share) * compressed

    def mean_step_s(self, inner_step_s: float, ring: Ring) -> float:
        """T̄, s."""
        return inner_step_s + self.exposed_s(inner_step_s, ring)

    def mean_bytes_per_s(self, inner_step_s: float, ring: Ring) -> float:
        """Rate at which a site sends on average, bytes/s."""
        compressed = self._sent_bytes(self.payload_bytes, ring) / self.sync_steps
        whole = ring.sent_bytes(self.whole_bytes, is_gathered=False)
        sent = self.whole_share * whole + (1.0 - self.whole_share) * compressed
        return sent / self.mean_step_s(inner_step_s, ring)

    def hiding_bytes_per_s(self, inner_step_s: float, ring: Ring) -> float | None:
        """Least rate of the link at which τ inner steps hide every fragment, bytes/s; None where none does."""
        hops = 1.0 if self.is_hop else 2.0 * (ring.num_sites - 1)
        room = self.overlap_steps * inner_step_s - hops * ring.latency_s
        if room <= 0.0:
            return None
        return self._sent_bytes(max(self.fragment_bytes), ring) / room
