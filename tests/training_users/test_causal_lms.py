"""Unmodified causal language models of transformers: ids, logits and beams equal those of their own `generate`."""

import dataclasses

import pytest
import torch
import transformers

import onward
from onward.errors import RequestError
from onward.models import reused_run
from onward.testing import poison

transformers.utils.logging.disable_progress_bar()

# As in tests/models/transformers_reference.py: float32, logits of order 1, some hundred roundings in another order.
TOLERANCE = 1e-4
PROMPTS = [[5, 77, 100, 8, 4, 9, 1, 33, 21], [50, 1], [9, 9, 4]]
NEW_TOKENS = 20
SMALL = {
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
MIXED_LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]


def build(name, attention="eager"):
    """A model of the family with random weights, such that its logits are of order 1."""
    kinds = {
        "llama": (transformers.LlamaForCausalLM, transformers.LlamaConfig(**SMALL)),
        "qwen3": (transformers.Qwen3ForCausalLM, transformers.Qwen3Config(**SMALL, head_dim=16)),
        "mistral, a window": (
            transformers.MistralForCausalLM,
            transformers.MistralConfig(**SMALL, sliding_window=5),
        ),
        "gemma2, windows and softcaps": (
            transformers.Gemma2ForCausalLM,
            transformers.Gemma2Config(**SMALL, head_dim=16, sliding_window=5, layer_types=MIXED_LAYERS),
        ),
        "gemma3, windows": (
            transformers.Gemma3ForCausalLM,
            transformers.Gemma3TextConfig(**SMALL, head_dim=16, sliding_window=5, layer_types=MIXED_LAYERS),
        ),
        "gpt2, learned positions": (
            transformers.GPT2LMHeadModel,
            transformers.GPT2Config(vocab_size=101, n_embd=32, n_layer=2, n_head=4, n_positions=64),
        ),
        "bloom, alibi": (
            transformers.BloomForCausalLM,
            transformers.BloomConfig(vocab_size=101, hidden_size=32, n_layer=2, n_head=4),
        ),
        "roberta, positions behind padding": (
            transformers.RobertaForCausalLM,
            transformers.RobertaConfig(**SMALL, is_decoder=True, pad_token_id=7),
        ),
    }
    model_class, config = kinds[name]
    config._attn_implementation = attention
    torch.manual_seed(0)
    module = model_class(config)
    for weight in module.parameters():
        if weight.dim() > 1:
            weight.data = torch.randn_like(weight) * weight.shape[-1] ** -0.5
    module.generation_config.eos_token_id = None
    module.generation_config.pad_token_id = 0
    return module


NAMES = [
    "llama",
    "qwen3",
    "mistral, a window",
    "gemma2, windows and softcaps",
    "gemma3, windows",
    "gpt2, learned positions",
    "bloom, alibi",
]


def continued(module, prompt, **options):
    """The ids that `transformers.generate` adds to a prompt."""
    ids = torch.tensor([prompt])
    module.eval()
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False} | options
    return module.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, len(prompt) :].tolist()


def ids_of(completions):
    return [completion.token_ids for completion in completions]


@pytest.fixture(params=NAMES)
def module(request):
    return build(request.param)


def test_ids_equal_transformers_alone_batched_chunked_and_drafted(module):
    lm = onward.LanguageModel(onward.Model.from_module(module), prefill_chunk=4)
    expected = [continued(module, prompt) for prompt in PROMPTS]
    assert [lm.generate(prompt, max_new_tokens=NEW_TOKENS).token_ids for prompt in PROMPTS] == expected
    assert ids_of(lm.generate(PROMPTS, max_new_tokens=NEW_TOKENS)) == expected
    assert ids_of(lm.generate(PROMPTS, max_new_tokens=NEW_TOKENS, draft="lookup")) == expected


