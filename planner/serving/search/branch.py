"""Branch and bound over deployments: which is simulated next, at which rate, and when the best is known.

A heap orders what is left by its bound on the score (smaller is better): families of deployments
(:mod:`meshplan.planner.serving.search.families`), their members, and members whose highest rate is being searched for.
The smallest bound is always the next; once the incumbent is within :data:`TIE` of it, nothing left is better by more.

*Under a given load* one simulation settles a member. Where it violates an SLO, or does not keep pace, members with one
more worker follow. Of one kind of worker the step doubles, and the numbers that were passed over are looked at again
once one suffices: fewer identical workers under the same load are taken never to be better, so either rules out all
smaller numbers.

*Where the load is free*, scores fall with the rate and the highest rate that meets every SLO is unknown: a member then
has a bracket of rates, [met, violated], with the bound s(violated), and each simulation narrows it. No bracket is
narrowed further than needed: the first rate tried is the one at which it would equal the incumbent, and a member that
violates an SLO there is dropped.

*Where nothing has met the SLOs* after :data:`MAX_SIMULATED` simulations in the order of the bound, the deployments
whose requests alone are answered soonest are simulated on all devices, and those that are expected to carry the load
with most to spare; once one meets the SLOs the search goes on.

*Bound.* The least of: the bounds of everything that was not simulated, and of each member with a bracket s(violated).
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from meshplan.planner.core.budget import Budget
from meshplan.planner.core.solution import OnProgress, Progress
from meshplan.planner.serving.problem.config import ServingConfig
from meshplan.planner.serving.problem.problem import ServingProblem
from meshplan.planner.serving.search.candidates import (
    Candidate,
    candidate_of,
    carriers,
    score_of,
    smaller_batches,
    soonest,
)
from meshplan.planner.serving.search.families import Counts, Family
from meshplan.planner.serving.search.overload import refused
from meshplan.planner.serving.search.scores import INFINITE, UNITS
from meshplan.planner.serving.search.slo_judgement import RATE_TOLERANCE, HighestRate, Judged, judge
from meshplan.planner.serving.search.trials import FEWEST, Effort

# Deployments that are simulated at most: a hundred simulations cost about two seconds.
MAX_SIMULATED = 60
# Where none of these meets the SLOs so many kinds of workers are tried on all devices: the soonest by the time to the
# first token and as many by the time between tokens, of workers that do both and of pairs.
MOST_RESCUERS = 8
# Deployments that are simulated though the bound already proves the incumbent: the runners-up of the table.
MIN_SIMULATED = 6
# Of these, so many should meet every SLO.
MIN_MET = 3
# Deployments that are simulated at most once the incumbent is proven: simpler ones that may tie with it, runners-up.
MAX_TIED = 12
# Simpler ones that are simulated however many have been before: a search that finds its incumbent late has ties, too.
MORE_TIED = 6
# Scores that differ by less are a tie: a highest rate is known no better than its bracket is wide.
TIE = RATE_TOLERANCE
# Rates that differ by less are one rate.
SAME = 1e-9
# A deployment is tried at the rate that would equal the incumbent once it is worse by this much: a rate of equal score
# is better by up to SAME, so that of several deployments each else outdoes the others by as little, without end.
LEAST_WORSE = 1e-6
# Steps towards the rate of a given score: power grows with less than the 0.7th power of the rate, 0.7^60 < SAME.
MOST_STEPS = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """A simulated candidate.

    Args:
        candidate: with its figures by the closed form.
        judged: simulated latencies and rates, and violated SLOs.
        score: objective, smaller is better; infinite where an SLO is violated or the rate is not kept pace with.
    """

    candidate: Candidate
    judged: Judged
    score: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A member of a family that has not been simulated.

    Args:
        family: its kinds.
        counts: number of each.
        least: of one kind of worker, the smallest number that is not ruled out: the bound is that number's.
        step: by how many workers the next one is larger, should this one violate an SLO.
    """

    family: Family
    counts: Counts
    least: int
    step: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Bracket:
    """A candidate whose highest rate is being searched for."""

    candidate: Candidate
    search: HighestRate


