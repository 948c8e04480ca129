"""Limits of one request body, checked before anything is tokenised, rendered or compiled."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from onward.util.option_names import check_option_names
from onward.util.options import option, options_of


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The most of each thing that one body may ask for or contain. `onward serve --limit NAME=N` changes one.

    Raises:
        RequestError: a value that is not a whole number of 1 or more.
    """

    fields: int = option(256, low=1, help="Fields of a body.")
    n: int = option(128, low=1, help="`n`: texts for one prompt.")
    beams: int = option(128, low=1, help="`beams`.")
    prompts: int = option(256, low=1, help="Prompts in one body.")
    texts: int = option(1024, low=1, help="Prompts times `n`.")
    ids: int = option(1_000_000, low=1, help="Token ids in a prompt or in /detokenize.")
    messages: int = option(4096, low=1, help="Messages of a chat, and items of a response's `input`.")
    parts: int = option(1024, low=1, help="Parts of a message's content.")
    tools: int = option(512, low=1, help="Tools.")
    schema_values: int = option(20_000, low=1, help="Values in a JSON Schema, or in all schemas of `tools`.")
    schema_depth: int = option(64, low=1, help="Objects and lists within each other in a JSON Schema.")
    grammar_characters: int = option(500_000, low=1, help="Characters of `regex` and `grammar`.")
    choices: int = option(4096, low=1, help="Texts of `choice`.")
    stop_strings: int = option(64, low=1, help="Strings of `stop`.")
    stop_characters: int = option(1024, low=1, help="Characters of a stop string.")
    bad_words: int = option(1024, low=1, help="Entries of `bad_words`.")
    bad_word_characters: int = option(256, low=1, help="Characters or ids of a bad word.")
    biases: int = option(4096, low=1, help="Entries of `logit_bias`, and ids of `eos` and `dry_sequence_breakers`.")
    logprobs: int = option(20, low=1, help="`logprobs`, `top_logprobs` and `prompt_logprobs`: alternatives per token.")
    text_characters: int = option(1_048_576, low=1, help="Characters of a text or a chat for /tokenize.")
    template_values: int = option(4096, low=1, help="Values in `chat_template_kwargs`, nested ones included.")

    def __post_init__(self) -> None:
        kind: Any = type(self)  # mypy takes a dataclass's own hash for its class's
        for name, declared in options_of(kind).items():
            declared.check(getattr(self, name))

    @classmethod
    def of(cls, limits: Mapping[str, Any]) -> Self:
        """Limits with some changed. Raises `RequestError`: an unknown name, or an invalid value."""
        check_option_names(limits, [field.name for field in dataclasses.fields(cls)], noun="limit")
        return cls(**limits)
