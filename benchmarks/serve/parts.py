"""The parts of the benchmark: their requests, and the figures from their times."""

import itertools

from benchmarks.compare.contenders import OURS
from benchmarks.compare.turns import progress
from benchmarks.serve.course import DENSE, ENGINE, GENERATE, SHORT_STEPS, Course, Part, Plan
from benchmarks.serve.figures import (
    decode_rate,
    first_token,
    gaps,
    median,
    quantile,
    requests_per_second,
    throughput,
)
from benchmarks.serve.sheet import Column, ratio
from benchmarks.serve.workload import Request, closed_loop, log_uniform, poisson

PROMPT = 128
PREFILL = 512
WARM_TOKENS = 6  # of each answer in a closed loop that warms up
LEAD_OF_ONE, LEAD_OF_MORE = 1.3, 1.8
SHARE_OF_PREFILL = 0.65
MIXED_PROMPTS, MIXED_NEW = (16, 2048), (16, 256)
LOAD, CAPACITY_CLIENTS = 0.7, 16
# The row after whose tokens the long prompt comes may be the first to begin: the others have begun by then.
DECODING_ROWS, LONG_PROMPT, LONG_AFTER, ROWS_NEW = 8, 4000, 96, 384
GAP_GROWTH = 2.5
PREFIX, SUFFIX, PREFIX_GAIN = 2000, 32, 12.0
CONTEXTS, OVERHEAD = (32, 512, 4000), 1.02


def _warm_up(course: Course, *lengths: int, rows: int = 1) -> None:
    """Warm up: the first requests take longer, because programs are traced and memory is touched."""
    for name in course.everyone():
        for length in lengths or (PROMPT,):
            course.run(name, [Request(course.prompt(length), 4) for _ in range(rows)], keep=False)


def _closed(course: Course) -> None:
    plan = course.plan
    for clients in plan.clients:  # prompts with decoding rows have other shapes than rows that start together
        for name in course.everyone():
            course.run(name, _clients(course, clients, WARM_TOKENS), keep=False)
    for turn in range(plan.rounds):
        for clients in plan.clients:
            progress(f"round {turn + 1} of {plan.rounds}, {clients} clients")
            requests = _clients(course, clients, plan.tokens)
            for name in course.everyone(turn):
                if records := course.run(name, requests):
                    course.note(name, str(clients), throughput(records))
            course.note_bandwidth()
    turns = [course.sheet.values(course.sheet.champion, str(clients)) for clients in plan.clients]
    growth = [grown for fewer, more in itertools.pairwise(turns) if (grown := ratio(more, fewer)) is not None]
    course.sheet.check("least growth as N grows", min(growth, default=None), 1.0)


def _clients(course: Course, clients: int, tokens: int) -> list[Request]:
    """The requests of several clients in a closed loop."""
    count = clients * course.plan.each
    return closed_loop([course.prompt(PROMPT) for _ in range(count)], [tokens] * count, clients)


def _closed_columns(plan: Plan) -> list[Column]:
    return [Column(str(clients), LEAD_OF_ONE if clients == 1 else LEAD_OF_MORE) for clients in plan.clients]


def _decode(course: Course) -> None:
    plan, sheet = course.plan, course.sheet
    for rows in plan.clients:
        _warm_up(course, rows=rows)
    _warm_up(course, PREFILL)
    for turn in range(plan.rounds):
        progress(f"round {turn + 1} of {plan.rounds}")
        for rows in plan.clients:
            requests = [Request(course.prompt(PROMPT), plan.tokens) for _ in range(rows)]
            for name in course.everyone(turn):
                if records := course.run(name, requests):
                    course.note(name, str(rows), decode_rate(records))
            course.note_decode_limit(str(rows), rows, PROMPT + plan.tokens / 2)
        prompt = course.prompt(PREFILL)
        for name in course.everyone(turn):
            if records := course.run(name, [Request(prompt, 1)]):
                course.note(name, "prefill", PREFILL / first_token(records[0]))
    most = str(max(plan.clients))
    share = ratio(sheet.values(sheet.champion, most), sheet.values(sheet.champion, "prefill"))
    sheet.check(f"{most} rows over prefill", share, SHARE_OF_PREFILL, unit="")


