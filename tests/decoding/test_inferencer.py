"""Prefill and decode by hand equal generate; and speculation works with any two inferencers."""

import pytest
import torch

import onward
from onward import Sampler, SamplingParams, greedy
from onward.errors import ContextOverflowError, RequestError
from onward.inferencer import ModelInferencer
from onward.testing import scripted_model, tiny_model

PROMPTS = torch.tensor([[5, 77, 130, 9], [200, 1, 9, 31]])


@pytest.fixture(scope="module")
def model():
    return tiny_model("qwen3")


def by_hand(inferencer, prompts, new, strategy, max_len=40):
    """Prompt, first token and the rest, in as many calls as a user would make; ids and the logits of each."""
    kv = inferencer.new_cache(len(prompts), max_len)
    prefilled = inferencer.prefill(prompts, kv, strategy)
    decoded = inferencer.decode(prefilled.token_ids, kv, new - 1, strategy)
    ids = torch.cat((prefilled.token_ids, decoded.token_ids), 1)
    return ids, torch.cat((prefilled.token_logits[:, -1:], decoded.token_logits), 1), kv


@pytest.mark.parametrize("options", [{"temperature": 0}, {"temperature": 0.9, "top_k": 40, "seed": 11}], ids=str)
@pytest.mark.parametrize("chunk", [2, 512])
def test_an_inferencer_equals_generate(model, options, chunk):
    lm = onward.LanguageModel(model)
    completions = lm.generate(PROMPTS.tolist(), max_new_tokens=10, **options)
    sampler = Sampler([SamplingParams(**options)] * 2)
    ids, _, kv = by_hand(ModelInferencer(model, prefill_chunk=chunk), PROMPTS, 10, sampler)
    assert ids.dtype == torch.int64
    assert ids.tolist() == [completion.token_ids for completion in completions]
    assert kv.lengths.tolist() == [4 + 9, 4 + 9]


def test_logits_equal_those_of_the_whole_text(model):
    ids, logits, kv = by_hand(ModelInferencer(model), PROMPTS, 8, greedy)
    lm = onward.LanguageModel(model)
    for row, prompt in enumerate(PROMPTS.tolist()):
        text = prompt + ids[row].tolist()
        whole = lm.logits(text)
        # Another number of rows and columns may be summed in another order: 2 layers of float32 sums of <= 64 terms.
        torch.testing.assert_close(logits[row], whole[3:-1], rtol=1e-4, atol=1e-4)
    inferencer = ModelInferencer(model)
    kv = inferencer.new_cache(2, 40)
    prefilled = inferencer.prefill(PROMPTS, kv, greedy)
    assert prefilled.token_logits.shape == (2, 4, 258)
    assert torch.equal(prefilled.token_ids[:, 0], prefilled.token_logits[:, -1].argmax(-1))


def test_a_prompt_may_come_in_parts(model):
    inferencer = ModelInferencer(model)
    whole, _, _ = by_hand(inferencer, PROMPTS, 8, greedy)
    kv = inferencer.new_cache(2, 40)
    inferencer.prefill(PROMPTS[:, :3], kv, greedy)
    first = inferencer.prefill(PROMPTS[:, 3:], kv, greedy).token_ids
    steps = [first]
    for _ in range(7):
        steps.append(inferencer.decode(steps[-1], kv, 1, greedy).token_ids)
    assert torch.equal(torch.cat(steps, 1), whole)


def test_truncated_tokens_leave_no_trace(model):
    """Rows of different lengths, after tokens that were not meant."""
    inferencer = ModelInferencer(model)
    whole, _, _ = by_hand(inferencer, PROMPTS, 8, greedy)
    kv = inferencer.new_cache(2, 40)
    first = inferencer.prefill(PROMPTS, kv, greedy).token_ids
    inferencer.decode(first, kv, 3, greedy)
    inferencer.prefill(torch.tensor([[3, 3, 3], [4, 4, 4]]), kv, greedy)
    kv.truncate(torch.tensor([6, 5]))
    query = torch.stack((whole[0, 2], whole[1, 1])).unsqueeze(1)
    rest = inferencer.decode(query, kv, 4, greedy).token_ids
    assert rest.tolist() == [whole[0, 3:7].tolist(), whole[1, 2:6].tolist()]
    assert kv.lengths.tolist() == [10, 9]