@torch.no_grad()
def test_positions_start_where_the_modules_do():
    """In transformers 5 `generate` gives RoBERTa other positions than its forward, so the forward is the judge."""
    module = build("roberta, positions behind padding").eval()
    ids = list(PROMPTS[0])
    for _ in range(NEW_TOKENS):
        ids.append(int(module(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    model = onward.Model.from_module(module)
    assert model.max_seq_len == SMALL["max_position_embeddings"] - 8  # rows 0 … 7 are not used
    lm = onward.LanguageModel(model, prefill_chunk=4)
    assert lm.generate(PROMPTS[0], max_new_tokens=NEW_TOKENS).token_ids == ids[len(PROMPTS[0]) :]


def test_invalid_weights_are_named_at_the_first_decode():
    module = build("llama")
    module.model.norm.weight.data.fill_(float("nan"))
    lm = onward.LanguageModel(onward.Model.from_module(module))
    with pytest.raises(onward.OnwardError, match="NaN"):
        lm.generate(PROMPTS[0], max_new_tokens=2)


@torch.no_grad()
def test_logits_equal_transformers(module):
    module.eval()
    expected = module(torch.tensor(PROMPTS[:1]), use_cache=False).logits[0]
    assert expected.std() > 0.5
    for chunk in (1, 4, 512):
        logits = onward.LanguageModel(onward.Model.from_module(module), prefill_chunk=chunk).logits(PROMPTS[0])
        torch.testing.assert_close(logits, expected, rtol=0, atol=TOLERANCE)


def test_beams_equal_transformers(module):
    lm = onward.LanguageModel(onward.Model.from_module(module))
    beams = [continued(module, prompt, num_beams=3, max_new_tokens=8) for prompt in PROMPTS]
    assert ids_of(lm.generate(PROMPTS, beams=3, max_new_tokens=8)) == beams


def test_torchs_fused_attention_serves_ragged_rows_too():
    module = build("qwen3", attention="sdpa")
    lm = onward.LanguageModel(onward.Model.from_module(module), prefill_chunk=4)
    expected = [continued(module, prompt) for prompt in PROMPTS]
    assert ids_of(lm.generate(PROMPTS, max_new_tokens=NEW_TOKENS)) == expected


def test_ended_rows_do_not_change_the_others(module):
    """Rows of a batch are copied and the batch narrowed when one ends."""
    lm = onward.LanguageModel(onward.Model.from_module(module))
    expected = [continued(module, prompt) for prompt in PROMPTS]
    lengths = [3, 1, NEW_TOKENS]
    completions = lm.generate(PROMPTS, per_prompt=[{"max_new_tokens": length} for length in lengths])
    assert ids_of(completions) == [ids[:length] for ids, length in zip(expected, lengths, strict=True)]


def test_tokens_are_rejected_per_row(module):
    inferencer = onward.inferencer.ModelInferencer(onward.Model.from_module(module))
    prompts = torch.tensor([PROMPTS[0], PROMPTS[0][::-1]])
    cache = inferencer.new_cache(2, 40)
    first = inferencer.prefill(prompts, cache, onward.greedy)
    inferencer.decode(first.token_ids, cache, 6, onward.greedy)
    cache.truncate(torch.tensor([9, 5]))
    query = torch.stack((first.token_ids[0], prompts[1, 5:6]))
    again = inferencer.decode(query, cache, 3, onward.greedy)
    assert again.token_ids[0].tolist() == continued(module, PROMPTS[0], max_new_tokens=4)[1:]
    assert again.token_ids[1].tolist() == continued(module, prompts[1, :6].tolist(), max_new_tokens=3)


def test_entries_past_an_offset_are_never_read(module):
    model = onward.Model.from_module(module)
    dirty = dataclasses.replace(model, new_cache=lambda *size: poison(model.new_cache(*size)))
    expected = [continued(module, prompt) for prompt in PROMPTS]
    assert ids_of(onward.LanguageModel(dirty).generate(PROMPTS, max_new_tokens=NEW_TOKENS)) == expected


def test_a_training_step_affects_the_next_decode():
    module = build("llama").train()
    model = onward.Model.from_module(module)
    prompt = torch.tensor([PROMPTS[0]])
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    before = onward.generate(model, prompt, NEW_TOKENS, temperature=0)
    module(prompt, labels=prompt).loss.backward()
    optimizer.step()
    after = onward.generate(model, prompt, NEW_TOKENS, temperature=0)
    assert module.training
    assert after[0, prompt.shape[1] :].tolist() == continued(module, PROMPTS[0])
    assert not torch.equal(before, after)


def test_other_weights_of_the_same_names_may_be_passed():
    module, averaged = build("llama"), build("llama")
    with torch.no_grad():
        for weight in averaged.parameters():
            weight.mul_(0.9).add_(0.01)
    model = dataclasses.replace(onward.Model.from_module(module), params=dict(averaged.named_parameters()))
    buffers = dict(averaged.named_buffers())
    model = dataclasses.replace(model, params={**model.params, **buffers})
    assert onward.LanguageModel(model).generate(PROMPTS[0], max_new_tokens=8).token_ids == continued(
        averaged, PROMPTS[0], max_new_tokens=8
    )


def test_properties_of_a_model_from_a_module():
    model = onward.Model.from_module(build("gpt2, learned positions"))
    assert (model.vocab_size, model.max_seq_len) == (101, 64)
    assert onward.Model.from_module(build("bloom, alibi")).max_seq_len is None
    assert onward.Model.from_module(build("llama"), max_seq_len=10).max_seq_len == 10
    cache = model.new_cache(2, 7)
    assert [tuple(keys.shape) for keys in cache.keys] == [(2, 4, 7, 8)] * 2
    run = reused_run(model)
    onward.generate(model, torch.tensor(PROMPTS[:1]), 2)
    assert run.explain().backend == "eager"
    assert "does not allow compilation" in run.why_eager


def test_the_whole_context_is_usable():
    """Padding after short rows never uses a position past the learned ones."""
    module = build("gpt2, learned positions")
    lm = onward.LanguageModel(onward.Model.from_module(module))
    prompts = [[1, 2, 3], list(range(40))]
    rest = [64 - len(prompt) for prompt in prompts]
    completions = lm.generate(prompts, per_prompt=[{"max_new_tokens": most} for most in rest], draft="lookup")
    expected = [continued(module, prompt, max_new_tokens=most) for prompt, most in zip(prompts, rest, strict=True)]
    assert ids_of(completions) == expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_cache_has_the_modules_dtype(dtype):
    module = build("llama").to(dtype)
    model = onward.Model.from_module(module)
    assert model.new_cache(1, 4).keys[0].dtype == dtype
    ids = onward.LanguageModel(model).generate(PROMPTS[0], max_new_tokens=6).token_ids
    assert ids == continued(module, PROMPTS[0], max_new_tokens=6)


def test_a_dtype_other_than_the_caches_is_refused():
    module = build("llama").to(torch.bfloat16)
    model = onward.Model.from_module(module)
    module.to(torch.float32)
    with pytest.raises(RequestError, match=r"keys and values are torch.float32, but its cache was made for torch.bfl"):
        onward.generate(model, torch.tensor(PROMPTS[:1]), 2)


def with_silent_layers():
    """Its config has five layers, three of which have a cache."""
    module = build("llama")
    module.config.num_hidden_layers = 5
    return module


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (
            lambda: transformers.T5ForConditionalGeneration(
                transformers.T5Config(vocab_size=101, d_model=32, num_layers=1, num_heads=2, d_ff=44)
            ),
            "T5ForConditionalGeneration is an encoder-decoder",
        ),
        (
            lambda: transformers.MambaForCausalLM(
                transformers.MambaConfig(vocab_size=101, hidden_size=32, num_hidden_layers=1)
            ),
            "MambaForCausalLM cannot be decoded as it is .it takes no past_key_values",
        ),
        (
            lambda: transformers.Lfm2ForCausalLM(
                transformers.Lfm2Config(**SMALL, layer_types=["conv", "full_attention", "conv"])
            ),
            "layers of the type conv keep a recurrent state",
        ),
        (
            lambda: transformers.RecurrentGemmaForCausalLM(
                transformers.RecurrentGemmaConfig(
                    vocab_size=101, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=44
                )
            ),
            "layers of the type linear_attention keep a recurrent state",
        ),
        (with_silent_layers, "3 of 5 layers cached keys and values"),
        (
            lambda: transformers.LlamaModel(transformers.LlamaConfig(**SMALL)),
            "LlamaModel has no head that returns logits .* AutoModelForCausalLM",
        ),
        (
            lambda: transformers.BertLMHeadModel(
                transformers.BertConfig(vocab_size=101, hidden_size=32, num_hidden_layers=1, num_attention_heads=2)
            ),
            "BertLMHeadModel cannot be decoded as it is .its attention is not causal",
        ),
    ],
    ids=["encoder-decoder", "recurrent", "convolutions", "linear attention", "silent layers", "no head", "both ways"],
)
def test_unsupported_modules_raise_a_clear_error(make, says):
    with pytest.raises(RequestError, match=says):
        onward.Model.from_module(make())
