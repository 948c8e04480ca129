"""`onward generate` and `onward verify`: continue a prompt, and check that a model and build generate a text."""

import dataclasses
import datetime
import json
import statistics
import sys
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from onward.cli.flags import (
    AS_JSON,
    CHAT,
    INPUT,
    TEXT_FILE,
    AdapterFlags,
    AppliedAdapterFlags,
    DraftFlags,
    ModelFlags,
    TemplateFlags,
    flag,
)
from onward.cli.inputs import (
    check_writable,
    finite,
    generate_options,
    load_model,
    parse_ids,
    read_prompt,
    read_text,
    starting,
    template_variables,
    write_json,
)
from onward.cli.option_flags import GenerateFlags, SamplingFlags
from onward.cli.terminal import TextWriter, follow, is_terminal, note, summary, waiting, write
from onward.errors import OnwardError, RequestError
from onward.util.options import OUTPUT

if TYPE_CHECKING:
    from onward.language_model import Completion, LanguageModel, Piece
    from onward.sampling import TokenLogprobs
    from onward.tokenizer import Tokenizer


def generate(
    prompt: Annotated[
        str | None, typer.Argument(metavar="PROMPT", help="Prompt; by default, or for '-', standard input.")
    ] = None,
    *,
    file: Path | None = TEXT_FILE,
    chat: bool = flag("Send the prompt as a chat message.", default=False, group=CHAT),
    system: str | None = flag("System message for --chat.", group=CHAT),
    ids: bool = flag("Read and print token ids instead of text.", default=False, group=INPUT),
    as_json: bool = AS_JSON,
    receipt: Path | None = flag("Write a receipt of the text to FILE, for onward verify.", group=OUTPUT),
    template: TemplateFlags,
    sampling: SamplingFlags,
    texts: GenerateFlags,
    model: ModelFlags,
    drafting: DraftFlags,
    adapting: AppliedAdapterFlags,
) -> None:
    """Generate text from a prompt.

    Standard output gets only the generated text: token by token, or once it
    is complete with --samples or --beams. A file or standard input may end
    with a newline, which is not part of the prompt. Options for length,
    sampling and repetition default to the model's generation config.

    To run a file of prompts, use onward batch.
    """
    if system is not None and not chat:
        raise RequestError("--system needs --chat: add it")
    if template.is_set and not chat:
        raise RequestError("--thinking, --no-thinking and --template-option need --chat: add it")
    if chat and ids:
        raise RequestError("--chat takes text and --ids takes token ids: use one of them")
    text = read_prompt(prompt, file, example='onward generate "Once upon a time"')
    ids_or_text = parse_ids(text) if ids else text
    options = generate_options(sampling, texts) | adapting.first()
    if not as_json and (texts.logprobs is not None or texts.prompt_logprobs is not None):
        raise RequestError("--logprobs and --prompt-logprobs need --json: add it")
    if drafting.draft is not None and (texts.beams or 1) > 1:
        raise RequestError("--beams does not work with --draft: use one of them")
    if receipt is not None:
        if max(texts.beams or 1, texts.n or 1) > 1:
            raise RequestError("--receipt is of one text: leave out --samples and --beams")
        options = {"n": 1, "beams": 1} | options
        check_writable(receipt)
    lm = load_model(model, drafting, adapting)
    variables = template_variables(template, lm, model.model) if chat else {}
    now = datetime.datetime.now(datetime.UTC)
    messages = [] if system is None else [{"role": "system", "content": system}]
    messages.append({"role": "user", "content": text})
    as_ids = ids or lm.tokenizer is None
    if not as_json and lm.defaults.replace(**options).rows == 1:
        if chat:
            stream = lm.stream_chat(messages, template=variables, now=now, **options)
        else:
            stream = lm.stream(ids_or_text, **options)
        _write_receipt(lm, _print_stream(stream, as_ids=as_ids), receipt)
        return
    if chat:
        request = lm.chat_request(messages, template=variables, now=now, **options)
    else:
        request = lm.request(ids_or_text, **options)
    with waiting("generating …"):
        completion = lm.generate(request)
    if as_json:
        fields = json_fields(completion, request.prompt, lm.tokenizer)
        # Bytes: JSON is UTF-8, whatever the terminal's encoding.
        typer.echo(json.dumps(fields, ensure_ascii=False).encode())
    else:
        _print_texts(completion.choices, as_ids=as_ids)
    _write_receipt(lm, completion, receipt)


