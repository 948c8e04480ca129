"""The simulated fleet compared with theory: queues with a closed form, Little's law, and no lost requests."""

import itertools
import math
import random
import statistics
from dataclasses import replace

import pytest
from arrivals import trace
from simulated_fleet import Arrival, Fleet, Plan
from simulated_replica import StepTime

# A step of any number of rows takes so long: then an engine of k rows is a queue with k servers.
STEP = 0.05
SERVERS = StepTime(STEP, 0, 0, 0, 0, 0)
ONE = Plan(1, patience=0, blocks=10**9)
# Student's t of 19 degrees of freedom at 99.9 %, two-sided.
T = 3.883


def exponential(count: int, arrivals: float, service: float, seed: int) -> list[Arrival]:
    """Poisson arrivals whose services are exponential, in whole steps."""
    generator, at = random.Random(seed), 0.0
    made = []
    for _ in range(count):
        at += generator.expovariate(arrivals)
        steps = max(1, math.ceil(generator.expovariate(1 / service) / STEP))
        made.append(Arrival(at, 1, steps))
    return made


def mean_wait(servers: int, arrivals: float, service: float) -> float:
    """Of M/M/k, by Erlang's C."""
    load = arrivals * service
    queued = load**servers / math.factorial(servers) * servers / (servers - load)
    free = sum(load**each / math.factorial(each) for each in range(servers))
    return queued / (free + queued) * service / (servers - load)


@pytest.mark.parametrize(("servers", "share"), [(1, 0.6), (4, 0.8), (16, 0.9)])
def test_an_engine_of_k_rows_is_a_queue_with_k_servers(servers: int, share: float) -> None:
    """The mean of each of 20 runs' means, after each run's beginning, lies in the interval of confidence.

    Requests join and end at the ends of steps: a mean service is longer by half a step, for it is rounded up, and a
    wait by less than one step; both are in the bounds.
    """
    waits = []
    for seed in range(20):
        arrived = exponential(600, share * servers, 1.0, seed)
        Fleet(replace(ONE, max_sequences=servers), SERVERS).run(arrived)
        waits.append(statistics.mean(each.first - STEP - each.at for each in arrived[100:] if each.first is not None))
    around = T * statistics.stdev(waits) / math.sqrt(len(waits))
    low, high = mean_wait(servers, share * servers, 1.0), mean_wait(servers, share * servers, 1.0 + STEP / 2) + STEP
    assert low - around <= statistics.mean(waits) <= high + around


def test_littles_law_applies() -> None:
    """Requests in the engine, looked at at random times, are the rate of arrivals times the mean time in it."""
    arrived = exponential(3000, 3.0, 1.0, 7)
    Fleet(replace(ONE, max_sequences=4), SERVERS).run(arrived)
    span = arrived[-1].at
    times = [(each.at, each.last or math.inf) for each in arrived]
    generator = random.Random(0)
    looks = [generator.uniform(0, span) for _ in range(4000)]
    seen = statistics.mean(sum(begin <= look < end for begin, end in times) for look in looks[:400])
    # Exact over the whole span: the time within it that each was there.
    there = sum(min(end, span) - begin for begin, end in times) / span
    spread = math.sqrt(there * 4 / 400) * 4
    assert abs(seen - there) <= spread
    rate, mean_time = len(arrived) / span, statistics.mean(end - begin for begin, end in times)
    after = sum(max(0.0, end - span) for _, end in times) / span
    assert rate * mean_time == pytest.approx(there + after, rel=1e-9)


CLOCK = StepTime(0.02, 0.0015, 0, 0.027, 0.001, 1e-6)


@pytest.mark.parametrize("affinity", [True, False])
def test_every_request_ends_once_with_all_its_tokens(affinity: bool) -> None:
    arrivals = trace(6.0, 60.0, seed=3)
    plan = Plan(8, affinity=affinity, failures=0.15, restart=5.0, patience=0, budget=False)
    fleet = Fleet(replace(plan, options=replace(plan.options, attempts=50)), CLOCK, seed=1).run(arrivals)
    assert fleet.deaths > 5
    assert fleet.retries > 10
    assert len(fleet.requests) == len(arrivals)
    assert all(each.last is not None and not each.failed for each in arrivals)
    assert all(each.first is not None and each.at < each.first <= each.last for each in arrivals if each.last)


def test_affinity_increases_prefix_hits() -> None:
    shares = []
    for affinity in (True, False):
        fleet = Fleet(Plan(16, affinity=affinity, patience=0), CLOCK).run(trace(10.0, 60.0))
        prompts = sum(engine.prompt_tokens for engine in fleet.retired)
        shares.append(sum(engine.cached_tokens for engine in fleet.retired) / prompts)
    assert shares[0] > shares[1]


def test_a_budget_limits_retries() -> None:
    """All replicas except one die: no more of their requests are retried than the budget allows."""
    arrivals = [Arrival(at / 100, 500, 300) for at in range(400)]
    plan = Plan(50, deaths=[(3.5, 0.9)], patience=0)
    few = replace(plan, options=replace(plan.options, retry_burst=20, retry_share=0.0))
    with_budget = Fleet(few, CLOCK).run([replace(each) for each in arrivals])
    without = Fleet(replace(few, budget=False), CLOCK).run([replace(each) for each in arrivals])
    assert with_budget.retries == 20
    assert with_budget.exhausted + 20 == without.retries > 100
    assert sum(each.failed == "budget" for each in with_budget.requests) == with_budget.exhausted


def test_the_same_seed_gives_the_same_run() -> None:
    runs = [Fleet(Plan(4, failures=0.2), CLOCK, seed=2).run(trace(3.0, 30.0)) for _ in range(2)]
    times = [[(each.first, each.last, each.failed) for each in run.requests] for run in runs]
    assert times[0] == times[1]
    assert all(before.at <= after.at for before, after in itertools.pairwise(trace(3.0, 30.0)))
