"""`Engine`: a thread that runs the decode loop for requests that come and go."""

import hashlib
import struct
import weakref
from collections import abc
from typing import Any, NoReturn, Self, Unpack, overload

from onward.cache.slot import digest_of
from onward.decoding.shared_cache import context_of, engine_slots
from onward.decoding.speculation import HeadDrafter, ModelDrafter
from onward.engine.generation import Generation
from onward.engine.request import EngineRequest
from onward.engine.scheduler import Scheduler
from onward.engine.stats import EngineStats
from onward.engine.updates import InFlight, PendingUpdate, checked_in_flight, served
from onward.engine.worker import EngineWorker
from onward.errors import EngineError, OptionError, RequestError
from onward.language_model import ChatOptionsDict, GenerateOptionsDict, LanguageModel, Messages, Prompt, Request
from onward.language_model.fingerprint import bits_fingerprint, check_same_bits, with_changes
from onward.language_model.new_weights import NewWeights, WeightsUpdate
from onward.language_model.request import Emitted, checked_emitted, one_prompt
from onward.models.adapters import Steering
from onward.util.checks import check_whole, is_finite
from onward.util.option_names import checks_option_names
from onward.util.text import described

_MAX_PRIORITY = 2**31


class Engine:
    """Serves concurrent requests from threads and asyncio.

        with onward.Engine(lm) as engine:
            generation = engine.submit("Once upon a time", temperature=0.8)
            for piece in generation:
                print(piece.text, end="")

    A request's tokens depend only on its prompt, options and seed, not on other requests, arrival time, prefill chunks,
    cache hits or preemption. They equal those of `LanguageModel.generate`.

    Close the engine, or use it in a `with` statement. An engine without references finishes its requests, and then its
    thread ends. Functions passed with requests (`stop_when`, drafters) run in that thread and block all requests.

    lm: the model, with its tokenizer, template, defaults and draft. Of a model loaded with `trainable=True` the engine
        serves a copy of the packed weights, its own `lm`, until `update_weights` brings others.
    max_sequences: the maximum number of sequences that run at once.
    cache_memory: bytes of keys, values and recurrent states, including the prefix cache.
    max_waiting, max_waiting_tokens: the maximum number of queued requests and of their prompt tokens. Further requests
        are rejected immediately.
    max_step_ms: target step time in milliseconds while prompts are processed. None: 1.8x a decode step, at least 40.
    overcommit: 1 reserves all memory that a request may need when it is admitted, so that nothing is preempted. Above 1
        only this fraction of its new tokens is reserved; when memory runs out the newest request is preempted, and
        recomputed later.
    ageing: seconds of waiting that are worth one step of priority.

    Raises:
        RequestError: a limit outside its range, or too little memory for one block.
    """

    @checks_option_names
    def __init__(
        self,
        lm: LanguageModel,
        *,
        max_sequences: int = 32,
        cache_memory: int | None = None,
        max_waiting: int = 1024,
        max_waiting_tokens: int = 1_000_000,
        max_step_ms: float | None = None,
        overcommit: float = 1.0,
        ageing: float = 10.0,
    ) -> None:
        if not isinstance(lm, LanguageModel):
            raise RequestError(f"an engine serves a LanguageModel; got {type(lm).__name__}: see onward.load")
        check_whole("max_sequences", max_sequences, low=1)
        check_whole("max_waiting", max_waiting, low=1)
        check_whole("max_waiting_tokens", max_waiting_tokens, low=1)
        step = 0 if max_step_ms is None else max_step_ms
        for name, limit, low in (("max_step_ms", step, 0), ("overcommit", overcommit, 1), ("ageing", ageing, 0)):
            if not (is_finite(limit) and limit >= low):
                raise OptionError(name, f"must be a number of {low} or more; got {limit!r}")
        self.lm = lm = served(lm)
        self.max_sequences = max_sequences
        slots = engine_slots(lm.model, max_sequences, cache_memory)
        if slots.whole:
            raise RequestError("the rows of this model's cache can't be identified: pass max_sequences=1")
        scheduler: Scheduler[EngineRequest] = Scheduler(
            max_sequences=max_sequences,
            max_waiting=max_waiting,
            max_waiting_tokens=max_waiting_tokens,
            max_step_ms=max_step_ms,
            prefill_chunk=lm.prefill_chunk,
            overcommit=overcommit,
            ageing=ageing,
            joins=slots.shares_rows,
        )
        max_len = slots.max_len or context_of(lm.model)
        self._worker = EngineWorker(lm._model_run, slots, scheduler, max_len, lm._disk)
        weakref.finalize(self, self._worker.abandon).atexit = False

    def __repr__(self) -> str:
        stats = self.stats()
        return described(self, f"{stats.running} running", f"{stats.waiting} waiting", repr(self.lm))

    def __reduce__(self) -> NoReturn:
        raise EngineError("an engine cannot be copied or pickled, because it runs a thread: make another one")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(drain=kind is None)

    @overload
    def submit(
        self, prompt: Prompt, *, priority: int = 0, client: str | None = None, **options: Unpack[GenerateOptionsDict]
    ) -> Generation: ...

    @overload
    def submit(
        self, *, messages: Messages, priority: int = 0, client: str | None = None, **options: Unpack[ChatOptionsDict]
    ) -> Generation: ...

    def submit(
        self,
        prompt: Prompt | None = None,
        *,
        messages: Messages | None = None,
        priority: int = 0,
        client: str | None = None,
        **options: Any,
    ) -> Generation:
        """Validate and queue a request, and return immediately.

        Args:
            prompt: a text, ids, or a `Request`.
            messages: a conversation instead of a prompt, as for `LanguageModel.chat`.
            priority: smaller values go first.
            client: the name of the client, for fair shares of the engine (docs/engine.md). It does not change the text;
                requests without a name share a client.
            options: those of `LanguageModel.generate`; with messages those of `chat`. time_limit starts now.

        Raises:
            RequestError: as `LanguageModel.generate` raises it; both or neither of prompt and messages; a request that
                exceeds the engine's limits.
            EngineBusyError: the queue is full; `retry_after` estimates in how many seconds to try again.
            EngineError: the engine is closed.
        """
        return self._submit(self._request(prompt, messages, options), priority, client, ())

    @overload
    def resume(
        self,
        prompt: Prompt,
        *,
        emitted: Emitted,
        fingerprint: str | None = None,
        priority: int = 0,
        client: str | None = None,
        **options: Unpack[GenerateOptionsDict],
    ) -> Generation: ...

    @overload
    def resume(
        self,
        *,
        messages: Messages,
        emitted: Emitted,
        fingerprint: str | None = None,
        priority: int = 0,
        client: str | None = None,
        **options: Unpack[ChatOptionsDict],
    ) -> Generation: ...

    def resume(
        self,
        prompt: Prompt | None = None,
        *,
        messages: Messages | None = None,
        emitted: Emitted,
        fingerprint: str | None = None,
        priority: int = 0,
        client: str | None = None,
        **options: Any,
    ) -> Generation:
        """Continue a request from ids that another engine or process has emitted for it.

        Pieces and completion are bit for bit those of the uninterrupted request, from the first piece on: emitted ids
        count for usage, limits, penalties, stop strings and noise. They are prefilled with the prompt, except for a
        cached prefix, and not decoded again. If they already end the text, the generation ends immediately. Beam search
        restarts, with the same result. Timings, draft counts and cache hits are this engine's; a `time_limit` starts
        now.

        Args:
            emitted: the ids of the text so far; with n above 1 a list for each text (`Generation.emitted`).
            prompt, messages, options: as in `submit`, unchanged. Sampling needs a seed.
            priority, client: as in `submit`.
            fingerprint: the `fingerprint` of the engine that emitted the ids, or its `fingerprint_with` the request's
                adapter, to compare with this engine's.

        Raises:
            RequestError: as `submit` raises it; ids that the request cannot have emitted; sampling without a seed;
                another fingerprint.
            EngineBusyError, EngineError: as `submit` raises them.
        """
        request = self._request(prompt, messages, options)
        if fingerprint is not None:
            check_same_bits(fingerprint, self.fingerprint_with(request.options.adapter, request.options.steering))
        return self._submit(request, priority, client, checked_emitted(emitted, request, self.lm.model.vocab_size))

    def _submit(
        self, request: Request, priority: int, client: str | None, emitted: abc.Sequence[list[int]]
    ) -> Generation:
        check_whole("priority", priority, low=-_MAX_PRIORITY)
        if priority > _MAX_PRIORITY:
            raise RequestError(f"priority must be {_MAX_PRIORITY} or less; got {priority}")
        if not (client is None or isinstance(client, str)):
            raise OptionError("client", f"must be a text or None; got {client!r}")
        rows = request.options.rows
        if rows > self.max_sequences:  # before there is memory for each
            raise RequestError(
                f"the request runs {rows} texts at once, but the engine runs at most {self.max_sequences}: ask "
                "for fewer, or give the engine a larger max_sequences",
                "n" if request.options.n == rows else "beams",
            )
        worker = self._worker
        queued = EngineRequest(
            request, emitted, self.lm, priority, client, worker.slots, worker.cancel, worker.notifier.add
        )
        queued.generation.add(queued.new_pieces(self.weights_version)[0], None)
        if queued.has_ended:  # no tokens are asked for, or all were emitted
            queued.end()
        else:
            worker.offer(queued)
        return queued.generation

    @property
    def weights_version(self) -> int:
        """The version of the weights that the next step reads (`LanguageModel.weights_version`)."""
        return self._worker.run.model.weights_version

    @checks_option_names
    def update_weights(self, weights: NewWeights, *, in_flight: InFlight = "finish", version: int | None = None) -> int:
        """Replace all weights between two steps, and wait until that is done.

        The weights are checked and converted in the calling thread, while the engine runs, and then copied. Requests
        never find prefixes that older weights have computed, and each token has the version of the weights that
        computed it.

        Args:
            weights, version: as for `LanguageModel.update_weights`.
            in_flight: for requests that have started. "finish": the update waits until they have ended, and others wait
                for it. "recompute": they continue from their tokens, whose keys and values are computed again. "keep":
                they continue with the keys and values that they have, which older weights have computed; texts without
                tokens, beam searches and requests that are preempted later are computed again.

        Returns:
            The version of the new weights.

        Raises:
            RequestError: as `LanguageModel.update_weights` raises it. Nothing has changed.
            EngineError: the engine is closed, or calls this itself.
        """
        self._worker.check_outside()
        self._check_model()
        checked_in_flight(in_flight)
        update = WeightsUpdate(self.lm.model, self.lm.adapters, weights, version)
        return self._worker.update(PendingUpdate(update, in_flight))

    @property
    def fingerprint(self) -> str:
        """A short text that identifies all that outputs depend on besides the request: the model with its weights and
        quantization, the device and instruction set, the build of Onward and its kernels, the version of torch.

        Engines with equal fingerprints give bit-identical results; for requests with an adapter, those with equal
        `fingerprint_with`. The first use, and the first after a change of the weights, reads all their bytes.
        """
        return self.fingerprint_with(None)

    def fingerprint_with(self, adapter: str | None, steering: Steering | None = None) -> str:
        """The fingerprint of requests with a loaded adapter, and with a steering (`GenerateOptions.steering`). Raises
        `RequestError` if no adapter has the name."""
        loaded = self.lm.adapters.find(adapter)
        text = bits_fingerprint(self.lm.model, loaded)
        return text if steering is None else with_changes(text, f"{digest_of(loaded)} {steering.digest}")

    def stats(self) -> EngineStats:
        """The engine's current state and its counts."""
        return self._worker.stats()

    @property
    def memory(self) -> int:
        """Bytes of the weights, also of a draft model, and the most that the cache takes."""
        drafter = None if self.lm.draft is None else self.lm.draft.drafter
        of_drafter = drafter.nbytes if isinstance(drafter, ModelDrafter | HeadDrafter) else 0
        return self.lm.model.nbytes + of_drafter + self._worker.slots.nbytes

    def check_open(self) -> None:
        """Raise `EngineError` if the engine is closed or has failed, or if this is a forked process."""
        self._worker.check_open()

    @property
    def seconds_since_step(self) -> float:
        """For how long the current step has been running; 0 when idle. Takes no lock. Steps take seconds at most, so a
        growing value means that the engine hangs, for example in a function of a request."""
        return self._worker.seconds_since_step

    def close(self, drain: bool = True) -> None:
        """Reject further requests and end the thread. May be called twice, and by functions that the engine calls.

        drain: finish all requests first, including queued ones. Otherwise they end as "cancelled".
        """
        self._worker.close(drain)

    def _check_model(self) -> None:
        self._worker.check_open()
        if self.lm.model is not self._worker.run.model:
            raise EngineError("the LanguageModel has another model than when this engine was made: make another engine")

    def _request(self, prompt: Prompt | None, messages: Messages | None, options: abc.Mapping[str, Any]) -> Request:
        self._check_model()
        if (prompt is None) == (messages is None):
            raise RequestError(f"give a prompt, or messages= for a chat; got {'neither' if prompt is None else 'both'}")
        if "cache" in options:
            raise RequestError("an engine has its own cache: leave out cache, or use LanguageModel.generate")
        if messages is not None:
            return self.lm.chat_request(messages, **options)
        assert prompt is not None
        return self.lm.request(one_prompt(prompt, "submit", "submit each"), **options)


