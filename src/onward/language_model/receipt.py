"""Receipts: small JSON documents that say which request gave which ids (docs/receipts.md)."""

import dataclasses
import hashlib
import json
import math
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from onward.chat import FORMATS, AnswerFormat
from onward.constraints import Grammar, GrammarSource
from onward.errors import OptionError, RequestError
from onward.language_model.completion import Completion
from onward.language_model.fingerprint import check_fingerprint
from onward.language_model.options import BEAM_OPTIONS, CONSTRAINTS, GenerateOptions, option_names
from onward.language_model.request import Request
from onward.util.text import brief
from onward.util.text_input import parse_json

_FORMAT = 1
# Options that are not in receipts: how many texts there are, what is reported, how tokens are computed, what ends a
# text from outside. A seed and a grammar are fields of their own.
_LEFT_OUT = frozenset(
    (
        *("n", "beams", *BEAM_OPTIONS, *CONSTRAINTS, "logprobs", "prompt_logprobs", "sampling_logprobs"),
        *("taps", "draft", "time_limit", "cancel", "stop_when", "seed"),
    )
)
# How a text ended. The last three ends come from outside: a receipt cannot prove them.
FINISH_REASONS = ("stop", "length", "time", "cancelled", "stop_when")


@dataclass(frozen=True)
class Receipt:
    """The claim that a request gives a text, which `LanguageModel.verify` checks with one prefill.

    fingerprint: of the model, the device, the build and the adapter (`Engine.fingerprint`).
    prompt_sha256: of the prompt's ids, as int32 in little-endian order, in hexadecimal.
    options: those of `GenerateOptions` that bear on the ids and are not defaults, as JSON values.
    seed: of this text; None with greedy decoding.
    token_ids: all generated ids, including the ending one.
    finish_reason: as in `Completion`, or "stop_when" for a text that this function ended.
    prompt_ids: of the prompt; None if they were left out.
    logprobs: of each of `token_ids`, if they were reported. JSON has null for -inf.
    grammar: the constraint in llguidance's format.
    answer: in a chat, the format of the answer: its name, the ids of its marks, and whether reasoning is open.
    """

    fingerprint: str
    prompt_sha256: str
    options: Mapping[str, Any]
    seed: int | None
    token_ids: Sequence[int]
    finish_reason: str
    prompt_ids: Sequence[int] | None = None
    logprobs: Sequence[float] | None = None
    grammar: str | None = None
    answer: Mapping[str, Any] | None = None

    def __repr__(self) -> str:
        return f"Receipt({len(self.token_ids)} tokens, finish_reason={self.finish_reason!r}, {self.fingerprint})"

    @classmethod
    def of(cls, completion: Completion, fingerprint: str, *, prompt: bool = True) -> Self:
        """The receipt of a text. fingerprint: of what generated it. prompt: include the prompt's ids.

        Raises:
            RequestError: as `check_request` raises it.
        """
        request = completion.request
        if request is None:
            raise RequestError("this completion has no request: a receipt is of a text that Onward generated")
        options, grammar = request.options, check_request(request)
        by_function = completion.finish_reason == "stop" and completion.stopped_by is options.stop_when is not None
        logprobs = completion.logprobs
        return cls(
            fingerprint=fingerprint,
            prompt_sha256=digest(request.prompt),
            options=_as_json(options),
            seed=completion.seed,
            token_ids=list(completion.token_ids),
            finish_reason="stop_when" if by_function else completion.finish_reason,
            prompt_ids=list(request.prompt) if prompt else None,
            logprobs=None if logprobs is None else [token.chosen for token in logprobs],
            grammar=None if grammar is None else grammar.source(),
            answer=None if request.answer is None else _answer_fields(request.answer),
        )

    def to_json(self) -> dict[str, Any]:
        """The document: JSON values, without fields that are None, apart from the seed."""
        fields = {name: value for name, value in vars(self).items() if value is not None or name == "seed"}
        if self.logprobs is not None:
            fields["logprobs"] = [None if logprob == -math.inf else logprob for logprob in self.logprobs]
        return {"onward_receipt": _FORMAT, **fields}

    @classmethod
    def from_json(cls, document: str | bytes | Mapping[str, Any]) -> Self:
        """The receipt of a document. Raises `RequestError` if it is not one."""
        values = parse_json(document) if isinstance(document, str | bytes) else document
        if not isinstance(values, Mapping) or "onward_receipt" not in values:
            raise RequestError(f'a receipt is a JSON object with "onward_receipt"; got {brief(values)}')
        fields = {name: value for name, value in values.items() if name != "onward_receipt"}
        if (version := values["onward_receipt"]) != _FORMAT:
            raise RequestError(f"the receipt has format {brief(version)}, but this Onward reads {_FORMAT}: upgrade it")
        known = {field.name: field for field in dataclasses.fields(cls)}
        needed = {name for name, field in known.items() if field.default is dataclasses.MISSING}
        for name in [*fields.keys() - known.keys(), *needed - fields.keys()]:
            raise RequestError(f"the receipt {'has an unknown field' if name in fields else 'lacks'} {name!r}")
        for name, value in fields.items():
            expected, is_valid = _FIELDS[name]
            if not is_valid(value) and not (value is None and name not in needed):
                raise RequestError(f"{name} of the receipt must be {expected}; got {brief(value)}")
        if fields.get("logprobs") is not None:
            fields["logprobs"] = [-math.inf if logprob is None else logprob for logprob in fields["logprobs"]]
            if len(fields["logprobs"]) != len(fields["token_ids"]):
                raise RequestError("the receipt's token_ids and logprobs must have equal lengths")
        check_fingerprint(fields["fingerprint"])
        receipt = cls(**fields)
        receipt.request([0])  # checks the options
        return receipt

    def request(self, prompt: Sequence[int]) -> Request:
        """The request for the text, without logprobs. prompt: its ids."""
        changed = {name: _as_tuples(value) for name, value in self.options.items()}
        if wrong := sorted(_LEFT_OUT & changed.keys()):
            raise RequestError(f"a receipt has no option {wrong[0]!r}", wrong[0])
        if isinstance(biases := changed.get("logit_bias"), Mapping):
            # A mapping of anything else is for the option to reject.
            changed["logit_bias"] = {_id(token): -math.inf if bias is None else bias for token, bias in biases.items()}
        grammar = None if self.grammar is None else GrammarSource(self.grammar)
        try:
            options = GenerateOptions(**changed, seed=self.seed, constraint=grammar)
        except OptionError as error:
            raise RequestError(f"the receipt is not valid: {error.option} {error.problem}") from error
        return Request(tuple(prompt), options, None if self.answer is None else _answer_format(self.answer))


