"""Decoding with and without drafts, and drafters that are right, wrong, random or broken."""

import random

import torch

from onward.decoding import BatchSchedule, DecodeStep, RowCacheManager, SamplerCache, Sequence, decode_loop
from onward.decoding.row_cache import dims_of
from onward.decoding.speculation import Speculator
from onward.models import Run

CPU = torch.device("cpu")


class Guess:
    """A drafter by a function: row -> ids. Counts the drafts it was asked for. owner: the index of a row's sequence."""

    def __init__(self, guess):
        self.guess = guess
        self.asked = 0
        self.sequences = ()  # those that `decode` decodes

    def start(self, target):
        return self

    def owner(self, row):
        return next(at for at, sequence in enumerate(self.sequences) if sequence.token_ids is row.output)

    def propose(self, rows):
        self.asked += len(rows)
        return [self.guess(row) for row in rows]


def oracle(texts, wrong=lambda owner, position: False, more=0, vocab=32):
    """Knows what every row will say; where `wrong` says so it says another id. more: ids than the limit."""

    def guess(row):
        owner = drafter.owner(row)
        coming = texts[owner][len(row.output) : len(row.output) + row.limit + more]
        return [(token + 1) % vocab if wrong(owner, len(row) + k) else token for k, token in enumerate(coming)]

    drafter = Guess(guess)
    return drafter


def at_random(seed, vocab=32):
    """Any number of any ids, more than the limit too."""
    source = random.Random(seed)
    return Guess(lambda row: [source.randrange(vocab) for _ in range(source.randrange(row.limit + 3))])


def slots_over(model, rows, room, kind="own"):
    """Slots over a cache of `room` positions: one whose rows move, a caller's, or one that does not show its rows."""
    cache = model.new_cache(rows, room)
    if kind == "given":
        return RowCacheManager.wrap(model, cache, rows)
    if kind == "opaque":
        return RowCacheManager(cache, rows, room, None)
    return RowCacheManager(cache, rows, room, dims_of(model, cache, rows), model)


def decode(model, sequences, *, speculator=None, room=64, kind="own", run=None):
    """Run sequences to their end. kind: see `slots_over`. run: one of the model by default."""
    run = Run(model, "eager") if run is None else run
    slots = slots_over(model, len(sequences), room, kind)
    chooser = SamplerCache(CPU)
    step = DecodeStep(run, slots, chooser, CPU)
    if speculator is not None:
        max_len = max(sequence.longest for sequence in sequences)
        step = speculator.step(step, chooser, model, rows=len(sequences), max_len=max_len)
        step.join(sequences)
        if isinstance(speculator.drafter, Guess):
            speculator.drafter.sequences = sequences
    for _ in decode_loop(step, BatchSchedule(slots, sequences), slots):
        pass


def sequences_of(prompts, new, params, **options):
    """new: the most tokens of each."""
    return [
        Sequence(prompt, count, sampling=of_row, **options)
        for prompt, count, of_row in zip(prompts, new, params, strict=True)
    ]


def texts(model, prompts, new, params, **options):
    """The ids of every text; new: the most of each."""
    sequences = sequences_of(prompts, new, params)
    decode(model, sequences, **options)
    return [sequence.token_ids for sequence in sequences]


def fixed(drafter, length=4):
    return Speculator(drafter, length=length)
