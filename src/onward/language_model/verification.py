"""Replays of known ids, and the verification of receipts."""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, Unpack

from onward.decoding.sequence import FinishReason
from onward.errors import OptionError, RequestError
from onward.language_model.base import LanguageModelPart
from onward.language_model.completion import Completion
from onward.language_model.fingerprint import bits_fingerprint, parts_that_differ
from onward.language_model.options_dict import GenerateOptionsDict
from onward.language_model.receipt import Receipt, digest
from onward.language_model.request import Ids, Prompt, Request, one_prompt
from onward.sampling import TokenLogprobs
from onward.util.checks import plain_items


@dataclass(frozen=True)
class Replay:
    """The output of a request beside ids that it may have.

    token_ids: those ids.
    drawn: for each of them the id that the sampler draws after the prompt and the ids before it; None where the other
        options ban all ids. It is shorter than `token_ids` if the text ends earlier. After an id that a constraint
        forbids there are no further ones.
    logprobs: of the ids for which `drawn` has one, as in `Completion`, apart from a forbidden one; None unless
        requested.
    finish_reason: how the text ends with the last of `drawn`; None if it continues there.
    """

    token_ids: list[int]
    drawn: list[int | None]
    logprobs: list[TokenLogprobs] | None
    finish_reason: FinishReason | None

    def __repr__(self) -> str:
        return f"Replay({len(self.token_ids)} tokens, {self.agreeing} agreeing, difference={self.difference})"

    @property
    def difference(self) -> int | None:
        """The index of the first id that the request does not have; None if it has all of them."""
        pairs = enumerate(zip(self.token_ids, self.drawn, strict=False))
        ended = len(self.drawn) if len(self.drawn) < len(self.token_ids) else None
        return next((at for at, (token, drawn) in pairs if token != drawn), ended)

    @property
    def agreeing(self) -> int:
        """The number of ids that are those drawn."""
        return sum(token == drawn for token, drawn in zip(self.token_ids, self.drawn, strict=False))


@dataclass(frozen=True)
class Verification:
    """The result of `LanguageModel.verify`.

    difference: what differs first: the prompt, an id, a logprob, or the end of the text; None if nothing does.
    position: the index of the id or logprob that differs, or of the end.
    reason: the difference in words.
    other_parts: the parts of the fingerprint that differ, in words; "" if there are none.
    agreeing: how many of the ids are those that the sampler draws after the ids before them. With one altered id nearly
        all are; with another seed, another prompt or other weights fewer.
    tokens: the number of the receipt's ids.
    """

    difference: Literal["prompt", "token", "logprob", "end"] | None
    position: int | None
    reason: str | None
    other_parts: str
    agreeing: int
    tokens: int

    @property
    def is_same_text(self) -> bool:
        """Whether this model gives the text, whatever the fingerprint says."""
        return self.difference is None

    @property
    def is_verified(self) -> bool:
        """Whether this model and build give the text, and the receipt names them."""
        return self.is_same_text and not self.other_parts

    def __str__(self) -> str:
        if self.is_verified:
            return f"this model and build generate this text, {self.tokens} tokens"
        if self.is_same_text:
            return f"the text is the same, but the receipt is of another build or model (different: {self.other_parts})"
        return f"this model and build do not generate this text: {self.reason}"


