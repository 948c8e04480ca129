"""Random requests through the scheduler on a simulated machine: all end, in order, within blocks and time."""

import math

from hypothesis import given, settings
from hypothesis import strategies as st
from simulation import Machine, Request, Simulation

from onward.engine.scheduler import Scheduler

times = st.floats(0, 5)
requests = st.builds(
    Request,
    arrival=times,
    prompt=st.integers(1, 700),
    new=st.integers(1, 60),
    asked=st.sampled_from([0, 30, 600]),
    num_sequences=st.integers(1, 4),
    priority=st.sampled_from([0, 0, 0, -1, 2]),
)
mortal = st.builds(
    lambda request, deadline, cancel: Request(
        request.arrival, request.prompt, request.new, request.asked, request.num_sequences, request.priority,
        deadline=request.arrival + deadline, cancel=request.arrival + cancel,
    ),
    requests,
    deadline=st.sampled_from([math.inf, 0.0, 0.3, 2.0]),
    cancel=st.sampled_from([math.inf, math.inf, 0.0, 0.5, 3.0]),
)  # fmt: skip
# A machine that fits every request alone, and hardly more than two of the largest.
blocks = st.integers(4 * math.ceil((700 + 60 + 600) / 64), 200)
chunks = st.sampled_from([1, 7, 16, 100, 512])


def scheduler(**limits):
    return Scheduler(**{"max_sequences": 6, "max_waiting": 1000, "max_waiting_tokens": 10**6, **limits})


class Watch:
    """Checks the simulation before each step: rows and blocks, and whether the oldest running request continues."""

    def __init__(self, max_sequences):
        self.max_sequences, self.oldest = max_sequences, None

    def __call__(self, simulation):
        running = simulation.scheduler.running
        assert sum(request.num_sequences for request in running) <= self.max_sequences
        held = sum(request.blocks for request in running)
        assert held + simulation.free == simulation.blocks
        assert simulation.free >= 0
        assert self.oldest is None or self.oldest.finish or running[0] is self.oldest, "the oldest ran on"
        self.oldest = running[0] if running else None


def in_order(admissions, ageing=10.0):
    """Whether each was admitted as the module says: by arrival within a priority, and overtaken for so long only."""
    for at, first in enumerate(admissions):
        for second in admissions[at + 1 :]:
            waited_together = second.arrival <= first.admitted
            if first.priority == second.priority:
                assert first.arrival <= second.arrival
            elif waited_together:
                assert first.arrival <= second.arrival + (second.priority - first.priority) * ageing + 1e-9


@settings(max_examples=40)
@given(schedule=st.lists(mortal, max_size=25), blocks=blocks, chunk=chunks, max_waiting=st.sampled_from([3, 1000]))
def test_every_request_ends_in_order_without_a_preemption(schedule, blocks, chunk, max_waiting):
    run = Simulation(scheduler(prefill_chunk=chunk, max_waiting=max_waiting), Machine(), blocks, watch=Watch(6))
    run.run(schedule)
    assert all(request.finish for request in schedule)
    assert run.scheduler.preemptions == 0
    assert run.scheduler.waiting == run.scheduler.waiting_tokens == 0
    assert not run.scheduler.running
    in_order(run.admissions)
    for request in schedule:
        if request.finish == "length":
            assert not any(row.left for row in request.rows)
        assert request.finish != "time" or request.ended >= request.deadline


@settings(max_examples=40)
@given(schedule=st.lists(requests, min_size=5, max_size=25), blocks=blocks, overcommit=st.sampled_from([1.5, 4.0, 1e9]))
def test_with_overcommit_the_oldest_always_continues_and_all_end(schedule, blocks, overcommit):
    run = Simulation(scheduler(overcommit=overcommit), Machine(), blocks, watch=Watch(6)).run(schedule)
    assert {request.finish for request in schedule} <= {"length"}
    in_order(run.admissions)
    # Nobody joins after a preemption until a request has ended, so between two ends each that runs gives way once.
    assert run.scheduler.preemptions <= 6 * len(schedule)


def test_overcommit_preempts_when_blocks_are_short_and_runs_more_at_once():
    def busy(overcommit):
        schedule = [Request(0.0, 100, new=200, asked=400) for _ in range(12)]
        return Simulation(scheduler(overcommit=overcommit), Machine(), blocks=26).run(schedule)

    careful, bold = busy(1.0), busy(8.0)
    assert bold.scheduler.preemptions > 0
    assert bold.now < careful.now


machines = st.builds(
    lambda step, decoding_row, token, reading, doubling, noise: Machine(
        step, decoding_row, reading * token, token, token / doubling, making=0.5, noise=noise
    ),
    step=st.floats(0.001, 0.06),
    decoding_row=st.floats(0.0001, 0.003),
    token=st.floats(0.0002, 0.002),
    reading=st.floats(8, 32),  # the fixed cost of a chunk, in tokens
    doubling=st.floats(2000, 20_000),  # the position at which attention costs as much as the rest of a token
    noise=st.sampled_from([0.0, 0.1]),
)
mixed = st.lists(
    st.builds(
        Request, arrival=st.floats(0, 30), prompt=st.sampled_from([5, 40, 130, 600, 4000]), new=st.integers(1, 90)
    ),
    min_size=10,
    max_size=20,
)


def least(machine, step):
    """The minimum time of a step in which prompts progress: with 4 tokens of the first prompt."""
    return machine.seconds(step.decoding, [(position, min(tokens, 4)) for position, tokens in step.chunks[:1]])


