"""`onward generate`: continue a prompt."""

import datetime
import json
import sys
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from onward.cli.declarations import CHAT, INPUT, flag
from onward.cli.flags import AS_JSON, TEXT_FILE, AppliedAdapterFlags, DraftFlags, ModelFlags, TemplateFlags, options_of
from onward.cli.inputs import json_fields, parse_ids, read_prompt
from onward.cli.loading import load_model, template_variables
from onward.cli.option_flags import GenerateFlags, SamplingFlags
from onward.cli.terminal import TextWriter, follow, is_terminal, note, summary, waiting, write
from onward.errors import OnwardError, RequestError

if TYPE_CHECKING:
    from onward.language_model import Completion, Piece


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
    options = options_of(sampling, texts) | adapting.first()
    if not as_json and (texts.logprobs is not None or texts.prompt_logprobs is not None):
        raise RequestError("--logprobs and --prompt-logprobs need --json: add it")
    if drafting.draft is not None and (texts.beams or 1) > 1:
        raise RequestError("--beams does not work with --draft: use one of them")
    lm = load_model(model, drafting, adapting)
    variables = template_variables(template, lm, model.model) if chat else {}
    now = datetime.datetime.now(datetime.UTC)
    messages = [] if system is None else [{"role": "system", "content": system}]
    messages.append({"role": "user", "content": text})
    as_ids = ids or lm.tokenizer is None
    if not as_json and lm.defaults.replace(**options).rows == 1:
        start = lm.chat_prompt(messages, variables, now) if chat else ids_or_text
        _print_stream(lm.stream(start, **options), as_ids=as_ids)
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


def _print_stream(stream: "Generator[Piece, None, Completion]", *, as_ids: bool) -> None:
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
