"""Element formats of a cache: 8 bits, and a format without kernels that only this file defines."""

from dataclasses import replace
from functools import partial

import pytest
import torch

import onward
from onward import KVCache, LanguageModel, Session, native, ops
from onward.cache import CachePlan, KVPool, LayerShape
from onward.errors import RequestError
from onward.models import architecture_of, build_model
from onward.ops.kv_format import FORMATS, KVFormat
from onward.testing import ByteTokenizer, tiny_model


class Coarse(KVFormat):
    """int8 [D], then the bytes of a float32 scale, as bytes."""

    name, dtype = "coarse", torch.uint8

    def takes(self, dtype: torch.dtype) -> bool:
        return dtype.is_floating_point

    def width(self, dim: int) -> int:
        return dim + 4

    def dim(self, width: int) -> int:
        return width - 4

    def store(self, new: torch.Tensor) -> torch.Tensor:
        scale = new.float().abs().amax(-1, keepdim=True).clamp(min=1e-30) / 127
        return torch.cat([(new.float() / scale).round().to(torch.int8).view(torch.uint8), scale.view(torch.uint8)], -1)

    def load(self, rows: torch.Tensor) -> torch.Tensor:
        scale = rows[..., -4:].contiguous().view(torch.float32)
        return rows[..., :-4].contiguous().view(torch.int8).float() * scale


COARSE, INT8 = Coarse(), FORMATS[torch.int8]
FORMATS_OF_8_BITS = [COARSE, INT8]
PROMPTS = [[(7 * i * i + n) % 251 for i in range(n)] for n in (150, 3, 70, 64)]
# Layers of each kind: full attention, sliding windows, values that are features of the keys, recurrent states.
MODELS = {
    "qwen3": {},
    "gemma3": {"num_hidden_layers": 3, "sliding_window": 20, "sliding_window_pattern": 3},
    "deepseekv3": {},
    "qwen3next": {},
}


@pytest.fixture(autouse=True)
def _format(monkeypatch):
    monkeypatch.setitem(FORMATS, COARSE.dtype, COARSE)


@pytest.fixture
def definitions():
    before = ops.choice()
    ops.choose("definition")
    yield
    ops.choose("definition" if before.form == "definition" else before.isa)


def stored_in(format, family="qwen3", **options):
    stock = tiny_model(family, **MODELS[family])
    model = build_model(architecture_of(stock), stock.params, cache_format=format)
    return LanguageModel(model, ByteTokenizer(), **options)


class Rounded:
    """A cache of floats that stores what a format loads again."""

    def __init__(self, cache, format):
        self._cache, self._format = cache, format

    def attend(self, layer, q, k, v, offsets, **options):
        k, v = (None if new is None else self._format.load(self._format.store(new)) for new in (k, v))
        return self._cache.attend(layer, q, k, v, offsets, **options)

    def state(self, layer):
        return self._cache.state(layer)


