"""A suffix lookup learns whole outputs, each once, even if their requests overlap."""

import gc
import weakref

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onward import LanguageModel, Speculator
from onward.decoding.speculation import DraftRow, SuffixLookup
from onward.decoding.speculation.lookup import SuffixAutomaton
from onward.engine import Engine
from onward.ops.heads import BLOCK
from onward.testing import ByteTokenizer, tiny_model

SECONDS = 60  # a wait that takes longer never ends
OUTPUTS = st.lists(st.lists(st.integers(0, 3), max_size=12), min_size=1, max_size=6)


def one_after_another(outputs, **options):
    lookup = SuffixLookup(1, **options)
    for output in outputs:
        lookup.propose([DraftRow([9], output)])
    begin(lookup)
    return lookup


def begin(lookup):
    """Another row begins, and the lookup learns what all others have put out."""
    lookup.propose([DraftRow([9], [])])


def continuation(lookup, ids, limit=200):
    """The proposal for a new request without its own text to copy from."""
    return lookup.propose([DraftRow([], ids, limit)])[0]


def matched(automaton, text):
    """For each prefix of a text, the length of its longest suffix that was learned."""
    state = length = 0
    lengths = []
    for token in text:
        state, length = automaton.step(state, length, token)
        lengths.append(length)
    return lengths


@given(OUTPUTS, st.data())
def test_concurrent_requests_teach_the_same_as_sequential_ones(outputs, data):
    """Rows grow in any order, others begin meanwhile, and some are asked twice."""
    lookup = SuffixLookup(1)
    rows = [DraftRow([9], []) for _ in outputs]
    for row in rows:
        lookup.propose([row])
    while growing := [at for at, row in enumerate(rows) if len(row.output) < len(outputs[at])]:
        at = data.draw(st.sampled_from(growing))
        rows[at].output.append(outputs[at][len(rows[at].output)])
        if data.draw(st.booleans()):
            begin(lookup)
        if data.draw(st.booleans()):
            lookup.propose([rows[at]])
    begin(lookup)
    sequential = one_after_another(outputs)
    learnt, expected = lookup._earlier[None].automaton, sequential._earlier[None].automaton
    assert len(learnt) == len(expected), "each id once"
    for output in outputs:
        assert matched(learnt, output) == list(range(1, len(output) + 1)), "all of it, in one piece"
    foreign = data.draw(st.lists(st.integers(0, 3), max_size=30))
    assert matched(learnt, foreign) == matched(expected, foreign)


@given(OUTPUTS, st.data())
def test_texts_that_grow_in_any_order_are_found(texts, data):
    """The automaton finds the longest end of a foreign text that occurs in any text, and gives what follows there."""
    automaton = SuffixAutomaton()
    indices = [automaton.add_text() for _ in texts]
    order = data.draw(st.permutations([at for at, text in enumerate(texts) for _ in text]))
    lengths = [0] * len(texts)
    for at in order:
        automaton.push(texts[at][lengths[at]], indices[at])
        lengths[at] += 1
    foreign = data.draw(st.lists(st.integers(0, 3), max_size=20))
    state = length = 0
    for count, token in enumerate(foreign, 1):
        state, length = automaton.step(state, length, token)
        ends = [foreign[count - n : count] for n in range(count + 1)]
        assert length == max(n for n, end in enumerate(ends) if any(places(text, end) for text in texts))
        if length:
            following = [text[place + length :] for text in texts for place in places(text, ends[length])]
            assert automaton.following(state, 100) in following


def places(text, run):
    return [at for at in range(len(text) - len(run) + 1) if text[at : at + len(run)] == run]


def test_a_fully_learned_text_is_drafted_for_from_itself():
    """Another request begins between two drafts, so all of the row's own output was learned."""
    lookup = SuffixLookup(1)
    row = DraftRow([9], [1, 2, 3, 1, 2], 2)
    assert lookup.propose([row]) == [[3, 1]]
    begin(lookup)
    assert lookup.propose([row]) == [[3, 1]]


def test_concurrent_texts_together_remember_max_tokens_at_most():
    lookup = SuffixLookup(2, max_tokens=300)
    for turn in range(6):
        outputs = [[] for _ in range(5)]
        rows = [DraftRow([9], output) for output in outputs]
        for at in range(60):
            for row, output in enumerate(outputs):
                output.append(1000 * turn + 100 * row + at)
            lookup.propose(rows)
            begin(lookup)
            assert len(lookup._earlier[None].automaton) <= 300
    assert all(continuation(lookup, output[-4:-2]) == output[-2:] for output in outputs), "the latest are remembered"
    del rows
    begin(lookup)
    assert [output.ids for output in lookup._outputs] == [[]], "of the row that began last"


def test_a_row_copies_only_from_outputs_with_its_salt():
    lookup, output = SuffixLookup(2), [1, 2, 3, 4, 5, 6]
    lookup.propose([DraftRow([9], output, salt="a")])
    for salt, expected in ((None, []), ("", []), ("b", []), ("a", [4, 5])):
        assert lookup.propose([DraftRow([], [2, 3], 2, salt=salt)]) == [expected]