def test_rows_end_independently():
    inferencer = ModelInferencer(scripted_model(lambda history: history[-1] + 1), eos=(7, 11))
    kv = inferencer.new_cache(2, 20)
    first = inferencer.prefill(torch.tensor([[4], [8]]), kv, greedy)
    assert first.token_ids.tolist() == [[5], [9]]
    assert kv.lengths.tolist() == [1, 1]
    out = inferencer.decode(torch.tensor([[5], [8]]), kv, 10, greedy)
    assert out.token_ids.tolist() == [[6, 7, 7], [9, 10, 11]]
    assert out.token_logits.shape == (2, 3, 32)
    assert out.token_logits.argmax(-1).tolist() == [[6, 7, 0], [9, 10, 11]]
    assert not out.token_logits[0, 2].any()
    assert kv.lengths.tolist() == [1 + 2, 1 + 3]
    # The ending id is pending: it is the next query when decoding continues.
    assert inferencer.decode(torch.tensor([[7], [11]]), kv, 1, greedy).token_ids.tolist() == [[8], [12]]


def test_the_inferencer_wastes_no_forward():
    model = scripted_model(lambda history: history[-1] + 1)
    inferencer = ModelInferencer(model)
    kv = inferencer.new_cache(1, 20)
    inferencer.decode(inferencer.prefill(torch.tensor([[1, 2]]), kv, greedy).token_ids, kv, 3, greedy)
    assert [call.tokens for call in model.calls] == [[[1, 2]], [[3]], [[4]], [[5]]]


def test_a_failed_call_leaves_the_cache_unchanged():
    def script(history):
        if len(history) > 4:
            raise RuntimeError("out of luck")
        return 3

    inferencer = ModelInferencer(scripted_model(script))
    kv = inferencer.new_cache(1, 20)
    first = inferencer.prefill(torch.tensor([[1, 2]]), kv, greedy).token_ids
    with pytest.raises(RuntimeError, match="out of luck"):
        inferencer.decode(first, kv, 8, greedy)
    assert kv.lengths.tolist() == [2]
    assert inferencer.decode(first, kv, 1, greedy).token_ids.tolist() == [[3]]


# ── use cases ─────────────────────────────────────────────────────────────────────────────────────────────────


def speculate(drafter, target, prompts, new, strategy, draft=3):
    """Draft with one inferencer, verify with another by equality; rows accept each their own number."""
    rows, room = len(prompts), prompts.shape[1] + new + 2 * draft + 2
    cache, drafted = target.new_cache(rows, room), drafter.new_cache(rows, room)
    texts = torch.cat((prompts, target.prefill(prompts, cache, strategy).token_ids), 1).tolist()
    drafter.prefill(prompts[:, :-1], drafted, strategy)
    rounds = 0
    while min(map(len, texts)) < prompts.shape[1] + new:
        rounds += 1
        # The last two tokens of each row again: after a draft that was accepted whole the drafter lacks both.
        drafted.truncate(torch.tensor([len(text) - 2 for text in texts]))
        last_two = torch.tensor([text[-2:] for text in texts])
        proposal = drafter.prefill(last_two, drafted, strategy).token_ids
        proposal = torch.cat((proposal, drafter.decode(proposal, drafted, draft - 1, strategy).token_ids), 1)
        query = torch.cat((last_two[:, 1:], proposal), 1)
        logits = target.prefill(query, cache, strategy).token_logits
        for row, text in enumerate(texts):
            for at in range(draft + 1):
                picked = torch.cat([logits[r : r + 1, at] for r in range(rows)])
                positions = torch.tensor([len(t) for t in texts])
                token = int(strategy(picked, positions)[row] if isinstance(strategy, Sampler) else greedy(picked)[row])
                text.append(token)
                if at == draft or token != proposal[row, at]:
                    break
        cache.truncate(torch.tensor([len(text) - 1 for text in texts]))
    return [text[prompts.shape[1] :][:new] for text in texts], rounds


