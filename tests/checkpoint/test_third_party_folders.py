"""Folders from other tools: no architectures, ids past the vocabulary, generation fields in config.json."""

import json

import pytest
import torch

import onward
from onward.chat.format import special_token
from onward.checkpoint import CheckpointFolder
from onward.constraints import symbol
from onward.errors import CheckpointError, ConfigError, RequestError
from onward.language_model import Calibration, quantize_folder
from onward.language_model.generation_config import generation_defaults
from onward.models import FAMILIES
from onward.models.families import _OF_MODEL_TYPES
from onward.models.fields import GENERATION_FIELDS, generation_fields
from tiny_checkpoint import change_json, make_checkpoint, read_json, refused, write_json

LAST = 319  # id of the tiny tokenizer


# ── model_type alone ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("value", [..., None, []], ids=str)
def test_architectures_default_to_that_of_the_model_type(value, tmp_path):
    folder = make_checkpoint(tmp_path)
    expected = onward.load(folder).logits([1, 2])
    change_json(folder / "config.json", architectures=value)
    assert torch.equal(onward.load(folder).logits([1, 2]), expected)
    change_json(folder / "config.json", model_type="novel")
    with refused(ConfigError, "architectures"):
        onward.load(folder, via="onward")


def test_model_types_map_to_the_architectures_of_transformers():
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as THEIRS

    assert set(_OF_MODEL_TYPES.values()) == set(FAMILIES)
    for kind, name in _OF_MODEL_TYPES.items():
        # Of configs with a text part transformers may name the text model, and then finds it inside.
        assert THEIRS.get(kind, name) in (name, name.replace("ConditionalGeneration", "CausalLM"))


# ── ids past the vocabulary ───────────────────────────────────────────────────────────────────────────────────


def add_tokens(folder, *texts, special=True, first=LAST + 1):
    """Put tokens past the embedding into both of the tokenizer's files."""
    tokenizer, config = read_json(folder / "tokenizer.json"), read_json(folder / "tokenizer_config.json")
    marks = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": special}
    decoder = config.setdefault("added_tokens_decoder", {})
    for token, text in enumerate(texts, start=first):
        tokenizer["added_tokens"].append({"id": token, "content": text, **marks})
        decoder[str(token)] = {"content": text, **marks}
    write_json(folder / "tokenizer.json", tokenizer)
    write_json(folder / "tokenizer_config.json", config)


@pytest.mark.parametrize("special", [True, False])
def test_using_added_tokens_past_the_embedding_is_an_error(special, tmp_path):
    folder = make_checkpoint(tmp_path, vocab_size=320)
    expected = onward.load(folder).generate("hello", max_new_tokens=6, temperature=0).token_ids
    add_tokens(folder, "<image>", "<pad>", special=special)
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    change_json(folder / "tokenizer_config.json", pad_token="<pad>", chat_template=template)
    lm = onward.load(folder)
    assert lm.generate("hello", max_new_tokens=6, temperature=0).token_ids == expected
    assert lm.encode("hello <im") == onward.load(folder).encode("hello <im")
    assert special_token(lm.tokenizer, "<image>") is None
    assert symbol("<image>", lm.tokenizer) is None
    words = ("'<image>'", "id 320", "ends at 319")
    for use in (
        lambda: lm.generate("a <image> b", max_new_tokens=2),
        lambda: lm.encode("a <image> b"),
        lambda: lm.score("a <image> b"),
        lambda: lm.chat([{"role": "user", "content": "see <image>"}], max_new_tokens=2),
        lambda: lm.generate("a", bad_words=["<image>"], max_new_tokens=2),
    ):
        with refused(RequestError, *words):
            use()
    for use in (
        lambda: lm.generate([1, 320], max_new_tokens=2),
        lambda: lm.generate("a", eos=320, max_new_tokens=2),
        lambda: lm.generate("a", logit_bias={320: 1.0}, max_new_tokens=2),
        lambda: lm.generate("a", bad_words=[[320]], max_new_tokens=2),
    ):
        with refused(RequestError, "319"):
            use()


@pytest.mark.parametrize("special", [True, False])
def test_grammars_avoid_tokens_past_the_embedding(special, tmp_path):
    folder = make_checkpoint(tmp_path, vocab_size=320)
    add_tokens(folder, "[EXTRA]", special=special)
    lm = onward.load(folder)
    text = lm.generate("a", regex=r"\[EXTRA\]b", max_new_tokens=24).text
    assert text == "[EXTRA]b"


def test_an_engine_refuses_only_requests_with_tokens_past_the_embedding(tmp_path):
    folder = make_checkpoint(tmp_path, vocab_size=320)
    add_tokens(folder, "<image>")
    lm = onward.load(folder)
    expected = lm.generate("hello", max_new_tokens=4, temperature=0).text
    with onward.Engine(lm) as engine:
        good = engine.submit("hello", max_new_tokens=4, temperature=0)
        with refused(RequestError, "<image>"):
            engine.submit("hello <image>", max_new_tokens=4)
        assert good.result().text == expected


