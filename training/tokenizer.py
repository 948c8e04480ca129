"""The tokenizer: byte-level BPE with ChatML's special tokens, saved in the Hugging Face layout."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, IM_START, IM_END)

# Words with the space before them, digits one by one, runs of punctuation, newlines, other space:
# the split that Qwen's tokenizers use. Single digits keep numbers of any length copyable.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# ChatML. Tools are in the system turn, one per line; a call is written as in Hermes and Qwen. Without tools, the text
# is the same as with the template before tools were added.
CHAT_TEMPLATE = (
    "{%- set offered = namespace(text='') -%}"
    "{%- for tool in tools or [] -%}"
    "{%- set offered.text = offered.text + ('\\n' if offered.text else 'Tools:\\n') + (tool['function'] | tojson) -%}"
    "{%- endfor -%}"
    "{%- if offered.text and (not messages or messages[0]['role'] != 'system') -%}"
    "{{- '<|im_start|>system\\n' + offered.text + '<|im_end|>\\n' -}}"
    "{%- endif -%}"
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + (message['content'] or '') -}}"
    "{%- if loop.first and offered.text and message['role'] == 'system' -%}{{- '\\n\\n' + offered.text -}}{%- endif -%}"
    "{%- for call in message['tool_calls'] or [] -%}"
    "{%- if message['content'] or not loop.first -%}{{- '\\n' -}}{%- endif -%}"
    "{{- '<tool_call>\\n{\"name\": \"' + call['function']['name'] + '\", \"arguments\": ' -}}"
    "{{- call['function']['arguments'] if call['function']['arguments'] is string"
    " else call['function']['arguments'] | tojson -}}"
    "{{- '}\\n</tool_call>' -}}"
    "{%- endfor -%}"
    "{{- '<|im_end|>' + '\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)


def token_id(tokenizer: Tokenizer, token: str) -> int:
    """The id of a token that must exist."""
    found = tokenizer.token_to_id(token)
    if found is None:
        raise ValueError(f"the tokenizer has no token {token!r}")
    return int(found)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Learn merges from texts. All 256 bytes are in the alphabet, so any text round-trips."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_without_special_tokens(texts), trainer)
    return tokenizer


def _without_special_tokens(texts: Iterable[str]) -> Iterator[str]:
    """Replace special tokens by line breaks, so that no merge is spent on their letters."""
    for text in texts:
        for token in SPECIAL_TOKENS:
            text = text.replace(token, "\n")
        yield text


def save_tokenizer(tokenizer: Tokenizer, folder: Path, max_length: int) -> None:
    """Write tokenizer.json and tokenizer_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "add_bos_token": False,
        "add_eos_token": False,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "bos_token": END_OF_TEXT,
        "eos_token": IM_END,
        "pad_token": END_OF_TEXT,
        "unk_token": None,
        "additional_special_tokens": [IM_START, IM_END],
        "added_tokens_decoder": {
            str(token_id(tokenizer, token)): {
                "content": token,
                "lstrip": False,
                "normalized": False,
                "rstrip": False,
                "single_word": False,
                "special": True,
            }
            for token in SPECIAL_TOKENS
        },
        "chat_template": CHAT_TEMPLATE,
    }
    text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")
