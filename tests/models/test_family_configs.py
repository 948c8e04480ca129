"""Configs of the dense families from the hub: defaults, older forms, several parts, and refused values."""

import json
import warnings

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.glm.modeling_glm import GlmRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers_reference import CASES, CONFIGS, SMALL, TOLERANCE, build, save

import onward
from onward.errors import ConfigError, OnwardWarning, UnsupportedArchitectureError
from onward.models import num_parameters, read_config
from onward.models.blocks import RMSNorm
from onward.models.blocks.norm import rounded
from onward.testing import tiny_config

DENSE = ["gemma2", "gemma3", "gemma4", "olmo2", "olmo3", "smollm3", "granite", "glm", "glm4", "seedoss", "exaone4"]
SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


def without(config, *names):
    return {name: value for name, value in config.items() if name not in names}


@pytest.mark.parametrize("family", DENSE)
def test_empty_config_has_the_defaults_of_transformers(family):
    """All that a library's own default config says may be left out, but the sizes that every file has."""
    theirs = CONFIGS[family]()
    architecture = tiny_config(family)["architectures"]
    sizes = {name: getattr(theirs, name) for name in (*SIZES, "num_key_value_heads", "max_position_embeddings")}
    short = read_config({"architectures": architecture, **sizes})
    whole = read_config(json.loads(theirs.to_json_string(use_diff=False)) | {"architectures": architecture})
    assert short == whole


@pytest.mark.parametrize("family", DENSE)
def test_layer_types_of_another_length_are_refused(family):
    if family in ("olmo2", "granite", "glm", "glm4", "seedoss"):
        pytest.skip("its layers have no types")
    with pytest.raises(ConfigError, match=r"layer_types must have 2 entries \(num_hidden_layers\)"):
        read_config(tiny_config(family, layer_types=["full_attention"]))


@pytest.mark.parametrize("family", DENSE)
def test_unsupported_fields_that_change_results_are_named(family):
    with pytest.raises(ConfigError, match="'use_bidirectional_attention' is True"):
        read_config(tiny_config(family, use_bidirectional_attention=True))


def test_contradictory_fields_are_named():
    ropes = {"full_attention": {"rope_theta": 5.0}, "sliding_attention": {"rope_theta": 7.0}}
    with pytest.raises(ConfigError, match=r"rope_theta is .* in .* and .* in"):
        read_config(tiny_config("gemma3", rope_parameters=ropes))
    with pytest.raises(ConfigError, match="sliding_window gives no window"):
        read_config(tiny_config("gemma3", sliding_window=None))
    with pytest.raises(ConfigError, match="'full_attention' and for 'sliding_attention'; got a field 'rope_theta'"):
        read_config(tiny_config("olmo3", rope_parameters={"rope_theta": 5.0}))
    with pytest.raises(ConfigError, match="use_sliding_window and sliding_window give no window: set both"):
        read_config(tiny_config("smollm3", sliding_window=4, layer_types=["sliding_attention", "full_attention"]))
    with pytest.raises(ConfigError, match=r"no_rope_layers must have a 1 .* for each of 2 layers; got a list of 1"):
        read_config(tiny_config("smollm3", no_rope_layers=[1]))
    with pytest.raises(ConfigError, match=r"sliding_window_pattern must be a number, or letters L .* got 'LX'"):
        read_config(tiny_config("exaone4", sliding_window_pattern="LX"))
    with pytest.raises(ConfigError, match=r"partial_rotary_factor 0.2 of head_dim 16 is 3 features"):
        read_config(tiny_config("glm", partial_rotary_factor=0.2))


