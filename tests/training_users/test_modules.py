"""A module as a Model: live weights, eval mode within a forward, and its previous modes afterwards."""

import dataclasses
import importlib.util
from pathlib import Path

import pytest
import torch
from torch import nn

import onward
from onward.errors import ContextOverflowError, RequestError
from onward.testing import scripted_model

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_and_sample.py"
PROMPT = torch.tensor([[5, 77, 130], [200, 1, 9]])


def load_example():
    spec = importlib.util.spec_from_file_location("train_and_sample", EXAMPLE)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    return example


example = load_example()


@pytest.fixture
def module():
    torch.manual_seed(3)
    return example.ByteModel(width=32, layers=2, heads=2, max_seq_len=48)


def uncached(module, prompt, steps):
    """Greedy decoding by the training forward, over the whole text again for every token."""
    ids = prompt
    modes = [part.training for part in module.modules()]
    module.eval()
    for _ in range(steps):
        logits, _ = module(ids, torch.zeros(len(ids), dtype=torch.int32))
        ids = torch.cat((ids, logits[:, -1:].argmax(-1)), 1)
    for part, mode in zip(module.modules(), modes, strict=True):
        part.training = mode
    return ids


def test_a_decoded_module_equals_its_training_forward(module):
    model = onward.Model.from_module(module)
    assert torch.equal(onward.generate(model, PROMPT, 12, temperature=0), uncached(module, PROMPT, 12))
    assert model.max_seq_len == 48
    assert model.vocab_size == 256
    assert model.num_parameters == sum(p.numel() for p in module.parameters())


def test_entries_past_an_offset_are_never_read(module):
    """Large numbers, not NaN: PyTorch's attention multiplies what it has masked by 0."""
    model = onward.Model.from_module(module)
    cache = module.new_cache(2, 11)
    for tensor in (*cache.keys, *cache.values):
        tensor.fill_(1e3)
    dirty = dataclasses.replace(model, new_cache=lambda batch, length: cache)
    options = {"max_new_tokens": 8, "temperature": 0}
    assert torch.equal(onward.generate(dirty, PROMPT, **options), onward.generate(model, PROMPT, **options))


def test_batched_and_chunked_equal_alone(module):
    lm = onward.LanguageModel(onward.Model.from_module(module), prefill_chunk=2)
    prompts = [[5, 77, 130, 8, 4], [200, 1], [9]]
    batched = [c.token_ids for c in lm.generate(prompts, max_new_tokens=8)]
    alone = [uncached(module, torch.tensor([p]), 8)[0, len(p) :].tolist() for p in prompts]
    assert batched == alone


