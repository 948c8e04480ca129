"""Random requests that arrive at random times, and the result of each of them alone with an empty cache."""

import dataclasses
import functools
import random
import threading
from dataclasses import dataclass, field

from checked_engine import CheckedEngine

import onward
from onward import LanguageModel, Speculator
from onward.cache import PagedCacheManager
from onward.models import FAMILIES, pack_params
from onward.ops.heads import BLOCK
from onward.sampling import mask_of
from onward.testing import ByteTokenizer, scripted_model, tiny_model

REQUESTS = 120  # of each model
CHUNKS = (5, 32, 512)
LONGEST = 200  # positions of a text


def _next_id(ids):
    """A model that counts on by a step that it reads from its prompt."""
    return (ids[-1] + 1 + ids[0] % 3) % 61


def _scripted():
    return scripted_model(_next_id, vocab_size=64, max_seq_len=256)


def _packed(family):
    stock = tiny_model(family, seed=11)
    return dataclasses.replace(stock, params=pack_params(stock.params))


# The models of the random schedules. Some have no blocks: decoders over a dense cache, and a script.
MODELS = {
    "demo": lambda: onward.load("demo").model,
    "qwen3": lambda: tiny_model("qwen3", seed=7),
    "llama": lambda: tiny_model("llama", seed=3, num_hidden_layers=1),
    "mistral": lambda: tiny_model("mistral", seed=5, sliding_window=40),
    "sliding": lambda: tiny_model("gemma3", seed=5, sliding_window=50, num_hidden_layers=3),
    "qwen2": lambda: tiny_model("qwen2", seed=2, num_key_value_heads=1),
    "recurrent": lambda: tiny_model("qwen3_5", seed=4, num_hidden_layers=3),
    "recurrent, dense": lambda: dataclasses.replace(tiny_model("qwen3next", seed=6), new_blocks=None),
    "dense": lambda: dataclasses.replace(tiny_model("qwen3", seed=9), new_blocks=None),
    "scripted": _scripted,
}
# One of each family. Packed, as a checkpoint's weights are: torch, which multiplies by stacks of experts that are not,
# promises no bits.
FAMILY_MODELS = {
    f"{family}, packed": functools.partial(_packed, family)
    for family in (name.removesuffix("ForCausalLM").lower() for name in FAMILIES if name.endswith("ForCausalLM"))
}


@functools.cache
def model(name):
    return (MODELS | FAMILY_MODELS)[name]()


@functools.cache
def lm(name, chunk=512, memory=0, disk=None):
    """disk: a folder for its prefix cache, if its cache is in blocks."""
    tokenizer = onward.load("demo").tokenizer if name == "demo" else ByteTokenizer(vocab_size=model(name).vocab_size)
    folder = None if model(name).new_blocks is None else disk
    return LanguageModel(model(name), tokenizer, prefill_chunk=chunk, prefix_memory=memory, prefix_cache_dir=folder)


class Turns(onward.Constraint):
    """Every third id is refused, another third at each place. Every fifth place it guesses what follows, most often
    wrong."""

    def __init__(self, count=0):
        self.count = count

    def mask(self):
        return mask_of(token for token in range(300) if token % 3 != self.count % 3)

    def accept(self, token_id):
        assert token_id % 3 != self.count % 3
        self.count += 1

    def rollback(self, count):
        assert 0 < count <= self.count
        self.count -= count

    def fork(self):
        return Turns(self.count)

    @property
    def is_done(self):
        return self.count == 17

    def forced(self):
        return [at % 50 for at in range(self.count, self.count + 5)] if self.count % 5 == 0 else []


class Repeater:
    """A drafter that always proposes as many ids as it may: those that the text began with."""

    def start(self, request):
        return self

    def propose(self, rows):
        return [(row.output or row.prompt)[: row.limit] for row in rows]


FIXED_DRAFTS = (Speculator("lookup", length=4), Speculator(Repeater(), length=12))


def ends_early(ids, text):
    return len(ids) > 2 and sum(ids) % 11 == 0


@functools.cache
def requests(name):
    """Requests of every kind. Their prompts begin as others do, and end where blocks do or near."""
    chance = random.Random(f"requests of {name}")
    vocab = min(60, model(name).vocab_size)
    bases = [[chance.randrange(vocab) for _ in range(LONGEST)] for _ in range(3)]
    return [_request(name, chance, bases, vocab) for _ in range(REQUESTS)]