def _write_receipt(lm: "LanguageModel", completion: "Completion", file: Path | None) -> None:
    if file is not None:
        write_json(file, json.dumps(lm.receipt(completion).to_json(), ensure_ascii=False))


# Exit codes besides 0 and 2, which is that of errors.
DIFFERENT_TEXT, OTHER_FINGERPRINT = 1, 3


def verify(
    receipt: Annotated[Path, typer.Argument(metavar="RECEIPT", help="JSON file of a receipt; '-' is standard input.")],
    *,
    prompt: str | None = flag("Prompt, for a receipt without one.", group=INPUT),
    file: Path | None = TEXT_FILE,
    as_json: bool = AS_JSON,
    model: ModelFlags,
    adapting: AdapterFlags,
) -> None:
    """Check that this model and build generate a text.

    The text is that of a receipt, which generate --receipt writes. One prefill
    computes which token the sampler draws at each position, and the logprobs,
    and compares them with the receipt's.

    Exit codes: 0, the text is verified. 1, another text: the first difference
    and its reason are shown. 3, the same text, but the receipt is of another
    build or model. 2, an error.
    """
    content = read_text(receipt)
    text = None if prompt is None and file is None else read_prompt(prompt, file, example="--prompt TEXT")
    with starting():
        from onward.language_model import Receipt
    read = Receipt.from_json(content)
    lm = load_model(model, adapting=adapting)
    with waiting("verifying …"):
        result = lm.verify(read, text)
    verdict = {"verified": result.is_verified, "same_text": result.is_same_text, "message": str(result)}
    typer.echo(json.dumps({**verdict, **dataclasses.asdict(result)}) if as_json else str(result))
    if not result.is_verified:
        raise typer.Exit(OTHER_FINGERPRINT if result.is_same_text else DIFFERENT_TEXT)


def _print_stream(stream: "Generator[Piece, None, Completion]", *, as_ids: bool) -> "Completion":
    writer = TextWriter()
    separator = ""

    def emit(piece: "Piece") -> None:
        nonlocal separator
        writer.write(f"{separator}{piece.token_id}" if as_ids else piece.text)
        separator = " "

    try:
        completion = follow(stream, emit)
    except OnwardError:
        writer.end_line()
        raise
    writer.end_line()
    _note_summary(completion)
    return completion


def _print_texts(completions: "Sequence[Completion]", *, as_ids: bool) -> None:
    for number, completion in enumerate(completions):
        if number:
            write("---\n" if is_terminal(sys.stdout) else "\n---\n")
        text = " ".join(map(str, completion.token_ids)) if as_ids else completion.text
        writer = TextWriter()
        writer.write(text)
        writer.end_line()
        _note_summary(completion)


def _note_summary(completion: "Completion") -> None:
    if is_terminal(sys.stdout) and is_terminal(sys.stderr):
        note(summary(completion))


def json_fields(completion: "Completion", prompt: Sequence[int], tokenizer: "Tokenizer | None") -> dict[str, Any]:
    """Return a completion as a JSON object: the first text, and `choices` with all texts and their tokens.

    Only a chat has a `message`. With logprobs, tokens have `logprob` and `top`, and `prompt` has the prompt's tokens.
    With sampling_logprobs, tokens have `sampling_logprob` and `support`. Without a tokenizer, tokens have no text.
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
            if entry is not None and entry.sampling is not None:
                fields |= {"sampling_logprob": finite(entry.sampling), "support": entry.support}
        tokens.append(fields)
    return tokens
