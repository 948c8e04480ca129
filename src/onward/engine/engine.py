"""`Engine`: a thread that runs the decode loop for requests that come and go."""

import hashlib
import struct
import weakref
from collections import abc
from typing import Any, NoReturn, Self, Unpack, overload

from torch import Tensor

from onward.cache.manager import PagedCacheManager
from onward.cache.slot import digest_of
from onward.decoding import CacheManager, RowCacheManager
from onward.decoding.row_cache import dims_of
from onward.decoding.shared_cache import MAX_BLOCKS, blocks_within
from onward.engine.fingerprint import bits_fingerprint, check_same_bits
from onward.engine.generation import Generation
from onward.engine.request import EngineRequest
from onward.engine.scheduler import Scheduler
from onward.engine.stats import EngineStats
from onward.engine.worker import EngineWorker
from onward.errors import ContextOverflowError, EngineError, RequestError
from onward.language_model import ChatOptionsDict, GenerateOptionsDict, LanguageModel, Messages, Prompt, Request
from onward.language_model.job import RequestState
from onward.language_model.request import Emitted, as_list, checked_emitted
from onward.models import Model
from onward.models.model import computation
from onward.native.machine import memory_limit
from onward.ops.kv_write import BLOCK
from onward.program.leaves import leaves_of
from onward.util.checks import check_whole, is_finite
from onward.util.option_names import checks_option_names
from onward.util.text import described, in_bytes

# The share of the machine's memory that a cache takes at most where nothing else is asked for.
_SHARE = 0.25
# Positions of a text where the model does not say how many it serves.
_UNKNOWN_CONTEXT = 4096


