"""speculated == plain: the same ids, logprobs, ends and cache, with any drafter, however wrong."""

import functools

import pytest
import torch
from drafted import Guess, at_random, decode, fixed, oracle, sequences_of, texts
from hypothesis import example, given, settings
from hypothesis import strategies as st

import onward
from onward import native, ops
from onward.decoding import Sequence
from onward.decoding.speculation import ModelDrafter, PromptLookup, SuffixLookup
from onward.decoding.speculation.step import speculation_of
from onward.errors import OnwardError
from onward.models import Run
from onward.sampling import SamplingParams
from onward.testing import poison, scripted_model, tiny_model
from onward.tokenizer import StopStrings, StreamingDetokenizer

VOCAB = 12


@functools.cache
def noise(key):
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(key)) * 2.0


def follow(tokens):
    """Logits that depend on the last three tokens: texts that repeat themselves, so that lookups find something."""
    return noise(sum((token + 1) * 13**at for at, token in enumerate(tokens[-1:-4:-1])) % 997)


def almost(tokens):
    """A draft model that agrees with `follow` more often than not."""
    return follow(tokens) + 0.5 * noise(len(tokens) % 7)


def written(ids):
    return "".join(chr(ord("a") + token) for token in ids)


DRAFTERS = ["right", "wrong", "mixed", "too long", "random", "nothing", "lookup", "suffix", "same model", "other model"]


def drafter(kind, plain, seed):
    """A drafter for rows that will say `plain`."""
    return {
        "right": lambda: oracle(plain),
        "wrong": lambda: oracle(plain, lambda owner, position: True, vocab=VOCAB),
        "mixed": lambda: oracle(plain, lambda owner, position: (owner * 7 + position + seed) % 3 == 0, vocab=VOCAB),
        "too long": lambda: oracle(plain, more=50),
        "random": lambda: at_random(seed, VOCAB),
        "nothing": lambda: Guess(lambda row: []),
        "lookup": lambda: PromptLookup(1, 3),
        "suffix": lambda: SuffixLookup(1, 64),
        "same model": lambda: ModelDrafter(scripted_model(follow, vocab_size=VOCAB), "eager"),
        "other model": lambda: ModelDrafter(scripted_model(almost, vocab_size=VOCAB), "eager"),
    }[kind]()


params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.6, 1.0, 1.5]),
    seed=st.integers(0, 2**64 - 1),
    top_k=st.sampled_from([0, 4]),
    top_p=st.sampled_from([1.0, 0.8]),
    min_p=st.sampled_from([0.0, 0.1]),
    typical_p=st.sampled_from([1.0, 0.9]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    frequency_penalty=st.sampled_from([0.0, 0.4]),
    presence_penalty=st.sampled_from([0.0, -0.5]),
    dry_multiplier=st.sampled_from([0.0, 0.8]),
    no_repeat_ngram_size=st.sampled_from([0, 0, 1, 2]),
    logit_bias=st.sampled_from([{}, {3: 2.0, 5: float("-inf")}]),
    bad_words=st.sampled_from([(), ((1, 2), (4,))]),
)
request = st.lists(
    st.tuples(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=6), st.integers(0, 12), params),
    min_size=1,
    max_size=3,
)


def outcome(model, asked, eos, stop, tops, **options):
    """All that a request says: ids, texts, ends and logprobs; or its error."""
    sequences = [
        Sequence(
            prompt,
            new,
            eos,
            StopStrings(StreamingDetokenizer(written, before=prompt), stop),
            sampling=row,
            top_logprobs=tops[index % len(tops)],
        )
        for index, (prompt, new, row) in enumerate(asked)
    ]
    try:
        decode(model, sequences, room=26, **options)
    except OnwardError as error:
        return str(error)
    for sequence in sequences:
        if sequence.token_ids:  # the cache holds all of the text but its last id
            assert sequence.computed == len(sequence.prompt) + len(sequence.token_ids) - 1
        if sequence.history is not None:
            assert sequence.history.ids.tolist() == [*sequence.prompt, *sequence.token_ids]
    return [(each.token_ids, each.text, each.finish_reason, each.logprobs) for each in sequences]


