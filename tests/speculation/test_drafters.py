"""The proposals of each drafter; a drafter that fails gives one clear error."""

import tracemalloc
from pathlib import Path

import pytest
import torch
from drafted import CPU, Guess, decode, fixed, sequences_of, texts
from hypothesis import given
from hypothesis import strategies as st

from onward.decoding.speculation import (
    DraftRow,
    DraftTarget,
    ModelDrafter,
    PredictedOutput,
    PromptLookup,
    SuffixLookup,
    check_same_tokens,
)
from onward.decoding.speculation.drafter import continued
from onward.decoding.speculation.lookup import SuffixAutomaton
from onward.decoding.speculation.step import speculation_of
from onward.errors import DraftError, RequestError, TokenizerError
from onward.sampling import Sampler, SamplingParams
from onward.testing import ByteTokenizer, scripted_model

TARGET = DraftTarget(vocab_size=100, device=CPU, rows=4, max_len=100, positions=400, longest=15)


def proposed(drafter, ids, limit=4, prompt=0):
    """The proposal of a drafter after `ids`, of which the first `prompt` are the prompt."""
    return list(drafter.start(TARGET).propose([DraftRow(ids[:prompt], ids[prompt:], limit)])[0])


def earlier_ends(ids, length):
    """The positions after which the last `length` ids of a text stood before, by looking everywhere."""
    end = ids[len(ids) - length :]
    return [after for after in range(length, len(ids)) if ids[after - length : after] == end]


texts_of_few_ids = st.lists(st.integers(0, 3), min_size=1, max_size=40)


# ── predictions ───────────────────────────────────────────────────────────────────────────────────────────────


def test_a_prediction_is_proposed_and_resumed_after_a_difference():
    predicted = PredictedOutput([1, 2, 3, 4, 5, 6, 7, 8])
    assert proposed(predicted, [9, 9], prompt=2) == [1, 2, 3, 4]
    assert proposed(predicted, [9, 1, 2], prompt=1) == [3, 4, 5, 6]
    assert proposed(predicted, [9, 1, 2, 3, 4, 5, 6, 7], prompt=1) == [8]
    assert proposed(predicted, [9, 1, 2, 3, 4, 5, 6, 7, 8], prompt=1) == []
    assert proposed(predicted, [9, 1, 0], prompt=1) == []  # another id
    assert proposed(predicted, [9, 1, 0, 3, 4, 5], prompt=1) == [6, 7, 8]  # three that agree again
    assert proposed(predicted, [9, 1, 0, 4, 5], prompt=1) == []  # two are too few
    assert proposed(PredictedOutput([]), [9], prompt=1) == []


def test_a_prediction_resumes_after_its_last_position():
    predicted = PredictedOutput([1, 2, 3, 4, 0, 1, 2, 3, 5])
    assert proposed(predicted, [9, 1, 2, 3, 4, 7, 1, 2, 3], prompt=1) == [5]
    assert proposed(predicted, [9, 7, 1, 2, 3], prompt=1) == [4, 0, 1, 2]


@given(texts_of_few_ids, texts_of_few_ids, st.lists(st.integers(1, 4), min_size=1, max_size=40))
def test_proposing_twice_gives_the_same_prediction(ids, output, asks):
    drafting, whole = PredictedOutput(ids).start(TARGET), PredictedOutput(ids)
    grown: list[int] = []
    row = DraftRow([9], grown, 4)
    for count in asks:
        grown += output[len(grown) : len(grown) + count]
        assert list(drafting.propose([row])[0]) == proposed(whole, [9, *grown], prompt=1)


# ── lookups ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_prompt_lookup_proposes_the_continuation_of_the_longest_match():
    assert proposed(PromptLookup(2), [1, 2, 3, 4, 5, 1, 2]) == [3, 4, 5, 1]
    # 9 1 2 stood here once, 1 2 more often and later.
    assert proposed(PromptLookup(2), [9, 1, 2, 3, 8, 1, 2, 4, 8, 1, 2, 5, 9, 1, 2], 2) == [3, 8]
    # Of equals the latest.
    assert proposed(PromptLookup(2), [1, 2, 3, 1, 2, 4, 7, 1, 2], 1) == [4]
    assert proposed(PromptLookup(3), [1, 2, 9, 1, 2]) == []
    assert proposed(PromptLookup(3), [1, 2]) == []


