"""The table of what is written as GGUF: an architecture of config.json -> a line of the table of what is read."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from onward.checkpoint.gguf.families import FAMILIES, WITH_KEY
from onward.checkpoint.gguf.family import GgufFamily
from onward.errors import RequestError

# The end of an error about a model that Onward does not write.
OTHER_WAY = (
    "For llama.cpp, run `onward convert MODEL FOLDER --to safetensors` and then llama.cpp's "
    "`convert_hf_to_gguf.py FOLDER`"
)


class Written(NamedTuple):
    """architecture: GGUF's. family: its line. needs_head: llama.cpp opens no file of it without a head, so a tied one
    is written as a copy of the embedding."""

    architecture: str
    family: GgufFamily
    needs_head: bool = False

    def fields(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The config.json of what is written."""
        return {**config, **({"tie_word_embeddings": False} if self.needs_head else {})}


# Lines that turn round by themselves.
_PLAIN = (*("llama", "qwen2", "qwen3", "qwen3moe", "phi3", "exaone4", "granite", "granitemoe", "smollm3", "seed_oss"),)
WRITTEN: dict[str, Written] = {
    **{FAMILIES[name].architecture: Written(name, FAMILIES[name]) for name in _PLAIN},
    "MistralForCausalLM": Written("llama", FAMILIES["llama"]),
    "MixtralForCausalLM": Written("llama", WITH_KEY["llama", "expert_count"]),
    "Olmo2ForCausalLM": Written("olmo2", FAMILIES["olmo2"], needs_head=True),
    "Olmo3ForCausalLM": Written("olmo2", WITH_KEY["olmo2", "attention.sliding_window"], needs_head=True),
}


def export_family(config: Mapping[str, Any]) -> Written:
    """The line of a config.json's architecture.

    Raises:
        RequestError: Onward writes no GGUF files of this architecture.
    """
    (architecture,) = config["architectures"]
    if architecture not in WRITTEN:
        raise RequestError(f"{architecture} cannot be written as GGUF; these can: {', '.join(WRITTEN)}. {OTHER_WAY}")
    return WRITTEN[architecture]