@settings(max_examples=500)
@given(
    request,
    st.sampled_from(DRAFTERS),
    st.integers(1, 6),
    st.sets(st.integers(0, VOCAB - 1), max_size=2),
    st.sampled_from([(), ("ab",), ("cd", "e")]),
    st.sampled_from(["own", "given", "opaque"]),
    st.lists(st.sampled_from([None, 0, 2]), min_size=1, max_size=3),
    st.integers(0, 99),
)
def test_speculated_equals_plain(asked, kind, length, eos, stop, slots, tops, seed):
    model = scripted_model(follow, vocab_size=VOCAB)
    options = {"eos": frozenset(eos), "stop": stop, "kind": slots, "tops": tops}
    plain = outcome(model, asked, **options)
    coming = [row[0] for row in plain] if isinstance(plain, list) else [[] for _ in asked]
    speculator = fixed(drafter(kind, coming, seed), length)
    assert outcome(model, asked, **options, speculator=speculator) == plain
    if kind == "suffix":  # which now remembers all of it
        assert outcome(model, asked, **options, speculator=speculator) == plain


# The definitions promise equal ids in float32 alone: a product of another T rounds otherwise.
FORMS = [("definition", torch.float32)] + [
    (isa, dtype) for isa in native.available_isas()[:1] for dtype in (torch.float32, torch.bfloat16)
]


@pytest.mark.parametrize(("form", "dtype"), FORMS, ids=str)
@pytest.mark.parametrize("kind", ["lookup", "suffix", "same model", "other model", "mixed"])
@pytest.mark.stride(3)
def test_speculated_equals_plain_on_the_demo_model(kind, form, dtype):
    before = ops.choice()
    ops.choose(form)
    try:
        lm, draft = demo("demo", dtype, form), demo("demo-draft", dtype, form)  # packed as the form wants it
        prompts = [lm.encode(text) for text in ("Once upon a time", "The cat sat on the mat. The cat sat", "A")]
        params = [SamplingParams(), SamplingParams(temperature=0.8, top_p=0.9, repetition_penalty=1.1, seed=3)]
        params.append(SamplingParams(temperature=1.0, seed=4))
        run = Run(lm.model)
        new = [40, 30, 35]
        plain = texts(lm.model, prompts, new, params, room=128, run=run)
        guess = {
            "lookup": PromptLookup(1),
            "suffix": SuffixLookup(1),
            "same model": ModelDrafter(lm.model),
            "other model": ModelDrafter(draft.model),
            "mixed": oracle(plain, lambda owner, position: position % 4 == 0, vocab=256),
        }[kind]
        assert texts(lm.model, prompts, new, params, room=128, run=run, speculator=fixed(guess, 5)) == plain
    finally:
        ops.choose("definition" if before.form == "definition" else before.isa)


@functools.cache
def demo(name, dtype, form):
    return onward.load(name, dtype=dtype)


def test_a_draft_model_stays_in_step_after_a_fully_accepted_draft():
    """The scripted forward complains of any entry that was not written, and its script of any that is another's."""
    draft = scripted_model(follow, vocab_size=VOCAB)
    model = scripted_model(follow, vocab_size=VOCAB)
    sequences = sequences_of([[1, 2, 3]], [17], [SamplingParams()])
    decode(model, sequences, speculator=fixed(ModelDrafter(draft, "eager"), 3))
    counts = speculation_of(sequences[0])
    assert (counts.drafted, counts.accepted, counts.rounds) == (12, 12, 4)
    # The prompt when the row joins, then the last id of each draft and the one that the target added, in one call.
    catching_up = [call.tokens[0] for call in draft.calls if len(call.tokens[0]) > 1]
    ids = sequences[0].token_ids
    assert catching_up == [[1, 2, 3], ids[3:5], ids[7:9], ids[11:13]]


def test_a_round_is_one_pass_and_no_pass_is_wasted():
    model = scripted_model(follow, vocab_size=VOCAB)
    plain = texts(model, [[1, 2]], [11], [SamplingParams()])
    model.calls.clear()
    assert texts(model, [[1, 2]], [11], [SamplingParams()], speculator=fixed(oracle(plain), 4)) == plain
    assert [len(call.tokens[0]) for call in model.calls] == [2, 5, 5]


