"""Rows of a dense cache: a slot keeps its contents, wherever its row is and however long the cache is."""

import itertools
import random
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from onward.cache import KVCache
from onward.decoding import (
    BatchSchedule,
    DecodeStep,
    RowCacheManager,
    SamplerCache,
    ScheduledSequence,
    Sequence,
    decode_loop,
)
from onward.decoding.batch import batches
from onward.models import Model, Run
from onward.sampling import SamplingParams
from onward.testing import poison, scripted_model, tiny_model

CPU = torch.device("cpu")
ROWS = 4


def follow(tokens: list[int]) -> int:
    """Finds out any token that is lost, moved or another row's."""
    return sum((at + 1) * (token + 7) for at, token in enumerate(tokens)) % 31


def by_hand(prompt: list[int], new: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(new):
        tokens.append(follow(tokens))
    return tokens[len(prompt) :]


def sequences_of(prompts, new) -> list[Sequence]:
    return [Sequence(prompt, count, sampling=SamplingParams()) for prompt, count in zip(prompts, new, strict=True)]


def run(model, slots, sequences, chunk=512) -> list[list[int]]:
    step = DecodeStep(Run(model, "eager"), slots, SamplerCache(CPU), CPU)
    list(decode_loop(step, BatchSchedule(slots, sequences, chunk), slots))
    return [sequence.token_ids for sequence in sequences]


class Held:
    """Slots whose rows are written as forwards write them, and the expected contents of each."""

    def __init__(self, slots: RowCacheManager) -> None:
        self.slots, self.texts = slots, {}

    def write(self, slots, tokens: int, rng: random.Random) -> None:
        for group in self.slots.groups(slots, tokens):
            members = [slots[index] for index in group]
            view = self.slots.view(members, [slot.filled for slot in members], tokens)
            for slot, row in zip(members, view.rows, strict=True):
                ids = [rng.randrange(99) for _ in range(tokens)]
                view.cache.tokens[row, slot.filled : slot.filled + tokens] = torch.tensor(ids, dtype=torch.int32)
                self.texts[slot] += ids
            # A forward writes to all rows of its view; in rows without work, to positions that are never read.
            for row, offset in enumerate(view.offsets or ()):
                if row not in view.rows:
                    view.cache.tokens[row, offset : offset + tokens] = -7
            self.slots.accept(view, view.cache)
        for slot in slots:
            self.slots.commit(slot, len(self.texts[slot]), lambda first, last: [])

    def check(self) -> None:
        assert len({slot.row for slot in self.texts}) == len(self.texts), "no two slots share a row"
        for slot, text in self.texts.items():
            assert self.slots.cache.tokens[slot.row, : slot.filled].tolist() == text
        assert self.slots.stats().available == ROWS - len(self.texts)


@settings(max_examples=150)
@given(st.integers(0, 2**32), st.sampled_from(["own", "given"]))
def test_a_slot_keeps_its_entries_while_others_come_and_go(seed, kind):
    rng, model = random.Random(seed), scripted_model([1])
    slots = RowCacheManager.allocate(model, ROWS, 8)
    if kind == "given":
        slots = RowCacheManager.wrap(model, model.new_cache(ROWS, 512), ROWS)
    contents = Held(slots)
    for _ in range(30):
        some = [slot for slot in contents.texts if rng.random() < 0.7]
        what = rng.choice(["acquire", "acquire", "fork", "release", "truncate", "write", "write", "write"])
        length = max((len(text) for text in contents.texts.values()), default=0) + rng.randrange(1, 9)
        if what == "acquire":
            if (acquired := slots.acquire([1], length)) is not None:
                contents.texts[acquired[0]] = []
            else:
                assert len(contents.texts) == ROWS
        elif what == "fork" and some:
            positions = rng.randrange(len(contents.texts[some[0]]) + 1)
            if (fork := slots.fork(some[0], positions, length)) is not None:
                contents.texts[fork] = contents.texts[some[0]][:positions]
            else:
                assert len(contents.texts) == ROWS
        elif what == "release" and some:
            slots.release(some[0])
            del contents.texts[some[0]]
        elif what == "truncate" and some:
            positions = rng.randrange(len(contents.texts[some[0]]) + 1)
            slots.commit(some[0], positions, lambda first, last: [])
            del contents.texts[some[0]][positions:]
        elif what == "write" and some:
            rng.shuffle(some)
            tokens = rng.choice([1, 1, 3])
            assert all(slots.reserve(slot, len(contents.texts[slot]) + tokens + 1) for slot in some)
            contents.write(some, tokens, rng)
        contents.check()


def test_an_own_cache_compacts_its_rows_and_a_callers_does_not():
    model = scripted_model([1])
    for kind, rows in (("own", [0, 1]), ("given", [0, 3])):
        slots = RowCacheManager.allocate(model, ROWS, 8) if kind == "own" else None
        slots = RowCacheManager.wrap(model, model.new_cache(ROWS, 8), ROWS) if slots is None else slots
        first, *others, last = (slots.acquire([1], 8)[0] for _ in range(ROWS))
        for slot in others:
            slots.release(slot)
        assert slots.groups([first, last], 1) == [[0, 1]]
        assert sorted((first.row, last.row)) == rows
        view = slots.view([first, last], [0, 0], 1)
        assert view.cache.batch == rows[-1] + 1, "a forward gets no rows past those that it serves"


def test_a_view_shares_the_caches_memory_and_is_reused():
    """A program knows a cache by its tensors."""
    model = tiny_model()
    slots = RowCacheManager.wrap(model, model.new_cache(ROWS, 8), ROWS)
    acquired = [slots.acquire([1], 8)[0] for _ in range(ROWS)]
    view = slots.view(acquired[1:3], [0, 0], 1)
    assert slots.view(acquired[1:3], [0, 0], 1).cache is view.cache
    view.cache.keys[0].fill_(3)
    assert (slots.cache.keys[0][1:3] == 3).all()
    assert not slots.cache.keys[0][[0, 3]].any()


@given(st.lists(st.lists(st.integers(0, 31), min_size=1, max_size=6), min_size=1, max_size=4), st.booleans())
def test_new_caches_returned_by_the_forward_are_adopted(prompts, own):
    """All of its rows, or some alone."""
    inner, rows = scripted_model(follow), len(prompts)

    def forward(tokens, offsets, cache, params):
        logits, cache = inner.forward(tokens, offsets, type(cache)(cache.tokens.clone()), params)
        return logits, cache

    model = Model(forward, (), inner.new_cache, 32, compiles=False)
    slots = (
        RowCacheManager.allocate(model, rows, 16)
        if own
        else RowCacheManager.wrap(model, model.new_cache(rows, 16), rows)
    )
    new = [5, 2, 7, 4][:rows]
    assert run(model, slots, sequences_of(prompts, new)) == list(map(by_hand, prompts, new))


@pytest.mark.parametrize("make", [lambda: tiny_model(), lambda: scripted_model(follow)], ids=["KVCache", "any"])
def test_a_cache_grows_with_its_text(make):
    model, prompts, new = make(), [[3, 1, 4], [1, 5]], [270, 25]
    plain = run(model, RowCacheManager.allocate(model, 2, 512), sequences_of(prompts, new))
    slots = RowCacheManager(poison(model.new_cache(2, 8)), 2, 8, [0] * len(leaves(model.new_cache(1, 8))), model)
    step = DecodeStep(Run(model, "eager"), slots, SamplerCache(CPU), CPU)
    sequences = sequences_of(prompts, new)
    acquire = slots.acquire
    slots.acquire = lambda ids, length, **options: acquire(ids, 4, **options)  # as an engine does, which reserves later
    schedule, lengths = BatchSchedule(slots, sequences), []

    def growing():
        for sequence in sequences:
            assert sequence.slot is None or slots.reserve(sequence.slot, sequence.length)
        lengths.append(slots.max_len)
        return schedule()

    list(decode_loop(step, growing, slots))
    assert [sequence.token_ids for sequence in sequences] == plain
    grown = sorted(set(lengths))
    assert len(grown) > 2
    most = model.max_seq_len or 2 * grown[-1]
    assert all(longer >= min(2 * shorter, most) for shorter, longer in itertools.pairwise(grown))


def leaves(cache):
    return torch.utils._pytree.tree_leaves(cache)


# ── which rows one forward gets ───────────────────────────────────────────────────────────────────────────────


counts = st.lists(st.integers(1, 6), min_size=1, max_size=8)


@given(counts, st.booleans(), st.randoms())
def test_items_of_equal_length_run_together_without_padding(counts, scores, rng):
    model = scripted_model(follow)
    slots = RowCacheManager.allocate(model, len(counts), 8)
    sequences = [
        Sequence([at] * count, 1, sampling=SamplingParams(), prompt_top=0 if scores and at % 2 else None)
        for at, count in enumerate(counts)
    ]
    for sequence in sequences:
        sequence.slot, _ = slots.acquire(sequence.prompt, 7)
    rng.shuffle(sequences)
    work = [ScheduledSequence(sequence, len(sequence.prompt)) for sequence in sequences]
    together = [indices for indices, _ in batches(work, slots)]
    assert sorted(index for indices in together for index in indices) == list(range(len(work)))
    assert all(len({work[index].tokens for index in indices}) == 1 for indices in together)
    step = DecodeStep(Run(model, "eager"), slots, SamplerCache(CPU), CPU)
    assert [[token.id for token in tokens] for tokens in step(work)] == [by_hand(text.prompt, 1) for text in sequences]
    for sequence in sequences:
        if sequence.prompt_top is not None:
            assert len(sequence.prompt_logprobs) == len(sequence.prompt)
    assert sum(len(call.tokens) * len(call.tokens[0]) for call in model.calls) <= sum(counts) + (
        len(counts) * counts.count(1)  # one id a row goes over the rows between, too
    )


def test_rows_with_one_id_share_a_forward():
    model = scripted_model(follow)
    slots = RowCacheManager.wrap(model, model.new_cache(5, 16), 5)
    sequences = sequences_of([[at + 1] for at in range(5)], [9, 2, 9, 3, 9])
    assert run(model, slots, sequences) == [by_hand([at + 1], new) for at, new in enumerate([9, 2, 9, 3, 9])]
    assert len(model.calls) == 9


# ── fewer slots than texts ────────────────────────────────────────────────────────────────────────────────────


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 31), min_size=1, max_size=12), st.integers(0, 6)), min_size=1, max_size=8
    ),
    st.integers(1, 4),
    st.integers(1, 5),
    st.sampled_from(["own", "given"]),
)
def test_waiting_for_a_slot_does_not_change_texts(asked, rows, chunk, kind):
    model = scripted_model(follow)
    prompts, new = [prompt for prompt, _ in asked], [count for _, count in asked]
    slots = RowCacheManager.allocate(model, rows, 32)
    if kind == "given":
        slots = RowCacheManager.wrap(model, model.new_cache(rows, 32), rows)
    assert run(model, slots, sequences_of(prompts, new), chunk) == list(map(by_hand, prompts, new))
    assert max((len(call.tokens) for call in model.calls), default=0) <= rows
    assert slots.stats().available == rows