def test_fields_that_transformers_misreads_are_refused():
    """Half of a head, YaRN's steps that are not whole for one type of layer, and growing queries: it ignores these."""
    half = {"rope_type": "default", "rope_theta": 777.0, "partial_rotary_factor": 0.5}
    with pytest.raises(ConfigError, match="partial_rotary_factor is not supported"):
        read_config(tiny_config("gemma4", rope_parameters={"full_attention": half}))
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "truncate": False}
    with pytest.raises(ConfigError, match="there 'truncate' must be true"):
        read_config(tiny_config("gemma4", rope_parameters={"sliding_attention": yarn}))
    grown = {"rope_type": "default", "rope_theta": 1e4, "llama_4_scaling_beta": 0.5}
    with pytest.raises(ConfigError, match="no field 'llama_4_scaling_beta'"):
        read_config(tiny_config("ministral", rope_parameters=grown))


def test_a_flag_that_defaults_to_true_is_not_null():
    """transformers takes null for false."""
    for family, name in (
        ("deepseekv3", "norm_topk_prob"),
        ("lfm2moe", "use_expert_bias"),
        ("bamba", "mamba_conv_bias"),
    ):
        with pytest.raises(ConfigError, match=f"'{name}' must be true or false; got None"):
            read_config(tiny_config(family, **{name: None}))
    with pytest.raises(ConfigError, match="'truncate' must be true or false; got None"):
        read_config(tiny_config("gptoss", rope_parameters={"rope_type": "yarn", "factor": 4.0, "truncate": None}))


def test_older_gemma3_configs_give_the_same_model(tmp_path):
    """rope_theta, rope_local_base_freq and rope_scaling before transformers 5, and a pattern in place of types."""
    new = tiny_config(
        "gemma3",
        num_hidden_layers=4,
        layer_types=["sliding_attention", "full_attention"] * 2,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
        },
    )
    scaling = {"rope_type": "linear", "factor": 8.0}
    old = without(new, "layer_types", "rope_parameters") | {"rope_local_base_freq": 300.0, "rope_scaling": scaling}
    assert read_config(old) == read_config(without(new, "sliding_window_pattern"))


def test_exaones_pattern_letters_are_its_layer_types():
    config = without(tiny_config("exaone4", num_hidden_layers=6, sliding_window_pattern="LLG"), "head_dim")
    windows = [layer.mixer.window for layer in read_config(config).layers]
    assert windows == [24, 24, None, 24, 24, None]
    turning = [layer.mixer.rope is not None for layer in read_config(config).layers]
    assert turning == [True, True, False, True, True, False]


