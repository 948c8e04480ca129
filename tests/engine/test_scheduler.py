"""The decisions of the scheduler one by one: queue, order, admission, preemption and chunks of prompts."""

import gc
import math
import weakref
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulation import Machine, Request, Simulation

from onward.engine.scheduler import Scheduler


def scheduler(**limits):
    return Scheduler(**{"max_sequences": 8, "max_waiting": 100, "max_waiting_tokens": 10**6, **limits})


def always(item, new_tokens):
    return True


def never(item, new_tokens):
    return False


@dataclass(eq=False)
class Pending:
    """A row with `pending` tokens to process from a position on."""

    pending: int
    computed: int = 0
    client: str | None = None

    @property
    def total(self):
        return self.computed + self.pending


def processed(scheduler, rows, seconds=0.01):
    """Plan a step, run it, and return the tokens of each row in it. A prompt that ends begins to decode."""
    counts = dict.fromkeys(rows, 0)
    for row, tokens in scheduler.plan(rows):
        counts[row] = tokens
        row.computed += tokens
        row.pending = max(row.pending - tokens, 1)
    scheduler.record_step(seconds, 0)
    return [counts[row] for row in rows]


@given(
    max_waiting=st.integers(1, 5),
    max_tokens=st.integers(1, 10),
    events=st.lists(st.one_of(st.integers(1, 4), st.none()), max_size=40),
)
def test_the_limits_of_the_queue_are_exact(max_waiting, max_tokens, events):
    """An event is the arrival of a prompt with a number of tokens, or the end of the oldest waiting request."""
    queue, waiting = scheduler(max_waiting=max_waiting, max_waiting_tokens=max_tokens), []
    for tokens in events:
        if tokens is None:
            if waiting:
                queue.ended(waiting.pop(0))
        else:
            held = sum(request.prompt for request in waiting)
            fits = len(waiting) < max_waiting and (not waiting or held + tokens <= max_tokens)
            request = Request(0.0, tokens)
            assert (queue.offer(request, 0.0) is None) == fits
            waiting += [request] * fits
        assert queue.waiting == len(waiting)
        assert queue.waiting_tokens == sum(request.prompt for request in waiting)


def test_a_refusal_names_the_limit_and_the_waiting_work():
    queue = scheduler(max_waiting=2, max_waiting_tokens=100)
    assert queue.offer(Request(0.0, 60), 0.0) is None
    assert queue.offer(Request(0.0, 60), 0.0).reason == (
        "60 tokens of prompts wait (max_waiting_tokens=100), and this one has 60"
    )
    assert queue.offer(Request(0.0, 10), 0.0) is None
    assert queue.offer(Request(0.0, 10), 0.0).reason == "2 requests wait (max_waiting=2)"


def test_a_refusal_estimates_the_wait_from_measured_rates():
    queue = scheduler(max_sequences=1000, max_waiting=1, max_waiting_tokens=100)
    assert queue.offer(Request(0.0, 40), 0.0) is None
    assert queue.offer(Request(0.0, 1), 0.0).seconds > 0, "before anything was measured, too"
    for _ in range(50):  # each step takes half a second, admits one request and processes its 40 tokens
        (running,) = queue.admit(always)
        processed(queue, [Pending(40)], seconds=0.5)
        queue.ended(running)
        assert queue.offer(Request(0.0, 40), 0.0) is None
    assert queue.offer(Request(0.0, 40), 0.0).seconds == pytest.approx(0.5)
    assert queue.throughput.prompt == pytest.approx(80)
    roomy = scheduler(max_waiting_tokens=100)
    roomy.throughput = queue.throughput
    assert roomy.offer(Request(0.0, 90), 0.0) is None
    assert roomy.offer(Request(0.0, 50), 0.0).seconds == pytest.approx(40 / 80), "40 tokens are too many"


