"""Verification if no id can be chosen: logits that are not finite, and bans that leave no id."""

import pytest
import torch
from drafted import Guess, decode, fixed, sequences_of, texts

from onward.decoding.speculation import ModelDrafter, Speculator
from onward.decoding.speculation.step import speculation_of
from onward.errors import OnwardError, RequestError
from onward.inferencer import FilledCache, PrefillOutput, speculate
from onward.sampling import SamplingParams, greedy
from onward.testing import scripted_model

V = 5
NAN = torch.full((V,), float("nan"))


def counting(tokens):
    """One id more each time; NaN after 3."""
    return NAN if tokens[-1] == 3 else torch.eye(V)[(tokens[-1] + 1) % V] * 9


@pytest.mark.parametrize("drafter", ["right", "the model itself"])
@pytest.mark.parametrize("options", [{}, {"temperature": 0.5, "seed": 1}, {"no_repeat_ngram_size": 1}], ids=str)
def test_nan_logits_are_an_error_only_where_they_are_reached(drafter, options):
    model = scripted_model(counting, vocab_size=V)
    guess = Guess(lambda row: [1, 2, 3, 4][len(row.output) :][: row.limit])
    right = fixed(guess if drafter == "right" else ModelDrafter(model, "eager"), 4)
    sequences = sequences_of([[0]], [10], [SamplingParams(**options)], eos=frozenset({3}))
    decode(model, sequences, speculator=right)
    assert sequences[0].token_ids == [1, 2, 3]
    with pytest.raises(OnwardError, match="NaN or infinite"):
        decode(model, sequences_of([[0]], [10], [SamplingParams(**options)]), speculator=right)


class Counting:
    """An inferencer that says `counting`."""

    def new_cache(self, batch, max_len):
        return FilledCache(torch.zeros(batch, max_len), torch.zeros(batch, dtype=torch.int32))

    def prefill(self, query_token_ids, kv_cache, sample_strategy):
        kv_cache.lengths = kv_cache.lengths + query_token_ids.shape[1]
        logits = torch.stack([torch.stack([counting([token]) for token in row]) for row in query_token_ids.tolist()])
        return PrefillOutput(sample_strategy(logits[:, -1]).unsqueeze(1), logits)


def test_nan_logits_with_a_custom_select_function():
    one, prompt = Counting(), torch.tensor([[0]])
    for select in (greedy, lambda logits: logits.argmax(-1)):
        assert speculate(one, one, prompt, 10, select, eos=3, length=4).token_ids.tolist() == [[1, 2, 3]]
        with pytest.raises(OnwardError, match="NaN or infinite"):
            speculate(one, one, prompt, 10, select, length=4)


def test_a_row_stopped_by_a_wrong_draft_takes_no_id_from_the_others():
    """Row 0 would have used every id after its draft; row 1 is correct to its last id, and keeps its whole draft."""
    model = scripted_model(lambda tokens: (tokens[-1] + 1) % V, vocab_size=V)
    params = [SamplingParams(no_repeat_ngram_size=1), SamplingParams()]
    plain = texts(model, [[0], [1]], [3, 9], params)
    assert plain == [[1, 2, 3], [2, 3, 4, 0, 1, 2, 3, 4, 0]]
    drafts = {0: [2, 1, 3, 4, 0, 0], 1: plain[1]}
    guess = Guess(lambda row: drafts[guess.owner(row)][len(row.output) :][: row.limit])
    sequences = sequences_of([[0], [1]], [3, 9], params)
    decode(model, sequences, speculator=fixed(guess, 6))
    assert [sequence.token_ids for sequence in sequences] == plain
    assert speculation_of(sequences[1]).acceptance == 1


def test_invalid_arguments_of_a_speculator():
    with pytest.raises(RequestError, match="length must be a whole number of 1 or more; got 0"):
        Speculator(Guess(list), length=0)
    with pytest.raises(TypeError, match="unexpected keyword argument 'verifier'"):
        Speculator(Guess(list), verifier="rejection")
