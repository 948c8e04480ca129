"""Models with recurrent states keep every guarantee: their tokens depend only on the text."""

import dataclasses
import json
import random

import pytest
import torch
from safetensors.torch import load_file, save_file

import onward
from block_accounts import check_accounts
from onward import GenerateOptions, LanguageModel, Session, Speculator, native
from onward.cache import PagedCacheManager
from onward.decoding.speculation import ModelDrafter
from onward.errors import ConfigError, OnwardWarning
from onward.models import pack_params, read_config
from onward.testing import ByteTokenizer, random_checkpoint, tiny_config, tiny_model

pytestmark = pytest.mark.skipif(not native.available_isas(), reason="torch's products have no one order")

SAMPLED = {"temperature": 1.0, "top_p": 0.95, "seed": 11}
PROMPTS = [[(7 * i * i + n) % 251 for i in range(n)] for n in (70, 1, 16, 33, 15)]


def model(seed=7, family="qwen3_5", **config):
    stock = tiny_model(family, seed=seed, num_hidden_layers=3, **config)
    return dataclasses.replace(stock, params=pack_params(stock.params))


def language_model(chunk=512, **options):
    return LanguageModel(
        model(), ByteTokenizer(), defaults=GenerateOptions(max_new_tokens=40), prefill_chunk=chunk, **options
    )


@pytest.fixture(scope="module")
def lm():
    return language_model()


def ids(completion):
    return completion.token_ids


@pytest.mark.parametrize("chunk", [1, 5, 16, 48])
def test_logits_do_not_depend_on_the_chunks(lm, chunk):
    for prompt in PROMPTS:
        assert torch.equal(language_model(chunk).logits(prompt), lm.logits(prompt))


@pytest.mark.parametrize("options", [{"temperature": 0}, SAMPLED])
def test_batched_equals_alone(lm, options):
    alone = [ids(lm.generate(prompt, **options)) for prompt in PROMPTS]
    assert [ids(one) for one in lm.generate(PROMPTS, **options)] == alone
    assert [ids(one) for one in lm.generate(PROMPTS, cache=lm.new_cache(len(PROMPTS)), **options)] == alone


class Echo:
    """A drafter whose drafts are as long as they may be, and right up to a place that moves."""

    def __init__(self, texts):
        self.texts = texts

    def start(self, request):
        return self

    def propose(self, rows):
        drafts = []
        for row in rows:
            known = self.texts[tuple(row.prompt)]
            at = len(row.output)
            draft = known[at : at + row.limit]
            wrong = (5 * at + len(row.prompt)) % 16
            drafts.append([token if i != wrong else (token + 1) % 251 for i, token in enumerate(draft)])
        return drafts


@pytest.mark.parametrize("longest", [1, 4, 15, 40])
def test_drafted_equals_plain(lm, longest):
    plain = [ids(lm.generate(prompt, **SAMPLED)) for prompt in PROMPTS]
    drafter = Echo({tuple(prompt): text for prompt, text in zip(PROMPTS, plain, strict=True)})
    drafted = lm.generate(PROMPTS, draft=Speculator(drafter, length=longest), **SAMPLED)
    assert [ids(one) for one in drafted] == plain
    assert sum(one.speculation.accepted for one in drafted) > 20


@pytest.mark.parametrize("length", [3, 15, 30])
def test_a_recurrent_model_drafts(lm, length):
    plain = [ids(lm.generate(prompt, **SAMPLED)) for prompt in PROMPTS]
    for target in (lm, LanguageModel(tiny_model(seed=3), ByteTokenizer(), defaults=lm.defaults)):
        draft = Speculator(ModelDrafter(model(seed=8)), length=length)
        plain = [ids(target.generate(prompt, **SAMPLED)) for prompt in PROMPTS]
        assert [ids(one) for one in target.generate(PROMPTS, draft=draft, **SAMPLED)] == plain


def test_samples_and_beams_of_one_prompt(lm):
    three = lm.generate(PROMPTS[0], n=3, **SAMPLED)
    assert len({tuple(ids(one)) for one in three.choices}) == 3
    assert ids(three.choices[0]) == ids(lm.generate(PROMPTS[0], **SAMPLED))
    dense = dataclasses.replace(lm.model, new_blocks=None)
    searched = lm.generate(PROMPTS[3], beams=3, temperature=0)
    assert ids(
        LanguageModel(dense, ByteTokenizer()).generate(PROMPTS[3], beams=3, temperature=0, max_new_tokens=40)
    ) == ids(searched)