@given(texts_of_few_ids, st.integers(1, 3), st.integers(1, 6), st.integers(0, 40))
def test_prompt_lookup_equals_exhaustive_search(ids, shortest, longest, prompt):
    longest = max(shortest, longest)
    expected = []
    for length in range(min(longest, len(ids) - 1), shortest - 1, -1):
        if ends := earlier_ends(ids, length):
            expected = continued(ids, ends[-1], 5)
            break
    assert proposed(PromptLookup(shortest, longest), ids, 5, prompt) == expected


@given(texts_of_few_ids, st.lists(st.integers(1, 5), max_size=10))
def test_a_text_that_grows_between_drafts_equals_the_whole_text(ids, cuts):
    """However many ids came since, and also where rows were left out."""
    for drafter in (lambda: PromptLookup(1, 4), lambda: SuffixLookup(1)):
        drafting, output, start = drafter().start(TARGET), [], 0
        row = DraftRow([7], output, 3)
        for cut in cuts:
            output += ids[start : start + cut]
            start += cut
            if output:
                drafting.propose([row])
        output += ids[start:]
        whole = drafter().start(TARGET).propose([DraftRow([7], list(output), 3)])
        assert drafting.propose([row]) == whole


def test_a_repetition_predicts_any_number_of_ids():
    assert continued([5, 1, 2, 3, 1, 2, 3], 4, 8) == [1, 2, 3, 1, 2, 3, 1, 2]
    assert proposed(PromptLookup(2), [1, 2, 1, 2], 6) == [1, 2, 1, 2, 1, 2]
    assert proposed(SuffixLookup(2), [1, 2, 1, 2], 6) == [1, 2, 1, 2, 1, 2]


# ── the automaton ─────────────────────────────────────────────────────────────────────────────────────────────


@given(texts_of_few_ids)
def test_the_automaton_finds_the_longest_suffix_that_occurred_before(ids):
    automaton = SuffixAutomaton()
    for count, token in enumerate(ids, 1):
        automaton.push(token)
        text = ids[:count]
        longest = max((n for n in range(count) if earlier_ends(text, n)), default=0)
        assert automaton.length == longest
        if longest:
            assert automaton.after(automaton.state) in earlier_ends(text, longest)


@given(texts_of_few_ids, texts_of_few_ids)
def test_the_automaton_matches_foreign_texts_as_far_as_possible(ids, foreign):
    automaton = SuffixAutomaton()
    for token in ids:
        automaton.push(token)
    state = length = 0
    for count, token in enumerate(foreign, 1):
        state, length = automaton.step(state, length, token)
        ends = [foreign[count - n : count] for n in range(count + 1)]
        found = [n for n, end in enumerate(ends) if any(ids[i : i + n] == end for i in range(len(ids) - n + 1))]
        assert length == max(found)
        if length:
            after = automaton.after(state)
            assert ids[after - length : after] == foreign[count - length : count]


def test_the_automaton_is_linear_in_its_text():
    """At most two states and three transitions an id, also for texts made to be hard."""
    for text in ([0] * 500, [0] + [1] * 499, [0, 1, 1] * 170, torch.randint(0, 4, (500,)).tolist()):
        automaton = SuffixAutomaton()
        for token in text:
            automaton.push(token)
        assert len(automaton._next) <= 2 * len(text)
        assert sum(map(len, automaton._next)) <= 3 * len(text)


# ── memory ────────────────────────────────────────────────────────────────────────────────────────────────────


def learned(lookup, output, prompt=(50,)):
    """A request that put out these ids."""
    lookup.start(TARGET).propose([DraftRow(list(prompt), list(output), 1)])


def test_outputs_of_earlier_requests_are_remembered_but_prompts_are_not():
    lookup = SuffixLookup(2)
    learned(lookup, [1, 2, 3, 4, 5], prompt=[20, 21, 22, 23])
    assert proposed(lookup, [9, 1, 2]) == [3, 4, 5]
    assert proposed(lookup, [9, 20, 21]) == []
    # The text's own past is nearer, where it matches as far.
    assert proposed(lookup, [1, 2, 8, 1, 2], 2) == [8, 1]
    # A draft ends where the earlier text did: what follows is another one.
    learned(lookup, [6, 7, 8])
    assert proposed(lookup, [9, 4, 5]) == []


def test_output_after_the_last_draft_is_remembered_too():
    lookup, output = SuffixLookup(2), [1, 2, 3]
    lookup.start(TARGET).propose([DraftRow([9], output, 1)])
    output += [4, 5, 6]
    assert proposed(lookup, [9, 3, 4]) == [5, 6]