@given(
    offers=st.lists(st.tuples(st.floats(0, 100), st.integers(-3, 3)), min_size=2, max_size=20),
    ageing=st.floats(0.1, 30),
)
def test_first_come_first_served_within_a_priority_without_starvation(offers, ageing):
    queue = scheduler(max_sequences=100, ageing=ageing)
    requests = [Request(arrival, 1, priority=priority) for arrival, priority in sorted(offers, key=lambda o: o[0])]
    for request in requests:
        assert queue.offer(request, request.arrival) is None
    admitted = queue.admit(always)
    assert sorted(map(id, admitted)) == sorted(map(id, requests))
    for at, first in enumerate(admitted):
        for second in admitted[at + 1 :]:
            if first.priority == second.priority:
                assert requests.index(first) < requests.index(second)
            ahead = (second.priority - first.priority) * ageing
            assert first.arrival <= second.arrival + ahead + 1e-9


def test_a_smaller_priority_goes_first():
    queue = scheduler()
    late, urgent = Request(0.0, 1), Request(1.0, 1, priority=-1)
    queue.offer(late, 0.0)
    queue.offer(urgent, 1.0)
    assert queue.admit(always) == [urgent, late]


def test_the_head_of_the_queue_is_not_overtaken_while_it_lacks_memory():
    queue = scheduler(max_sequences=4)
    running, wide, narrow = Request(0.0, 1, num_sequences=2), Request(0.0, 1, num_sequences=3), Request(0.0, 1)
    for request in (running, wide, narrow):
        queue.offer(request, 0.0)
    assert queue.admit(always) == [running]
    assert queue.admit(always) == []
    queue.ended(running)
    asked = []
    assert queue.admit(lambda item, new: asked.append(item)) == []
    assert asked == [wide], "no request behind it is considered"
    assert queue.admit(always) == [wide, narrow]


@pytest.mark.parametrize(("overcommit", "reserved"), [(1.0, 100), (4.0, 25), (3.0, 34)])
def test_overcommit_determines_the_reserved_share_of_new_tokens(overcommit, reserved):
    queue = scheduler(overcommit=overcommit)
    queue.offer(Request(0.0, 10, new=100), 0.0)
    asked = []
    queue.admit(lambda item, new: asked.append(new))
    assert asked == [reserved]


def test_deadlines_apply_in_the_queue():
    queue = scheduler()
    early, late = Request(0.0, 5, deadline=1.0), Request(0.0, 7)
    queue.offer(early, 0.0)
    queue.offer(late, 0.0)
    assert queue.expire(0.9) == []
    assert queue.expire(1.0) == [early]
    assert queue.waiting_tokens == 7
    assert queue.admit(always) == [late]
    assert queue.expire(math.inf) == [], "those that run are not the queue's"


def test_the_newest_is_preempted_and_resumes_in_order_with_all_blocks():
    queue = scheduler(overcommit=10.0)
    first, second, third, fourth = requests = [Request(0.0, 1, new=50) for _ in range(4)]
    for request in requests[:3]:
        queue.offer(request, 0.0)
    assert queue.admit(always) == [first, second, third]
    queue.offer(fourth, 1.0)
    assert (queue.preempt(), queue.preempt(), queue.preempt()) == (third, second, None)
    assert queue.admit(always) == [], "no request is admitted until another one has ended"
    queue.ended(first)
    asked = []
    assert queue.admit(lambda item, new: asked.append((item, new)) is None) == [second, third, fourth]
    assert asked == [(second, 50), (third, 50), (fourth, 5)]
    assert queue.preemptions == 2


@pytest.mark.parametrize("expires", [False, True])
def test_ended_requests_are_forgotten(expires):
    queue = scheduler()
    requests = [Request(0.0, 1, deadline=1.0) for _ in range(3)]
    for request in requests:
        queue.offer(request, 0.0)
    queue.admit(always)
    queue.preempt()
    for request in requests[: 2 if expires else 3]:
        queue.ended(request)
    queue.expire(2.0)
    ghosts = [weakref.ref(request) for request in requests]
    del request, requests
    gc.collect()
    assert [ghost() for ghost in ghosts] == [None] * 3


