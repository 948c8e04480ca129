"""Drafts of EAGLE-3 and MTP heads: the text of plain decoding, with any state of the cache."""

import pytest
import torch
from head_checkpoints import LAYERS, MTP, eagle3_checkpoint, mtp_checkpoint

import onward
from onward import Session, Speculator
from onward.testing import random_checkpoint

TARGETS = {"eagle3-llama": "llama", "eagle3-gemma3": "gemma3", **{f"mtp-{family}": family for family in MTP}}
IDS = torch.randint(3, 250, (90,), generator=torch.Generator().manual_seed(5)).tolist()
PROMPTS = [IDS[:70], IDS[:3], IDS[:1], IDS[:70] + IDS[5:9]]
GREEDY = {"temperature": 0.0}
SAMPLED = {"temperature": 0.9, "top_p": 0.9, "repetition_penalty": 1.1, "seed": 5, "logprobs": 1}


def heads(folder, name):
    """A model with a head, and the model without."""
    family = TARGETS[name]
    if name.startswith("mtp"):
        target = mtp_checkpoint(folder / "target", family, num_hidden_layers=3)
        draft = "mtp"
    else:
        target = random_checkpoint(folder / "target", family, num_hidden_layers=LAYERS)
        draft = eagle3_checkpoint(folder / "head", target)
    lm = onward.load(target, draft=draft)
    lm.draft = Speculator(lm.draft.drafter, length=3)
    return lm, onward.load(target)


@pytest.fixture(scope="module", params=TARGETS)
def pair(request, tmp_path_factory):
    return heads(tmp_path_factory.mktemp(request.param), request.param)


def same(drafted, plain):
    assert (drafted.token_ids, drafted.logprobs) == (plain.token_ids, plain.logprobs)
    assert drafted.speculation.rounds > 0
    return drafted


@pytest.mark.parametrize("options", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_texts_and_logprobs_equal_plain_decoding(pair, options):
    lm, plain = pair
    options = {"max_new_tokens": 25, "ignore_eos": True, **options}
    for ids in PROMPTS:
        same(lm.generate(ids, **options), plain.generate(ids, **options))
    assert lm.generate(IDS, **options).cached_tokens > 0  # the features of the prefix were in the cache
    for one, other in zip(lm.generate(PROMPTS, n=2, **options), plain.generate(PROMPTS, n=2, **options), strict=True):
        for text, again in zip(one.choices, other.choices, strict=True):
            same(text, again)


@pytest.mark.strength(1)
@pytest.mark.parametrize("options", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_an_engine_drafts_for_all_requests_together(pair, options):
    lm, plain = pair
    options = {"max_new_tokens": 25, "ignore_eos": True, **options}
    texts = [plain.generate(ids, **options) for ids in PROMPTS]
    with onward.Engine(lm, max_sequences=3) as engine:
        requests = [engine.submit(ids, **options) for ids in (*PROMPTS, *PROMPTS)]
        for request, text in zip(requests, (*texts, *texts), strict=True):
            same(request.result(), text)


def test_sessions_keep_their_features(pair):
    lm, plain = pair
    ours, theirs = Session(lm), Session(plain)
    for turn in (IDS[:40], IDS[40:43], IDS[43:80]):
        options = {"max_new_tokens": 12, "ignore_eos": True, **SAMPLED}
        same(ours.generate(turn, **options), theirs.generate(turn, **options))
        ours.truncate(len(ours.tokens) - 3)
        theirs.truncate(len(theirs.tokens) - 3)