def test_embedding_factors_are_rounded_as_by_torch():
    for number in (3072**0.5, 33.94112549695428, 1.00390625, 48.0):
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            assert rounded(number, dtype) == torch.tensor(number).to(dtype).item()


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (Gemma3RMSNorm, RMSNorm(256, 1e-6, offset=1.0)),
        (Olmo2RMSNorm, RMSNorm(256, 1e-6, after_cast=False)),
        (GlmRMSNorm, RMSNorm(256, 1e-6)),
    ],
    ids=["gemma3", "olmo2", "glm"],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_norms_round_where_those_of_transformers_do(theirs, ours, dtype):
    """In float32 both agree to 2^-22 or so, which moves a rounding to 2^-11 once in a thousand times; a rounding in
    another place moves one in four."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 256, generator=generator).to(dtype)
    norm = theirs(256, 1e-6).to(dtype)
    norm.weight.data = torch.randn(256, generator=generator).to(dtype)
    with torch.no_grad():
        assert (ours(norm.weight, x) != norm(x)).float().mean() < 0.005


# ── several parts ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def multimodal(tmp_path):
    """A Gemma 3 that reads images, and its text model."""
    text = SMALL | CASES["gemma3"].fields
    vision = {
        "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
        "image_size": 8, "patch_size": 4,
    }  # fmt: skip
    config = transformers.Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=100,
        tie_word_embeddings=False, eos_token_id=0, pad_token_id=0, bos_token_id=0,
    )  # fmt: skip
    whole = transformers.Gemma3ForConditionalGeneration(config).eval()
    alone = build(CASES["gemma3"])
    whole.model.language_model.load_state_dict(alone.model.state_dict())
    whole.lm_head.load_state_dict(alone.lm_head.state_dict())
    return save(whole, tmp_path / "whole"), alone


# How names of weights begin in files of transformers 4.52 and later, and before.
NAMES = {
    "model.language_model.": "language_model.model.",
    "lm_head.": "language_model.lm_head.",
    "model.vision_tower.": "vision_tower.",
    "model.multi_modal_projector.": "multi_modal_projector.",
}


@pytest.mark.parametrize("names", [NAMES, {old: new for new, old in NAMES.items()}], ids=["older", "newer"])
def test_the_text_part_of_a_multimodal_checkpoint_loads_with_a_warning(multimodal, names, monkeypatch):
    folder, alone = multimodal
    tensors = load_file(folder / "model.safetensors")
    for start, other in names.items():
        tensors = {
            other + name.removeprefix(start) if name.startswith(start) else name: t for name, t in tensors.items()
        }
    assert all(name.startswith(tuple(names.values())) for name in tensors)
    save_file(tensors, folder / "model.safetensors")
    monkeypatch.setattr("onward.errors._warned", set())
    with pytest.warns(OnwardWarning, match="the text part is loaded"):
        lm = onward.load(folder)
    ids = list(range(20))
    with torch.no_grad():
        want = alone(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(lm.logits(ids), want, rtol=0, atol=TOLERANCE)
    assert num_parameters(read_config(json.loads((folder / "config.json").read_text()))) == lm.model.num_parameters
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        onward.load(folder)


@pytest.mark.parametrize("case", ["mistral", "ministral3", "mistral4"])
def test_the_text_part_of_mistrals_vision_models(case, tmp_path, monkeypatch):
    alone = build(CASES[case])
    vision = transformers.PixtralVisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, head_dim=8, image_size=28,
        patch_size=14,
    )  # fmt: skip
    text = alone.config.to_dict()
    config = transformers.Mistral3Config(text_config=text, vision_config=vision, tie_word_embeddings=False)
    whole = transformers.Mistral3ForConditionalGeneration(config).eval()
    whole.model.language_model.load_state_dict(alone.model.state_dict())
    whole.lm_head.load_state_dict(alone.lm_head.state_dict())
    monkeypatch.setattr("onward.errors._warned", set())
    with pytest.warns(OnwardWarning, match="the text part is loaded"):
        lm = onward.load(save(whole, tmp_path))
    ids = list(range(40))
    with torch.no_grad():
        want = alone(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(lm.logits(ids), want, rtol=0, atol=TOLERANCE)


def test_mistrals_text_part_of_another_kind_is_refused():
    whole = {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": {"model_type": "llama"}}
    with pytest.raises(ConfigError, match="must be one of 'mistral', 'ministral3', 'mistral4'; got 'llama'"):
        read_config(whole)


def test_a_multimodal_config_without_a_text_part_is_refused():
    with pytest.raises(ConfigError, match="Gemma3ForConditionalGeneration needs a 'text_config'"):
        read_config({"architectures": ["Gemma3ForConditionalGeneration"], "vision_config": {"hidden_size": 8}})


def test_unknown_fields_of_the_text_part_are_named():
    text = without(tiny_config("gemma3"), "architectures") | {"attn_logit_softcapping": 50.0}
    with pytest.raises(ConfigError, match=r"'attn_logit_softcapping' is 50.0"):
        read_config({"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text})


def test_a_vision_model_is_refused_by_its_name(tmp_path):
    (tmp_path / "config.json").write_text('{"architectures": ["SiglipVisionModel"], "hidden_size": 8}')
    expected = (
        "'SiglipVisionModel' is not supported; supported are .*; transformers has no causal language model of that name"
    )
    with pytest.raises(UnsupportedArchitectureError, match=expected):
        onward.load(tmp_path)


def test_an_adapter_folder_names_its_base_model(tmp_path):
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "google/gemma-3-1b-it", "r": 8}')
    with pytest.raises(ConfigError, match=r"no config.json.*adapter.*google/gemma-3-1b-it"):
        onward.load(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"the model that the adapter was trained on$"):
        onward.load(tmp_path)