def _request(name, chance, bases, vocab):
    shared = chance.choice([0, 3, 40, 63, 64, 65, 100, 128, 130])
    own = chance.choice([1, 2, 5, 20])
    kind = chance.choice(["greedy", "sampled", "sampled", "n", "beams", "long"])
    prompt = chance.choice(bases)[:shared] + [chance.randrange(vocab) for _ in range(own)]
    options = {"max_new_tokens": chance.choice([0, 1, 2, 6, 12, 30]), "eos": [chance.randrange(vocab)]}
    if kind == "long":  # it grows over many blocks
        return lm(name).request(prompt[-30:], max_new_tokens=LONGEST - 30, temperature=1, seed=len(prompt), logprobs=0)
    if kind in ("sampled", "n"):
        options |= {"temperature": chance.choice([0.5, 1.0, 2.0]), "seed": chance.randrange(2**32)}
        options |= chance.choice([{}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.05}])
    if kind == "n":
        options["n"] = chance.choice([2, 3])
    if kind == "beams":
        options |= {"beams": chance.choice([2, 3]), "early_stopping": chance.choice([True, False, "never"])}
    else:
        options["draft"] = chance.choice([None, None, "lookup", "suffix", *FIXED_DRAFTS])
    options |= chance.choice([{}, {}, {"repetition_penalty": 1.3}, {"frequency_penalty": 0.5}])
    options |= chance.choice([{}, {}, {"no_repeat_ngram_size": 2}, {"logit_bias": {7: 4.0, 8: -2.0}}])
    options |= chance.choice([{}, {}, {"stop": ["\x05", "ab\x07"]}, {"stop_when": ends_early}])
    options |= chance.choice([{}, {}, {"constraint": Turns()}, {"regex": r"([\x00-\x1f]|[\x10-\x38]{2})*"}])
    options |= chance.choice([{}, {}, {"logprobs": 0}, {"logprobs": 3}])
    options |= chance.choice([{}, {}, {}, {"prompt_logprobs": 1}])
    return lm(name).request(prompt, **options)


@functools.cache
def alone(name, index):
    """The result of a request alone, with an empty cache and without a draft."""
    request = requests(name)[index]
    return [content(choice) for choice in lm(name).generate(request.replace(draft=None)).choices]


def expected_of(name, index):
    return [dict(choice) for choice in alone(name, index)]


def emitted_of(name, index, part):
    """The ids of a part of each of a request's texts; none of beams, which emit nothing before their end."""
    options = requests(name)[index].options
    if options.beams > 1:
        return [[] for _ in range(options.n)]
    return [ids[: round(part * len(ids))] for ids in (choice["token_ids"] for choice in alone(name, index))]


def content(one):
    return {
        "token_ids": one.token_ids,
        "text": one.text,
        "finish_reason": one.finish_reason,
        "stopped_by": one.stopped_by,
        "seed": one.seed,
        "logprobs": one.logprobs,
        "prompt_logprobs": one.prompt_logprobs,
        "score": one.score,
    }


@dataclass
class Arrival:
    """index: of the request. at: the step before which it comes. cancel: it is cancelled so many steps later.
    by_event: by a `cancel` of its options. emitted: this part of each of its texts was emitted elsewhere; None for a
    request that begins here."""

    index: int
    at: int = 0
    priority: int = 0
    client: str | None = None
    cancel: int | None = None
    by_event: bool = False
    emitted: float | None = None


@dataclass
class Schedule:
    """What comes to an engine, and its limits. blocks: of the cache; None for as many as are needed. disk: a folder for
    its prefix cache."""

    name: str
    arrivals: list[Arrival]
    chunk: int = 512
    max_sequences: int = 4
    blocks: int | None = None
    overcommit: float = 1.0
    max_step_ms: float | None = None
    disk: str | None = None
    limits: dict = field(default_factory=dict)

    def engine(self):
        memory, new_blocks = None, model(self.name).new_blocks
        if self.blocks is not None and new_blocks is not None:
            one = PagedCacheManager(new_blocks(1), max_len=256, cached_blocks=0)
            memory = self.blocks * one.cost(3 * BLOCK) // 3 * one.unit_nbytes  # with windows and states
        return CheckedEngine(
            lm(self.name, self.chunk, disk=self.disk),
            max_sequences=self.max_sequences,
            cache_memory=memory,
            overcommit=self.overcommit,
            max_step_ms=self.max_step_ms,
            **self.limits,
        )