def check_request(request: Request) -> Grammar | None:
    """Raise `RequestError` if the texts of a request have no receipts: those of beam search, with steering, with a
    constraint that is no grammar, or in a custom message format. Returns the grammar."""
    options, grammar = request.options, request.options.constrained_by
    if options.beams > 1:
        raise RequestError("a receipt is of sampled or greedy text, but this one is of a beam search", "beams")
    if (steering := options.steering) is not None:
        problem = "a receipt cannot have the vectors that changed this text's values at taps"
        raise RequestError(f"{problem}: leave out {steering.option}", steering.option)
    if request.answer is not None:
        _answer_fields(request.answer)
    if grammar is None or isinstance(grammar, Grammar):
        return grammar
    problem = f"a receipt can have a grammar, but not your own constraint ({grammar!r})"
    raise RequestError(f"{problem}: generate with json_schema, regex, grammar or choice", "constraint")


def digest(prompt: Sequence[int]) -> str:
    """`Receipt.prompt_sha256` of a prompt's ids."""
    ids = array("i", prompt)
    if ids.itemsize != 4 or array("H", [1]).tobytes() != b"\1\0":
        ids = array("b", b"".join(token.to_bytes(4, "little", signed=True) for token in prompt))
    return hashlib.sha256(ids.tobytes()).hexdigest()


def _as_json(options: GenerateOptions) -> dict[str, Any]:
    values = {name: getattr(options, name) for name in option_names() if name not in _LEFT_OUT}
    values = {name: value for name, value in values.items() if value != getattr(GenerateOptions, name)}
    if "logit_bias" in values:
        biases = dict(values["logit_bias"])
        values["logit_bias"] = {str(token): None if bias == -math.inf else bias for token, bias in biases.items()}
    as_json: dict[str, Any] = json.loads(json.dumps(values, allow_nan=False))
    return as_json


def _as_tuples(value: Any) -> Any:
    return tuple(map(_as_tuples, value)) if isinstance(value, list | tuple) else value


def _id(token: str) -> Any:
    return int(token) if isinstance(token, str) and token.isascii() and token.isdecimal() else token


def _answer_fields(answer: AnswerFormat) -> dict[str, Any]:
    if FORMATS.get(answer.format.name) != answer.format:
        raise RequestError(f"a receipt can have a format of onward.chat.FORMATS, but not {answer.format!r}")
    fields = {"format": answer.format.name, "thinking": answer.thinking, "calls": answer.tools is not None}
    return fields | {"marks": [list(mark) for mark in answer.marks]}


def _answer_format(fields: Mapping[str, Any]) -> AnswerFormat:
    """What bears on ids. Messages are not parsed."""
    try:
        marks = tuple((int(token), str(text)) for token, text in fields["marks"])
        tools: dict[str, Any] | None = {} if fields["calls"] else None
        return AnswerFormat(FORMATS[fields["format"]], tools, fields["thinking"], marks)
    except (KeyError, TypeError, ValueError):
        raise RequestError(
            'answer of the receipt must be {"format", "thinking", "calls", "marks"}, the format a name in '
            f"onward.chat.FORMATS; got {brief(fields)}"
        ) from None


def _are(value: object, kinds: type | tuple[type, ...]) -> bool:
    return isinstance(value, Sequence) and all(
        isinstance(item, kinds) and not isinstance(item, bool) for item in value
    )  # fmt: skip


def _are_ids(value: object) -> bool:
    return _are(value, int) and isinstance(value, Sequence) and all(0 <= token < 2**31 for token in value)


# For each field, the values that it may have, in words, and a test of them.
_FIELDS: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    "fingerprint": ("a text", lambda value: isinstance(value, str)),
    "prompt_sha256": ("a text", lambda value: isinstance(value, str)),
    "options": ("an object", lambda value: isinstance(value, Mapping) and _are(list(value), str)),
    "seed": ("a whole number or null", lambda value: value is None or _are([value], int)),
    "token_ids": ("a list of ids", _are_ids),
    "finish_reason": (f"one of {', '.join(FINISH_REASONS)}", lambda value: value in FINISH_REASONS),
    "prompt_ids": ("a list of ids, at least one", lambda value: _are_ids(value) and len(value) > 0),
    "logprobs": ("a list of numbers or null", lambda value: _are(value, (int, float, type(None)))),
    "grammar": ("a text", lambda value: isinstance(value, str)),
    "answer": ("an object", lambda value: isinstance(value, Mapping)),
}