def test_reused_rows_do_not_change_texts_on_a_real_model():
    model = tiny_model()
    prompts = [[3, 1, 4, 1, 5, 9], [2, 6], [5, 3, 5, 8, 9, 7], [9], [3, 2, 3, 8, 4, 6], [2, 6, 4]]
    new = [3, 12, 7, 20, 5, 9]
    alone = [
        run(model, RowCacheManager.allocate(model, 1, 32), sequences_of([p], [n]))[0]
        for p, n in zip(prompts, new, strict=True)
    ]
    for rows in (1, 2, 3):
        slots = RowCacheManager.allocate(model, rows, 32)
        assert isinstance(slots.cache, KVCache)
        assert run(model, slots, sequences_of(prompts, new), 3) == alone


def test_a_row_moved_within_a_step_keeps_the_entries_of_the_step():
    """Steps of several kinds make one: a row may go in one of them after a forward of another."""
    model = tiny_model()
    slots = RowCacheManager.allocate(model, 2, 8)
    gone, stays = (slots.acquire([1], 8)[0] for _ in range(2))
    view = slots.view([stays], [0], 3)
    for layer in view.cache.keys:
        layer[:, :, :3] = 5
    slots.accept(view, view.cache)
    slots.release(gone)
    slots.groups([stays], 1)
    assert stays.row == 0
    assert all((layer[0, :, :3] == 5).all() for layer in slots.cache.keys)


