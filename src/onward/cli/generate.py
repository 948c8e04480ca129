"""`onward generate`: one prompt in, its continuation out."""

import datetime
import json
import sys
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from onward.cli.flags import (
    CHAT,
    OUTPUT,
    PROMPT,
    AdapterFlags,
    DraftFlags,
    GenerateFlags,
    ModelFlags,
    SamplingFlags,
    TemplateFlags,
    flag,
    options_of,
)
from onward.cli.inputs import json_fields, parse_ids, read_prompt
from onward.cli.loading import load_model, template_variables
from onward.cli.terminal import TextWriter, follow, is_terminal, note, summary, waiting, write
from onward.errors import OnwardError, RequestError

if TYPE_CHECKING:
    from onward.language_model import Completion, Piece


def generate(
    prompt: Annotated[
        str | None, typer.Argument(metavar="PROMPT", help="The prompt; '-' or none reads standard input.")
    ] = None,
    *,
    file: Path | None = flag("Read the prompt from FILE.", "-f", group=PROMPT),
    chat: bool = flag("Send the prompt as a user's message of a chat.", default=False, group=CHAT),
    system: str | None = flag("The system message of that chat.", group=CHAT),
    ids: bool = flag("Prompt and output are token ids.", default=False, group=PROMPT),
    as_json: bool = flag(
        "Print one JSON object: texts, tokens, seeds, timing …", "--json", default=False, group=OUTPUT
    ),
    template: TemplateFlags,
    sampling: SamplingFlags,
    texts: GenerateFlags,
    model: ModelFlags,
    drafting: DraftFlags,
    adapting: AdapterFlags,
) -> None:
    """Continue a prompt, and print the text as it comes.

    The prompt is the argument, a file or standard input; one newline at the
    end of the latter two is dropped. Into a pipe goes the text and nothing
    else. Options not given are the model's own. Several texts, and those of
    beams, are printed when all are finished.

    For files of prompts, a line each, there is onward batch.
    """
    if system is not None and not chat:
        raise RequestError("--system is the system message of a chat: add --chat")
    if template.is_set and not chat:
        raise RequestError("--no-thinking, --thinking and --template-option are for a chat: add --chat")
    if chat and ids:
        raise RequestError("--chat writes a text around the prompt, --ids takes it as ids: give one of them")
    text = read_prompt(prompt, file)
    continued = parse_ids(text) if ids else text
    options = options_of(sampling, texts) | adapting.first()
    if not as_json and (texts.logprobs is not None or texts.prompt_logprobs is not None):
        raise RequestError("logprobs are part of what --json prints: add it")
    if drafting.draft is not None and (texts.beams or 1) > 1:
        raise RequestError("beams cannot use a draft: give --beams or --draft")
    lm = load_model(model, drafting, adapting)
    variables = template_variables(template, lm, model.model) if chat else {}
    now = datetime.datetime.now(datetime.UTC)
    start = lm.chat_prompt(_messages(text, system), variables, now) if chat else continued
    as_ids = ids or lm.tokenizer is None
    if not as_json and lm.defaults.replace(**options).rows == 1:
        _print_stream(lm.stream(start, **options), as_ids=as_ids)
        return
    if chat:
        request = lm.chat_request(_messages(text, system), template=variables, now=now, **options)
    else:
        request = lm.request(start, **options)
    with waiting("generating …"):
        completion = lm.generate(request)
    if as_json:
        fields = json_fields(completion, request.prompt, lm.tokenizer)
        # Bytes, for JSON is UTF-8 whatever the terminal's encoding.
        typer.echo(json.dumps(fields, ensure_ascii=False).encode())
    else:
        _print_texts(completion.choices, as_ids=as_ids)


def _messages(text: str, system: str | None) -> list[dict[str, str]]:
    first = [] if system is None else [{"role": "system", "content": system}]
    return [*first, {"role": "user", "content": text}]


def _print_stream(stream: "Generator[Piece, None, Completion]", *, as_ids: bool) -> None:
    writer = TextWriter()
    before = ""

    def emit(piece: "Piece") -> None:
        nonlocal before
        writer.write(f"{before}{piece.token_id}" if as_ids else piece.text)
        before = " "

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