def _decode_columns(plan: Plan) -> list[Column]:
    return [*(Column(str(rows)) for rows in plan.clients), Column("prefill")]


def _arrivals(course: Course) -> None:
    """Measure the requests per second of each contender; then send a share of the best peer's rate to all."""
    plan = course.plan
    _warm_up(course, 16, 128, 1024, rows=4)
    capacities = {}
    prompts, new_tokens = _mixed(course, plan.arrivals // 2)
    for name in course.everyone():
        progress(f"capacity of {name}")
        if records := course.run(name, closed_loop(prompts, new_tokens, CAPACITY_CLIENTS)):
            capacities[name] = requests_per_second(records)
            course.note(name, CAPACITY, 60 * capacities[name])
    theirs = {name: capacity for name, capacity in capacities.items() if not name.startswith(OURS)} or capacities
    for turn in range(plan.rounds if theirs else 0):
        progress(f"round {turn + 1} of {plan.rounds}")
        prompts, new_tokens = _mixed(course, plan.arrivals)
        requests = poisson(prompts, new_tokens, LOAD * max(theirs.values()), course.random)
        for name in course.everyone(turn):
            if records := course.run(name, requests):
                first = [first_token(record) for record in records]
                between = [gap for record in records for gap in gaps(record)]
                for what, values in (("first token", first), ("gap", between)):
                    course.note(name, f"{what} p50", 1e3 * quantile(values, 0.5))
                    course.note(name, f"{what} p99", 1e3 * quantile(values, 0.99))
        course.note_bandwidth()


CAPACITY = "capacity /min"


def _mixed(course: Course, count: int) -> tuple[list[list[int]], list[int]]:
    prompts = [course.prompt(log_uniform(*MIXED_PROMPTS, course.random)) for _ in range(count)]
    return prompts, [log_uniform(*MIXED_NEW, course.random) for _ in range(count)]


def _arrivals_columns(plan: Plan) -> list[Column]:
    names = ("first token\np50", "first token\np99", "gap\np50", "gap\np99")
    return [Column("capacity\n/min"), *(Column(name, 1.0, more_is_better=False) for name in names)]


def _long_prompt(course: Course) -> None:
    plan, sheet = course.plan, course.sheet
    _warm_up(course, rows=DECODING_ROWS)
    _warm_up(course, 1024)
    for turn in range(plan.rounds):
        progress(f"round {turn + 1} of {plan.rounds}")
        rows = [Request(course.prompt(PROMPT), ROWS_NEW) for _ in range(DECODING_ROWS)]
        requests = [*rows, Request(course.prompt(LONG_PROMPT), 1, after=DECODING_ROWS - 1, tokens=LONG_AFTER)]
        for name in course.everyone(turn):
            if records := course.run(name, requests):
                *others, long = records
                began = max(record.tokens[0] for record in others)
                before = median([gap for record in others for gap in gaps(record, began, long.sent)])
                during = quantile([g for record in others for g in gaps(record, long.sent, long.tokens[0])], 0.99)
                course.note(name, "gap before p50", 1e3 * before)
                course.note(name, "gap during p99", 1e3 * during)
                course.note(name, "growth", during / before)
                course.note(name, "long prompt first, s", first_token(long))
        course.note_bandwidth()
    for label in sheet.ours:
        sheet.check(f"p99 gap over the median, {label}", sheet.value(label, "growth"), GAP_GROWTH, at_least=False)


def _long_prompt_columns(plan: Plan) -> list[Column]:
    names = ("gap before\np50", "gap during\np99", "\ngrowth", "long prompt\nfirst, s")
    return [Column(name, more_is_better=False, digits=2 if "growth" in name else 1) for name in names]


def _prefix(course: Course) -> None:
    plan, sheet = course.plan, course.sheet
    for turn in range(plan.rounds + 1):  # the first warms up
        progress(f"round {turn} of {plan.rounds}" if turn else "warming up")
        prefix = course.prompt(PREFIX)
        requests = [Request(prefix + course.prompt(SUFFIX), 4)]
        requests.append(Request(prefix + course.prompt(SUFFIX), 4, after=0, tokens=4))
        for name in course.everyone(turn):
            records = course.run(name, requests)
            if records and turn:
                without, shared = (first_token(record) for record in records)
                course.note(name, "without", 1e3 * without)
                course.note(name, "with", 1e3 * shared)
                course.note(name, "gain", without / shared)
        course.note_bandwidth()
    sheet.check("without over with", sheet.value(sheet.champion, "gain"), PREFIX_GAIN)


def _prefix_columns(plan: Plan) -> list[Column]:
    return [Column("without", more_is_better=False), Column("with", more_is_better=False), Column("gain")]


def _paging(course: Course) -> None:
    plan, sheet = course.plan, course.sheet
    _warm_up(course, *CONTEXTS)
    for turn in range(plan.rounds):
        for length in CONTEXTS:
            progress(f"round {turn + 1} of {plan.rounds}, after {length}")
            requests = [Request(course.prompt(length), plan.tokens)]
            for name in course.everyone(turn):
                if records := course.run(name, requests):
                    course.note(name, f"after {length}", 1e3 * median(gaps(records[0])))
            course.note_bandwidth()
    engine, generate, dense = sheet.ours
    for length in CONTEXTS:
        column = f"after {length}"
        times = {name: sheet.values(name, column) for name in sheet.ours}
        sheet.check(f"{column}: blocks over dense", ratio(times[generate], times[dense]), OVERHEAD, at_least=False)
        sheet.check(f"{column}: engine over generate", ratio(times[engine], times[generate]), OVERHEAD, at_least=False)


def _paging_columns(plan: Plan) -> list[Column]:
    return [Column(f"after\n{length}", more_is_better=False, digits=2) for length in CONTEXTS]


def _most(plan: Plan) -> int:
    return max(plan.clients)


PARTS = {
    part.name: part
    for part in (
        Part(
            "closed",
            "closed loop: output tokens/s with N clients",
            _closed_columns,
            _closed,
            sequences=_most,
            positions=256,
            ways=(ENGINE, GENERATE),
        ),
        Part(
            "decode",
            "decode: tokens/s of N rows together, and prefill of 512",
            _decode_columns,
            _decode,
            sequences=_most,
            positions=PREFILL + 64,
            ways=(ENGINE, GENERATE),
        ),
        Part(
            "arrivals",
            "arrivals at 70 % of the best peer's capacity: ms",
            _arrivals_columns,
            _arrivals,
            sequences=lambda plan: CAPACITY_CLIENTS,
            positions=MIXED_PROMPTS[1] + MIXED_NEW[1],
        ),
        Part(
            "long",
            "a prompt of 4,000 among 8 decoding rows: ms between their tokens",
            _long_prompt_columns,
            _long_prompt,
            sequences=lambda plan: DECODING_ROWS + 1,
            positions=4096,
            ways=(ENGINE, SHORT_STEPS),
        ),
        Part(
            "prefix",
            "a shared prefix of 2,000: ms to the first token",
            _prefix_columns,
            _prefix,
            sequences=lambda plan: 2,
            positions=2304,
        ),
        Part(
            "paging",
            "one text at a time: ms a token",
            _paging_columns,
            _paging,
            sequences=lambda plan: 1,
            positions=4352,
            ways=(ENGINE, GENERATE, DENSE),
            peers=False,
        ),
    )
}