def test_a_session_continues_and_is_edited(lm, tmp_path):
    session = Session(lm)
    first = session.generate(PROMPTS[0], **SAMPLED)
    longer = [*PROMPTS[0], *ids(first), 5, 6]
    second = session.generate(longer, **SAMPLED)
    assert second.cached_tokens == len(longer) - 3  # the last generated id was not processed, and two are new
    assert ids(second) == ids(lm.generate(longer, **SAMPLED))
    file = tmp_path / "session.safetensors"
    session.save(file)
    resumed = Session.load(file, lm)
    last = [*longer, *ids(second), 9]
    third = resumed.generate(last, **SAMPLED)
    assert third.cached_tokens == len(last) - 2
    assert ids(third) == ids(session.generate(last, **SAMPLED)) == ids(lm.generate(last, **SAMPLED))
    # An edit near the end reuses the states before it; an earlier edit needs states that are not cached.
    for length, cached in ((len(last) + 30, len(last) + 30), (20, 0)):
        edited = [*[*last, *ids(third)][:length], 1, 2, 3]
        again = session.generate(edited, **SAMPLED)
        assert again.cached_tokens == cached
        assert ids(again) == ids(lm.generate(edited, **SAMPLED))


def test_common_prefixes_continue_from_cached_states():
    lm, empty = language_model(), language_model(prefix_memory=0)
    prompt = PROMPTS[0]
    first = lm.generate(prompt, **SAMPLED)
    assert first.cached_tokens == 0
    again = lm.generate(prompt, **SAMPLED)
    assert again.cached_tokens == 64  # the states at the end of the prompt's last block
    assert ids(again) == ids(first) == ids(empty.generate(prompt, **SAMPLED))
    longer = [*prompt, *ids(first), 5, 6]
    second = lm.generate(longer, **SAMPLED)
    assert second.cached_tokens == len(longer) - 3  # the states at the end of the first text
    assert ids(second) == ids(empty.generate(longer, **SAMPLED))
    other = [*prompt[:66], 7, 8, 9]
    assert lm.generate(other, **SAMPLED).cached_tokens == 64
    assert lm.generate(prompt[:40], **SAMPLED).cached_tokens == 0
    assert ids(lm.generate(other, **SAMPLED)) == ids(empty.generate(other, **SAMPLED))


@pytest.mark.parametrize("running", [False, True], ids=["one after the other", "while the first runs"])
def test_a_third_prompt_continues_where_the_second_diverged(running):
    """The second stores the states there, since its prompt is cut there; the first could not know the position."""
    lm, empty = language_model(), language_model(prefix_memory=0)
    chance = random.Random(5)
    shared = [chance.randrange(250) for _ in range(150)]
    prompts = [[*shared, *(chance.randrange(250) for _ in range(60))] for _ in range(4)]
    alone = [ids(empty.generate(prompt, **SAMPLED)) for prompt in prompts]
    with onward.Engine(lm) as engine:
        texts = [engine.submit(prompts[0], **SAMPLED)]
        if running:
            next(iter(texts[0]))
        else:
            texts[0].result()
        for prompt in prompts[1:]:
            texts.append(engine.submit(prompt, **SAMPLED))
            texts[-1].result()
        done = [text.result() for text in texts]
    assert [ids(one) for one in done] == alone
    assert [one.cached_tokens for one in done] == [0, 0, 128, 128]


def test_texts_evict_the_states_of_others():
    """Many texts in little memory: the tokens do not depend on cache hits."""
    chance = random.Random(3)
    bases = [[chance.randrange(250) for _ in range(150)] for _ in range(3)]
    empty = language_model(prefix_memory=0)
    blocks = empty.model.new_blocks(1)
    lm = language_model(prefix_memory=40 * (blocks.block_nbytes + blocks.states.nbytes))
    found = 0
    for _ in range(40):
        shared = chance.choice([3, 63, 64, 65, 100, 128, 140])
        prompt = [*chance.choice(bases)[:shared], chance.randrange(250)]
        options = {"max_new_tokens": chance.choice([1, 5, 20]), "temperature": 1, "seed": chance.randrange(9)}
        got = lm.generate(prompt, draft=chance.choice([None, "lookup"]), **options)
        assert ids(got) == ids(empty.generate(prompt, **options))
        found += got.cached_tokens
        check_accounts(lm._prefix_cache._shared.slots)
    assert found > 200


