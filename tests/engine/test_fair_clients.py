"""Several clients: shares of the queue, of the sequences and of the time for prompts."""

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulation import Machine, Request, Simulation
from test_scheduler import Pending, always, processed, scheduler


def offered(queue, *requests):
    for request in requests:
        assert queue.offer(request, request.arrival) is None
    return requests


def admitted(queue):
    """Admit as an engine does. Returns the requests that were preempted."""
    victims = []
    while True:
        queue.admit(always)
        if (victim := queue.make_room()) is None:
            return victims
        victims.append(victim)


def pass_time(queue, seconds):
    queue.plan([Pending(1)])
    queue.record_step(seconds, 1)


def test_clients_alternate_by_share_and_requests_by_rank():
    queue = scheduler()
    a, b, c, late = offered(queue, *(Request(0.0, 1, client="a") for _ in range(3)), Request(1.0, 1, client="b"))
    urgent = Request(2.0, 1, client="b", priority=-1)
    offered(queue, urgent)
    assert queue.admit(always) == [urgent, a, b, late, c]


def test_a_client_alone_uses_everything_and_yields_its_newest_request():
    queue = scheduler(max_sequences=4)
    hog = offered(queue, *(Request(0.0, 1, client="a") for _ in range(6)))
    assert admitted(queue) == []
    assert queue.running == list(hog[:4])
    first, second, third = (Request(1.0, 1, client="b") for _ in range(3))
    offered(queue, first)
    assert admitted(queue) == [hog[3]]
    assert queue.running == [*hog[:3], first]
    offered(queue, second, third)
    assert admitted(queue) == [hog[2]], "two of four are its fair share"
    assert admitted(queue) == []
    queue.ended(first)
    assert admitted(queue) == []
    assert queue.running == [*hog[:2], second, third]
    queue.ended(second)
    queue.ended(third)
    assert admitted(queue) == []
    assert queue.running == list(hog[:4]), "preempted requests resume in order"


def test_preemption_is_never_in_vain_or_beyond_a_fair_share():
    queue = scheduler(max_sequences=4)
    offered(queue, *(Request(0.0, 1, client="a") for _ in range(4)))
    admitted(queue)
    offered(queue, Request(1.0, 1, num_sequences=3, client="b"))
    assert admitted(queue) == []


def test_a_large_part_of_the_cache_is_a_large_share():
    queue, room = scheduler(), [3]

    def reserve(item, new_tokens):
        room[0] -= 1
        return room[0] >= 0 or bool(room.append(0))

    hog = offered(queue, *(Request(0.0, 1, client="a", cache_share=0.3) for _ in range(3)))
    queue.admit(reserve)
    offered(queue, Request(1.0, 1, client="b", cache_share=0.3))
    assert queue.admit(reserve) == []
    assert queue.make_room() is hog[2]


def test_a_wide_request_resumes_and_then_runs_for_a_turn():
    queue = scheduler(max_sequences=4)
    (wide,) = offered(queue, Request(0.0, 1, num_sequences=4, client="a"))
    admitted(queue)
    (first,) = offered(queue, Request(0.0, 1, client="b"))
    assert admitted(queue) == [wide]
    queue.ended(first)
    assert admitted(queue) == []
    assert queue.running == [wide]
    offered(queue, Request(0.0, 1, client="b"))
    wide.rows[0].computed, wide.rows[0].total = 0, 9  # it is computed again
    pass_time(queue, 5.0)
    assert admitted(queue) == []
    wide.rows[0].computed = 8
    pass_time(queue, 5.4)
    assert admitted(queue) == [], "it decodes for as long as it was computed again, and half a second"
    pass_time(queue, 0.2)
    assert admitted(queue) == [wide]


def test_a_wide_request_is_not_overtaken_forever():
    queue = scheduler(max_sequences=4)
    waiting = itertools.cycle(["b", "c"])
    (wide,) = offered(queue, Request(0.0, 1, num_sequences=4, client="a"))
    offered(queue, Request(0.0, 1, client="b"))
    admitted(queue)
    assert wide not in queue.running
    for step in range(100):  # one ends and another comes in every step, so that there is never room for all four
        offered(queue, Request(step, 1, client=next(waiting)))
        victims = admitted(queue)
        if wide in queue.running:
            break
        assert not victims
        pass_time(queue, 0.5)
        if len(queue.running) > 1:
            queue.ended(queue.running[0])
    assert step == 20, "after 10 seconds"
    assert queue.running == [wide]
    pass_time(queue, 0.4)
    assert admitted(queue) == [], "for half a second"
    pass_time(queue, 0.2)
    assert admitted(queue) == [wide]