def engine_slots(model: Model, max_sequences: int, cache_memory: int | None) -> CacheManager:
    """Slots for an engine.

    cache_memory: bytes of keys, values and recurrent states; None takes what all sequences of full length need, and at
        most a quarter of the machine's memory. A cache in blocks takes memory only as it is written.

    Raises:
        RequestError: so much memory holds not even one block.
    """
    if cache_memory is not None:
        check_whole("cache_memory", cache_memory, low=1)
    limit = int(_SHARE * memory_limit()) if cache_memory is None else cache_memory
    context = _UNKNOWN_CONTEXT if model.max_seq_len is None else model.max_seq_len
    if model.new_blocks is None:
        return _dense(model, max_sequences, context, limit, cache_memory)
    one = PagedCacheManager(model.new_blocks(1), max_len=context, cached_blocks=0)
    unit = one.unit_nbytes
    limit = min(limit, max_sequences * one.blocks_for(context) * unit)
    if limit < (least := one.blocks_for(BLOCK) * unit):
        raise RequestError(
            f"cache_memory={cache_memory} bytes holds not even one block of {BLOCK} positions, which takes "
            f"{in_bytes(least)}: give more"
        )
    most = min(MAX_BLOCKS, max_sequences * -(-context // BLOCK))
    blocks = blocks_within(model.new_blocks, limit, most, model.device)
    return PagedCacheManager(blocks, max_len=context, cached_blocks=limit // unit, nbytes=limit)


def _dense(model: Model, rows: int, context: int, limit: int, cache_memory: int | None) -> CacheManager:
    """Rows of one dense cache, as long as fit into the memory."""
    least = min(BLOCK, context)
    position = _bytes_of(model.new_cache(1, least)) // least
    length = context if not position else min(context, limit // (rows * position))
    if length < least:
        raise RequestError(
            f"cache_memory={limit} bytes is too little for {rows} texts of {least} positions, of which each takes "
            f"{in_bytes(position)}: give more, or lower max_sequences"
        )
    cache = model.new_cache(rows, length)  # no longer than that, for the memory is a bound
    return RowCacheManager(cache, rows, length, dims_of(model, cache, rows), model)


def _bytes_of(cache: object) -> int:
    return sum(leaf.nbytes for leaf in leaves_of(cache) if isinstance(leaf, Tensor))


_MOST_PRIORITY = 2**31


class Engine:
    """Serves requests that come and go, from any thread and from asyncio.

        with onward.Engine(lm) as engine:
            generation = engine.submit("Once upon a time", temperature=0.8)
            for piece in generation:
                print(piece.text, end="")

    A request's tokens depend on its prompt, its options and its seed alone: not on what else is served, when it came,
    how its prompt was cut, what was cached, or whether it was preempted. They are those of `LanguageModel.generate`.

    Close it, or use it in a `with` statement. An engine that nobody holds any more serves what was submitted, and then
    its thread ends. Functions that requests bring (`stop_when`, drafters) run in that thread: while one runs, every
    request waits.

    lm: the model, with its tokenizer, template, defaults and draft.
    max_sequences: the most texts that run at once.
    cache_memory: bytes of keys, values and recurrent states, of texts that run and of prefixes that are kept.
    max_waiting, max_waiting_tokens: the most requests that wait, and ids of their prompts. More are refused at once.
    max_step_ms: about how long a step may take, in milliseconds, while texts decode: prompts are cut accordingly. None:
        about 2.25 times as long as without prompts, but not less than 100 ms.
    overcommit: 1 reserves all that a request may need when it joins, so nothing is ever preempted. Above 1 only this
        fraction of its new tokens is reserved; the newest gives way where room is missing, and is computed again later.
    ageing: seconds of waiting that a step of priority is worth.

    Raises:
        RequestError: a limit outside its range, or a memory that holds not even one block.
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
        for name, value in (
            ("max_sequences", max_sequences),
            ("max_waiting", max_waiting),
            ("max_waiting_tokens", max_waiting_tokens),
        ):
            check_whole(name, value, low=1)
        step = 0 if max_step_ms is None else max_step_ms
        for name, limit, low in (("max_step_ms", step, 0), ("overcommit", overcommit, 1), ("ageing", ageing, 0)):
            if not (is_finite(limit) and limit >= low):
                raise RequestError(f"{name} must be a number of {low} or more; got {limit!r}")
        self.lm = lm
        self.max_sequences = max_sequences
        slots = engine_slots(lm.model, max_sequences, cache_memory)
        if slots.whole:
            raise RequestError("this model's cache does not show its rows: an engine serves it with max_sequences=1")
        policy: Scheduler[EngineRequest] = Scheduler(
            max_sequences=max_sequences,
            max_waiting=max_waiting,
            max_waiting_tokens=max_waiting_tokens,
            max_step_ms=max_step_ms,
            prefill_chunk=lm.prefill_chunk,
            overcommit=overcommit,
            ageing=ageing,
        )
        self._serving = EngineWorker(lm._model_run, slots, policy)
        self._fingerprints: tuple[object, dict[str, str]] | None = None  # of a state of the weights, by adapter
        weakref.finalize(self, self._serving.abandon).atexit = False

    def __repr__(self) -> str:
        stats = self.stats()
        return described(self, f"{stats.running} running", f"{stats.waiting} waiting", repr(self.lm))

    def __reduce__(self) -> NoReturn:
        raise EngineError("an engine is a thread with the memory of its process: make one where you need it")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(drain=kind is None)

    # ── for callers, from any thread ────────────────────────────────────────────────────────────────────────────

    @overload
    def submit(self, prompt: Prompt, *, priority: int = 0, **options: Unpack[GenerateOptionsDict]) -> Generation: ...

    @overload
    def submit(self, *, messages: Messages, priority: int = 0, **options: Unpack[ChatOptionsDict]) -> Generation: ...

    def submit(
        self,
        prompt: Prompt | None = None,
        *,
        messages: Messages | None = None,
        priority: int = 0,
        **options: Any,
    ) -> Generation:
        """Queue a request and return at once. Everything is checked here, before anything is queued.

        Args:
            prompt: a text, ids, or a `Request`.
            messages: in place of a prompt, a conversation, as `LanguageModel.chat` takes it.
            priority: smaller goes first.
            options: those of `LanguageModel.generate`; with messages those of `chat`. time_limit counts from here.

        Raises:
            RequestError: as `LanguageModel.generate` raises it; both or none of prompt and messages; a request that the
                engine's limits could never serve.
            EngineBusyError: the queue is full; `retry_after` says for how many seconds about.
            EngineError: the engine is closed.
        """
        return self._submit(self._request(prompt, messages, options), priority, None)

    @overload
    def resume(
        self,
        prompt: Prompt,
        *,
        emitted: Emitted,
        fingerprint: str | None = None,
        priority: int = 0,
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
        **options: Any,
    ) -> Generation:
        """Go on with a request from ids that its texts emitted before, in another engine or another process.

        The pieces, from the first on, and the completion are those of the request served without a break, bit for bit:
        emitted ids count as the completion's for its usage, limits, penalties, stop strings and noise. They are
        processed together with the prompt, as far as the cache does not hold them, and never decoded again. Where they
        end the text already, it ends at once. Beams begin anew, with the same result.

        The times are those of this engine, and so are the counts of drafts and of what the cache held. A `time_limit`
        counts from here.

        Args:
            emitted: ids of the text so far; with n above 1 a list of them for each text (`Generation.emitted`).
            prompt, messages, priority, options: as in `submit`, and as they were. Sampling needs a seed.
            fingerprint: of the engine that emitted the ids (`fingerprint`, or `fingerprint_with` of the request's
                adapter), to have it compared with this one's.

        Raises:
            RequestError: as `submit` raises it; ids that the request cannot have emitted; a request that cannot be
                resumed, for it samples without a seed; another fingerprint.
            EngineBusyError, EngineError: as `submit` raises them.
        """
        request = self._request(prompt, messages, options)
        if fingerprint is not None:
            check_same_bits(fingerprint, self.fingerprint_with(request.options.adapter))
        return self._submit(request, priority, checked_emitted(emitted, request, self.lm.model.vocab_size))

    def _submit(self, request: Request, priority: int, emitted: list[list[int]] | None) -> Generation:
        serving = self._serving
        check_whole("priority", priority, low=-_MOST_PRIORITY)
        if priority > _MOST_PRIORITY:
            raise RequestError(f"priority must be {_MOST_PRIORITY} or less; got {priority}")
        job = RequestState(request, self.lm.tokenizer, self.lm.adapters)
        if emitted is not None:
            job.replay(emitted)
        vocab_size = self.lm.model.vocab_size
        ticket = EngineRequest(job, priority, serving.slots, vocab_size, serving.cancel, serving.watches)
        self._check_fits(ticket)
        if replayed := job.replayed_pieces():
            ticket.generation.add(replayed, None)
        if job.has_ended:  # it asks for no tokens, or has them all
            ticket.end()
        else:
            serving.offer(ticket)
        return ticket.generation

    @property
    def fingerprint(self) -> str:
        """What the bits of texts depend on beside their requests, as a short text: the model with its weights and
        quantization, the device and instruction set, the build of Onward and its kernels, the version of torch.

        Two engines with equal fingerprints give the same bits for the same request; of one with an adapter where
        `fingerprint_with` is equal. All bytes of the weights are read when it is first asked for, and anew when they
        have changed.
        """
        return self.fingerprint_with(None)

    def fingerprint_with(self, adapter: str | None) -> str:
        """The fingerprint of requests with a loaded adapter.

        Raises:
            RequestError: none of that name is loaded.
        """
        loaded, state = self.lm.adapters.find(adapter), computation(self.lm.model)
        kept = self._fingerprints  # several threads may ask at once, and find that the weights have changed
        if kept is None or kept[0] != state:
            kept = self._fingerprints = state, {}
        known, digest = kept[1], digest_of(loaded)
        if digest not in known:
            known[digest] = bits_fingerprint(self.lm.model, loaded)
        return known[digest]

    def stats(self) -> EngineStats:
        """What the engine does now, and its counts so far."""
        return self._serving.stats()

    def check_open(self) -> None:
        """Raise `EngineError` unless requests are taken: the engine is closed, it has failed, or this is a fork."""
        self._serving.check_open()

    @property
    def seconds_since_step(self) -> float:
        """For how long the step that runs has been running; 0 where nothing runs. It waits for no lock.

        A step takes seconds at most. Where this grows on, the engine hangs, in a function of a request's for example.
        """
        return self._serving.seconds_since_step

    def close(self, drain: bool = True) -> None:
        """Take no more requests and end the thread. Closing twice does nothing; a function of the user's that an engine
        calls may close it too.

        drain: let all requests end first, those that wait too. Otherwise they end as "cancelled".
        """
        self._serving.close(drain)

    # ── checks ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _request(self, prompt: Prompt | None, messages: Messages | None, options: abc.Mapping[str, Any]) -> Request:
        self._serving.check_open()
        if self.lm.model is not self._serving.run.model:
            raise EngineError("the LanguageModel has another model than when this engine was made: make another engine")
        if (prompt is None) == (messages is None):
            count = "neither" if prompt is None else "both"
            raise RequestError(f"give a prompt, or messages= for a chat; got {count}")
        if "cache" in options:
            raise RequestError("an engine has a cache of its own: leave out cache, or use LanguageModel.generate")
        if messages is not None:
            return self.lm.chat_request(messages, **options)
        assert prompt is not None
        prompts, is_batch = as_list(prompt)
        if is_batch:
            raise RequestError(f"submit takes one prompt; got a list of {len(prompts)}: submit each")
        return self.lm.request(prompt, **options)

    def _check_fits(self, ticket: EngineRequest) -> None:
        if ticket.sequences > self.max_sequences:
            raise RequestError(
                f"the request runs {ticket.sequences} texts at once, and the engine {self.max_sequences}: ask for "
                "fewer, or give the engine a larger max_sequences"
            )
        needed = ticket.needed_blocks
        if needed > self._serving.slots.total:
            longest = ticket.job.sequences[0].longest
            raise ContextOverflowError(
                f"the request may take {ticket.sequences} x {longest} positions, more than the engine's whole cache: "
                "ask for fewer new tokens, shorten the prompt, or give the engine more cache_memory"
            )


# The ids of a probe's prompt, and those that follow.
_ASKED, _MADE = 32, 8
# Spreads the ids of the prompt over a vocabulary (Knuth's multiplicative hashing).
_SPREAD = 2_654_435_761


def probe(engine: Engine) -> str:
    """8 hexadecimal digits of the ids and logprobs of a text: prompt and continuation, without an adapter.

    It waits for a request of 40 tokens.

    Raises:
        EngineError: the engine is closed or busy, or the model fails.
    """
    model = engine.lm.model
    context = _ASKED + _MADE if model.max_seq_len is None else model.max_seq_len
    made = min(_MADE, context // 2)
    asked = min(_ASKED, context - made)
    ids = [number * _SPREAD % model.vocab_size for number in range(1, asked + 1)]
    completion = engine.submit(
        ids, max_new_tokens=made, temperature=0.0, ignore_eos=True, logprobs=0, prompt_logprobs=0, draft=None
    ).result()
    entries = (*(completion.prompt_logprobs or ()), *(completion.logprobs or ()))
    logprobs = [entry.chosen for entry in entries if entry is not None]
    bits = struct.pack(f"<{len(completion.token_ids)}q{len(logprobs)}d", *completion.token_ids, *logprobs)
    return hashlib.blake2b(bits, digest_size=4).hexdigest()