@pytest.mark.parametrize("format", ["int8", "int4"])
def test_quantized(format):
    wide = tiny_model("qwen3_5", seed=3, hidden_size=64, intermediate_size=96)
    quantized = onward.quantize(LanguageModel(wide, defaults=GenerateOptions(max_new_tokens=40)), format)
    alone = [ids(quantized.generate(prompt, **SAMPLED)) for prompt in PROMPTS]
    assert [ids(one) for one in quantized.generate(PROMPTS, **SAMPLED)] == alone
    assert [ids(one) for one in quantized.generate(PROMPTS, draft="lookup", **SAMPLED)] == alone


def test_programs_equal_eager(lm):
    eager = language_model(compile="eager")
    assert [ids(one) for one in eager.generate(PROMPTS, **SAMPLED)] == [
        ids(one) for one in lm.generate(PROMPTS, **SAMPLED)
    ]
    assert "(torch)" not in str(lm.explain())


def test_states_are_allocated_and_freed_with_texts(lm):
    blocks = lm.model.new_blocks(8)
    slots = PagedCacheManager(blocks, max_len=256, cached_blocks=8)
    assert not slots.shares_rows
    taken = [slots.acquire([1, 2, 3], 40)[0] for _ in range(8)]
    assert slots.acquire([1], 1) is None
    assert len({slot.state for slot in taken}) == 8
    slots.release(taken.pop(), [1, 2, 3])
    slot, reused = slots.acquire([1, 2, 3, 4], 40)
    assert reused == 0
    check_accounts(slots)
    assert slots.fork(slot, 5, 40) is None  # nothing was computed, so there are no states of 5 positions


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5moe"])
def test_the_text_part_of_a_checkpoint_with_vision(family, tmp_path, monkeypatch):
    text = random_checkpoint(tmp_path / "text", family, seed=3)
    whole = tmp_path / "whole"
    whole.mkdir()
    config = json.loads((text / "config.json").read_text())
    name = config["architectures"][0].replace("CausalLM", "ConditionalGeneration")
    parts = {"text_config": config, "vision_config": {"depth": 2}, "image_token_id": 5}
    (whole / "config.json").write_text(json.dumps(parts | {"architectures": [name]}))
    tensors = load_file(text / "model.safetensors")
    renamed = {name.replace("model.", "model.language_model."): tensor for name, tensor in tensors.items()}
    others = {"model.visual.patch_embed.weight": torch.ones(3), "mtp.fc.weight": torch.ones(3)}
    save_file(renamed | others, whole / "model.safetensors", metadata={"format": "pt"})
    monkeypatch.setattr("onward.errors._warned", set())
    with pytest.warns(OnwardWarning, match="only the text part is loaded: prompts cannot contain images"):
        loaded = onward.load(whole)
    assert torch.equal(loaded.logits(PROMPTS[3]), onward.load(text).logits(PROMPTS[3]))


def test_the_qwen3_5_moe_config_on_the_hub_is_read():
    """Fields that transformers' own class does not have, or has for other families."""
    always = {"attn_output_gate": True, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
    plain = tiny_config("qwen3_5moe")
    assert "intermediate_size" in plain
    of_hub = {name: value for name, value in plain.items() if name != "intermediate_size"}
    assert read_config(of_hub | always | {"mtp_num_hidden_layers": 1, "mamba_ssm_dtype": "float32"}) == read_config(
        plain
    )
    for name in ("attn_output_gate", "norm_topk_prob"):
        with pytest.raises(ConfigError, match=f"{name} must be True in this family; got False"):
            read_config(plain | {name: False})


def test_unsupported_configs_are_refused():
    with pytest.raises(ConfigError, match="num_experts_per_tok"):
        tiny_model("qwen3next", num_experts=4, num_experts_per_tok=5)
    with pytest.raises(ConfigError, match="full_attention"):
        tiny_model("qwen3_5", layer_types=["linear_attention"] * 2)
    with pytest.raises(ConfigError, match="linear_num_value_heads"):
        tiny_model("qwen3_5", linear_num_key_heads=3)