def test_a_training_step_affects_the_next_decode(module):
    model = onward.Model.from_module(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    for _ in range(3):
        logits, _ = module(PROMPT, torch.zeros(2, dtype=torch.int32))
        logits[..., :100].sum().backward()
        optimizer.step()
        assert torch.equal(onward.generate(model, PROMPT, 6, temperature=0), uncached(module, PROMPT, 6))
    assert all(model.params[name] is parameter for name, parameter in module.named_parameters())


def test_replaced_tensors_are_seen_too(module):
    """load_state_dict(assign=True) and an assigned buffer put other tensors in place of those there were."""
    model = onward.Model.from_module(module)
    torch.manual_seed(4)
    other = example.ByteModel(width=32, layers=2, heads=2, max_seq_len=48)
    module.load_state_dict(other.state_dict(), assign=True)
    assert torch.equal(onward.generate(model, PROMPT, 6, temperature=0), uncached(other, PROMPT, 6))
    assert model.params["head.weight"] is module.head.weight


def test_other_weights_of_the_same_names_may_be_passed(module):
    torch.manual_seed(4)
    other = example.ByteModel(width=32, layers=2, heads=2, max_seq_len=48)
    model = onward.Model.from_module(module)
    averaged = dataclasses.replace(model, params=dict(other.named_parameters()))
    assert torch.equal(onward.generate(averaged, PROMPT, 6, temperature=0), uncached(other, PROMPT, 6))
    assert torch.equal(onward.generate(model, PROMPT, 6, temperature=0), uncached(module, PROMPT, 6))
    lacking = dataclasses.replace(model, params={"head.weight": module.head.weight})
    with pytest.raises(RequestError, match="names of the module's own parameters and buffers"):
        onward.generate(lacking, PROMPT, 1)


class Tied(nn.Module):
    """No attention: the next id depends on the last one and on a buffer. The head is the embedding."""

    vocab_size = 11

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 4)
        self.head = nn.Linear(4, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("shift", torch.zeros(11))
        self.dropout = nn.Dropout(0.5)
        self.seen_modes = []

    def forward(self, tokens, offsets, cache):
        self.seen_modes.append([part.training for part in self.modules()])
        assert not torch.is_grad_enabled()
        return self.head(self.dropout(self.embedding(tokens))) + self.shift, cache

    def new_cache(self, batch, max_len):
        return ()


def test_tied_weights_count_once_and_buffers_are_live():
    module = Tied()
    model = onward.Model.from_module(module)
    assert model.num_parameters == 44
    assert model.nbytes == (44 + 11) * 4
    module.shift = torch.eye(11)[7] * 1e6
    assert onward.generate(model, torch.tensor([[1]]), 3, temperature=0).tolist() == [[1, 7, 7, 7]]
    with torch.no_grad():
        module.embedding.weight.zero_()
        module.shift = -torch.arange(11.0)
    assert onward.generate(model, torch.tensor([[1]]), 2, temperature=0).tolist() == [[1, 0, 0]]


@pytest.mark.parametrize("raises", [False, True], ids=["returns", "raises"])
@pytest.mark.parametrize("mixed", [False, True], ids=["training", "a part frozen in eval"])
def test_every_submodule_keeps_its_mode(raises, mixed):
    module = Tied()
    module.dropout.train(not mixed)
    before = [part.training for part in module.modules()]

    def call(module, *arguments):
        returned = module(*arguments)
        module.head.train()  # changes that a module makes to its modes there are undone, too
        if raises:
            raise RuntimeError("out of luck")
        return returned

    model = onward.Model.from_module(module, call=call)
    if raises:
        with pytest.raises(RuntimeError, match="out of luck"):
            onward.generate(model, torch.tensor([[1]]), 2)
    else:
        onward.generate(model, torch.tensor([[1]]), 2)
    assert not any(any(modes) for modes in module.seen_modes)
    assert [part.training for part in module.modules()] == before


def test_logits_have_no_gradient_in_any_mode():
    model = onward.Model.from_module(Tied())
    tokens, offsets = torch.tensor([[1, 2]], dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    with torch.enable_grad():
        logits, _ = model(tokens, offsets, ())
        assert torch.is_grad_enabled()
    assert not logits.requires_grad
    prompt = torch.tensor([[1]])
    alone = onward.generate(model, prompt, 4, seed=1)
    with torch.no_grad():
        assert torch.equal(onward.generate(model, prompt, 4, seed=1), alone)
    with torch.inference_mode():
        assert torch.equal(onward.generate(model, prompt, 4, seed=1), alone)


def test_a_whole_module_decodes_in_inference_mode(module):
    model = onward.Model.from_module(module)
    expected = uncached(module, PROMPT, 5)
    with torch.inference_mode():
        assert torch.equal(onward.generate(model, PROMPT, 5, temperature=0), expected)
    assert torch.equal(onward.generate(model, PROMPT, 5, temperature=0), expected)


def test_another_signature_by_call(module):
    class Other(nn.Module):
        """Keywords, and logits alone; the cache is its own business."""

        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, *, input_ids, start, kv):
            return self.inner(input_ids, start, kv)[0]

    other = Other(module)
    model = onward.Model.from_module(
        other,
        new_cache=module.new_cache,
        vocab_size=256,
        max_seq_len=20,
        call=lambda module, tokens, offsets, cache: (module(input_ids=tokens, start=offsets, kv=cache), cache),
    )
    assert torch.equal(onward.generate(model, PROMPT, 5, temperature=0), uncached(module, PROMPT, 5))
    with pytest.raises(ContextOverflowError, match=r"prompt \(3 tokens\) \+ max_new_tokens \(18\) = 21"):
        onward.generate(model, PROMPT, 18)


def test_logits_only_at_requested_positions():
    module = Tied()
    asked = []

    def call(module, tokens, offsets, cache, logits_at=None):
        asked.append(None if logits_at is None else logits_at.tolist())
        logits, cache = module(tokens, offsets, cache)
        return (logits if logits_at is None else logits.gather(1, logits_at[..., None].expand(-1, -1, 11))), cache

    model = onward.Model.from_module(module, call=call)
    plain = onward.Model.from_module(module)
    prompt = torch.tensor([[1, 2, 3]])
    assert torch.equal(onward.generate(model, prompt, 3, seed=1), onward.generate(plain, prompt, 3, seed=1))
    assert asked == [[[2]], None, None]


def test_a_compiled_module_decodes(module):
    compiled = torch.compile(module, backend="eager")
    model = onward.Model.from_module(compiled)
    assert torch.equal(onward.generate(model, PROMPT, 3, temperature=0), uncached(module, PROMPT, 3))


@pytest.mark.parametrize(
    ("returned", "says"),
    [
        (lambda logits, cache: logits, "it returned a Tensor: adapt it with call="),
        (lambda logits, cache: (logits, cache, None), r"it returned \(Tensor, tuple, NoneType\)"),
        (lambda logits, cache: {"logits": logits}, "it returned a dict"),
        (lambda logits, cache: (None, cache), r"it returned \(NoneType, tuple\)"),
        (lambda logits, cache: (logits[:, -1], cache), r"\[1, 1, 11\]; got torch.float32 \[1, 11\]"),
        (lambda logits, cache: (logits[..., :5], cache), r"\[1, 1, 11\]; got torch.float32 \[1, 1, 5\]"),
        (lambda logits, cache: (logits.argmax(-1), cache), r"\[1, 1, 11\]; got torch.int64 \[1, 1\]"),
    ],
)
def test_invalid_logits_and_caches(returned, says):
    module = Tied()
    model = onward.Model.from_module(module, call=lambda module, *arguments: returned(*module(*arguments)))
    with pytest.raises(RequestError, match=says):
        onward.generate(model, torch.tensor([[1]]), 1)
    assert all(part.training for part in module.modules())


def test_invalid_models(module):
    with pytest.raises(RequestError, match="Module; got function"):
        onward.Model.from_module(uncached)
    with pytest.raises(RequestError, match="needs new_cache, and this Linear has no such attribute"):
        onward.Model.from_module(nn.Linear(2, 2))
    with pytest.raises(RequestError, match="needs vocab_size"):
        onward.Model.from_module(nn.Linear(2, 2), new_cache=module.new_cache)
    with pytest.raises(RequestError, match="vocab_size must be a whole number of 1 or more; got 'many'"):
        onward.Model.from_module(module, vocab_size="many")
    with pytest.raises(RequestError, match="max_seq_len must be a whole number of 1 or more; got 0"):
        onward.Model.from_module(module, max_seq_len=0)
    with pytest.raises(RequestError, match="new_cache must be a function"):
        onward.Model.from_module(module, new_cache=3)


def test_a_peft_model_is_refused_with_advice():
    peft = pytest.importorskip("peft")
    wrapped = peft.get_peft_model(nn.Sequential(nn.Linear(2, 2)), peft.LoraConfig(target_modules=["0"]))
    with pytest.raises(RequestError, match=r"this Peft\w*Model has no such attribute: pass module.get_base_model\(\)"):
        onward.Model.from_module(wrapped)


def test_a_module_moved_to_another_device_or_dtype():
    module = Tied()
    model = onward.Model.from_module(module)
    module.to("meta")
    with pytest.raises(RequestError, match="the module is on meta, but its Model was made for cpu"):
        onward.generate(model, torch.tensor([[1]]), 1)


# ── generate ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_rows_that_end_early_are_padded():
    model = scripted_model(lambda history: {1: 4, 2: 3, 4: 5, 5: 6, 6: 7}.get(history[-1], 9))
    prompts = torch.tensor([[8, 1], [8, 2]], dtype=torch.int32)
    out = onward.generate(model, prompts, 4, temperature=0, eos=(3, 6))
    assert out.dtype == torch.int64
    assert out.tolist() == [[8, 1, 4, 5, 6, 6], [8, 2, 3, 3, 3, 3]]
    padded = onward.generate(model, prompts, 4, temperature=0, eos=3, pad=0)
    assert padded.tolist() == [[8, 1, 4, 5, 6, 7], [8, 2, 3, 0, 0, 0]]
    assert onward.generate(model, prompts, 0).tolist() == prompts.tolist()
    assert onward.generate(model, prompts, 0).shape == (2, 2)


def test_no_forward_is_wasted():
    model = scripted_model([4, 3, 2])
    onward.generate(model, torch.tensor([[8, 1]]), 3, temperature=0)
    assert [call.tokens for call in model.calls] == [[[8, 1]], [[3]], [[2]]]
    onward.generate(model, torch.tensor([[8, 1]]), 0)
    assert len(model.calls) == 3


def test_a_row_depends_only_on_its_seed(module):
    model = onward.Model.from_module(module)
    options = {"temperature": 1.0, "top_k": 50, "top_p": 0.95}
    both = onward.generate(model, PROMPT, 10, seed=[7, 8], **options)
    assert torch.equal(onward.generate(model, PROMPT[:1], 10, seed=7, **options), both[:1])
    assert torch.equal(onward.generate(model, PROMPT[1:], 10, seed=8, **options), both[1:])
    lm = onward.LanguageModel(model)
    assert lm.generate(PROMPT[1].tolist(), max_new_tokens=10, seed=8, **options).token_ids == both[1, 3:].tolist()
    twice = onward.generate(model, PROMPT[:1].expand(2, -1), 10, seed=7, **options)
    assert torch.equal(twice[0], twice[1])
    torch.manual_seed(0)
    fresh = onward.generate(model, PROMPT[:1].expand(2, -1), 10, **options)
    assert not torch.equal(fresh[0], fresh[1])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model": example.ByteModel()}, "takes an onward.Model; got ByteModel: see onward.Model.from_module"),
        ({"prompt_tokens": [[1, 2]]}, r"must be a tensor of ids \[B, P\]; got list"),
        ({"prompt_tokens": torch.tensor([1, 2])}, r"must be whole numbers \[B, P\]"),
        ({"prompt_tokens": torch.ones(1, 2)}, r"got torch.float32 \[1, 2\]"),
        ({"prompt_tokens": torch.ones(0, 2, dtype=torch.int64)}, r"got torch.int64 \[0, 2\]"),
        ({"prompt_tokens": torch.ones(2, 0, dtype=torch.int64)}, r"got torch.int64 \[2, 0\]"),
        ({"prompt_tokens": torch.tensor([[1, 32]])}, "names id 32, but the vocabulary ends at 31"),
        ({"prompt_tokens": torch.tensor([[-1, 3]])}, "prompt_tokens must be a whole number of 0 or more; got -1"),
        ({"max_new_tokens": -1}, "max_new_tokens must be a whole number of 0 or more; got -1"),
        ({"temperature": -1.0}, "temperature must be"),
        ({"top_p": -0.5}, "top_p must be"),
        ({"eos": 32}, "eos names id 32"),
        ({"pad": 32}, "pad names id 32"),
        ({"pad": -100}, "pad must be a whole number of 0 or more; got -100"),
        ({"seed": [1]}, "seed must be one number or one for each of the 2 rows; got 1"),
        ({"seed": -1}, "seed must be a whole number"),
    ],
)
def test_invalid_arguments_of_generate(change, says):
    arguments = {"model": scripted_model([1]), "prompt_tokens": torch.tensor([[1], [2]]), "max_new_tokens": 1} | change
    with pytest.raises(RequestError, match=says):
        onward.generate(**arguments)


# ── the example ───────────────────────────────────────────────────────────────────────────────────────────────


def test_the_example_learns_and_samples(capsys):
    text = b"the quick brown fox jumps over the lazy dog. " * 20
    first = example.train(text, 60, max_steps=1)
    loss = example.train(text, 60, max_steps=6, sample_every=0)
    assert loss < first
    shown = capsys.readouterr().out
    assert shown.count("── step") == 7
    assert shown.count("the quick brown ") >= 7