@pytest.mark.parametrize("format", FORMATS_OF_8_BITS, ids=lambda format: format.name)
@pytest.mark.parametrize("family", MODELS)
@pytest.mark.usefixtures("definitions")
def test_logits_equal_attention_over_the_loaded_rows(family, format):
    model, floats = stored_in(format, family).model, tiny_model(family, **MODELS[family])
    tokens, at = torch.tensor([PROMPTS[2]], dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    with torch.no_grad():
        expected, _ = floats(tokens, at, Rounded(floats.new_cache(1, 80), format))
        got, cache = model(tokens, at, model.new_cache(1, 80))
        plain, _ = floats(tokens, at, floats.new_cache(1, 80))
    assert {leaf.dtype for leaf in cache.keys} == {format.dtype}
    assert torch.equal(got, expected)
    assert not torch.equal(got, plain)


@pytest.mark.parametrize("format", FORMATS_OF_8_BITS, ids=lambda format: format.name)
@pytest.mark.parametrize("family", MODELS)
def test_dense_paged_compiled_and_batched_tokens_are_equal(family, format):
    lm = stored_in(format, family)
    alone = [lm.generate(prompt, max_new_tokens=24, temperature=0).token_ids for prompt in PROMPTS]
    assert [each.token_ids for each in lm.generate(PROMPTS, max_new_tokens=24, temperature=0)] == alone
    dense = LanguageModel(replace(lm.model, new_blocks=None), ByteTokenizer())
    assert [dense.generate(prompt, max_new_tokens=24, temperature=0).token_ids for prompt in PROMPTS] == alone
    eager = LanguageModel(lm.model, ByteTokenizer(), compile="eager")
    assert eager.generate(PROMPTS[0], max_new_tokens=24, temperature=0).token_ids == alone[0]


@pytest.mark.parametrize("format", FORMATS_OF_8_BITS, ids=lambda format: format.name)
@pytest.mark.parametrize("family", MODELS)
def test_forks_prefixes_drafts_and_sessions_copy_rows_unchanged(family, format, tmp_path):
    lm, fresh = stored_in(format, family), partial(stored_in, format, family, prefix_memory=0)
    expected = fresh().generate(PROMPTS[0], max_new_tokens=40, temperature=0)
    sampled = {"seed": 5, "max_new_tokens": 9, "temperature": 1.0}
    several = [each.token_ids for each in lm.generate(PROMPTS[0], n=3, **sampled).choices]
    again = [each.token_ids for each in fresh(compile="eager").generate(PROMPTS[0], n=3, **sampled).choices]
    assert several == again
    assert len(set(map(tuple, several))) == 3
    assert lm.generate(PROMPTS[0], max_new_tokens=40, temperature=0).token_ids == expected.token_ids
    session = Session(lm)
    session.generate(PROMPTS[0], max_new_tokens=8, temperature=0)
    session.save(tmp_path / "session")
    text = PROMPTS[0] + expected.token_ids[:8]
    again = Session.load(tmp_path / "session", fresh()).generate(text, max_new_tokens=32, temperature=0)
    assert again.cached_tokens > 100
    assert again.token_ids == expected.token_ids[8:]
    drafted = fresh().generate(PROMPTS[0], max_new_tokens=40, temperature=0, draft="lookup")
    assert drafted.token_ids == expected.token_ids
    search = {"beams": 3, "max_new_tokens": 9, "temperature": 0}
    assert lm.generate(PROMPTS[0], **search).token_ids == fresh().generate(PROMPTS[0], **search).token_ids


@pytest.mark.parametrize("format", FORMATS_OF_8_BITS, ids=lambda format: format.name)
def test_memory_plans_include_the_bytes_of_rows(format):
    shapes = (LayerShape(2, 16, 8), LayerShape(1, 24, 0), LayerShape(2, 16, 16, window=100))
    plan = CachePlan(shapes, torch.bfloat16, format=format)
    position = [2 * (20 + 12), 28, 2 * (20 + 20)]  # values that are not stored have no scale either
    assert plan.bytes_of(1000) == 1000 * sum(position[:2]) + 256 * position[2]
    assert KVCache.of(plan, 3, 50).nbytes == 3 * 50 * sum(position)
    pool = KVPool(plan, 4)
    assert (pool.block_nbytes, pool.windows.block_nbytes) == (64 * sum(position[:2]), 64 * position[2])
    floats = replace(plan, format=None)
    assert KVCache.of(floats, 3, 50).nbytes == 3 * 50 * 2 * (2 * 24 + 24 + 2 * 32)


@pytest.mark.skipif(native.library() is None, reason="no native library was built")
def test_formats_without_a_kernel_code_use_the_definitions():
    forms = (None, INT8, COARSE)
    floats, int8, coarse = ({(row.op, row.kernel) for row in stored_in(each).explain().rows} for each in forms)
    assert int8 == floats
    assert coarse - floats == {("cached_attention", "(torch)"), ("write_cache", "(torch)")}
    (why,) = {row.why for row in stored_in(COARSE).explain().missing}
    assert why == "a cache in coarse"


def test_rows_of_the_wrong_width_or_dtype_are_refused():
    at = torch.zeros(1, dtype=torch.int32)
    q, rows = torch.randn(1, 2, 1, 8), torch.zeros(1, 2, 4, 12, dtype=torch.int8)
    ops.write_cache(rows, q, at)
    assert ops.cached_attention(q, rows, rows, at).shape == (1, 2, 1, 8)
    with pytest.raises(RequestError, match="a cache"):
        ops.write_cache(rows[..., :8].contiguous(), q, at)
    with pytest.raises(RequestError, match=r"k \[1, 2, 4, 8\]"):
        ops.cached_attention(q, rows[..., :8].contiguous(), None, at, value_dim=8)
    with pytest.raises(RequestError, match="one dtype"):
        ops.cached_attention(q, rows, torch.zeros(1, 2, 4, 12), at)
    with pytest.raises(RequestError, match="one dtype"):
        ops.scaled_dot_product_attention(q, rows[..., :8].contiguous(), rows)
    for values, value_dim in ((rows, 8), (None, None), (None, 9), (None, 0)):
        with pytest.raises(RequestError, match="give values, or None and as value_dim"):
            ops.cached_attention(q, rows, values, at, value_dim=value_dim)


def test_load_accepts_a_format_name():
    lm, floats = onward.load("demo", cache_format="int8"), onward.load("demo")
    assert {leaf.dtype for leaf in lm.model.new_cache(1, 8).keys} == {torch.int8}
    text = "The dragon said"
    options = {"max_new_tokens": 40, "temperature": 0.7, "seed": 3}
    expected = lm.generate(text, **options).token_ids
    with onward.Engine(lm, max_sequences=3) as engine:
        answers = [engine.submit(lm.request(text, **options)) for _ in range(4)]
        assert [answer.result(60).token_ids for answer in answers] == [expected] * 4
        int8 = engine.fingerprint
    with onward.Engine(floats) as engine:
        assert engine.fingerprint != int8
    with pytest.raises(RequestError, match="cache_format must be None or one of int8, coarse; got 'int5'"):
        onward.load("demo", cache_format="int5")


def test_sessions_of_another_format_are_refused(tmp_path):
    session = Session(onward.load("demo", cache_format="int8"))
    session.generate("Once", max_new_tokens=3)
    session.save(tmp_path / "session")
    with pytest.raises(onward.OnwardError, match="its KV cache has int8, this model's bfloat16"):
        Session.load(tmp_path / "session", onward.load("demo"))