def test_outputs_of_recent_salts_are_remembered_and_growing_ones_relearned():
    lookup = SuffixLookup(1)
    rows = [DraftRow([9], [100 * salt, 100 * salt + 1], salt=str(salt)) for salt in range(20)]
    for row in rows:
        lookup.propose([row])
    for row in rows:
        row.output += [row.output[0] + 2, row.output[0] + 3]
    begin(lookup)
    assert len(lookup._earlier) <= 8
    drafts = [lookup.propose([DraftRow([], [row.output[2]], 1, salt=row.salt)])[0] for row in reversed(rows)]
    assert drafts[0] == rows[-1].output[3:]
    assert all(draft in ([], row.output[3:]) for draft, row in zip(drafts, reversed(rows), strict=True))


# ── in an engine ──────────────────────────────────────────────────────────────────────────────────────────────

MODEL = tiny_model(seed=3)


def served(requests, lookup, *, together, **limits):
    """The completions of requests that an engine serves with these drafts."""
    lm = LanguageModel(MODEL, ByteTokenizer(), prefix_memory=0)
    with Engine(lm, **limits) as engine:
        generations = []
        for prompt, options in requests:
            # A fixed length, for an adaptive one depends on times.
            generations.append(engine.submit(prompt, draft=Speculator(lookup, length=3), **options))
            if not together:
                generations[-1].result(SECONDS)
        completions = [generation.result(SECONDS) for generation in generations]
        assert "overcommit" not in limits or engine.stats().preemptions > 0
        return completions


@pytest.mark.parametrize(
    "limits",
    [
        {"max_sequences": 8},
        {"max_sequences": 4, "cache_memory": 7 * MODEL.new_blocks(1).block_nbytes, "overcommit": 100.0},
    ],
    ids=["all together", "some are preempted"],
)
def test_an_engine_teaches_whole_outputs(limits):
    options = {"max_new_tokens": 2 * BLOCK, "temperature": 1.0}
    requests = [(f"prompt {seed}", {"seed": seed, "n": 1 + seed % 2, **options}) for seed in range(6)]
    lookup = SuffixLookup()
    completions = served(requests, lookup, together=True, **limits)
    alone = served(requests, SuffixLookup(), together=False, max_sequences=2)
    outputs = [each.token_ids for completion in completions for each in (completion, *completion.others)]
    assert outputs == [each.token_ids for completion in alone for each in (completion, *completion.others)]
    begin(lookup)
    learnt = lookup._earlier[None].automaton
    assert len(learnt) == len(one_after_another(outputs)._earlier[None].automaton), "each once"
    for output in outputs:
        assert matched(learnt, output) == list(range(1, len(output) + 1))


def test_output_of_cancelled_and_failed_requests_is_learned():
    def fails(ids, text):
        if len(ids) == 20:
            raise LookupError("mine")
        return False

    lookup = SuffixLookup()
    lm = LanguageModel(MODEL, ByteTokenizer(), prefix_memory=0)
    options = {"max_new_tokens": 200, "temperature": 1.0, "draft": Speculator(lookup, length=3)}
    with Engine(lm, max_sequences=4) as engine:
        failing = engine.submit("fails", seed=1, stop_when=fails, **options)
        cancelled = engine.submit("is cancelled", seed=2, **options)
        pieces = iter(cancelled)
        begun = [next(pieces).token_id for _ in range(20)]
        cancelled.cancel()
        output = cancelled.result(SECONDS).token_ids
        with pytest.raises(LookupError):
            failing.result(SECONDS)
    assert output[:20] == begun
    right = lm.generate("fails", seed=1, max_new_tokens=19, temperature=1.0).token_ids
    begin(lookup)
    for learnt in (output, right):
        assert matched(lookup._earlier[None].automaton, learnt) == list(range(1, len(learnt) + 1))


def test_draft_counts_survive_a_preemption():
    """With room for little more than one text the others give way again and again."""
    limits = {"cache_memory": 5 * MODEL.new_blocks(1).block_nbytes, "overcommit": 100.0}
    requests = [(f"{seed}", {"seed": seed, "max_new_tokens": 3 * BLOCK, "temperature": 1.0}) for seed in range(3)]

    class Anything:
        rounds = 0

        def start(self, request):
            return self

        def propose(self, rows):
            self.rounds += len(rows)
            return [[0] for _ in rows]

    drafter = Anything()
    completions = served(requests, drafter, together=True, max_sequences=3, **limits)
    assert sum(completion.speculation.rounds for completion in completions) == drafter.rounds


def test_a_drafter_keeps_no_request_alive():
    lm, begun = LanguageModel(MODEL, ByteTokenizer(), prefix_memory=0), []

    class Watched(SuffixLookup):
        def propose(self, rows):
            begun.extend(map(weakref.ref, rows))
            return super().propose(rows)

    speculator = Speculator(Watched(), length=3)
    lm.generate(["one", "two"], max_new_tokens=20, seed=1, temperature=1.0, draft=speculator)
    gc.collect()
    assert begun
    assert all(row() is None for row in begun)
