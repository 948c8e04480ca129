"""A field that config.json leaves out has the same default as in transformers: every family, every field."""

import json

import pytest
from transformers import AutoConfig

from onward.errors import OnwardError
from onward.models import FAMILIES, read_config
from onward.models.families import _OF_MODEL_TYPES
from onward.testing import random_checkpoint

# Two sizes of tensors, which a file cannot hold otherwise than config.json makes them.
SIZES = {"head_dim", "num_key_value_heads"}
NAMES = sorted(name.removesuffix("ForCausalLM").lower() for name in FAMILIES if name.endswith("ForCausalLM"))


def config_of(family, folder):
    random_checkpoint(folder, family)
    config = json.loads((folder / "config.json").read_text())
    kinds = {name: kind for kind, name in reversed(_OF_MODEL_TYPES.items())} | {"LlamaForCausalLM": "llama"}
    return config | {"model_type": kinds[config["architectures"][0]]}


def read(config):
    try:
        return read_config(config)
    except OnwardError:
        return None


@pytest.mark.parametrize("family", NAMES)
def test_omitted_fields_have_the_defaults_of_transformers(family, tmp_path):
    config = config_of(family, tmp_path / family)
    defaults = AutoConfig.for_model(config["model_type"]).to_dict()
    compared = 0
    for name in config.keys() & defaults.keys() - SIZES - {"architectures", "model_type"}:
        without = read({field: value for field, value in config.items() if field != name})
        explicit = read(config | {name: defaults[name]})
        if without is not None and explicit is not None:
            assert without == explicit, f"{name}: the default of transformers is {defaults[name]}"
            compared += 1
    assert compared >= 4