@pytest.mark.parametrize("options", [{"temperature": 0}, {"temperature": 0.7, "seed": 5}], ids=str)
@pytest.mark.parametrize("seed", [0, 1], ids=["the target itself drafts", "another model drafts"])
def test_speculation_on_two_inferencers_equals_plain_decoding(model, options, seed):
    drafter = ModelInferencer(tiny_model("qwen3", seed=seed))
    strategy = Sampler([SamplingParams(**options)] * 2) if options["temperature"] else greedy
    plain = onward.LanguageModel(model).generate(PROMPTS.tolist(), max_new_tokens=12, **options)
    texts, rounds = speculate(drafter, ModelInferencer(model), PROMPTS, 12, strategy)
    assert texts == [completion.token_ids for completion in plain]
    if seed == 0:
        assert rounds == 3  # one token by the prefill, then four a round


# ── bad input ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("query", "says"),
    [
        (torch.tensor([1]), r"must be whole numbers \[1, T\]"),
        (torch.tensor([[1], [2]]), r"as many rows as the cache has; got torch.int64 \[2, 1\]"),
        (torch.ones(1, 1), "got torch.float32"),
        (torch.ones(1, 0, dtype=torch.int64), r"got torch.int64 \[1, 0\]"),
        (torch.tensor([[32]]), r"ids from 0 to 31; got \[\[32\]\]"),
        (torch.tensor([[-1]]), "ids from 0 to 31"),
    ],
)
def test_invalid_queries(query, says):
    inferencer = ModelInferencer(scripted_model([1]))
    kv = inferencer.new_cache(1, 8)
    with pytest.raises(RequestError, match=says):
        inferencer.prefill(query, kv, greedy)
    with pytest.raises(RequestError, match=says):
        inferencer.decode(query, kv, 1, greedy)


def test_other_invalid_calls():
    inferencer = ModelInferencer(scripted_model([1], max_seq_len=6))
    kv = inferencer.new_cache(1, 8)
    inferencer.prefill(torch.tensor([[1, 2, 3]]), kv, greedy)
    with pytest.raises(RequestError, match=r"decode takes one query token a row, \[B, 1\]; got \[1, 2\]"):
        inferencer.decode(torch.tensor([[1, 2]]), kv, 1, greedy)
    with pytest.raises(RequestError, match="max_new_tokens must be a whole number of 1 or more; got 0"):
        inferencer.decode(torch.tensor([[1]]), kv, 0, greedy)
    with pytest.raises(ContextOverflowError, match=r"cached text \(3 tokens\) \+ max_new_tokens \(4\) = 7, "):
        inferencer.decode(torch.tensor([[1]]), kv, 4, greedy)
    with pytest.raises(
        ContextOverflowError, match=r"query_token_ids \(4\) = 7, but the context holds 6: .* at most 3 "
    ):
        inferencer.prefill(torch.tensor([[1, 2, 3, 4]]), kv, greedy)
    with pytest.raises(RequestError, match="the sampler has 2 rows, but 1 are needed: create one with 1 rows"):
        inferencer.prefill(torch.tensor([[1]]), kv, Sampler([SamplingParams(temperature=1.0)] * 2))
    for lengths in ([4], [-1], [1, 1]):
        with pytest.raises(
            RequestError, match=r"truncate takes a length for each row, from 0 to what the row holds, \[3\]"
        ):
            kv.truncate(torch.tensor(lengths))
    assert inferencer.decode(torch.tensor([[1]]), kv, 3, greedy).token_ids.tolist() == [[1, 1, 1]]