def test_concurrent_requests_are_independent():
    lookup = SuffixLookup(2)
    one, other = lookup.start(TARGET), lookup.start(TARGET)
    row = DraftRow([1, 2, 3, 1, 2], [], 2)
    assert one.propose([row]) == [[3, 1]]
    assert other.propose([DraftRow([1, 2, 5, 1, 2], [], 2)]) == [[5, 1]]
    row.output.append(3)
    assert one.propose([row]) == [[1, 2]]


def test_memory_is_limited_to_the_latest_outputs():
    lookup = SuffixLookup(2, max_tokens=2000)
    generator = torch.Generator().manual_seed(0)
    tracemalloc.start()
    sizes = []
    for _ in range(200):
        output = torch.randint(0, 100, (97,), generator=generator).tolist()
        learned(lookup, output)
        sizes.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    assert max(sizes[100:]) <= 1.2 * max(sizes[:100]), "no growth once it is full"
    assert max(sizes) < 2000 * 800
    assert proposed(lookup, [99, *output[10:16]]) == output[16:20]
    assert proposed(SuffixLookup(2, max_tokens=0), [1, 2]) == []


def test_lookups_refuse_invalid_arguments():
    with pytest.raises(RequestError, match="1 <= shortest <= longest; got 3 and 2"):
        PromptLookup(3, 2)
    with pytest.raises(RequestError, match="shortest must be a whole number of 1 or more; got 0"):
        SuffixLookup(0)


# ── draft models ──────────────────────────────────────────────────────────────────────────────────────────────


def test_a_draft_model_is_not_asked_past_its_context():
    draft = scripted_model(lambda tokens: (tokens[-1] + 1) % 32, max_seq_len=20)
    model = scripted_model(lambda tokens: (tokens[-1] + 1) % 32)
    sequences = sequences_of([[1]], [40], [SamplingParams()])
    decode(model, sequences, speculator=fixed(ModelDrafter(draft, "eager"), 4))
    assert sequences[0].token_ids == [token % 32 for token in range(2, 42)]
    assert speculation_of(sequences[0]).rounds == 4  # from texts of 1, 6, 11 and 16 ids; after 21 there is no room
    assert all(call.offsets[0] + len(call.tokens[0]) <= 20 for call in draft.calls)


def test_rows_of_a_draft_model_leave_its_batch_when_they_end():
    draft = scripted_model(lambda tokens: (tokens[-1] + 1) % 32)
    model = scripted_model(lambda tokens: (tokens[-1] + 1) % 32)
    plain = texts(model, [[1], [2], [3]], [3, 20, 9], [SamplingParams()] * 3)
    found = texts(
        model, [[1], [2], [3]], [3, 20, 9], [SamplingParams()] * 3, speculator=fixed(ModelDrafter(draft, "eager"), 4)
    )
    assert found == plain
    assert [len(call.tokens) for call in draft.calls if len(call.tokens[0]) == 1][-1] == 1


def test_ids_that_the_target_lacks_are_never_drafted():
    """Its likeliest id is padding that the target lacks; the likeliest of the others is the one."""

    def script(tokens):
        logits = torch.zeros(40)
        logits[36] = 9.0
        logits[(tokens[-1] + 1) % 32] = 5.0
        return logits

    draft = ModelDrafter(scripted_model(script, vocab_size=40), "eager")
    model = scripted_model(lambda tokens: (tokens[-1] + 1) % 32)
    sequences = sequences_of([[1]], [11], [SamplingParams()])
    decode(model, sequences, speculator=fixed(draft, 4))
    assert speculation_of(sequences[0]).acceptance == 1


def test_a_draft_model_with_fewer_ids_drafts_those():
    """Also where the text holds ids that it does not have, and where options name them."""
    draft = ModelDrafter(scripted_model(lambda tokens: (tokens[-1] + 1) % 8, vocab_size=8), "eager")
    model = scripted_model(lambda tokens: (tokens[-1] + 1) % 12, vocab_size=12)
    params = [SamplingParams(temperature=1.0, seed=1, logit_bias={11: 1.0}, bad_words=((9, 11),))]
    plain = texts(model, [[1]], [30], params)
    sequences = sequences_of([[1]], [30], params)
    decode(model, sequences, speculator=fixed(draft, 3))
    assert sequences[0].token_ids == plain[0]
    assert 0.2 < speculation_of(sequences[0]).acceptance < 0.9


def test_a_model_drafter_needs_a_model():
    with pytest.raises(RequestError, match=r"takes an onward\.Model; got str"):
        ModelDrafter("demo")


class Table(ByteTokenizer):
    def __init__(self, *tokens):
        super().__init__()
        self.table = tokens

    def tokens(self):
        return self.table