class Branch:
    """The search over deployments; see the module's text.

    Args:
        problem: the question.
        families: of which deployments may be made.
        seed: for drawing the requests.
        budget: once it is spent, what was simulated is the answer; None for no limit.
        on_progress: called after every simulation.

    Attributes:
        simulated: every deployment that was simulated.
        rejected: reason → number of members that the engine, a limit or a bound refuses.
        num_refused: of these members, those that a limit or a bound refuses.
        num_members: members whose bound was looked at, and families of which none was.
    """

    def __init__(
        self,
        problem: ServingProblem,
        families: Iterable[Family],
        *,
        seed: int = 0,
        budget: Budget | None = None,
        on_progress: OnProgress | None = None,
    ) -> None:
        self.problem, self.seed, self.on_progress = problem, seed, on_progress
        self.budget = budget or Budget(memory_limit_bytes=None)
        self.order = itertools.count()
        self.families, self.most_simulated, self.has_rescued = list(families), MAX_SIMULATED, False
        # (bound, what is simpler first among equal bounds, order of arrival, item).
        self.left: list[tuple[float, tuple[float, ...], int, Family | Member | Candidate | Bracket]] = []
        for family in self.families:
            self._put(family.bound, family)
        self.num_members = len(self.left)
        self.num_started = self.num_met = self.num_when_proven = 0
        self.incumbent, self.unseen = INFINITE, INFINITE
        # Least score of what was given up without being shown to violate an SLO at every better rate.
        self.not_refuted = INFINITE
        self.simplest: tuple[float, ...] = (INFINITE,)
        # What was given up because the incumbent was proven, with its bound: :meth:`resume` goes on there.
        self.given_up: list[tuple[float, Family | Member | Candidate | Bracket]] = []
        self.simulated: list[Simulated] = []
        self.rejected, self.num_refused = Counter[str](), 0
        self.seen: set[ServingConfig] = set()

    def run(self) -> tuple[list[Simulated], float]:
        """Every deployment that was simulated, and the bound on all deployments."""
        self._run()
        if self.given_up and not self.has_rescued and math.isinf(self.incumbent) and not self.budget.stopped:
            self._rescue()
        return self.simulated, min(self.incumbent, self.least_unseen)

    def _rescue(self) -> None:
        """Simulate what is most likely to meet the SLOs, and look at the rest again where something does."""
        self.has_rescued = True

        def is_legal(family: Family, counts: Counts) -> bool:
            return family.fits(counts) and not self._broken(family, counts)

        likely = [*soonest(self.families, MOST_RESCUERS // 4, is_legal), *carriers(self.families, is_legal)]
        self.most_simulated = self.num_started + 2 * len(likely)
        for family, counts in likely:
            least = 1 if len(counts) == 1 else counts[0]
            bound = family.score((least,) if len(counts) == 1 else counts)
            self._put(bound, Member(family=family, counts=counts, least=least))
        waiting, self.given_up = self.given_up, []
        self._run()
        if math.isinf(self.incumbent):
            self.given_up += waiting
            return
        self.most_simulated = self.num_started + MAX_SIMULATED
        for bound, item in waiting:
            self._put(bound, item)
        self._run()

    def _run(self) -> None:
        """Simulate what is left, in the order of the bound."""
        while self.left:
            bound, simplicity, _, item = heapq.heappop(self.left)
            proven = self.incumbent <= bound * (1.0 + TIE)
            is_late = bool(self.budget.stopped)
            if isinstance(item, Bracket):
                if proven and not is_late and item.search.look_above():
                    self._note(bound, item)
                elif proven or is_late:
                    ties = not is_late and self._ties(bound, item)
                    self._end(item.candidate, item.search.met() if ties else item.search.judged())
                    self.given_up.append((bound, item))
                else:
                    self._narrow(bound, item)
            elif is_late or self.num_started >= self._most(bound, simplicity, is_proven=proven):
                self.given_up.append((bound, item))
            elif isinstance(item, Family):
                self._open(item)
            else:
                self._start(bound, item)
            if self.on_progress is not None:
                self.on_progress(self._progress(bound))

    @property
    def least_unseen(self) -> float:
        """The least bound of what was given up, or whose highest rate is known no better."""
        return min(self.unseen, *(bound for bound, _ in self.given_up), INFINITE)

    def resume(self, incumbent: float) -> bool:
        """Whether something is left to look at where the best is worse than the runs of the search had promised.

        Longer runs may lower the highest rate of the incumbent after others were given up for what it promised: those
        whose bound is better than its score now are looked at again by the next :meth:`run`.
        """
        again = [(bound, item) for bound, item in self.given_up if bound * (1.0 + TIE) < incumbent]
        if not again or self.budget.stopped or incumbent <= self.incumbent * (1.0 + TIE):
            return False
        self.incumbent = incumbent
        self.given_up = [(bound, item) for bound, item in self.given_up if bound * (1.0 + TIE) >= incumbent]
        cut = {id(item.candidate) for _, item in again if isinstance(item, Bracket)}
        self.simulated[:] = [one for one in self.simulated if id(one.candidate) not in cut]
        for bound, item in again:
            self._put(bound, item)
        return True

    def _progress(self, bound: float) -> Progress:
        """How far it is: beyond the incumbent the least bound left says nothing more."""
        incumbent = self.incumbent if math.isfinite(self.incumbent) else None
        return Progress(
            incumbent=incumbent,
            bound=bound if incumbent is None else min(bound, incumbent),
            note=f"{len(self.simulated)} simulated",
            unit=UNITS[self.problem.objective],
        )

    @property
    def is_complete(self) -> bool:
        """Nothing was left out that a bound does not rule out."""
        return self.least_unseen >= min(self.incumbent / (1.0 + TIE), INFINITE)

    def _most(self, bound: float, simplicity: tuple[float, ...], *, is_proven: bool) -> int:
        """Deployments that may have been simulated for one more to be."""
        if not is_proven:
            self.num_when_proven = self.num_started
            return self.most_simulated
        may_tie = bound <= self.incumbent * (1.0 + SAME) and simplicity < self.simplest
        if may_tie:
            return max(MAX_TIED, self.num_when_proven + MORE_TIED)
        return MIN_SIMULATED if self.num_met >= MIN_MET else MIN_SIMULATED + MIN_MET

    def _put(self, bound: float, item: Family | Member | Candidate | Bracket) -> None:
        simplicity: tuple[float, ...] = ()
        if isinstance(item, (Member, Candidate)):
            simplicity = item.family.simplicity(item.counts)
        heapq.heappush(self.left, (bound, simplicity, next(self.order), item))

    def _broken(self, family: Family, counts: Counts) -> tuple[str, ...]:
        """What the engine refuses about a member of a family."""
        return self.problem.rules.broken(self.problem.shape, candidate_of(family, counts).config)

    def _open(self, family: Family) -> None:
        """The members of a family that the search begins with, unless the engine refuses the family."""
        members = family.first()
        self.num_members += len(members) - 1
        if not members:
            return
        if broken := self._broken(family, members[0]):
            self.rejected[f"{self.problem.rules.name}: {broken[0]}"] += len(members)
            self.num_members -= len(members)
            return
        for counts in members:
            self._put(family.score(counts), Member(family=family, counts=counts, least=counts[0]))

    # --- one deployment -----------------------------------------------------------------------------------------------

    def _start(self, bound: float, item: Member | Candidate) -> None:
        candidate = candidate_of(item.family, item.counts) if isinstance(item, Member) else item
        if candidate.config in self.seen:
            return
        self.seen.add(candidate.config)
        for more in item.family.beyond(item.counts) if isinstance(item, Member) else ():
            self._add(Member(family=item.family, counts=more, least=more[0]))
        if (reason := refused(self.problem, candidate)) is not None:
            self.rejected[reason] += 1
            self.num_refused += 1
            return
        self.num_started += 1
        if self.problem.has_free_rate:
            costs = candidate.costs
            rate = candidate.request_rate_per_s
            search = HighestRate(self.problem, candidate.config, high_per_s=rate, seed=self.seed, costs=costs)
            self._narrow(bound, Bracket(candidate=candidate, search=search))
            return
        cannot_win = bound * (1.0 - TIE) > self.incumbent * (1.0 + TIE)
        # What can only tie with a simpler incumbent need not be held against longer runs.
        is_rival = bound < self.incumbent * (1.0 - SAME) or item.family.simplicity(item.counts) < self.simplest
        effort = Effort.DECIDE if is_rival else Effort.SEARCH
        num_requests = FEWEST if cannot_win else None
        judged = judge_once(self.problem, candidate, seed=self.seed, num_requests=num_requests, effort=effort)
        self._end(candidate, judged)
        if self.problem.workload.request_rate_per_s is not None and isinstance(item, Member):
            self._follow(item, judged)

    def _follow(self, item: Member, judged: Judged) -> None:
        """What is left to look at around a member that was simulated under a given load."""
        family, counts, least = item.family, item.counts, item.least
        if judged.is_met:
            if len(counts) == 1 and counts[0] > least:  # a smaller number that was passed over may do
                middle = (least + counts[0] - 1) // 2
                self._add(Member(family=family, counts=(middle,), least=least))
            return
        if len(counts) > 1:
            waits = any(slo.metric in ("ttft", "e2e") for slo, _ in judged.violated)
            wants_prefill = waits or judged.offered_per_s is not None
            for more in family.following(counts, wants_prefill=wants_prefill):
                self._add(Member(family=family, counts=more, least=more[0]))
            return
        for step in (item.step, 1):
            if family.fits((counts[0] + step,)):
                more = (counts[0] + step,)
                self._add(Member(family=family, counts=more, least=counts[0] + 1, step=2 * step))
                return

    def _add(self, member: Member) -> None:
        self.num_members += 1
        least = (member.least,) if len(member.counts) == 1 else member.counts
        self._put(member.family.score(least), member)

    def _narrow(self, bound: float, item: Bracket) -> None:
        """One more simulation of a deployment whose highest rate is searched for."""
        search, equal = item.search, self._rate_of(item, self.incumbent)
        is_worse = not search.met_per_s or self._score_at(item, search.met_per_s) > self.incumbent * (1.0 + LEAST_WORSE)
        untried = (is_worse and search.met_per_s < equal < search.violated_per_s) or not search.num_runs
        search.narrow(equal if equal > 0.0 and untried else None)
        self._note(bound, item)

    def _note(self, bound: float, item: Bracket) -> None:
        """A deployment's bracket has changed: the incumbent, and what is left of the deployment."""
        candidate, search = item.candidate, item.search
        if search.met_per_s:
            self.incumbent = min(self.incumbent, self._score_at(item, search.met_per_s))
        reached = max(bound, self._score_at(item, search.violated_per_s))
        if search.is_closed and not search.look_above():
            self._end(candidate, search.judged())
            self.unseen = min(self.unseen, reached if search.met_per_s else INFINITE)
        else:
            self._put(reached, item)

    def _ties(self, bound: float, item: Bracket) -> bool:
        """Whether a deployment simpler than the incumbent ties with it, though no rate is left at which it is better.

        It has then met every SLO at a rate whose score is within the tie of the least bound, which one more simulation
        may have to tell.
        """
        simplicity, search = item.candidate.family.simplicity(item.candidate.counts), item.search
        if simplicity >= self.simplest:
            return False
        most = min(self.incumbent, bound, self.least_unseen) / (1.0 - TIE) * (1.0 - SAME)
        rate = self._rate_of(item, most)
        if search.met_per_s < rate < search.violated_per_s:
            search.narrow(rate)
        ties = search.met_per_s > 0.0 and self._score_at(item, search.met_per_s) <= most * (1.0 + SAME)
        if ties:
            self.simplest = simplicity
        return ties

    def _rate_of(self, item: Bracket, least_score: float) -> float:
        """The rate at which a deployment would have a score, requests/s, at most its highest.

        Scores fall as 1/rate, so that the first step finds it; of energy more slowly, as power falls with the rate
        too: each step then leaves a share of the distance.
        """
        most = item.candidate.request_rate_per_s
        rate = min(self._score_at(item, most) / least_score, 1.0) * most
        for _ in range(MOST_STEPS):
            score = self._score_at(item, rate) if rate > 0.0 else least_score
            if score >= least_score * (1.0 - SAME):
                break
            rate *= score / least_score
        return rate

    def _score_at(self, item: Bracket, rate_per_s: float) -> float:
        """The objective of a deployment if it met every SLO at a rate."""
        tokens_per_s = rate_per_s * item.search.tokens_per_request
        return score_of(self.problem, item.candidate, request_rate_per_s=rate_per_s, tokens_per_s=tokens_per_s)

    def _end(self, candidate: Candidate, judged: Judged) -> None:
        """Record a result. A violated SLO on the time between tokens adds candidates with smaller batches."""
        score = INFINITE if not judged.is_met else score_judged(self.problem, candidate, judged)
        self.num_met += score < INFINITE
        self.simulated.append(Simulated(candidate=candidate, judged=judged, score=score))
        if score < INFINITE and score <= self.incumbent * (1.0 + SAME):
            simplicity = candidate.family.simplicity(candidate.counts)
            self.simplest = simplicity if score < self.incumbent * (1.0 - SAME) else min(self.simplest, simplicity)
        self.incumbent = min(self.incumbent, score)
        if judged.refuted_per_s:
            tokens_per_s = judged.refuted_per_s * self.problem.workload.mean_lengths[1]
            at_refuted = score_of(
                self.problem, candidate, request_rate_per_s=judged.refuted_per_s, tokens_per_s=tokens_per_s
            )
            self.not_refuted = min(self.not_refuted, at_refuted)
        if any(slo.metric in ("tpot", "itl") for slo, _ in judged.violated):
            for smaller in smaller_batches(candidate):
                self._put(smaller.score, smaller)


def simulate_candidate(problem: ServingProblem, candidate: Candidate, *, seed: int = 0) -> Simulated:
    """One candidate, whatever the others do."""
    if problem.has_free_rate:
        costs = candidate.costs
        rate = candidate.request_rate_per_s
        search = HighestRate(problem, candidate.config, high_per_s=rate, seed=seed, costs=costs)
        judged = search.close().settle().judged()
    else:
        judged = judge_once(problem, candidate, seed=seed)
    score = INFINITE if not judged.is_met else score_judged(problem, candidate, judged)
    return Simulated(candidate=candidate, judged=judged, score=score)


def judge_once(
    problem: ServingProblem,
    candidate: Candidate,
    *,
    seed: int,
    num_requests: int | None = None,
    effort: Effort = Effort.DECIDE,
) -> Judged:
    """Simulate a candidate under the given load; if the load is free, at its maximum concurrency.

    Args:
        problem: the question.
        candidate: the deployment.
        seed: for drawing the requests.
        num_requests: of one run, where the candidate cannot win; None: as many as decide it.
        effort: whether longer runs keep the SLOs, or only whether the candidate is worth that question.
    """
    costs = candidate.costs
    running = candidate.num_running if problem.has_free_load else None
    return judge(
        problem,
        candidate.config,
        num_running=running,
        num_requests=num_requests,
        supply_per_s=candidate.family.rate(candidate.counts),
        effort=effort,
        seed=seed,
        costs=costs,
    )


def score_judged(problem: ServingProblem, candidate: Candidate, judged: Judged) -> float:
    """The objective of a simulated candidate."""
    rate, tokens_per_s = judged.requests_per_s, judged.output_tokens_per_s
    return score_of(problem, candidate, request_rate_per_s=rate, tokens_per_s=tokens_per_s)
