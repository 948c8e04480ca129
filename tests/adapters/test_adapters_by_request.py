"""Adapters per request: a row of a batch with an adapter computes the same as alone, and the same as peft."""

import copy
import gc
import inspect
import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft_adapters import FORMS, adapted, base, saved
from safetensors.torch import save_file

import onward
from onward.errors import CheckpointError, RequestError, SessionError
from onward.sampling.logprobs import token_logprobs
from tiny_checkpoint import FEW_EXPERTS

IDS = [5, 17, 99, 3, 42, 8]
# As in test_merging.py: of logprobs too, for a logprob moves by no more than twice what the logits do.
TOLERANCE = 1e-4
# Norms are the same for all rows of a batch.
BESIDE = [form for form in FORMS if form not in ("saved modules", "saved convolutions")]
NAMES = ("plain", "DoRA", "patterns", "head and embedding")


def logprobs(lm, adapter=None, ids=IDS):
    """float32 [T - 1, V]"""
    everything = lm.score(ids, logprobs=lm.model.vocab_size, adapter=adapter).logprobs[1:]
    return torch.tensor([[dict(at.top)[token] for token in range(lm.model.vocab_size)] for at in everything])


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The folder of a model, and those of adapters of it by their forms."""
    place = tmp_path_factory.mktemp("adapters")
    source = saved(base(), place / "model")
    return source, {form: saved(adapted(base(), form), place / form) for form in FORMS}


@pytest.fixture(scope="module")
def loaded(folders):
    source, by_form = folders
    return onward.load(source, adapters={name: by_form[name] for name in NAMES})


@pytest.mark.parametrize("form", BESIDE)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_logprobs_equal_peft_and_the_merged_model(tmp_path, family, form):
    model = base(family)
    source = saved(model, tmp_path / "model")
    wrapped = adapted(model, form)
    with torch.no_grad():
        expected = wrapped(torch.tensor([IDS])).logits[0].log_softmax(-1)[:-1]
    lm = onward.load(source, adapters={"it": saved(wrapped, tmp_path / "adapter")})
    torch.testing.assert_close(logprobs(lm, "it"), expected, rtol=0, atol=TOLERANCE)
    torch.testing.assert_close(logprobs(lm.merge("it")), expected, rtol=0, atol=TOLERANCE)
    assert (logprobs(lm) - expected).abs().max() > 0.05, "a request without it has the model's own weights"
    assert not lm._model_run.why_eager
    assert not lm._model_run.adapted.why_eager, "both run as programs"


def test_fused_projections_use_the_checkpoints_module_names(tmp_path):
    from peft import LoraConfig, get_peft_model
    from peft_adapters import SMALL
    from transformers import Phi3Config, Phi3ForCausalLM

    torch.manual_seed(0)
    model = Phi3ForCausalLM(Phi3Config(**SMALL, pad_token_id=0, bos_token_id=1, eos_token_id=2)).eval()
    source = saved(model, tmp_path / "model")
    config = LoraConfig(r=4, target_modules=["qkv_proj", "gate_up_proj"], init_lora_weights=False)
    wrapped = get_peft_model(model, config).eval()
    with torch.no_grad():
        expected = wrapped(torch.tensor([IDS])).logits[0].log_softmax(-1)[:-1]
    lm = onward.load(source, adapters={"it": saved(wrapped, tmp_path / "adapter")})
    torch.testing.assert_close(logprobs(lm, "it"), expected, rtol=0, atol=TOLERANCE)


PROMPTS = st.lists(
    st.tuples(st.lists(st.integers(0, 100), min_size=1, max_size=12), st.sampled_from([None, *NAMES])),
    min_size=1,
    max_size=5,
)


@pytest.mark.strength(1)
@pytest.mark.parametrize("cache", ["blocks", "dense"])
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8", "int4", "iq4_nl", "eager"])
def test_mixed_batch_equals_each_row_alone(folders, kind, cache):
    source, by_form = folders
    options = {"float32": {}, "eager": {"compile": "eager"}, "bfloat16": {"dtype": "bfloat16"}}
    lm = onward.load(source, **options.get(kind, {"quantize": kind}), adapters={name: by_form[name] for name in NAMES})
    lm.prefix_memory = 0

    def texts(prompts, adapters):
        own = [{"adapter": adapter, "seed": at, "temperature": 0.9} for at, adapter in enumerate(adapters)]
        own_cache = lm.new_cache(len(prompts)) if cache == "dense" else None
        made = lm.generate(prompts, per_prompt=own, max_new_tokens=4, logprobs=3, cache=own_cache)
        return [(each.token_ids, each.logprobs) for each in made]

    @settings(max_examples=12)
    @given(PROMPTS, st.sampled_from([3, 512]))
    def check(rows, chunk):
        prompts, adapters = [ids for ids, _ in rows], [adapter for _, adapter in rows]
        lm.prefill_chunk = chunk
        together = texts(prompts, adapters)
        lm.prefill_chunk = 512
        for at, (ids, adapter) in enumerate(rows):
            own_cache = lm.new_cache(1) if cache == "dense" else None
            options = {"adapter": adapter, "seed": at, "temperature": 0.9}
            alone = lm.generate(ids, max_new_tokens=4, logprobs=3, cache=own_cache, **options)
            assert (alone.token_ids, alone.logprobs) == together[at]

    check()


@pytest.mark.parametrize("format", ["int8", "int4", "iq4_nl"])
def test_updates_of_quantized_models_are_stored_in_8_bits(folders, format):
    source, by_form = folders
    exact = onward.load(source, adapters={"it": by_form["plain"]})
    rounded = onward.load(source, quantize=format, adapters={"it": by_form["plain"]})
    from onward.checkpoint import read_adapter
    from onward.models.adapters.forward import row_updates

    updates = row_updates(exact.model, read_adapter(by_form["plain"]))
    stacks = rounded._adapters._stacks._updates
    assert stacks.keys() == updates.keys()
    index = rounded.adapters["it"].index
    for name, update in updates.items():
        stack, rank = stacks[name], update.rank
        assert stack.a.dtype == stack.b.dtype == torch.int8
        product = (stack.a[index, :rank].double() * stack.factors[index, :rank, None]).T @ stack.b[
            index, :rank
        ].double()
        # Each number is off by half a step at most, which is 1 / 254 of the largest in its row.
        a, b = update.a.double().abs(), update.b.double().abs()
        of_a, of_b = a.amax(1, keepdim=True) / 254, b.amax(1, keepdim=True) / 254
        bound = of_a.expand_as(a).T @ b + a.T @ of_b.expand_as(b) + of_a.expand_as(a).T @ of_b.expand_as(b)
        assert ((product - update.a.T.double() @ update.b.double()).abs() <= bound * (1 + 1e-6)).all()


def test_row_without_adapter_equals_a_model_without_adapters(folders, loaded):
    bare = onward.load(folders[0])
    alone = bare.generate(IDS, max_new_tokens=6, temperature=0, logprobs=5)
    (mixed, _) = loaded.generate(
        [IDS, IDS], per_prompt=[{}, {"adapter": "plain"}], max_new_tokens=6, temperature=0, logprobs=5
    )
    assert (alone.token_ids, alone.logprobs) == (mixed.token_ids, mixed.logprobs)


def test_samples_beams_and_drafts_use_the_adapter(loaded):
    merged = loaded.merge("plain")
    repeated = [7, 8, 9, 7, 8, 9, 7, 8]
    for options in ({"n": 3, "seed": 5, "temperature": 1.0}, {"beams": 3}, {"draft": "lookup", "temperature": 0}):
        adapted = loaded.generate(repeated, adapter="plain", max_new_tokens=8, **options)
        whole = merged.generate(repeated, max_new_tokens=8, **options)
        assert [text.token_ids for text in adapted.choices] == [text.token_ids for text in whole.choices], options
    plain = loaded.generate(repeated, adapter="plain", max_new_tokens=8, temperature=0, logprobs=2)
    drafted = loaded.generate(repeated, adapter="plain", max_new_tokens=8, temperature=0, logprobs=2, draft="lookup")
    assert (plain.token_ids, plain.logprobs) == (drafted.token_ids, drafted.logprobs)


# ── prefixes ──────────────────────────────────────────────────────────────────────────────────────────────────

LONG = [(7 * at) % 101 for at in range(100)]


def test_prefixes_are_shared_only_between_equal_adapters(folders):
    source, by_form = folders
    lm = onward.load(source, adapters={"a": by_form["plain"], "b": by_form["patterns"], "same": by_form["plain"]})

    def cached(adapter):
        return lm.generate(LONG, adapter=adapter, max_new_tokens=1).cached_tokens

    assert [cached(None), cached("a"), cached("b")] == [0, 0, 0]
    assert [cached(None), cached("a"), cached("b"), cached("same")] == [99, 99, 99, 99]
    lm.drop_adapter("a")
    lm.load_adapter("a again", by_form["plain"])
    assert cached("a again") == 99


def test_session_continues_only_with_its_own_adapter(folders):
    source, by_form = folders
    lm = onward.load(source, adapters={"a": by_form["plain"], "b": by_form["patterns"]})
    lm.prefix_memory = 0
    session = onward.Session(lm)
    for adapter, cached in (("a", 0), ("a", 99), ("b", 0), (None, 0), ("a", 0)):
        answer = session.generate(LONG, adapter=adapter, max_new_tokens=4, temperature=0)
        assert answer.cached_tokens == cached
        assert answer.token_ids == lm.generate(LONG, adapter=adapter, max_new_tokens=4, temperature=0).token_ids
    lm.load_adapter("equal", by_form["plain"])
    assert session.generate(LONG, adapter="equal", max_new_tokens=1).cached_tokens == 99


def test_saved_session_identifies_the_adapter_by_content(folders, tmp_path):
    source, by_form = folders
    lm = onward.load(source, adapters={"a": by_form["plain"]})
    session = onward.Session(lm)
    session.generate(LONG, adapter="a", max_new_tokens=4, temperature=0)
    session.save(tmp_path / "talk")
    other = onward.load(source, adapters={"wrong": by_form["patterns"]})
    with pytest.raises(SessionError, match=r"computed with an adapter of digest .*, which this model does not have"):
        onward.Session.load(tmp_path / "talk", other)
    other.load_adapter("under another name", by_form["plain"])
    resumed = onward.Session.load(tmp_path / "talk", other)
    text = [*LONG, *lm.generate(LONG, adapter="a", max_new_tokens=4, temperature=0).token_ids, 1]
    answer = resumed.generate(text, adapter="under another name", max_new_tokens=4, temperature=0)
    assert answer.cached_tokens == len(LONG) + 3
    assert answer.token_ids == lm.generate(text, adapter="a", max_new_tokens=4, temperature=0).token_ids
    assert onward.Session.load(tmp_path / "talk", other).generate(text, max_new_tokens=1).cached_tokens == 0


# ── coming and going ──────────────────────────────────────────────────────────────────────────────────────────


@settings(max_examples=8)
@given(PROMPTS, st.randoms(use_true_random=False))
def test_engine_requests_equal_each_request_alone(loaded, rows, random):
    alone = [
        loaded.generate(ids, adapter=adapter, seed=at, max_new_tokens=5, logprobs=1)
        for at, (ids, adapter) in enumerate(rows)
    ]
    with onward.Engine(loaded, max_sequences=3, cache_memory=2**20) as engine:
        order = list(range(len(rows)))
        random.shuffle(order)
        generations = {}
        for at in order:
            ids, adapter = rows[at]
            generations[at] = engine.submit(ids, adapter=adapter, seed=at, max_new_tokens=5, logprobs=1)
            if random.random() < 0.5:
                generations[at].result()
        for at, expected in enumerate(alone):
            got = generations[at].result()
            assert (got.token_ids, got.logprobs) == (expected.token_ids, expected.logprobs)


def test_adapters_load_and_unload_while_an_engine_runs(folders):
    source, by_form = folders
    lm = onward.load(source, adapters={"a": by_form["plain"]})
    options = {"max_new_tokens": 60, "temperature": 0}
    expected = lm.generate(IDS, adapter="a", **options).token_ids
    with onward.Engine(lm) as engine:
        first = engine.submit(IDS, adapter="a", **options)
        next(iter(first))
        lm.drop_adapter("a")
        with pytest.raises(RequestError, match="there is no adapter 'a'; loaded: none"):
            engine.submit(IDS, adapter="a")
        lm.load_adapter("b", by_form["patterns"])  # of higher ranks: the stacks grow under the running request
        second = engine.submit(IDS, adapter="b", **options)
        assert first.result().token_ids == expected
        assert (
            second.result().token_ids
            == onward.load(source).merge(by_form["patterns"]).generate(IDS, **options).token_ids
        )
        del first
    gc.collect()
    lm.load_adapter("c", by_form["DoRA"])
    # The slot of "a" is used again, by "b" if the first request has ended by then.
    assert lm.adapters["c"].index in {1, 2, 3} - {lm.adapters["b"].index}
    merged = onward.load(source).merge(by_form["DoRA"])
    assert lm.generate(IDS, adapter="c", **options).token_ids == merged.generate(IDS, **options).token_ids


def test_more_adapters_than_initial_slots(folders):
    source, by_form = folders
    lm = onward.load(source)
    for at in range(20):
        lm.load_adapter(f"of {at}", by_form[("plain", "rsLoRA")[at % 2]])
    rows = lm.generate([IDS] * 20, per_prompt=[{"adapter": f"of {at}"} for at in range(20)], max_new_tokens=8)
    for at, row in enumerate(rows):
        assert row.token_ids == rows[at % 2].token_ids
    assert rows[0].token_ids != rows[1].token_ids


def test_copies_include_the_adapters(loaded):
    copied = copy.deepcopy(loaded)
    assert list(copied.adapters) == list(loaded.adapters)
    options = {"adapter": "DoRA", "max_new_tokens": 5, "temperature": 0}
    assert copied.generate(IDS, **options).token_ids == loaded.generate(IDS, **options).token_ids


# ── bad input ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_adapter_of_another_model_is_refused(loaded, tmp_path):
    for name, other, message in [
        ("narrow", base(hidden_size=16), r"update of model\.layers\.0\.\S+ is .*: it is for another model"),
        ("deep", base(num_hidden_layers=3), r"modules that the model does not have, such as 'model\.layers\.2\.\S+'"),
    ]:
        folder = saved(adapted(other, "plain"), tmp_path / name)
        with pytest.raises(CheckpointError, match=message):
            loaded.load_adapter(name, folder)
        assert name not in loaded.adapters


def test_updates_of_experts_are_refused_by_name(tmp_path):
    source = onward.testing.random_checkpoint(tmp_path / "model", "qwen3moe", **FEW_EXPERTS["qwen3moe"])
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 1, "lora_alpha": 1}))
    module = "base_model.model.model.layers.0.mlp.experts.0.gate_proj"
    update = {f"{module}.lora_A.weight": torch.zeros(1, 32), f"{module}.lora_B.weight": torch.zeros(48, 1)}
    save_file(update, folder / "adapter_model.safetensors")
    for options in ({"merge": folder}, {"adapters": {"experts": folder}}):
        with pytest.raises(CheckpointError, match=r"experts\.0\.gate_proj: adapters of experts are not supported"):
            onward.load(source, **options)


def test_parameters_shared_by_rows_are_refused_with_advice(folders, loaded):
    with pytest.raises(RequestError, match=r"norm\S* which cannot differ between the rows of a batch: merge it"):
        loaded.load_adapter("norms", folders[1]["saved modules"])


def test_adapter_names_are_checked_at_submission(folders, loaded):
    message = "there is no adapter 'other'; loaded: 'plain', 'DoRA'"
    for call in (
        lambda: loaded.request(IDS, adapter="other"),
        lambda: loaded.stream(IDS, adapter="other"),
        lambda: loaded.generate([IDS], per_prompt=[{"adapter": "other"}]),
        lambda: loaded.score(IDS, adapter="other"),
        lambda: loaded.drop_adapter("other"),
    ):
        with pytest.raises(RequestError, match=message):
            call()
    with pytest.raises(RequestError, match="adapter must be a string; got 3"):
        loaded.generate(IDS, adapter=3)
    with pytest.raises(RequestError, match="an adapter named 'plain' is already loaded"):
        loaded.load_adapter("plain", folders[1]["plain"])
    with pytest.raises(RequestError, match="must be a non-empty string"):
        loaded.load_adapter("", folders[1]["plain"])
    with pytest.raises(RequestError, match="drop plain, DoRA, patterns, head and embedding first"):
        loaded.model = loaded.model


def test_custom_forward_has_no_modules_to_adapt(folders):
    lm = onward.LanguageModel(onward.Model(lambda *_: None, {}, lambda batch, length: (), vocab_size=5))
    with pytest.raises(RequestError, match="names modules of a checkpoint"):
        lm.load_adapter("plain", folders[1]["plain"])


# ── every verb ────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", [None, *NAMES])
@pytest.mark.parametrize("cut", [1, 3, 5])
def test_continuations_are_scored_with_the_adapter(loaded, name, cut):
    """As the ids at the end of a whole text, bit for bit."""
    others = [7, 11]
    scores = loaded.score_continuations(IDS[:cut], [IDS[cut:], others], logprobs=2, adapter=name)
    for score, ids in zip(scores, (IDS, [*IDS[:cut], *others]), strict=True):
        assert score.logprobs[cut:] == loaded.score(ids, logprobs=2, adapter=name).logprobs[cut:]


@pytest.mark.parametrize("name", [None, *NAMES])
@pytest.mark.parametrize("chunk", [2, 512])
def test_logits_use_the_adapter(loaded, name, chunk):
    lm = copy.copy(loaded)
    lm.prefill_chunk = chunk
    logits = lm.logits(IDS, adapter=name)
    assert logits.dtype == torch.float32
    assert logits.shape == (len(IDS), lm.model.vocab_size)
    expected = lm.score(IDS, logprobs=3, adapter=name).logprobs[1:]
    assert token_logprobs(IDS[1:], logits[:-1], 3) == expected, "bit for bit"


def test_every_method_takes_an_adapter_and_refuses_unloaded_ones(loaded):
    """All methods of LanguageModel that run the model for ids, a text or messages."""
    verbs = {
        "generate": lambda **options: loaded.generate(IDS, max_new_tokens=4, **options).token_ids,
        "stream": lambda **options: [piece.token_id for piece in loaded.stream(IDS, max_new_tokens=4, **options)],
        "request": lambda **options: loaded.generate(loaded.request(IDS, max_new_tokens=4, **options)).token_ids,
        "score": lambda **options: loaded.score(IDS, **options).logprobs,
        "score_continuations": lambda **options: loaded.score_continuations(IDS, [IDS], **options)[0].logprobs,
        "logits": lambda **options: loaded.logits(IDS, **options).tolist(),
        "logprobs": lambda **options: loaded.logprobs(IDS, **options).tolist(),
        "hidden_states": lambda **options: loaded.hidden_states(IDS, "norm", **options).tolist(),
        "embed": lambda **options: loaded.embed(IDS, **options).tolist(),
    }
    verbs["replay"] = lambda **options: loaded.replay(IDS, IDS, temperature=0, logprobs=0, **options).logprobs
    for verb in verbs.values():
        assert verb(adapter="head and embedding") != verb()
        with pytest.raises(RequestError, match="nobody"):
            verb(adapter="nobody")
    runs_the_model = {
        name
        for name, method in inspect.getmembers(onward.LanguageModel, inspect.isfunction)
        if not name.startswith("_")
        and {"text", "prompt", "ids", "messages", "context"} & set(inspect.signature(method).parameters)
    }
    chats = {"chat", "stream_chat", "chat_request", "chat_prompt"}  # they make requests; the model here has no template
    assert runs_the_model - chats - {"encode", "decode", "receipt", "verify", "lens"} == set(verbs)