def test_vocabularies_are_compared_token_by_token():
    check_same_tokens(Table("a", "b"), Table("a", "b", "<pad>"))
    check_same_tokens(Table("a", None, "c"), Table("a", "b", "c"))
    with pytest.raises(TokenizerError, match="id 1 is 'x' there and 'b' in the model"):
        check_same_tokens(Table("a", "b"), Table("a", "x", "y"))


def test_vocabularies_that_cannot_be_listed_are_compared_by_texts():
    class Shifted(ByteTokenizer):
        def decode(self, ids):
            return super().decode([token + (token > 64) for token in ids])

    check_same_tokens(ByteTokenizer(), ByteTokenizer(eos_id=None))
    with pytest.raises(TokenizerError, match="id 65 is 'B' there and 'A' in the model"):
        check_same_tokens(ByteTokenizer(), Shifted())


# ── drafters that fail ────────────────────────────────────────────────────────────────────────────────────────


def broken(result):
    class Broken:
        def start(self, target):
            return self

        def propose(self, rows):
            if isinstance(result, Exception):
                raise result
            return result

    return Broken()


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (RuntimeError("out of\nluck"), r"the drafter Broken failed \(RuntimeError: out of luck\)"),
        ([], "returned 0 drafts for 1 rows"),
        ([[1], [2]], "returned 2 drafts for 1 rows"),
        ([[1, 32]], "proposed id 32, but the model's ids are from 0 to 31"),
        ([[-1]], "proposed id -1"),
        ([[1.5]], r"must propose ids, whole numbers; got \[1.5\]"),
        (["ab"], "must propose ids, whole numbers; got 'ab'"),
        ([None], "must propose ids, whole numbers; got None"),
        ([([1, 2], torch.ones(2, 32))], r"must propose ids, whole numbers; got \(\[1, 2\], tensor"),
    ],
)
def test_a_broken_drafter_is_one_clear_error(result, message):
    model = scripted_model([1, 2, 3])
    with pytest.raises(DraftError, match=message):
        decode(model, sequences_of([[1, 2]], [9], [SamplingParams()]), speculator=fixed(broken(result)))


def test_an_interrupt_in_a_drafter_is_passed_on():
    def interrupt(row):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        decode(scripted_model([1]), sequences_of([[1]], [9], [SamplingParams()]), speculator=fixed(Guess(interrupt)))


def test_ids_may_be_numpy_or_torch_integers():
    model = scripted_model(lambda tokens: (tokens[-1] + 1) % 32)
    sequences = sequences_of([[1]], [9], [SamplingParams()])
    guess = Guess(lambda row: torch.arange(row.ids()[-1] + 1, row.ids()[-1] + 1 + row.limit))
    decode(model, sequences, speculator=fixed(guess))
    assert sequences[0].token_ids == list(range(2, 11))
    assert speculation_of(sequences[0]).acceptance == 1


def test_the_documented_drafter_drafts():
    page = (Path(__file__).parents[2] / "docs" / "tutorials" / "write-a-drafter.md").read_text()
    source = page.split("\nclass Table")[1].split("\nlm = ")[0]
    names = {}
    exec("class Table" + source, names)
    model = scripted_model(lambda tokens: (tokens[-1] + 1) % 8)
    sequences = sequences_of([[1], [5]], [30, 20], [SamplingParams()] * 2)
    decode(model, sequences, speculator=fixed(names["Table"](), 3))
    assert sequences[0].token_ids == [token % 8 for token in range(2, 32)]
    assert speculation_of(sequences[0]).acceptance == 1
    assert speculation_of(sequences[0]).accepted > 8


def test_coupled_draws_agree_at_the_documented_rate():
    """(1 - d) / (1 + d) at least, d the total variation distance of the two distributions (arXiv 2408.07978)."""
    generator = torch.Generator().manual_seed(5)
    draws = 20_000
    params = [SamplingParams(temperature=1.0, seed=3)] * draws
    sampler, positions = Sampler(params), torch.arange(draws)
    for spread in (0.1, 0.5, 2.0):
        target = torch.randn(20, generator=generator)
        draft = target + spread * torch.randn(20, generator=generator)
        distance = float((target.softmax(-1) - draft.softmax(-1)).abs().sum() / 2)
        one, other = (sampler(logits.expand(draws, -1), positions) for logits in (target, draft))
        agreed = float((one == other).double().mean())
        deviation = 5 * (0.25 / draws) ** 0.5  # five standard deviations of a share of this sample
        assert (1 - distance) / (1 + distance) - deviation < agreed < 1 - distance + deviation