def test_the_largest_client_is_preempted_but_never_the_oldest_request():
    queue = scheduler(overcommit=10.0)
    first, b, second, third, c = offered(
        queue,
        *(Request(0.0, 1, new=50, client=name) for name in "abaac"),
    )
    assert set(queue.admit(always)) == {first, b, second, third, c}
    assert [queue.preempt() for _ in range(2)] == [third, second]
    assert queue.admit(always) == [], "until a request has ended"
    assert queue.make_room() is None
    assert {queue.preempt(), queue.preempt()} == {b, c}
    assert queue.preempt() is None
    assert queue.running == [first]


@given(
    limit=st.integers(1, 12),
    arrivals=st.lists(st.tuples(st.sampled_from("aaaabcd"), st.integers(1, 5)), max_size=60),
    tokens=st.booleans(),
)
def test_one_client_does_not_fill_the_queue_of_the_others(limit, arrivals, tokens):
    limits = {"max_waiting_tokens": limit} if tokens else {"max_waiting": limit}
    queue, amounts = scheduler(**limits), dict.fromkeys("abcd", 0)
    for name, prompt in arrivals:
        amount = prompt if tokens else 1
        half = -(-limit // 2)
        counted = amounts[name] + sum(min(amounts[other], half) for other in "abcd" if other != name)
        fits = counted + amount <= limit or (tokens and not counted)
        assert (queue.offer(Request(0.0, prompt, client=name), 0.0) is None) == fits
        amounts[name] += amount * fits
    assert queue.waiting <= limit + limit // 2 or tokens


def test_a_small_clients_prompt_does_not_wait_for_a_large_clients():
    def steps(names):
        queue = scheduler(prefill_chunk=64)
        prompt = Pending(200, client="b")
        rows = [*(Pending(20_000, client=name) for name in names), prompt]
        for step in range(1, 10_000):
            rows.append(Pending(100, client="a"))
            processed(queue, [row for row in rows if row.pending > 1])
            if prompt.pending == 1:
                return step
        return None

    assert steps("a" * 15) <= 2 * steps("") + 1


class Timed(Simulation):
    """Checks each second preemption, and notes how long prompts took to be computed again."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.returned = {}  # the seconds of prompt and of decoding since they came back
        self.longest_return = 0.0

    def _join(self, request):
        super()._join(request)
        if request.preempted:
            self.returned[request] = [0.0, 0.0]

    def _preempt(self, victim):
        if victim in self.returned:
            prompt, decoding = self.returned.pop(victim)
            assert decoding >= prompt + 0.5 - 1e-6
        super()._preempt(victim)

    def _step(self):
        before = self.now
        super()._step()
        for request, times in self.returned.items():
            if not request.finish:
                times[request.decodes] += self.now - before
                self.longest_return = max(self.longest_return, times[0])


clients = st.sampled_from("aabcd")
requests = st.builds(
    Request,
    arrival=st.floats(0, 8),
    prompt=st.integers(1, 400),
    new=st.integers(1, 90),
    num_sequences=st.sampled_from([1, 1, 2]),
    priority=st.sampled_from([0, 0, 0, -1, 2]),
    client=clients,
)
wide = st.builds(
    Request,
    arrival=st.floats(0, 8),
    prompt=st.integers(1, 200),
    new=st.integers(50, 200),
    num_sequences=st.integers(4, 8),
    client=st.sampled_from("aab"),
)


@settings(max_examples=40, deadline=None)
@given(schedule=st.lists(requests | wide, min_size=5, max_size=25), seed=st.integers(0, 99))
def test_all_are_served_and_a_new_client_waits_three_turns_at_most(schedule, seed):
    """A newcomer within its fair share waits until the protected requests may be preempted, for an overdue request
    that waits for the same, and for the turn of that one: each is half a second and twice the time of a prompt."""
    run = Timed(scheduler(), Machine(), seed=seed).run(schedule, most_steps=20_000)
    assert {request.finish for request in schedule} == {"length"}
    longest = 3 * (0.5 + 2 * run.longest_return) + 3 * max(step.seconds for step in run.steps)
    for request in schedule:
        is_new = all(
            other.client != request.client or other.arrival > request.arrival or other.ended <= request.arrival
            for other in schedule
            if other is not request
        )
        if is_new and request.num_sequences <= 2:
            assert request.admitted - request.arrival <= longest
        assert request.preempted <= 1 + 2 * (request.ended - request.arrival)


@pytest.mark.parametrize("seed", range(3))
def test_a_new_client_is_admitted_in_the_next_step(seed):
    chance = random.Random(seed)
    schedule = [
        Request(
            0.0, chance.randint(1, 300), new=chance.randint(100, 400), num_sequences=chance.randint(1, 8), client="a"
        )
        for _ in range(20)
    ]
    newcomer = Request(3.0, 50, new=10, client="b")
    run = Simulation(scheduler(), Machine()).run([*schedule, newcomer])
    assert newcomer.admitted - newcomer.arrival <= max(step.seconds for step in run.steps)
    assert run.scheduler.preemptions <= 2