def test_a_tokenizer_with_a_larger_base_vocabulary_is_refused(tmp_path):
    folder = make_checkpoint(tmp_path, vocab_size=300)
    with refused(CheckpointError, "ends at 299", "different models"):
        onward.load(folder)


@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
def test_special_ids_past_the_vocabulary_are_ignored(file, tmp_path):
    folder = make_checkpoint(tmp_path)
    change_json(folder / file, eos_token_id=[1, 352], pad_token_id=400, bos_token_id=353, suppress_tokens=[5, 999])
    lm = onward.load(folder)
    assert lm.defaults.eos == (1,)
    assert dict(lm.defaults.logit_bias) == {5: float("-inf")}
    assert len(lm.generate("hello", max_new_tokens=4).token_ids) <= 4


def test_no_eos_within_the_vocabulary_is_a_warning(tmp_path):
    folder = make_checkpoint(tmp_path)
    change_json(folder / "generation_config.json", eos_token_id=5000)
    with pytest.warns(UserWarning, match=r"eos_token_id names id 5000.*ends at 351: no id ends a text"):
        assert onward.load(folder).defaults.eos == ()


# ── generation fields of config.json ──────────────────────────────────────────────────────────────────────────

GENERATION = {
    "do_sample": True,
    "temperature": 0.6,
    "top_k": 20,
    "top_p": 0.9,
    "min_p": 0.05,
    "typical_p": 0.95,
    "repetition_penalty": 1.2,
    "no_repeat_ngram_size": 3,
    "max_new_tokens": 12,
    "min_new_tokens": 2,
    "bad_words_ids": [[7, 8]],
    "suppress_tokens": [9],
    "sequence_bias": [[[5], 1.5]],
    "eos_token_id": [3, 4],
    "num_return_sequences": 2,
    "stop_strings": ["end"],
}
BEAMS = {"num_beams": 3, "length_penalty": 0.5, "early_stopping": True, "eos_token_id": 3}


@pytest.mark.parametrize("fields", [GENERATION, BEAMS, {}], ids=["sampling", "beams", "nothing"])
def test_generation_fields_of_config_json_are_read(fields, tmp_path):
    folder = make_checkpoint(tmp_path)
    write_json(folder / "generation_config.json", fields)
    expected = onward.load(folder).defaults
    (folder / "generation_config.json").unlink()
    change_json(folder / "config.json", **fields)
    assert onward.load(folder).defaults == expected
    write_json(folder / "generation_config.json", {})  # which wins, as a whole
    assert onward.load(folder).defaults.temperature == 0


@pytest.mark.parametrize("nested", [{}, {"temperature": 0.5, "top_k": 3, "eos_token_id": 9}, None])
@pytest.mark.parametrize("own", [{}, {"temperature": 0.7, "top_k": None}, GENERATION])
def test_fields_are_interpreted_as_in_transformers(own, nested):
    from transformers import GenerationConfig

    config = {"model_type": "llama", **own} | ({} if nested is None else {"text_config": nested})
    theirs = GenerationConfig.from_model_config(json.loads(json.dumps(config))).to_dict()
    ours = generation_fields(config)
    assert ours == {name: value for name, value in theirs.items() if name in ours and value is not None}
    assert all(theirs[name] is None or theirs[name] == ours.get(name, theirs[name]) for name in GENERATION_FIELDS)


def test_every_generation_field_of_transformers_is_known():
    from transformers import GenerationConfig

    theirs = {name for name in GenerationConfig().__dict__ if not name.startswith("_")} - {"transformers_version"}
    assert theirs <= GENERATION_FIELDS


def test_messages_name_the_file_of_the_field(tmp_path):
    folder = make_checkpoint(tmp_path)
    change_json(folder / "config.json", do_sample=True, temperature="hot")
    with refused(ConfigError, "config.json", "temperature", "'hot'"):
        onward.load(folder)
    change_json(folder / "config.json", temperature=1.0, guidance_scale=2.0)
    with pytest.warns(UserWarning, match=r"/config\.json asks for guidance_scale"):
        onward.load(folder)


def test_generation_fields_of_the_text_config_are_read(tmp_path):
    assert generation_defaults({}, (), has_text=False, folder=tmp_path).temperature == 0
    folder = make_checkpoint(tmp_path)
    change_json(folder / "config.json", text_config={"do_sample": True, "temperature": 0.3, "eos_token_id": 11})
    found = CheckpointFolder(folder)
    assert found.generation_config == {"do_sample": True, "temperature": 0.3, "eos_token_id": 11}
    assert found.eos == (11,)


def test_folders_with_unusable_tokens_are_quantized_with_calibration(tmp_path):
    folder = make_checkpoint(tmp_path / "source", vocab_size=320)
    add_tokens(folder, "<image>")
    change_json(folder / "config.json", eos_token_id=[1, 999], architectures=...)
    quantize_folder(folder, tmp_path / "small", "int8", calibrate=Calibration())
    lm = onward.load(tmp_path / "small")
    assert lm.defaults.eos == (1,)
    assert len(lm.generate("hello", max_new_tokens=3, ignore_eos=True).token_ids) == 3