def test_a_draft_is_no_longer_than_the_remaining_tokens_of_its_row():
    model = scripted_model(follow, vocab_size=VOCAB)
    plain = texts(model, [[1], [2]], [4, 9], [SamplingParams()] * 2)
    guess = oracle(plain)
    asked, right = [], guess.guess
    guess.guess = lambda row: asked.append((guess.owner(row), len(row.output), row.limit)) or right(row)
    texts(model, [[1], [2]], [4, 9], [SamplingParams()] * 2, speculator=fixed(guess, 6))
    assert asked == [(0, 0, 3), (1, 0, 6), (1, 7, 1)]


def test_a_draft_fits_the_remaining_cache():
    """A row near the end of the cache bounds the padded drafts of all: the scripted cache complains of an overflow."""
    model = scripted_model(follow, vocab_size=VOCAB)
    prompts, new = [[1] * 14, [2]], [2, 12]
    plain = texts(model, prompts, new, [SamplingParams()] * 2, room=16)
    for kind in ("own", "given", "opaque"):
        drafted = texts(
            model, prompts, new, [SamplingParams()] * 2, room=16, kind=kind, speculator=fixed(oracle(plain), 8)
        )
        assert drafted == plain


def test_eos_inside_an_accepted_draft_ends_the_row_and_its_cache():
    model = scripted_model(lambda tokens: (tokens[-1] + 1) % 32)
    params = [SamplingParams(repetition_penalty=1.01)]  # so that there is a history
    (sequence,) = sequences_of([[3]], [20], params, eos=frozenset({8}))
    coming = [list(range(4, 30))]
    decode(model, [sequence], speculator=fixed(oracle(coming), 9))
    assert sequence.token_ids == [4, 5, 6, 7, 8]
    assert sequence.finish_reason == "stop"
    assert (sequence.computed, sequence.ids(5, sequence.length)) == (5, [8])
    assert sequence.history.ids.tolist() == [3, 4, 5, 6, 7, 8]
    counts = speculation_of(sequence)
    assert (counts.accepted, counts.rounds) == (4, 1)


def test_a_ban_caused_by_a_wrong_draft_does_not_end_the_text():
    """After the drafted 0, 1 every other id has been generated; plain decoding never generates 1."""
    model = scripted_model([0, 2, 3], vocab_size=4)
    params = [SamplingParams(no_repeat_ngram_size=1)]
    plain = texts(model, [[1]], [3], params)
    assert texts(model, [[1]], [3], params, speculator=fixed(Guess(lambda row: [0, 2, 3, 1][: row.limit]), 3)) == plain
    assert texts(model, [[1]], [3], params, speculator=fixed(Guess(lambda row: [3, 2, 0]), 3)) == plain


def test_entries_past_the_offset_are_never_read():
    """Over a poisoned cache, with drafts that leave wrong entries behind, as over a new one."""
    model = tiny_model()
    asked = [[1, 2, 3], [4]], [12, 9], [SamplingParams(temperature=1.0, seed=1)] * 2
    plain = texts(model, *asked)
    poisoned = type(model)(
        forward=model.forward,
        params=model.params,
        new_cache=lambda batch, max_len: poison(model.new_cache(batch, max_len)),
        vocab_size=model.vocab_size,
    )
    wrong = oracle(plain, lambda owner, position: position % 2, vocab=258)
    assert texts(poisoned, *asked, speculator=fixed(wrong)) == plain
    assert texts(poisoned, *asked, speculator=fixed(ModelDrafter(poisoned))) == plain


@given(st.integers(0, 2**32))
@example(0)
@settings(max_examples=20)
def test_rows_accept_their_own_drafts_independently(seed):
    model = scripted_model(follow, vocab_size=VOCAB)
    prompts = [[1, 2], [3], [4, 5, 6]]
    rows = [SamplingParams(temperature=1.0, seed=seed + row) for row in range(3)]
    plain = texts(model, prompts, [15] * 3, rows)
    alone = [texts(model, [prompt], [15], [row])[0] for prompt, row in zip(prompts, rows, strict=True)]
    assert plain == alone
    guess = oracle(plain, lambda owner, position: owner == 0 or (owner == 1 and position % 4 == 0), vocab=VOCAB)
    sequences = sequences_of(prompts, [15] * 3, rows)
    decode(model, sequences, speculator=fixed(guess, 5))
    assert [sequence.token_ids for sequence in sequences] == plain
    counts = [speculation_of(sequence) for sequence in sequences]
    assert counts[0].accepted == 0
    assert counts[2].acceptance == 1
    assert 0 < counts[1].acceptance < 1
