"""The state of a running request: its sequences, their timing, and its completion."""

import time
from collections import abc
from dataclasses import replace
from operator import itemgetter
from typing import Any

from onward.chat import AnswerFormat, AssistantMessage, MessageDelta
from onward.constraints import AfterText, JsonSchema
from onward.decoding import BeamOptions, BeamSearch, FinishReason, Sequence
from onward.decoding.speculation.step import speculation_of
from onward.language_model.chat import ToolGrammar
from onward.language_model.completion import Completion, Piece, Stopwatch
from onward.language_model.options import ConstraintMaker
from onward.language_model.request import Request
from onward.models.adapters import Adapters
from onward.sampling import ConstraintState, SamplingParams, fresh_seed, sample_seed
from onward.tokenizer import NoTextStream, StopStrings, StreamingDetokenizer, TextStream, Tokenizer, special_tokens


class AnswerParser:
    """Parses the text of one sequence of a chat into a message. seed: of the sampling."""

    def __init__(self, answer: AnswerFormat, sequence: Sequence, seed: int | None) -> None:
        self._sequence = sequence
        self._parser = answer.parser(sequence.prompt, seed)
        self._deltas: list[MessageDelta] = []
        self._characters = 0  # of the text, parsed so far
        self._marks = 0

    def read(self, at: int, text: str) -> MessageDelta:
        """The part of the message for token number `at`. text: the text that became final with it."""
        first, end = self._characters, self._characters + len(text)
        for mark in self._sequence.marks[self._marks :]:
            if mark.at > at or mark.position > end:  # of a later token, or after text that is not final yet
                break
            self._parser.feed(text[self._characters - first : mark.position - first])
            self._parser.feed(mark.text)
            self._characters = mark.position
            self._marks += 1
        self._parser.feed(text[self._characters - first :])
        self._characters = end
        if self._sequence.finish_reason is not None and at + 1 == len(self._sequence.token_ids):
            self._parser.finish()
        delta = self._parser.take()
        self._deltas.append(delta)
        return delta

    def message(self) -> AssistantMessage:
        """The message so far. If the sequence was ended from outside, text that was not final is missing."""
        return AssistantMessage.of(self._deltas)

    def reasoning_tokens(self) -> int:
        """The number of ids with at least a part of a character of the reasoning, without its markers."""
        spans, ends = self._parser.reasoning_spans, self._sequence.ends
        count = waiting = begin = 0
        for at, end in enumerate(ends, 1):
            waiting += 1  # with ids that end inside a character, which counts for the next one
            if end == begin and at < len(ends):
                continue
            after = max(end, begin + 1)  # an incomplete character at the end counts as one
            if any(first < after and last > begin for first, last in spans):
                count += waiting
            waiting, begin = 0, end
        return count


