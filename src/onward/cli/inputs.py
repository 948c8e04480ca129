"""Prompts from the argument, a file or standard input; and completions as JSON."""

import dataclasses
import math
import os
import re
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onward.cli.terminal import is_terminal
from onward.errors import RequestError
from onward.util.text_input import TextError, decode_text

if TYPE_CHECKING:
    from onward.language_model import Completion
    from onward.sampling import TokenLogprobs
    from onward.tokenizer import Tokenizer


def read_prompt(argument: str | None, file: Path | None) -> str:
    """The prompt as text.

    The newline that editors and `echo` put at the very end of a file or of standard input is dropped, so that the
    same words give the same prompt wherever they come from.

    Raises:
        RequestError: there is no prompt, there are two, or the prompt is not UTF-8.
    """
    from_input = "-" in (argument, str(file))
    if argument is not None and file is not None:
        raise RequestError("the prompt is given twice, as an argument and with --file: give one")
    if argument is not None and not from_input:
        return argument
    if file is not None and not from_input:
        return _without_last_newline(_read(file, "prompt file", f"the prompt in {file}"))
    if not from_input and (sys.stdin is None or is_terminal(sys.stdin)):
        raise RequestError("no prompt: give one as an argument, with --file FILE, or on standard input")
    return _without_last_newline(_standard_input("the prompt in standard input"))


def read_text(file: Path) -> str:
    """The content of a file that a flag names; '-' is standard input.

    Raises:
        RequestError: it cannot be read as UTF-8.
    """
    return _standard_input("standard input") if str(file) == "-" else _read(file, "file", repr(str(file)))


def parse_ids(text: str) -> list[int]:
    """Token ids with spaces, commas or the brackets of a list around them."""
    words = re.sub(r"[\[\],]", " ", text).split()
    try:
        return [int(word) for word in words]
    except ValueError:
        wrong = next(word for word in words if not re.fullmatch(r"[+-]?\d+", word))
        raise RequestError(f"with --ids the prompt is token ids such as '1 2 3'; got {wrong!r}") from None


def expanded(file: Path) -> Path:
    """With ~ as the shell would have it; where that user is unknown, the name as it stands."""
    return Path(os.path.expanduser(file))


def expanded_source(source: str) -> str:
    """A model's source with ~ as the shell would have it, for `--model=~/x`, which shells leave alone."""
    return os.path.expanduser(source) if source.startswith("~") else source


def _read(file: Path, what: str, where: str) -> str:
    try:
        return _decoded(expanded(file).read_bytes(), where)
    except OSError as error:
        raise RequestError(f"the {what} {str(file)!r} cannot be read: {error.strerror or error}") from error


def _standard_input(where: str) -> str:
    if sys.stdin is None:
        raise RequestError("standard input is closed, and the prompt was to come from there")
    return _decoded(sys.stdin.buffer.read(), where)


def _decoded(content: bytes, where: str) -> str:
    try:
        return decode_text(content)
    except TextError as error:
        raise RequestError(f"{where} is not UTF-8 text: {error}") from error


def _without_last_newline(text: str) -> str:
    return text.removesuffix("\n").removesuffix("\r") if text.endswith("\n") else text


def json_fields(completion: "Completion", prompt: Sequence[int], tokenizer: "Tokenizer | None") -> dict[str, Any]:
    """All texts of a prompt, `choices`, each with its tokens; the first one's text stands beside them.

    The same fields whatever was asked for, but for the `message` of a chat, and those of logprobs: `logprob` and `top`
    of a token, and `prompt`, the prompt's tokens. Without a tokenizer tokens have no text.
    """
    fields: dict[str, Any] = {
        "text": completion.text,
        "prompt_tokens": completion.prompt_tokens,
        "cached_tokens": completion.cached_tokens,
    }
    if completion.prompt_logprobs is not None:
        fields["prompt"] = _tokens(prompt, completion.prompt_logprobs, (), tokenizer)
    return fields | {"choices": [_choice(one, prompt, tokenizer) for one in completion.choices]}


def _choice(completion: "Completion", prompt: Sequence[int], tokenizer: "Tokenizer | None") -> dict[str, Any]:
    draft, laps = completion.speculation, completion.timing.per_token_ms
    return {
        "text": completion.text,
        **({} if completion.message is None else {"message": completion.message.to_dict()}),
        "tokens": _tokens(completion.token_ids, completion.logprobs, prompt, tokenizer),
        "finish_reason": completion.finish_reason,
        "stopped_by": completion.stopped_by,
        "seed": completion.seed,
        "score": completion.score,
        "timing": {
            "prefill_ms": completion.timing.prefill_ms,
            "total_ms": completion.timing.total_ms,
            "tokens_per_second": completion.timing.tokens_per_second,
            "median_ms_per_token": statistics.median(laps) if laps else None,
            "worst_ms_per_token": max(laps, default=None),
        },
        "speculation": None if draft is None else dataclasses.asdict(draft),
    }


def _tokens(
    ids: Sequence[int],
    logprobs: "Sequence[TokenLogprobs | None] | None",
    before: Sequence[int],
    tokenizer: "Tokenizer | None",
) -> list[dict[str, Any]]:
    """Ids with their texts, which add up to the whole: a character of several tokens is in the last of them."""
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
    """JSON knows no infinity."""
    return value if math.isfinite(value) else None