# The probe's numbers of prompt ids and of new tokens.
_PROBE_PROMPT, _PROBE_TOKENS = 32, 8
# Spreads the ids of the prompt over a vocabulary (Knuth's multiplicative hashing).
_SPREAD = 2_654_435_761


def probe(engine: Engine) -> str:
    """Return 8 hexadecimal digits that identify the ids and logprobs of a test request of 40 tokens without an adapter.
    Raises `EngineError` if the engine is closed or busy, or the model fails."""
    model = engine.lm.model
    context = _PROBE_PROMPT + _PROBE_TOKENS if model.max_seq_len is None else model.max_seq_len
    new_tokens = min(_PROBE_TOKENS, context // 2)
    prompt_tokens = min(_PROBE_PROMPT, context - new_tokens)
    ids = [number * _SPREAD % model.vocab_size for number in range(1, prompt_tokens + 1)]
    completion = engine.submit(
        ids, max_new_tokens=new_tokens, temperature=0.0, ignore_eos=True, logprobs=0, prompt_logprobs=0, draft=None
    ).result()
    entries = (*(completion.prompt_logprobs or ()), *(completion.logprobs or ()))
    logprobs = [entry.chosen for entry in entries if entry is not None]
    bits = struct.pack(f"<{len(completion.token_ids)}q{len(logprobs)}d", *completion.token_ids, *logprobs)
    return hashlib.blake2b(bits, digest_size=4).hexdigest()