class RequestState:
    """The state of one request: a sequence for each of its `n` texts, or one beam search.

    siblings: maps sequences to the first one, with which they share the prompt. deadline: on the clock
    `time.monotonic`; None for none. replays: the texts of resumed ids that were not delivered yet, by sequence.
    """

    def __init__(self, request: Request, tokenizer: Tokenizer | None, adapters: Adapters) -> None:
        """Create the sequences and start the time limit. Raises `RequestError` if the adapter has been dropped."""
        self.request = request
        self._adapter = adapters.find(request.options.adapter)
        options = request.options
        limit = options.time_limit
        self.deadline = None if limit is None else time.monotonic() + limit
        self._tokenizer = tokenizer
        self._constraint = options.new_constraint(tokenizer)
        if options.beams > 1:
            beams = BeamOptions(options.beams, options.length_penalty, options.early_stopping)
            self.sequences: list[Sequence] = [self._sequence(options, beams)]
        else:
            seed = fresh_seed() if options.seed is None else options.seed
            samples = [options.replace(seed=sample_seed(seed, index)) for index in range(options.n)]
            self.sequences = [self._sequence(sample) for sample in samples]
            for sequence in self.sequences[1:]:
                sequence.prompt_top = None
        self.siblings = dict.fromkeys(self.sequences[1:], self.sequences[0])
        self._stopwatches = {sequence: Stopwatch() for sequence in self.sequences}
        self._delivered = dict.fromkeys(self.sequences, 0)  # tokens of each
        self._choices = {sequence: choice for choice, sequence in enumerate(self.sequences)}
        self.replays: dict[Sequence, list[str]] = {}
        self._parsers: dict[Sequence, AnswerParser] = {}
        if request.answer is not None:
            self._parsers = {
                sequence: AnswerParser(request.answer, sequence, self._seed(sequence))
                for sequence in self.sequences
                if not isinstance(sequence, BeamSearch)  # beams are parsed at the end
            }

    @property
    def has_ended(self) -> bool:
        return not any(sequence.pending for sequence in self.sequences)

    @property
    def has_tokens(self) -> bool:
        return any(watch.tokens for watch in self._stopwatches.values())

    def replay(self, emitted: abc.Sequence[abc.Sequence[int]]) -> None:
        """Start each text with ids that were emitted elsewhere; beam search, which emits nothing before its end,
        restarts. Raises `RequestError` for ids that the text cannot have."""
        for sequence, ids in zip(self.sequences, emitted, strict=False):
            if not isinstance(sequence, BeamSearch):
                self.replays[sequence] = sequence.replay(ids)

    def replayed_pieces(self) -> list[Piece]:
        """The pieces of resumed ids that are due: all, or with logprobs those whose logprobs are computed."""
        due = []
        for sequence, texts in list(self.replays.items()):
            ready = len(texts) if sequence.top_logprobs is None else min(len(texts), len(sequence.logprobs))
            for at in range(self._delivered[sequence], ready):
                due.append((at, self.next_piece(sequence, sequence.token_ids[at], texts[at], drafted=False)))
            if ready == len(texts):
                del self.replays[sequence]
        return [piece for _, piece in sorted(due, key=itemgetter(0))]

    def end(self, reason: FinishReason) -> None:
        for sequence in self.sequences:
            if sequence.pending:
                sequence.end(reason)
            if (texts := self.replays.pop(sequence, None)) is not None:  # before their logprobs were computed
                count = self._delivered[sequence]
                sequence.take_back(count, "".join(texts[:count]))

    def record_step(self, seconds: float) -> None:
        """Record the time of a step, after its tokens were accepted."""
        for sequence, stopwatch in self._stopwatches.items():
            count = sequence.tokens if isinstance(sequence, BeamSearch) else len(sequence.token_ids)
            tokens = count - sequence.replayed  # beams are never replayed
            if sequence.finish_reason is None or tokens > stopwatch.tokens:
                stopwatch.step(seconds, tokens - stopwatch.tokens)

    def next_piece(self, sequence: Sequence, token: int, text: str, drafted: bool) -> Piece:
        at = self._delivered[sequence]
        self._delivered[sequence] += 1
        logprobs = sequence.logprobs[at] if sequence.top_logprobs is not None else None
        message = self._parsers[sequence].read(at, text) if sequence in self._parsers else None
        return Piece(text, token, logprobs, self._choices[sequence], message, drafted)

    def completion(self) -> Completion:
        """The completion of the first text, with the others' in `others`. All sequences must have ended."""
        first = self.sequences[0]
        if isinstance(first, BeamSearch):
            best = first.ended[: self.request.options.n]
            texts = [self._completion(sequence, first, score) for score, sequence in best]
            if not texts:  # no tokens were requested
                texts = [self._completion(first, first)]
        else:
            texts = [self._completion(sequence, sequence) for sequence in self.sequences]
        return replace(texts[0], others=texts[1:])

    def _completion(self, sequence: Sequence, timed: Sequence, score: float | None = None) -> Completion:
        options = self.request.options
        answer = self._answer(sequence)
        return Completion(
            text=sequence.text,
            token_ids=sequence.token_ids,
            finish_reason=sequence.finish_reason or "length",
            stopped_by=sequence.stopped_by,
            timing=self._stopwatches[timed].timing(),
            prompt_tokens=len(self.request.prompt),
            cached_tokens=self.sequences[0].cached,
            seed=self._seed(sequence),
            logprobs=None if options.logprobs is None else sequence.logprobs,
            prompt_logprobs=None if options.prompt_logprobs is None else self.sequences[0].prompt_logprobs,
            score=score,
            speculation=speculation_of(sequence),
            json_schema=_json_schema(options.constrained_by),
            message=None if answer is None else answer.message(),
            reasoning_tokens=None if answer is None else answer.reasoning_tokens(),
        )

    def _answer(self, sequence: Sequence) -> AnswerParser | None:
        if self.request.answer is None or sequence in self._parsers:
            return self._parsers.get(sequence)
        parser = AnswerParser(self.request.answer, sequence, self._seed(sequence))
        parser.read(len(sequence.token_ids) - 1, sequence.text)
        return parser

    def _seed(self, sequence: Sequence) -> int | None:
        options = self.request.options
        assert sequence.sampling is not None
        return None if options.temperature == 0 or options.beams > 1 else sequence.sampling.seed

    def _sequence(self, sampling: SamplingParams, beams: BeamOptions | None = None) -> Sequence:
        request, options = self.request, self.request.options
        text: TextStream = NoTextStream()
        if self._tokenizer is not None:
            detokenizer = StreamingDetokenizer(self._tokenizer.decode, before=request.prompt)
            marks = None if request.answer is None else dict(request.answer.marks)
            text = StopStrings(detokenizer, options.stop, marks, special_tokens(self._tokenizer))
        kinds: dict[str, Any] = {
            "sampling": sampling,
            "adapter": self._adapter,
            "top_logprobs": options.logprobs,
            "prompt_top": options.prompt_logprobs,
            "stop_when": options.stop_when,
            "deadline": self.deadline,
            "cancel": options.cancel,
        }
        if self._constraint is not None:
            kinds["constraint"] = ConstraintState(self._constraint.fork(), options.stop_ids)
        if beams is not None:
            return BeamSearch(beams, request.prompt, request.max_new_tokens, options.stop_ids, text, **kinds)
        return Sequence(request.prompt, request.max_new_tokens, options.stop_ids, text, **kinds)


def _json_schema(constraint: ConstraintMaker | None) -> JsonSchema | None:
    """The schema of the text, or of the part after reasoning."""
    if isinstance(constraint, AfterText):
        constraint = constraint.grammar
    if isinstance(constraint, ToolGrammar):
        return constraint.json_schema
    return constraint if isinstance(constraint, JsonSchema) else None