def random_schedule(seed, most=64, name=None):
    """name: of the model; None for any of `MODELS`."""
    chance = random.Random(seed)
    name = name or chance.choice(list(MODELS))
    tight = chance.random() < 0.25  # too few blocks for long texts that run together
    long = [index for index, request in enumerate(requests(name)) if request.max_new_tokens > 100]
    clients = chance.choice([[None], ["a", "a", "b", "c"]])
    arrivals = []
    for _ in range(chance.randint(1, most)):
        cancel = chance.choice([None] * 6 + [0, 1, 3, 8])
        arrivals.append(
            Arrival(
                chance.choice(long) if tight and chance.random() < 0.3 else chance.randrange(REQUESTS),
                chance.choice([0, 0, 1, 3, 10, 40]),
                chance.choice([0, 0, 0, -3, 5]),
                chance.choice(clients),
                cancel,
                chance.random() < 0.5,
                chance.choice([None, None, None, 0.0, 0.3, 0.9, 1.0]),
            )
        )
    return Schedule(
        name,
        arrivals,
        chunk=chance.choice(CHUNKS),
        max_sequences=8 if tight else chance.choice([3, 4, 8]),
        blocks=9 if tight else chance.choice([9, 12, 16, None]),
        overcommit=10.0 if tight else chance.choice([1.0, 1.0, 2.0, 10.0]),
        max_step_ms=chance.choice([None, 0.0, 1.0, 100.0]),
        limits={"ageing": chance.choice([0.0, 0.01, 10.0])},
    )


class _Run:
    """Submits and cancels at the steps that the schedule names; at once where the engine has nothing to do."""

    def __init__(self, schedule, engine):
        self.schedule, self.engine = schedule, engine
        self.step = 0
        self.lock = threading.RLock()
        self.coming = sorted(schedule.arrivals, key=lambda arrival: arrival.at)
        self.to_cancel = []
        self.served = []

    def before_step(self):
        with self.lock:
            self.step += 1
            while self.coming and self.coming[0].at <= self.step:
                self.submit(self.coming.pop(0))
            for entry in [entry for entry in self.to_cancel if entry[0] <= self.step]:
                self.to_cancel.remove(entry)
                entry[1]()

    def submit(self, arrival):
        event = threading.Event()
        request = requests(self.schedule.name)[arrival.index]
        if arrival.by_event:
            request = request.replace(cancel=event)
        if arrival.emitted is None:
            generation = self.engine.submit(request, priority=arrival.priority, client=arrival.client)
        else:
            emitted = emitted_of(self.schedule.name, arrival.index, arrival.emitted)
            generation = self.engine.resume(request, emitted=emitted, priority=arrival.priority, client=arrival.client)
        self.served.append((arrival, generation))
        if arrival.cancel is not None:
            self.to_cancel.append((self.step + arrival.cancel, event.set if arrival.by_event else generation.cancel))

    def __call__(self):
        self.engine.between_steps(self.before_step)
        while True:
            with self.lock:
                if self.coming:
                    self.submit(self.coming.pop(0))
                served = list(self.served)
            for _, generation in served:
                generation.result(60)
            with self.lock:
                if not self.coming and len(served) == len(self.served):
                    return


def run(schedule):
    """Serve a schedule, and assert that every request gets the same result as alone. Returns the engine's stats."""
    with schedule.engine() as engine:
        worker = _Run(schedule, engine)
        worker()
    engine.check()
    for arrival, generation in worker.served:
        _assert_equal_alone(schedule, arrival, generation)
    return engine.stats()


def _assert_equal_alone(schedule, arrival, generation):
    expected = expected_of(schedule.name, arrival.index)
    completion = generation.result(0)
    pieces = list(generation)
    what = f"request {arrival.index} of {schedule.name}: {generation.request}"
    beams = generation.request.options.beams > 1
    cancelled = any(choice.finish_reason == "cancelled" for choice in completion.choices)
    assert arrival.cancel is not None or not cancelled, what
    if not beams:
        for index, choice in enumerate(completion.choices):
            of_choice = [piece for piece in pieces if piece.choice == index]
            assert [piece.token_id for piece in of_choice] == choice.token_ids, what
            assert "".join(piece.text for piece in of_choice) == choice.text, what
            if choice.logprobs is not None:
                assert [piece.logprobs for piece in of_choice] == choice.logprobs, what
    if beams and arrival.cancel is not None:  # the best so far, which may have ended by itself
        return
    for choice, right in zip(completion.choices, expected, strict=True):
        served = content(choice)
        if cancelled:  # then the logprobs of the prompt may not be all there
            scored = len(served["prompt_logprobs"] or ())
            served["prompt_logprobs"] = right["prompt_logprobs"] = (right["prompt_logprobs"] or [])[:scored]
        if choice.finish_reason == "cancelled":
            right = _cut(right, choice)
        assert served == right, what


def _cut(right, choice):
    """The part of a cancelled text. Possible parts of a character or a stop string are not in it."""
    taken = len(choice.token_ids)
    logprobs = None if right["logprobs"] is None else right["logprobs"][:taken]
    text = choice.text if right["text"].startswith(choice.text.rstrip("\ufffd")) else right["text"]
    cut = {"token_ids": right["token_ids"][:taken], "logprobs": logprobs, "text": text}
    return right | cut | {"finish_reason": "cancelled", "stopped_by": None}
