"""Prompts as JSON Lines: an object a line in, an object a line out, in the same order."""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import typer

from onward.cli.json_output import json_fields
from onward.cli.prompt import expanded
from onward.cli.terminal import waiting
from onward.errors import OnwardError, RequestError, one_line
from onward.option_names import check_option_names
from onward.text_input import LONGEST_LINE, TextError, parse_request_json, read_lines

if TYPE_CHECKING:
    from onward import Completion, LanguageModel
    from onward.requests import Request


@dataclass
class Line:
    """One line: its place among those that are not blank, its `id`, if it has one, and its fields or what is wrong."""

    index: int
    fields: dict[str, Any]
    error: str | None = None

    def write(self, answer: Mapping[str, Any]) -> None:
        """Print what came of it."""
        name = {"id": self.fields["id"]} if "id" in self.fields else {}
        content = {"index": self.index, **name, **(answer if self.error is None else {"error": self.error})}
        # Bytes, for JSON is UTF-8 whatever the terminal's encoding.
        typer.echo(json.dumps(content, ensure_ascii=False).encode("utf-8", "backslashreplace"))


@dataclass(frozen=True)
class LinePrompts:
    """What lines mean to a model.

    options: those of the flags, which a line's own win over. variables: of the chat template, likewise. as_chat: a
    text is a user's message. system: the system message before it.
    """

    lm: "LanguageModel"
    options: Mapping[str, Any]
    variables: Mapping[str, Any]
    as_chat: bool = False
    system: str | None = None

    def request(self, fields: Mapping[str, Any]) -> "Request":
        """Raises `OnwardError` for a line that cannot be served."""
        from onward.requests.options import option_names

        own = {name: value for name, value in fields.items() if name not in ("id", "prompt", "messages")}
        if ("prompt" in fields) == ("messages" in fields):
            raise RequestError('a line wants a "prompt", a text or a list of ids, or "messages": one of them')
        messages = fields.get("messages")
        if self.as_chat and isinstance(fields.get("prompt"), str):
            first = [] if self.system is None else [{"role": "system", "content": self.system}]
            messages = [*first, {"role": "user", "content": fields["prompt"]}]
        if messages is None:
            check_option_names(own, option_names())
            prompt = fields["prompt"]
            if not isinstance(prompt, str | list):
                raise RequestError(f'"prompt" must be a text or a list of ids; got {prompt!r}')
        else:
            if not (isinstance(messages, list) and all(isinstance(message, dict) for message in messages)):
                raise RequestError(f'"messages" must be a list of objects with a role and a content; got {messages!r}')
            of_flags = {name: value for name, value in self.variables.items() if name not in own}
            template = {**of_flags, **(own.pop("template", None) or {})}
            return self.lm.chat_request(messages, **{**self.options, **own, "template": template})
        return self.lm.request(prompt, **{**self.options, **own})


def generate_lines(file: Path, prompts: LinePrompts, batch: int) -> bool:
    """Complete the prompts of a file's lines, `batch` at a time, and print a line for each.

    Returns:
        Whether all could be served. One that could not is a line with an "error"; the others go on.
    """
    all_served = True
    with _opened(file) as content:
        lines = _lines(content)
        while group := list(islice(lines, batch)):
            with waiting("generating …"):
                _complete(prompts, group)
            all_served = all_served and all(line.error is None for line in group)
    return all_served


def _complete(prompts: LinePrompts, group: Sequence[Line]) -> None:
    requests: dict[int, Request] = {}
    for line in group:
        if line.error is None:
            try:
                requests[line.index] = prompts.request(line.fields)
            except Exception as error:
                line.error = _reason(error)
    completions = _completions(prompts.lm, group, requests)
    for line in group:
        completion = completions.get(line.index)
        fields = (
            {} if completion is None else json_fields(completion, requests[line.index].prompt, prompts.lm.tokenizer)
        )
        line.write(fields)


def _completions(
    lm: "LanguageModel", group: Sequence[Line], requests: "Mapping[int, Request]"
) -> "dict[int, Completion]":
    """Together; where one of them cannot be served to its end, each alone."""
    if not requests:
        return {}
    try:
        return dict(zip(requests, lm.generate(list(requests.values())), strict=True))
    except Exception:
        completions = {}
        for line in group:
            if line.index in requests:
                try:
                    completions[line.index] = lm.generate(requests[line.index])
                except Exception as error:
                    line.error = _reason(error)
        return completions


def _reason(error: Exception) -> str:
    """The message of a line's error; a defect, too, is of its line alone."""
    return str(error) if isinstance(error, OnwardError) else f"{type(error).__name__}: {one_line(error)}"


@contextmanager
def _opened(file: Path) -> Iterator[IO[bytes]]:
    if str(file) == "-":
        if sys.stdin is None:
            raise RequestError("standard input is closed, and the prompts were to come from there")
        yield sys.stdin.buffer
        return
    try:
        content = expanded(file).open("rb")
    except OSError as error:
        raise RequestError(f"the prompts in {str(file)!r} cannot be read: {error.strerror or error}") from error
    with content:
        yield content


def _lines(content: IO[bytes]) -> Iterator[Line]:
    for index, text in enumerate(text for text in read_lines(content) if text.strip()):
        if len(text) > LONGEST_LINE:
            yield Line(index, {}, f"the line is longer than {LONGEST_LINE:,} bytes")
            continue
        try:
            fields = parse_request_json(text)
        except TextError as error:
            yield Line(index, {}, f"no JSON: {error}" if error.at is None else str(error))
            continue
        if isinstance(fields, dict):
            yield Line(index, fields)
        else:
            yield Line(index, {}, f"a line must be a JSON object; got {type(fields).__name__}")
