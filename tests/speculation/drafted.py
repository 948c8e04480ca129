"""Decoding with and without drafts, and drafters that are right, wrong, random or broken."""

import random

import torch

from onward.decoding import DecodeState, DecodeStep, Picker, Row, decode_loop
from onward.sampling import History, Sampler
from onward.speculation import Speculator

CPU = torch.device("cpu")


class Guess:
    """A drafter by a function: row -> ids. Counts the drafts it was asked for."""

    def __init__(self, guess):
        self.guess = guess
        self.asked = 0

    def start(self, request):
        self.request = request
        return self

    def propose(self, rows):
        self.asked += len(rows)
        return [self.guess(row) for row in rows]


def oracle(texts, wrong=lambda owner, position: False, more=0, vocab=32):
    """Knows what every row will say; where `wrong` says so it says another id. more: ids than wanted."""

    def guess(row):
        coming = texts[row.owner][len(row.output) : len(row.output) + row.wanted + more]
        return [(token + 1) % vocab if wrong(row.owner, len(row) + k) else token for k, token in enumerate(coming)]

    return Guess(guess)


def at_random(seed, vocab=32):
    """Any number of any ids, more than wanted too."""
    source = random.Random(seed)
    return Guess(lambda row: [source.randrange(vocab) for _ in range(source.randrange(row.wanted + 3))])


def decode(model, prompts, rows, params, *, speculator=None, room=64, compact=True, top_logprobs=None, run=None):
    """Run the rows to their end; the step and the last state. run: the model by default."""
    run = model if run is None else run
    sampler = Sampler(params)
    histories = [History(prompt) for prompt in prompts] if sampler.needs_history else None
    picker = Picker(sampler, histories, top_logprobs)
    state = DecodeState.start(prompts, model.new_cache(len(prompts), room), CPU, compact=compact)
    if speculator is None:
        step = DecodeStep(run, picker)
    else:
        step = speculator.step(run, picker, prompts, rows, max_len=room, vocab_size=model.vocab_size, device=CPU)
    for emission in decode_loop(step, state, rows):
        state = emission.state
    return step, state


def texts(model, prompts, new, params, **options):
    """The ids of every row; new: the most of each."""
    rows = [Row(count) for count in new]
    decode(model, prompts, rows, params, **options)
    return [row.token_ids for row in rows]


def fixed(drafter, length=4, verifier="coupled"):
    return Speculator(drafter, length=length, verifier=verifier)
