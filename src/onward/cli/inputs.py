"""Prompts from an argument, a file or standard input, and completions as JSON."""

import dataclasses
import math
import os
import re
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onward.cli.terminal import is_terminal, note
from onward.errors import RequestError
from onward.util.text_input import TextError, decode_text

if TYPE_CHECKING:
    from onward.language_model import Completion
    from onward.sampling import TokenLogprobs
    from onward.tokenizer import Tokenizer


_WAYS = "pass it as an argument ({}), with --file FILE or through a pipe"


def read_prompt(argument: str | None, file: Path | None, *, example: str) -> str:
    """Return the prompt as text, without the final newline that editors and `echo` add to a file or standard input.

    example: a command line with a prompt, for errors.
    """
    from_input = "-" in (argument, str(file))
    if argument is not None and file is not None:
        raise RequestError("the text is both an argument and a file (--file): use one of them")
    if argument is not None and not from_input:
        return argument
    if file is not None and not from_input:
        where, text = str(file), _read(file, f"the text in {file}")
    else:
        if is_terminal(sys.stdin):
            if not from_input:
                raise RequestError(f"no text: {_WAYS.format(example)}")
            note("type the text, and end it with Ctrl-D on a new line")
        where, text = "standard input", _standard_input("the text in standard input")
    text = text.removesuffix("\n").removesuffix("\r") if text.endswith("\n") else text
    if not text:
        raise RequestError(f"{where} is empty: {_WAYS.format(example)}")
    return text


def read_text(file: Path) -> str:
    """Read a file, or standard input for '-'; raise `RequestError` if it cannot be read as UTF-8."""
    return _standard_input("standard input") if str(file) == "-" else _read(file, repr(str(file)))


def parse_ids(text: str) -> list[int]:
    """Parse token ids, separated by spaces or written as a list."""
    words = re.sub(r"[\[\],]", " ", text).split()
    try:
        return [int(word) for word in words]
    except ValueError:
        wrong = next(word for word in words if not re.fullmatch(r"[+-]?\d+", word))
        raise RequestError(f"--ids needs token ids such as '1 2 3'; got {wrong!r}") from None


def expanded(file: Path) -> Path:
    """Expand ~ as the shell does; the path of an unknown user stays as it is."""
    return Path(os.path.expanduser(file))


def expanded_source(source: str) -> str:
    """Expand ~ in a model source: shells do not in `--model=~/x`."""
    return os.path.expanduser(source) if source.startswith("~") else source


def _read(file: Path, where: str) -> str:
    try:
        return _decoded(expanded(file).read_bytes(), where)
    except OSError as error:
        raise RequestError(f"{str(file)!r} cannot be read: {error.strerror or error}") from error


def _standard_input(where: str) -> str:
    if sys.stdin is None:
        raise RequestError(f"{where} cannot be read: standard input is closed")
    return _decoded(sys.stdin.buffer.read(), where)


def _decoded(content: bytes, where: str) -> str:
    try:
        return decode_text(content)
    except TextError as error:
        raise RequestError(f"{where} is not UTF-8 text: {error}") from error


def json_fields(completion: "Completion", prompt: Sequence[int], tokenizer: "Tokenizer | None") -> dict[str, Any]:
    """Return a completion as a JSON object: the first text, and `choices` with all texts and their tokens.

    Only a chat has a `message`. With logprobs, tokens have `logprob` and `top`, and `prompt` has the prompt's tokens.
    Without a tokenizer, tokens have no text.
    """
    fields: dict[str, Any] = {name: getattr(completion, name) for name in ("text", "prompt_tokens", "cached_tokens")}
    if completion.prompt_logprobs is not None:
        fields["prompt"] = _tokens(prompt, completion.prompt_logprobs, (), tokenizer)
    return fields | {"choices": [_choice(one, prompt, tokenizer) for one in completion.choices]}


def _choice(completion: "Completion", prompt: Sequence[int], tokenizer: "Tokenizer | None") -> dict[str, Any]:
    draft, timing = completion.speculation, completion.timing
    steps = timing.per_token_ms
    return {
        "text": completion.text,
        **({} if completion.message is None else {"message": completion.message.to_dict()}),
        "tokens": _tokens(completion.token_ids, completion.logprobs, prompt, tokenizer),
        **{name: getattr(completion, name) for name in ("finish_reason", "stopped_by", "seed", "score")},
        "timing": {
            **{name: getattr(timing, name) for name in ("prefill_ms", "total_ms", "tokens_per_second")},
            "median_ms_per_token": statistics.median(steps) if steps else None,
            "worst_ms_per_token": max(steps, default=None),
        },
        "speculation": None if draft is None else dataclasses.asdict(draft),
    }


def _tokens(
    ids: Sequence[int],
    logprobs: "Sequence[TokenLogprobs | None] | None",
    before: Sequence[int],
    tokenizer: "Tokenizer | None",
) -> list[dict[str, Any]]:
    """Return ids with their texts, which concatenate to the whole: the last token of a character has all of it."""
    from onward.tokenizer.text_stream import token_texts

    texts = None if tokenizer is None else token_texts(ids, logprobs, before, tokenizer)
    tokens = []
    for at, token in enumerate(ids):
        fields: dict[str, Any] = {"id": token} if texts is None else {"id": token, "text": texts[at].text}
        if logprobs is not None:
            entry = logprobs[at]
            top = []
            for place, (one, value) in enumerate(() if entry is None else entry.top):
                text = {} if texts is None else {"text": texts[at].top[place].text}
                top.append({"id": one} | text | {"logprob": finite(value)})
            fields |= {"logprob": None if entry is None else finite(entry.chosen), "top": top}
        tokens.append(fields)
    return tokens


def finite(value: float) -> float | None:
    """Return None for NaN and infinities, which JSON does not have."""
    return value if math.isfinite(value) else None
