"""Tokens that end a text by what they are called, whatever `eos_token_id` and their types say: llama.cpp's rules."""

from collections.abc import Collection, Mapping, Sequence

_ENDS = """
<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> <end_of_turn> <|endoftext|> </s> <|eom_id|> <EOT>
_<EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance> <eos> <turn|> <|tool_response> <\uff5cend▁of▁sentence\uff5c> [e~[
"""
ENDS = frozenset(_ENDS.split())
# In Gemma 4 it ends text that is struck through.
STRUCK = "</s>"
# Of filling in the middle: the key before "_token_id" -> what the token is called where no key names it.
FIM_ENDS = {
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
# Marks of filling in the middle, which end nothing.
_FIM_MARKS = """
<|fim_prefix|> <fim-prefix> <fim_prefix> <\uff5cfim▁begin\uff5c> <PRE> ▁<PRE> <|code_prefix|> <|prefix|>
<|fim_suffix|> <fim-suffix> <fim_suffix> <\uff5cfim▁hole\uff5c> <SUF> ▁<SUF> <|code_suffix|> <|suffix|>
<|fim_middle|> <fim-middle> <fim_middle> <\uff5cfim▁end\uff5c> <MID> ▁<MID> <|code_middle|> <|middle|>
"""
FIM_MARKS = frozenset(_FIM_MARKS.split())


def known_ends(tokens: Sequence[str], named: Mapping[str, int] | None = None) -> list[int]:
    """The ids that end a text by what they are called. named: ids that keys name, by the key before "_token_id"."""
    named = named or {}
    present = ENDS.intersection(tokens)
    ids = set(ids_of(tokens, present - no_ends(present)))
    for key, called in FIM_ENDS.items():
        token = named.get(key, next(iter(ids_of(tokens, called)), None))
        ids |= set() if token is None else {token}
    return sorted(ids)


def ids_of(tokens: Sequence[str], texts: Collection[str]) -> list[int]:
    """The ids of the tokens with these texts. Few vocabularies have any: one look at all tells."""
    present = set(texts).intersection(tokens)
    return [id for id, text in enumerate(tokens) if text in present] if present else []


def no_ends(present: Collection[str]) -> set[str]:
    """Those that mean something else beside others."""
    none = set()
    # Harmony (gpt-oss) and Solar end messages with <|end|>, and turns in other ways.
    calls = "<|call|>" in present or "<|calls|>" in present
    if calls and ("<|return|>" in present or "<|flush|>" in present):
        none.add("<|end|>")
    if "<|tool_response>" in present:
        none.add(STRUCK)
    return none