class Verifier(LanguageModelPart):
    """Methods of `LanguageModel`."""

    def replay(
        self,
        prompt: Prompt | Completion,
        token_ids: Ids | None = None,
        **options: Unpack[GenerateOptionsDict],
    ) -> Replay:
        """Score ids as the output of a request, in one prefill: which ids its sampler draws at their positions, and
        the logprobs that it reports for them.

        Args:
            prompt: as for `stream`; or a `Completion`, for its prompt, options, seed and ids.
            token_ids: the ids after the prompt, from any source; left out with a completion.
            options: the fields of `onward.GenerateOptions`, such as logprobs=0. Sampling needs a seed. max_new_tokens
                is the number of ids by default.

        Raises:
            RequestError: as `stream` raises it; sampling without a seed; beam search; no ids.
            ContextOverflowError: prompt and max_new_tokens do not fit the context.
        """
        if isinstance(prompt, Completion):
            ids, prompt = prompt.token_ids, _request_of(prompt, token_ids)
        else:
            prompt, ids = one_prompt(prompt, "replay", "call it for each"), self._ids_after(token_ids)
        if not isinstance(prompt, Request):
            options = {"max_new_tokens": len(ids), **options}
        (request,) = self._reader.read([prompt], options, one_text=True)
        if request.options.rows > 1:
            name = "n" if request.options.beams == 1 else "beams"
            raise RequestError(f"a replay is of one sampled or greedy text: leave out {name}", name)
        if request.options.temperature > 0 and request.options.seed is None:
            raise RequestError("a sampled text is replayed with its seed: give it (Completion.seed)", "seed")
        sequence = self._runner.replay(request, ids)
        logprobs = None if request.options.logprobs is None else sequence.logprobs
        return Replay(list(ids), sequence.drawn, logprobs, sequence.finish_reason)

    def _ids_after(self, token_ids: Ids | None) -> list[int]:
        if token_ids is None:
            raise RequestError("a replay needs the ids after the prompt: give them, or a Completion", "token_ids")
        if isinstance(token_ids, str) or not isinstance(token_ids, Iterable):
            raise OptionError("token_ids", f"must be a list of ids; got {token_ids!r}")
        ids, vocab = plain_items(token_ids), self.model.vocab_size
        for token in ids:
            if type(token) is not int or not 0 <= token < vocab:
                raise OptionError("token_ids", f"must be whole numbers from 0 to {vocab - 1}; got {token!r}")
        return ids

    def receipt(self, completion: Completion, *, prompt: bool = True) -> Receipt:
        """The receipt of a text that this model has generated, for `verify`: also of an engine's, and of each of
        `Completion.choices`. It has the logprobs that were requested.

        The first call, and the first after a change of the weights, reads all their bytes.

        prompt: include the prompt's ids. Without them whoever verifies the receipt needs the prompt.

        Raises:
            RequestError: a text of beam search, with a constraint that is no grammar, or in a custom message format;
                the weights have changed since.
        """
        self.model.refresh()
        now, versions = self.model.weights_version, {version for _, version in completion.weights_versions}
        if versions - {now}:
            raise RequestError(
                f"the text is of weights with the version {' and '.join(map(str, sorted(versions)))}, and this model "
                f"has the version {now}: make the receipt before the weights change"
            )
        name = None if completion.request is None else completion.request.options.adapter
        return Receipt.of(completion, bits_fingerprint(self.model, self.adapters.find(name)), prompt=prompt)

    def verify(self, receipt: Receipt, prompt: str | Ids | None = None) -> Verification:
        """Whether this model and build give the text of a receipt, by one prefill.

        prompt: for a receipt without one; a text, which is encoded as in `generate`, or ids.

        Raises:
            RequestError: no prompt, an option that is not valid for this model, an adapter that is not loaded.
            ContextOverflowError: prompt and max_new_tokens do not fit the context.
        """
        here = bits_fingerprint(self.model, self.adapters.find(receipt.options.get("adapter")))
        parts = parts_that_differ(receipt.fingerprint, here)
        ids = receipt.prompt_ids
        if prompt is not None:
            ids = self._reader.prompt_ids(prompt)
        elif ids is None:
            raise RequestError("the receipt has no prompt: give it", "prompt")
        token_ids = list(receipt.token_ids)
        if digest(ids) != receipt.prompt_sha256:
            reason = f"the prompt, {len(ids)} ids, is not that of the receipt's prompt_sha256"
            return Verification("prompt", None, reason, parts, 0, len(token_ids))
        known = list(itertools.takewhile(lambda token: token < self.model.vocab_size, token_ids))
        request = receipt.request(ids)
        if receipt.logprobs is not None:
            request = request.replace(logprobs=0)
        replay = self.replay(request, known)
        difference, position, why = _first_difference(receipt, replay)
        if why is not None and not parts:
            why += "; the fingerprint is this build's, so the receipt was altered or forged"
        elif why is not None:
            why += f"; the receipt is of another build or model (different: {parts})"
        return Verification(difference, position, why, parts, replay.agreeing, len(token_ids))


def _first_difference(
    receipt: Receipt, replay: Replay
) -> tuple[Literal["token", "logprob", "end"] | None, int | None, str | None]:
    """What differs first, where, and in words."""
    token_ids = receipt.token_ids
    token_at = replay.difference
    if token_at is None and len(replay.token_ids) < len(token_ids):  # the next one is outside the vocabulary
        token_at = len(replay.token_ids)
    replayed = () if replay.logprobs is None else [token.chosen for token in replay.logprobs]
    pairs = zip(receipt.logprobs or (), replayed, strict=False)
    logprob_at = next((at for at, (theirs, ours) in enumerate(pairs) if theirs != ours), None)
    if logprob_at is not None and (token_at is None or logprob_at < token_at):
        theirs, ours = (receipt.logprobs or ())[logprob_at], replayed[logprob_at]
        return "logprob", logprob_at, f"the logprob of token {logprob_at} is {ours!r}, and not {theirs!r}"
    if token_at is not None and token_at >= len(replay.drawn) and replay.finish_reason is not None:
        reason = f"it ends ({replay.finish_reason!r}) with {token_at} of the receipt's {len(token_ids)} tokens"
        return "end", token_at, reason
    if token_at is not None:
        drawn = replay.drawn[token_at] if token_at < len(replay.drawn) else None
        instead = "no such id exists" if drawn is None else f"the sampler draws {drawn}"
        agreeing = f"{replay.agreeing} of {len(token_ids)} ids agree"
        return "token", token_at, f"token {token_at} is id {token_ids[token_at]}, but {instead} ({agreeing})"
    expected = {
        "stop": ("stop",),
        "length": ("length",),
        "stop_when": (None, "length"),  # a text that reaches its maximum length may be stopped there
    }.get(receipt.finish_reason, (None,))
    if replay.finish_reason in expected:
        return None, None, None
    ends = "continues" if replay.finish_reason is None else f"ends ({replay.finish_reason!r})"
    return "end", len(token_ids), f"after its {len(token_ids)} tokens it {ends}, and not {receipt.finish_reason!r}"


def _request_of(completion: Completion, token_ids: Ids | None) -> Request:
    """The request for the text of a completion alone."""
    request = completion.request
    if request is None:
        raise RequestError("this completion has no request: give the prompt, the ids and the options")
    if token_ids is not None:
        raise RequestError("a completion has its ids: leave out token_ids, or give a prompt", "token_ids")
    request = request if request.options.beams > 1 else request.replace(n=1)
    return request if completion.seed is None else request.with_seed(completion.seed)