@settings(max_examples=25)
@given(schedule=mixed, machine=machines)
def test_steps_with_decoding_rows_keep_their_time_limit(schedule, machine):
    """Once rows and positions were measured, whatever the machine is like.

    Where 4 tokens alone take longer than a step may, their time is the bound. The factor: a unit of cost is measured
    with a chunk of t tokens and used for one of s. Where it costs as much as r tokens more than it has, and not 16,
    the prediction is off by (s + r) (t + 16) / ((t + r) (s + 16)), which is at most 1.84 for r from 8 to 32 and sizes
    from 2 to 512. Within a range the positions double, and so may the cost. Noise may be low when measured and high
    when used.
    """
    run = Simulation(scheduler(max_sequences=12, max_step_ms=100), machine).run(schedule)
    factor = 1.84 * 2 * (1 + machine.noise) / (1 - machine.noise)
    measured: dict[tuple[str, int], int] = {}
    for step in run.steps:
        places = {("rows", step.decoding), *(("range", (at // 512).bit_length()) for at, _ in step.chunks)}
        if step.decoding and not step.new and all(measured.get(place, 0) >= 3 for place in places):
            assert step.seconds <= factor * max(0.1, least(machine, step))
        for place in places:
            measured[place] = measured.get(place, 0) + 1


@settings(max_examples=25)
@given(schedule=mixed, unit=st.floats(0.0001, 0.003))
def test_steps_use_their_time_limit_on_a_machine_as_assumed(schedule, unit):
    """Decoding rows cost unit * (rows + 16) and chunks unit * (tokens + 4): the very first step teaches all there is to
    know."""
    machine = Machine(step=16 * unit, decoding_row=unit, chunk=4 * unit, token=unit)
    run = Simulation(scheduler(max_sequences=12, max_step_ms=100), machine).run(schedule)
    for step in run.steps[1:]:
        if step.decoding:
            assert step.seconds <= max(0.1, least(machine, step)) * (1 + 1e-9)
            # A chunk of such a size is not the end of its prompt, so the next size would have taken too long.
            sizes = {64: 80, 80: 96, 96: 112, 112: 128, 128: 160}
            larger = sizes.get(step.chunks[0][1]) if len(step.chunks) == 1 else None
            if larger and step.chunks[0][0] + larger <= 600:
                assert machine.seconds(step.decoding, [(0, larger)]) > 0.1


@settings(max_examples=25)
@given(schedule=mixed, unit=st.floats(0.0001, 0.003))
def test_without_a_limit_prompts_double_a_step_at_most(schedule, unit):
    """The bound that docs/engine.md names: twice the step without prompts, 40 ms, or what 4 tokens take."""
    machine = Machine(step=16 * unit, decoding_row=unit, chunk=4 * unit, token=unit)
    run = Simulation(scheduler(max_sequences=12), machine).run(schedule)
    for step in run.steps[1:]:
        if step.decoding:
            limit = max(2 * machine.decode(step.decoding), 0.04)
            assert step.seconds <= max(limit, least(machine, step)) * (1 + 1e-9)


def prompt_with_rows(machine, rows, prompt, **limits):
    """The steps while a prompt is processed and other rows decode, and the machine's time for the prompt alone."""
    schedule = [*(Request(0.0, 20, new=3000) for _ in range(rows)), Request(30.0, prompt)]
    run = Simulation(scheduler(max_sequences=rows + 1, **limits), machine).run(schedule)
    steps = [step for step in run.steps if schedule[-1].admitted <= step.start < schedule[-1].ended]
    return steps, schedule[-1].ended - schedule[-1].arrival, machine.seconds(0, [(0, prompt)])


@settings(max_examples=20)
@given(
    rows=st.integers(1, 16),
    row=st.floats(0.0005, 0.002),
    token=st.floats(0.0005, 0.002),
    doubling=st.floats(1000, 8000),
    noise=st.sampled_from([0.0, 0.1]),
)
def test_a_long_prompt_at_most_doubles_gaps_and_its_own_time(rows, row, token, doubling, noise):
    """Attention costs as much as the rest of a token at the position `doubling`.

    Without noise, a step is off by its prediction: a unit is measured with a chunk of t tokens and used for one of s,
    which may be the next size, up to 1.5 times as large, and (1.5 t + r) (t + 4) / ((t + r) (1.5 t + 4)) is at most 1.2
    for r from 1 on. With noise, the units are off by as much as a step is.
    """
    machine = Machine(0.02, row, token, token, token / doubling, noise=noise)
    steps, first_token, alone = prompt_with_rows(machine, rows, 4000)
    decoding = machine.decode(rows)
    noisy = (1 + noise) / (1 - noise)
    for step in steps[2:]:  # the first two may measure the rows and the tokens
        most = max(2 * decoding, 0.04, least(machine, step))
        assert step.seconds <= 1.2 * noisy * most
    # 16 of 17 steps have a chunk, of at least two thirds of the tokens that fit.
    assert first_token <= 3.5 * noisy * alone + 17 * decoding


def test_the_cost_of_prompts_does_not_raise_the_decoding_limit():
    """Attention makes the tokens of a prompt eleven times as dear at its end. A chunk of 40 at position 300 costs a
    tenth more than the one before it."""
    machine = Machine(0.05, 0.001, 0.001, 0.001, 0.001 / 400)
    steps, _, _ = prompt_with_rows(machine, 8, 4000)
    assert max(step.seconds for step in steps[2:]) <= 2.25 * machine.decode(8)


def test_prompts_with_their_own_forward_get_enough_tokens_to_pay_for_it():
    machine = Machine(0.1, 0.001, chunk=0.1, token=0.001)
    steps, first_token, _ = prompt_with_rows(machine, 1, 4000, joins=False)
    assert all(tokens >= 16 for step in steps for _, tokens in step.chunks)
    # 250 chunks of 16 tokens, and a decoding step with each and after 16 of them.
    assert first_token <= 250 * machine.prefill(0, 16) + 267 * machine.decode(1)
