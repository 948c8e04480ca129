"""The guarantee of every family: the bits of a text depend only on the text."""

import torch

import onward


def assert_bits_depend_only_on_the_text(lm: onward.LanguageModel, ids: list[int], new_tokens: int) -> None:
    """Over the program: in chunks, in a batch of different lengths and drafted as whole, alone and plain."""
    assert lm.explain().backend == "native"
    whole = lm.logits(ids)
    for chunk in (1, 7, 64):
        lm.prefill_chunk = chunk
        assert torch.equal(lm.logits(ids), whole)
    prompts = [ids[:n] for n in (33, 1, 64)]
    options = {"max_new_tokens": new_tokens, "temperature": 0}
    together = [one.token_ids for one in lm.generate(prompts, **options)]
    assert together == [lm.generate(one, **options).token_ids for one in prompts]
    assert together == [one.token_ids for one in lm.generate(prompts, draft="lookup", **options)]