@pytest.mark.parametrize("pieces", [(3, 1), (1, 2, 1)])
def test_a_row_that_a_step_runs_twice_keeps_all_entries(pieces):
    """As a search's prompt is, and then its last id: rows on both sides write where the row between them ends."""
    model = tiny_model(seed=3)
    slots = RowCacheManager.allocate(model, 3, 64)
    outer, inner, other = (slots.acquire([1], 64)[0] for _ in range(3))

    def forward(chosen, token, tokens, first):
        view = slots.view(chosen, [first] * len(chosen), tokens)
        offsets = torch.tensor([first] * len(chosen) if view.offsets is None else view.offsets, dtype=torch.int32)
        _, cache = model(torch.full((len(offsets), tokens), token, dtype=torch.int32), offsets, view.cache)
        slots.accept(view, cache)

    for first, tokens in zip(itertools.accumulate(pieces, initial=0), pieces, strict=False):
        forward([inner], 7, tokens, first)
    end = sum(pieces)
    before = [layer[inner.row, :, :end].clone() for layer in (*slots.cache.keys, *slots.cache.values)]
    forward([outer, other], 9, 1, 0)
    after = [layer[inner.row, :, :end] for layer in (*slots.cache.keys, *slots.cache.values)]
    assert all(torch.equal(one, two) for one, two in zip(before, after, strict=True))


