"""Steering: the rows that request it change as they do alone, and the others keep their bits."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config

import onward
from demo_adapters import demo_adapter
from onward import Engine, LanguageModel, Steer
from onward.cache import AdaptedCache
from onward.errors import CheckpointError, RequestError, SessionError
from onward.models import Run
from onward.ops.tap import updating
from onward.program import ForwardBatch
from onward.testing import random_checkpoint, tiny_model

PROMPT = "Once upon a time there was a little dog who"
GREEDY: dict[str, Any] = {"max_new_tokens": 16, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def lm() -> LanguageModel:
    return onward.load("demo")


@pytest.fixture(scope="module")
def vector(lm: LanguageModel) -> torch.Tensor:
    return torch.randn(lm.model.taps["norm"].shape, generator=torch.Generator().manual_seed(1)) * 4


def steers(vector: torch.Tensor) -> list[dict[str, Any] | None]:
    return [
        {"layers.2": vector},
        None,
        {"layers.2": Steer(vector, scale=0.5), "norm": Steer(vector)},
        {"layers.2": Steer(vector, replace=True)},
        {"embedding": Steer(vector, scale=0.01)},
    ]


def test_steered_rows_are_equal_alone_batched_in_engines_and_eagerly(lm, vector):
    alone = [lm.generate(PROMPT, steer=steer, **GREEDY).token_ids for steer in steers(vector)]
    assert len({tuple(ids) for ids in alone}) == len(alone)
    together = lm.generate([PROMPT] * len(alone), per_prompt=[{"steer": steer} for steer in steers(vector)], **GREEDY)
    assert [each.token_ids for each in together] == alone
    for draft in (None, "lookup"):
        with Engine(lm, max_sequences=8) as engine:
            handles = [engine.submit(PROMPT, steer=steer, draft=draft, **GREEDY) for steer in steers(vector)]
            assert [handle.result().token_ids for handle in handles] == alone
    eager = LanguageModel(lm.model, lm.tokenizer, compile="eager", prefill_chunk=3)
    assert [eager.generate(PROMPT, steer=steer, **GREEDY).token_ids for steer in steers(vector)] == alone


def test_samples_and_beams_are_steered_too(lm, vector):
    for options in ({"n": 3, "temperature": 1.0, "seed": 3}, {"beams": 3, "n": 3}):
        texts = lm.generate(PROMPT, steer={"layers.2": vector}, max_new_tokens=8, **options).choices
        with Engine(lm) as engine:
            other = engine.submit(PROMPT, steer={"layers.2": vector}, max_new_tokens=8, **options).result()
        assert [each.token_ids for each in other.choices] == [each.token_ids for each in texts]
        assert texts[0].token_ids != lm.generate(PROMPT, max_new_tokens=8, **options).token_ids


def test_values_at_taps_include_the_steering(lm, vector):
    steer = {"layers.2": Steer(vector, replace=True)}
    taps = lm.generate(
        PROMPT, steer=steer, taps={"layers.2": "all", "layers.1": "all", "layers.3": "all"}, **GREEDY
    ).taps
    dtype = lm.model.taps["norm"].dtype
    assert bool((taps["layers.2"] == vector.to(dtype)).all())
    plain = lm.generate(PROMPT, taps={"layers.1": "all", "layers.3": "all"}, **GREEDY)
    count = len(lm.encode(PROMPT))
    assert torch.equal(taps["layers.1"][:count], plain.taps["layers.1"][:count])
    assert not torch.equal(taps["layers.3"][:count], plain.taps["layers.3"][:count])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_patching_a_run_with_its_own_values_changes_no_bit(dtype):
    """By the update of a forward at every position, and by a request whose text has a single position."""
    model = tiny_model(dtype=dtype)
    ids = [(11 * i) % 258 for i in range(23)]

    def forward(compile: str = "eager") -> Any:
        batch = ForwardBatch(
            torch.tensor([ids], dtype=torch.int32),
            torch.zeros(1, dtype=torch.int32),
            model.new_cache(1, 64),
            taps=tuple(model.taps),
        )
        return Run(model, compile).step(batch)

    plain = forward()
    for name in model.taps:
        with updating({name: lambda x, name=name: plain.taps[name]}):
            patched = forward()
        assert torch.equal(patched.logits, plain.logits)
    lm = LanguageModel(model)
    options: dict[str, Any] = {"max_new_tokens": 4, "temperature": 0, "logprobs": 3, "taps": {"norm": "all"}}
    one = lm.generate(ids, **options)
    for name, states in lm.hidden_states(ids, list(model.taps)).items():
        for rows, at in ((range(23), "prompt"), (range(4, 9), slice(4, 9)), ((7, 2, 22), [7, 2, 22])):
            patched = lm.generate(ids, steer={name: Steer(states[list(rows)], replace=True, at=at)}, **options)
            assert patched.token_ids == one.token_ids
            assert patched.logprobs == one.logprobs
            assert torch.equal(patched.taps["norm"], one.taps["norm"])


def placed_steers(vector: torch.Tensor, count: int) -> list[dict[str, Any] | None]:
    """A different set of positions each. count: the number of ids of the prompt."""
    rows = vector * torch.linspace(0.5, 1.5, count).unsqueeze(1)
    return [
        {"layers.2": Steer(vector, at="prompt")},
        {"layers.2": Steer(vector, at="new"), "norm": Steer(vector, at=slice(count, None))},
        None,
        {"layers.2": Steer(rows, at="prompt"), "layers.4": Steer(rows[:3], replace=True, at=[1, 6, 2])},
        {"layers.2": Steer(vector, at=range(0, count + 9, 2))},
        {"norm": Steer(vector, at=slice(count + 2, count + 4))},
    ]


def test_steered_positions_are_equal_in_batches_chunks_engines_and_eagerly(lm, vector):
    count = len(lm.encode(PROMPT))
    each = placed_steers(vector, count)
    alone = [lm.generate(PROMPT, steer=steer, **GREEDY).token_ids for steer in each]
    assert len({tuple(ids) for ids in alone}) == len(alone)
    assert alone[5][:2] == alone[2][:2]  # the later positions alone are steered
    for chunk, compile in ((3, "auto"), (1, "auto"), (512, "eager")):
        other = LanguageModel(lm.model, lm.tokenizer, compile=compile, prefill_chunk=chunk)
        together = other.generate([PROMPT] * len(each), per_prompt=[{"steer": steer} for steer in each], **GREEDY)
        assert [one.token_ids for one in together] == alone
    with Engine(lm, max_sequences=8) as engine:
        for draft in (None, "lookup"):
            handles = [engine.submit(PROMPT, steer=steer, draft=draft, **GREEDY) for steer in each]
            assert [handle.result().token_ids for handle in handles] == alone


def test_only_the_selected_positions_change(lm, vector):
    count = len(lm.encode(PROMPT))
    plain = lm.generate(PROMPT, taps={"layers.2": "all"}, **GREEDY).taps["layers.2"][:count]
    dtype = plain.dtype
    for at, rows in (("prompt", range(count)), (slice(3, 5), (3, 4)), ([8, 1], (8, 1)), ("new", (count - 1,))):
        steered = lm.generate(
            PROMPT, steer={"layers.2": Steer(vector, at=at)}, taps={"layers.2": "all"}, **GREEDY
        ).taps["layers.2"]
        want = plain.clone()
        want[list(rows)] = plain[list(rows)] + vector.to(dtype)
        assert torch.equal(steered[:count], want)


def test_other_positions_and_vectors_reuse_no_cached_prefix(lm, vector):
    lm = LanguageModel(lm.model, lm.tokenizer)
    text = PROMPT * 20  # several blocks

    def cached(**options: Any) -> int:
        return lm.generate(text, max_new_tokens=1, **options).cached_tokens

    count = len(lm.encode(text))
    options: list[dict[str, Any]] = [
        {},
        {"steer": {"layers.2": vector}},
        {"steer": {"layers.2": Steer(vector, at="prompt")}},
        {"steer": {"layers.2": Steer(vector, at=slice(5, 9))}},
        {"steer": {"layers.2": Steer(vector, at=slice(5, 8))}},
        {"steer": {"layers.2": Steer(vector * 2, at=slice(5, 9))}},
        {"prompt_embeds": {5: vector[None]}},
        {"prompt_embeds": {6: vector[None]}},
        {"prompt_embeds": {6: vector[None] * 2}},
    ]
    assert [cached(**each) for each in options] == [0] * len(options)
    assert all(cached(**each) == count - 1 for each in options)


def test_a_saved_session_continues_only_with_an_equal_steer(lm, vector, tmp_path):
    folder = demo_adapter(tmp_path / "adapter", seed=3)
    source, other = onward.load("demo", adapters={"a": folder}), onward.load("demo")
    for adapter in (None, "a"):
        options: dict[str, Any] = {"steer": {"layers.2": vector}, "adapter": adapter, "temperature": 0}
        session = onward.Session(source)
        text = [*source.encode(PROMPT), *session.generate(PROMPT, max_new_tokens=4, **options).token_ids, 1]
        session.save(tmp_path / "talk")
        if adapter is not None:
            with pytest.raises(SessionError, match="which this model does not have loaded: use load_adapter"):
                onward.Session.load(tmp_path / "talk", other)
            other.load_adapter("a", folder)
        want = source.generate(text, max_new_tokens=4, **options).token_ids
        got = onward.Session.load(tmp_path / "talk", other).generate(text, max_new_tokens=4, **options)
        assert (got.token_ids, got.cached_tokens) == (want, len(text) - 2)
        options["steer"] = {"layers.2": vector * 2}
        unlike = onward.Session.load(tmp_path / "talk", other).generate(text, max_new_tokens=4, **options)
        assert unlike.cached_tokens == 0
        assert unlike.token_ids == source.generate(text, max_new_tokens=4, **options).token_ids


def test_prompt_embeds_equal_the_embeddings_of_ids(lm):
    ids = lm.encode(PROMPT)
    table = lm.hidden_states(ids, "embedding")
    plain = lm.generate(ids, logprobs=2, **GREEDY)
    hidden = [7] * len(ids)
    some = [*ids[:3], 7, 7, *ids[5:9], 7, *ids[10:]]
    cases: list[tuple[list[int], dict[int, torch.Tensor] | None]] = [
        (hidden, {0: table}),
        (some, {3: table[3:5], 9: table[9:10]}),
        (ids, None),
        (hidden, {0: table.flip(0).contiguous()}),
        (some, None),
    ]
    alone = [lm.generate(prompt, prompt_embeds=embeds, logprobs=2, **GREEDY) for prompt, embeds in cases]
    for same in alone[:3]:
        assert same.token_ids == plain.token_ids
        assert same.logprobs == plain.logprobs
    assert len({repr(each.logprobs) for each in alone}) == 3
    prompts, options = [prompt for prompt, _ in cases], [{"prompt_embeds": embeds} for _, embeds in cases]
    for chunk in (512, 2):
        other = LanguageModel(lm.model, lm.tokenizer, prefill_chunk=chunk)
        together = other.generate(prompts, per_prompt=options, logprobs=2, **GREEDY)
        assert [each.logprobs for each in together] == [each.logprobs for each in alone]
    with Engine(lm, max_sequences=8) as engine:
        handles = [
            engine.submit(prompt, logprobs=2, **own, **GREEDY) for prompt, own in zip(prompts, options, strict=True)
        ]
        assert [handle.result().logprobs for handle in handles] == [each.logprobs for each in alone]


def test_prompt_embeds_equal_transformers(tmp_path):
    model = random_checkpoint(tmp_path, "qwen3", seed=3)
    module = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
    embeds = torch.randn(1, 9, module.config.hidden_size, generator=torch.Generator().manual_seed(1)) * 0.05
    with torch.no_grad():
        want = module(inputs_embeds=embeds).logits[0, -1].log_softmax(-1)
    ours = onward.load(model).generate(
        [0] * 9, prompt_embeds={0: embeds[0]}, max_new_tokens=1, logprobs=258, temperature=0
    )
    top = ours.logprobs[0].top
    got = torch.tensor([dict(top)[token] for token in range(len(want))])
    torch.testing.assert_close(got, want, rtol=0, atol=1e-4)  # as of all families


def test_a_steered_forward_is_a_program_and_changes_no_other_row(lm, vector):
    lm.generate(PROMPT, steer={"layers.2": vector}, max_new_tokens=1)
    adapted, ids = lm._model_run.adapted, lm.encode(PROMPT)
    assert adapted.why_eager == ""
    cache = AdaptedCache(adapted.model.new_cache(2, 256), torch.zeros(2, dtype=torch.int32))
    program = onward.compile(
        adapted.model.forward, params=adapted.model.params, cache=cache, tokens=0, backend="native", fallback="raise"
    )
    tokens, offsets = torch.tensor([ids, ids], dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    logits, _ = program(tokens, offsets, cache)
    assert torch.equal(logits[0], lm.logits(ids).to(logits.dtype))


def test_a_steer_with_loaded_adapters_and_after_many_others(lm, tmp_path):
    lm = LanguageModel(lm.model, lm.tokenizer)
    lm.load_adapter("other", demo_adapter(tmp_path / "other", 3))
    adapted = lm.generate(PROMPT, adapter="other", **GREEDY).token_ids
    width = lm.model.taps["norm"].shape[0]
    texts: dict[int, list[int]] = {}
    for number in range(40):  # more than there are slots at once
        steer = {f"layers.{number % 6}": torch.full((width,), 0.05 * number)}
        texts[number] = lm.generate(PROMPT, steer=steer, **GREEDY).token_ids
    both = lm.generate(
        [PROMPT, PROMPT],
        per_prompt=[{"adapter": "other"}, {"steer": {"layers.1": torch.full((width,), 0.35)}}],
        **GREEDY,
    )
    assert [each.token_ids for each in both] == [adapted, texts[7]]
    assert lm.adapters._stacks.capacity.slots == 16


def test_a_steer_together_with_an_adapter(lm, vector, tmp_path):
    """The result is that of the model with the adapter merged into it, of which a steered row has the bits alone."""
    lm = LanguageModel(lm.model, lm.tokenizer)
    lm.load_adapter("other", demo_adapter(tmp_path / "other", 3))
    options: list[dict[str, Any]] = [
        {"adapter": adapter, "steer": steer}
        for adapter in (None, "other")
        for steer in (None, {"layers.2": vector}, {"layers.2": Steer(vector, at="new")})
    ]
    alone = [lm.generate(PROMPT, **each, **GREEDY).token_ids for each in options]
    assert len({tuple(ids) for ids in alone}) == len(alone)
    together = lm.generate([PROMPT] * len(options), per_prompt=options, **GREEDY)
    assert [each.token_ids for each in together] == alone
    with Engine(lm, max_sequences=8) as engine:
        handles = [engine.submit(PROMPT, **each, **GREEDY) for each in options]
        assert [handle.result().token_ids for handle in handles] == alone
    zero = {"layers.2": torch.zeros_like(vector)}
    assert lm.generate(PROMPT, adapter="other", steer=zero, **GREEDY).token_ids == alone[3]
    taps = {"layers.2": "all"}
    adapted = lm.generate(PROMPT, adapter="other", taps=taps, **GREEDY).taps["layers.2"]
    both = lm.generate(PROMPT, adapter="other", taps=taps, steer={"layers.2": vector}, **GREEDY).taps["layers.2"]
    count = len(lm.encode(PROMPT))
    assert torch.equal(both[:count], adapted[:count] + vector.to(adapted.dtype))


def control_vector(path: Path, vectors: dict[int, np.ndarray], kind: str = "controlvector") -> Path:
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(path, kind)
    writer.add_string("controlvector.model_hint", "llama")
    writer.add_uint32("controlvector.layer_count", len(vectors))
    for layer, values in vectors.items():
        writer.add_tensor(f"direction.{layer}", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_control_vector_file_steers_its_layers(lm, vector, tmp_path):
    other = (vector * 0.5).numpy()
    path = control_vector(tmp_path / "happy.gguf", {2: vector.numpy(), 3: other})
    want = lm.generate(PROMPT, steer={"layers.2": vector, "layers.3": torch.tensor(other)}, **GREEDY)
    for source in (path, str(path)):
        assert lm.generate(PROMPT, steer=source, **GREEDY).token_ids == want.token_ids
    scaled = onward.read_control_vector(path, scale=0.5, at="new")
    want = {name: Steer(each, 0.5, at="new") for name, each in (("layers.2", vector), ("layers.3", vector * 0.5))}
    ids = lm.generate(PROMPT, steer=want, **GREEDY).token_ids
    assert lm.generate(PROMPT, steer=scaled, **GREEDY).token_ids == ids
    wrong = control_vector(tmp_path / "model.gguf", {2: other}, kind="llama")
    with pytest.raises(RequestError, match=r"model\.gguf is no control vector: it is a GGUF file of 'llama'"):
        lm.generate(PROMPT, steer=wrong)


def test_bad_input_is_one_clear_error(lm, vector, tmp_path):
    (tmp_path / "text.gguf").write_text("a text, and no tensors: " * 9)
    own = LanguageModel(onward.Model(lambda t, o, c, p: (p[t.long()], c), torch.eye(9), lambda b, n: torch.zeros(b), 9))
    for steer, problem in (
        ({"layers.99": vector}, r"steer names 'layers.99', .* it has embedding, layers.0, .*norm"),
        ({"norm": vector[:5]}, r"steer needs vectors of width \[192\] for 'norm'; got \[5\]"),
        ({"norm": vector[None]}, "steer has 1 vectors for 'norm', but at='all' has an open end"),
        ({"norm": vector[None, None]}, r"needs a vector \[D\] or \[N, D\] for 'norm'; got a tensor \[1, 1, 192\]"),
        ({"norm": Steer(vector[None], at=[1, 2])}, r"1 vectors for 'norm', but at=\[1, 2\] has 2 positions"),
        ({"norm": Steer(vector, at=[1, 99])}, "changes 'norm' at position 99, but there are only 27 positions"),
        ({"norm": Steer(vector, at=[1, 1])}, "distinct positions from 0"),
        ({"norm": Steer(vector, at=slice(-3, None))}, r'needs for \'norm\' at="all", "prompt", "new", a slice'),
        ({"norm": Steer(vector, at="last")}, "got 'last'"),
        ({"norm": "happy"}, "needs a vector .* got str"),
        ({"norm": vector * float("nan")}, "numbers that are not finite"),
        ({"norm": Steer(vector, scale=float("inf"))}, "needs a finite scale"),
        ({}, "must map names of taps to vectors"),
        ("nothing.gguf", "there is no file 'nothing.gguf': a control vector is a GGUF file"),
        (tmp_path / "text.gguf", "is not a GGUF file"),
    ):
        with pytest.raises((RequestError, CheckpointError), match=problem):
            lm.generate(PROMPT, steer=steer, max_new_tokens=16)
    for embeds, problem in (
        ({}, "prompt_embeds must map first positions to tensors"),
        ({-1: vector[None]}, "whole numbers from 0 on; got -1"),
        ({0: vector}, r"prompt_embeds needs a vector \[N, D\] for position 0; got a tensor \[192\]"),
        ({0: vector[None, :5]}, r"prompt_embeds needs vectors of width \[192\] for 'embedding'; got \[1, 5\]"),
        ({0: vector[None] / 0}, "position 0 with numbers that are not finite"),
        ({0: vector.repeat(3, 1), 2: vector[None]}, "two vectors for position 2"),
        ({99: vector[None]}, "changes 'embedding' at position 99, but there are only 11 positions"),
    ):
        with pytest.raises(RequestError, match=problem):
            lm.generate(PROMPT, prompt_embeds=embeds)
    with pytest.raises(RequestError, match="prompt_embeds and a steer of 'embedding' exclude each other"):
        lm.generate(PROMPT, prompt_embeds={0: vector[None]}, steer={"embedding": vector})
    with pytest.raises(RequestError, match="names 'norm', which the model's forward does not have; it has none"):
        own.generate([1], steer={"norm": vector}, max_new_tokens=1)
    with pytest.raises(RequestError, match="names 'embedding', which the model's forward does not have; it has none"):
        own.generate([1], prompt_embeds={0: vector[None]}, max_new_tokens=1)
    completion = lm.generate(PROMPT, steer={"norm": vector}, max_new_tokens=1)
    with pytest.raises(RequestError, match=r"a receipt cannot have the vectors .*: leave out steer"):
        onward.Receipt.of(completion, "")


# ── models of other kinds ────────────────────────────────────────────────────────────────────────────────────


class Averages(torch.nn.Module):
    """A model whose only layer averages the embeddings so far. Its cache is a dict of its own."""

    vocab_size = 40

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(2)
        self.table = torch.nn.Parameter(torch.randn(self.vocab_size, 16, generator=generator))
        self.mixed = torch.nn.Parameter(torch.randn(16, 16, generator=generator))
        self.head = torch.nn.Parameter(torch.randn(self.vocab_size, 16, generator=generator))
        self.in_place = in_place

    def new_cache(self, batch: int, max_len: int) -> dict[str, torch.Tensor]:
        return {"rows": torch.zeros(batch, max_len, 16)}

    def forward(self, tokens: torch.Tensor, offsets: torch.Tensor, cache: dict[str, torch.Tensor]) -> Any:
        x = onward.tap(self.table[tokens.long()], "embedding")
        positions = offsets.long()[:, None] + torch.arange(tokens.shape[1])
        rows = cache["rows"] if self.in_place else cache["rows"].clone()
        rows[torch.arange(len(tokens))[:, None], positions] = x
        weights = (torch.arange(rows.shape[1]) <= positions[..., None]).float()
        y = onward.tap((weights / weights.sum(2, keepdim=True)) @ rows @ self.mixed, "layers.0")
        return (x + y).tanh() @ self.head.T, {"rows": rows}


def compiled_forward(tokens: torch.Tensor, offsets: torch.Tensor, cache: onward.KVCache, params: Any) -> Any:
    x = onward.tap(params["table"][tokens.long()], "embedding")
    q = (x @ params["mixed"]).unsqueeze(1)
    y = onward.tap(cache.attend(0, q, q, x.unsqueeze(1), offsets).squeeze(1), "layers.0")
    return (x + y).tanh() @ params["head"].T, cache


def other_model(kind: str, folder: Path) -> LanguageModel:
    """A model that is of no built-in family."""
    if kind.startswith("transformers"):
        torch.manual_seed(4)
        sizes = {
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 128,
            "vocab_size": 40,
            "initializer_range": 0.3,
        }
        module = AutoModelForCausalLM.from_config(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)).eval()
        if kind == "transformers module":
            return LanguageModel(onward.Model.from_module(module))
        module.save_pretrained(folder)
        return onward.load(folder, via="transformers")
    module = Averages(in_place=kind != "new tensors")
    if kind != "compiled":
        return LanguageModel(onward.Model.from_module(module))
    new_cache = partial(
        onward.KVCache.new, num_layers=1, num_kv_heads=1, head_dim=16, dtype=torch.float32, device="cpu"
    )
    params = {name: x.detach() for name, x in module.named_parameters()}
    return LanguageModel(onward.Model(compiled_forward, params, lambda b, n: new_cache(batch=b, max_len=n), 40))


KINDS = ["module", "new tensors", "compiled", "transformers", "transformers module"]


@pytest.mark.parametrize("kind", KINDS)
def test_models_of_no_built_in_family_are_steered_by_row(kind, tmp_path):
    lm = other_model(kind, tmp_path)
    prompts = [[1 + 7 * i % 39 for i in range(count)] for count in (9, 3, 14, 6)]
    vector = torch.randn(lm.model.taps["layers.0"].shape, generator=torch.Generator().manual_seed(3)) * 2
    each: list[dict[str, Any] | None] = [
        {"layers.0": vector},
        None,
        {"layers.0": Steer(vector, replace=True, at="new"), "embedding": Steer(vector, at=[1, 2])},
        {"embedding": Steer(vector, at="prompt")},
    ]
    options = {**GREEDY, "logprobs": 0}
    alone = [lm.generate(ids, steer=steer, **options) for ids, steer in zip(prompts, each, strict=True)]
    texts = [completion.token_ids for completion in alone]
    for at in (0, 2, 3):
        assert texts[at] != lm.generate(prompts[at], **options).token_ids
    assert alone[1].logprobs == lm.generate(prompts[1], **options).logprobs
    chunked = LanguageModel(lm.model, prefill_chunk=2)
    for other in (lm, chunked):
        together = other.generate(prompts, per_prompt=[{"steer": steer} for steer in each], **options)
        assert [completion.token_ids for completion in together] == texts
    with Engine(lm, max_sequences=3) as engine:
        handles = [engine.submit(ids, steer=steer, **options) for ids, steer in zip(prompts, each, strict=True)]
        assert [handle.result().token_ids for handle in handles] == texts
    session = onward.Session(lm)
    assert session.generate(prompts[0], steer=each[0], **options).token_ids == texts[0]
    # The definition: the same update in a plain forward.
    eager = LanguageModel(lm.model, compile="eager")
    with updating({"layers.0": lambda x: x + vector.to(x.dtype)}):
        assert eager.generate(prompts[0], **options).token_ids == texts[0]


@pytest.mark.parametrize("kind", KINDS)
def test_patching_another_model_with_its_own_values_changes_no_bit(kind, tmp_path):
    lm = other_model(kind, tmp_path)
    ids = [1 + 7 * i % 39 for i in range(9)]
    options: dict[str, Any] = {"max_new_tokens": 3, "temperature": 0, "logprobs": 3}
    plain = lm.generate(ids, **options)
    for name, states in lm.hidden_states(ids, ["embedding", "layers.0"]).items():
        patched = lm.generate(ids, steer={name: Steer(states, replace=True, at="prompt")}, **options)
        assert patched.logprobs == plain.logprobs
    embeds = {2: lm.hidden_states(ids, "embedding")[2:6]}
    placeholder = [*ids[:2], 0, 0, 0, 0, *ids[6:]]
    assert lm.generate(placeholder, prompt_embeds=embeds, **options).logprobs == plain.logprobs


def test_taps_that_cannot_be_steered_are_errors():
    def model(tapped: Any, max_seq_len: int | None = None) -> LanguageModel:
        def forward(tokens: Any, offsets: Any, cache: Any, params: Any) -> Any:
            return tapped(params[tokens.long()]) @ params.T, cache

        new_cache = lambda batch, max_len: torch.zeros(batch, 1)  # noqa: E731
        return LanguageModel(onward.Model(forward, torch.randn(40, 8), new_cache, 40, max_seq_len))

    heads = model(lambda x: onward.tap(x.view(*x.shape[:2], 2, 4), "heads").flatten(2))
    with pytest.raises(
        RequestError, match=r"cannot change 'heads', whose values at a position have the shape \[2, 4\]: only"
    ):
        heads.generate([1, 2], steer={"heads": torch.ones(2, 4)}, max_new_tokens=1)
    first = model(lambda x: x + onward.tap(x[:, :1], "first"))
    with pytest.raises(RequestError, match=r"must be \[B, T, ...\], here \[1, 2, '...'\]; got \[1, 1, 8\]"):
        first.generate([1, 2], steer={"first": torch.ones(8)}, max_new_tokens=1)
    long = model(lambda x: onward.tap(x, "x"))
    with pytest.raises(RequestError, match="steer works up to 1,048,576 positions; got 2,000,001: ask for fewer"):
        long.generate([1], steer={"x": torch.ones(8)}, max_new_tokens=2_000_000)


def test_a_forward_compiled_by_torch_is_steered_too(vector):
    eager, compiled = (onward.load("demo", compile=backend) for backend in ("eager", "inductor"))
    want = eager.generate(PROMPT, steer={"layers.2": vector}, **GREEDY).token_ids
    assert compiled.generate(PROMPT, steer={"layers.2": vector}, **GREEDY).token_ids == want