def test_cancelled_requests_neither_wait_nor_run():
    queue = scheduler(max_sequences=1)
    first, second, third = requests = [Request(0.0, 1) for _ in range(3)]
    for request in requests:
        queue.offer(request, 0.0)
    queue.admit(always)
    queue.ended(second)
    queue.ended(first)
    queue.ended(first)
    assert queue.admit(always) == [third]
    assert queue.waiting_tokens == 0


@given(pending=st.lists(st.integers(1, 200), min_size=1, max_size=5), chunk=st.sampled_from([1, 7, 16, 100, 512]))
def test_a_step_takes_every_decoding_row_and_few_sizes_of_chunks(pending, chunk):
    queue, rows, steps_without = scheduler(prefill_chunk=chunk), [Pending(count) for count in pending], 0
    while any(row.pending > 1 for row in rows):
        before = [row.pending for row in rows]
        counts = processed(queue, rows)
        prompts = [(was, count) for was, count in zip(before, counts, strict=True) if was > 1]
        assert all(count == 1 for was, count in zip(before, counts, strict=True) if was == 1)
        assert 0 <= sum(count for _, count in prompts) <= chunk
        steps_without = 0 if any(count for _, count in prompts) else steps_without + 1
        # Decoding rows are measured alone, and the very first step of all may have made a program.
        assert steps_without <= 2 * (1 in before)
        for was, count in prompts:
            assert count <= was
            if 0 < count < was and count != chunk:
                quarters = count / 2 ** (math.floor(math.log2(count)) - 2)
                assert count >= 4
                assert quarters in ((4, 5, 6, 7) if count >= 16 else (4, 6))


def test_without_decoding_rows_a_step_takes_whole_chunks_of_several_prompts():
    queue, rows = scheduler(prefill_chunk=512), [Pending(400), Pending(400), Pending(400)]
    assert processed(queue, rows) == [400, 112, 0]


def steps_of(prompt, others, arrivals, turn):
    """Steps until a prompt is processed: it comes behind `others`, and `arrivals` come behind it, one a step."""
    queue, row = scheduler(prefill_chunk=64), Pending(prompt)
    rows, arrivals, steps = [*map(Pending, others), row], list(arrivals), 0
    if turn:
        processed(queue, [Pending(2)])
    while row.pending > 1:
        steps += 1
        processed(queue, [each for each in rows if each.pending > 1])
        rows += [Pending(arrivals.pop(0))] if arrivals else []
    return steps


@given(
    prompt=st.integers(2, 1000),
    arrivals=st.lists(st.integers(2, 100), max_size=100),
    others=st.lists(st.integers(2000, 4000), max_size=2),
    turn=st.booleans(),
)
def test_first_and_shortest_prompts_take_at_most_twice_their_steps(prompt, arrivals, others, turn):
    alone = steps_of(prompt, [], [], turn)
    assert steps_of(prompt, [], arrivals, turn) <= 2 * alone + 1, "it is the first, and shorter ones come"
    short = min(prompt, 150)
    assert steps_of(short, others, [short + 1] * 100, turn) <= 2 * steps_of(short, [], [], turn) + 1


def test_a_long_prompt_does_not_delay_a_short_one():
    long, short = Request(0.0, 20_000, new=5), Request(0.5, 100, new=5)
    Simulation(scheduler(), Machine()).run([long, short])
    assert short.ended < long.ended / 4


def test_prompts_progress_even_if_every_step_exceeds_its_limit():
    queue, decoding, prompt = scheduler(max_step_ms=1), Pending(1), Pending(1000)
    for _ in range(10):
        count = processed(queue, [decoding, prompt], seconds=0.5)[1]
    assert count == 4