# ── pinned rows ───────────────────────────────────────────────────────────────────────────────────────────────


def test_a_pinned_row_is_reused_only_through_its_pin():
    slots = RowCacheManager.allocate(scripted_model([1]), 1, 16)
    slots.set_weights_version("these")
    slot, _ = slots.acquire([1, 2, 3], 8)
    slots.release(slot, [1, 2, 3], pin=True)
    assert slots.pinned(slot) == 3
    assert slots.stats().available == 0
    assert slots.acquire([1, 2, 3, 4], 8) is None, "the only row is pinned"
    again, reused = slots.acquire([1, 2, 9, 9], 8, pin=slot)
    assert reused == again.filled == 2
    slots.release(again, [1, 2, 9], pin=True)
    assert slots.acquire([1, 2, 9], 8, pin=again)[1] == 2, "the last id predicts the next one"


@pytest.mark.parametrize("change", ["weights", "adapter", "reuse"])
def test_a_pinned_row_of_other_weights_is_not_reused(change):
    slots = RowCacheManager.allocate(scripted_model([1]), 1, 16)
    slots.set_weights_version("these")
    slot, _ = slots.acquire([1, 2, 3], 8)
    slots.release(slot, [1, 2, 3], pin=True)
    adapter = None
    if change == "weights":
        slots.set_weights_version("others")
        assert slots.pinned(slot) == 0
    elif change == "adapter":
        adapter = SimpleNamespace(index=1, digest="another")
    again, reused = slots.acquire([1, 2, 3, 4], 8, pin=slot, adapter=adapter, reuse=change != "reuse")
    assert reused == again.filled == 0
    slots.release(again)
    assert slots.stats().available == 1


def test_a_pinned_row_grows_by_doubling():
    """Where lengths are not rounded up: a text that grows is copied less than twice altogether."""
    model = Model(
        lambda *_: None, (), lambda batch, max_len: torch.zeros(batch, max_len), 32, device=torch.device("cuda")
    )
    slots, pin, lengths = RowCacheManager.allocate(model, 1, 10), None, []
    for length in (10, 11, 20, 21, 100):
        pin, _ = slots.acquire([1], length, pin=pin)
        slots.release(pin, [1], pin=True)
        lengths.append(slots.max_len)
    assert lengths == [10, 20, 20, 40, 100]
