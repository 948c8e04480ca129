"""A session gives the tokens of fresh calls, after any edit, interruption, save or training step."""

import contextlib
import dataclasses
import threading
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from session_cases import GREEDY, PENALISED, SAMPLED, TOKENIZER, WINDOWED, contents, counting, spoil, tiny

import onward
from onward import GenerateOptions, LanguageModel, Model, Session
from onward.chat import ChatTemplate
from onward.decoding.speculation import ModelDrafter, PromptLookup, Speculator
from onward.errors import ContextOverflowError, RequestError
from onward.testing import scripted_model, tiny_model

few = settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])


# ── the same tokens ───────────────────────────────────────────────────────────────────────────────────────


@dataclasses.dataclass(frozen=True)
class Turn:
    """keep: the share of the text so far that the prompt begins with. new: ids after it. options: of the request.
    draft: whose guesses it is decoded with. taken: pieces after which the stream is left, None for none. saved: whether
    the session goes through a file first.
    """

    keep: float
    new: list[int]
    options: dict[str, Any]
    draft: str | None
    taken: int | None
    saved: bool


turns = st.builds(
    Turn,
    keep=st.sampled_from((1.0, 1.0, 1.0, 0.0)) | st.floats(0, 1),
    new=st.lists(st.integers(0, 257), min_size=1, max_size=20),
    options=st.builds(
        dict.__or__,
        st.sampled_from((GREEDY, SAMPLED, PENALISED)),
        st.fixed_dictionaries({"max_new_tokens": st.integers(0, 12), "eos": st.sampled_from(((), tuple(range(60))))}),
    ),
    draft=st.sampled_from((None, None, "lookup", "right", "wrong")),
    taken=st.none() | st.integers(0, 12),
    saved=st.sampled_from((False, False, True)),
)


@given(turns=st.lists(turns, min_size=2, max_size=7))
@few
def test_tokens_equal_those_of_fresh_calls(turns: list[Turn], tmp_path_factory: pytest.TempPathFactory) -> None:
    # Without prefix memory, a session finds its own text alone.
    lm, file = tiny(prefix_memory=0), tmp_path_factory.getbasetemp() / "turns.safetensors"
    session, sharing, text = Session(lm), Session(tiny()), [1]
    fresh_lm = LanguageModel(lm.model, TOKENIZER, defaults=lm.defaults, prefill_chunk=16, prefix_memory=0)
    for turn in turns:
        if turn.saved:
            session.save(file)
            session = Session.load(file, lm)
        prompt = text[: round(turn.keep * len(text))] + turn.new
        held = session.tokens
        fresh = fresh_lm.generate(prompt, **turn.options)
        if turn.taken is None:
            completion = session.generate(prompt, draft=drafted(turn.draft), **turn.options)
            assert contents(completion) == contents(fresh)
            reused = min(common_prefix(held, prompt), len(prompt) - 1) if turn.options["max_new_tokens"] else 0
            assert completion.cached_tokens == reused
            shared = sharing.generate(prompt, draft=drafted(turn.draft), **turn.options)
            assert contents(shared) == contents(fresh)
            assert session.tokens == (prompt + completion.token_ids)[:-1] or not completion.token_ids
            text = prompt + completion.token_ids
        else:
            stream = session.stream(prompt, draft=drafted(turn.draft), **turn.options)
            pieces = [piece for piece, _ in zip(stream, range(turn.taken), strict=False)]
            stream.close()
            assert [piece.token_id for piece in pieces] == fresh.token_ids[: turn.taken]
            text = prompt + [piece.token_id for piece in pieces]
            # A step that brought several tokens was noted whole.
            assert session.tokens == (prompt + fresh.token_ids)[: len(session.tokens)] or not pieces
        if session.tokens:
            spoil(session)


def drafted(by: str | None) -> Speculator | None:
    """Drafts of 3 ids: the session's own text, its own model, or another."""
    drafters = {"lookup": PromptLookup, "right": lambda: ModelDrafter(tiny().model)}
    drafters["wrong"] = lambda: ModelDrafter(tiny(seed=8).model)
    return None if by is None else Speculator(drafters[by](), length=3)


def common_prefix(one: list[int], two: list[int]) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))


@pytest.mark.parametrize("which", ["float32", "bfloat16", "int8"])
def test_a_chat_of_the_demo_model_equals_fresh_calls(which: str, form: str) -> None:
    if form == "definition" and which != "float32":
        pytest.skip("the definitions promise the same tokens in float32 alone")
    lm = onward.load(
        "demo", dtype="float32" if which == "float32" else None, quantize="int8" if which == "int8" else None
    )
    session, messages = Session(lm), [{"role": "system", "content": "Tell stories."}]
    for number, options in enumerate((GREEDY, SAMPLED, PENALISED, GREEDY)):
        messages.append({"role": "user", "content": f"Tell me story number {number}, please."})
        answer = session.chat(messages, max_new_tokens=25, **options)
        assert contents(answer) == contents(lm.chat(messages, max_new_tokens=25, **options))
        assert (answer.cached_tokens > 0) == (number > 0)
        messages.append({"role": "assistant", "content": answer.text})


def test_a_streamed_chat_equals_the_chat() -> None:
    lm = LanguageModel(tiny().model, TOKENIZER, ChatTemplate("{{ messages | tojson }}", {}))
    messages = [{"role": "user", "content": "Hi"}]
    pieces = Session(lm).stream_chat(messages, max_new_tokens=8)
    assert [piece.token_id for piece in pieces] == lm.chat(messages, max_new_tokens=8).token_ids


@pytest.mark.parametrize("memory", [0, 2**20, 2**30])
def test_the_prefix_cache_size_does_not_affect_sessions(memory: int) -> None:
    lm = LanguageModel(tiny_model("qwen3", seed=7, **WINDOWED), TOKENIZER)
    one, two = Session(lm), Session(lm)
    for session, prompt in ((one, list(range(90))), (two, list(range(90, 110)))):
        session.generate(prompt, max_new_tokens=5)
    lm.prefix_memory = memory
    for session in (one, two, one):
        text = session.tokens
        assert len(text) > 20
        completion = session.generate([*text, 7, 8], max_new_tokens=10, **SAMPLED)
        assert completion.cached_tokens == len(text)
        assert contents(completion) == contents(lm.generate([*text, 7, 8], max_new_tokens=10, **SAMPLED))


# ── only new tokens ───────────────────────────────────────────────────────────────────────────────────────


def test_turns_process_only_their_new_tokens() -> None:
    model, processed = counting(tiny().model)
    lm = LanguageModel(model, TOKENIZER, prefill_chunk=512, compile="eager")
    session, text = Session(lm), list(b"A system prompt that is long. ")
    for turn in range(5):
        text += b"And a question."
        del processed[:]
        completion = session.generate(text, max_new_tokens=6)
        # The last id of the answer before was never processed, so it counts as new.
        new = len(b"And a question.") + (len(b"A system prompt that is long. ") if turn == 0 else 1)
        assert processed == [new] + [1] * 5
        assert completion.cached_tokens == completion.prompt_tokens - new
        text += completion.token_ids


def test_an_edit_reprocesses_only_the_tokens_after_it() -> None:
    model, processed = counting(tiny().model)
    session = Session(LanguageModel(model, TOKENIZER, compile="eager"))
    session.generate("The quick brown fox", max_new_tokens=4)
    for prompt, new in (("The quick brown dog", 3), ("The quick brown dog", 1), ("The", 1), ("Thus", 2)):
        del processed[:]
        assert session.generate(prompt, max_new_tokens=1).cached_tokens == len(prompt) - new
        assert processed == [new]


def test_fresh_sessions_without_prefix_memory_reuse_nothing() -> None:
    lm = LanguageModel(tiny().model, TOKENIZER, prefix_memory=0)
    for _ in range(2):
        assert Session(lm).generate("Hi").cached_tokens == 0
        assert lm.generate("Hi").cached_tokens == 0
        assert Session(lm).tokens == []


def test_sessions_work_without_prefix_memory() -> None:
    lm = LanguageModel(tiny().model, TOKENIZER, prefix_memory=0)
    session, text = Session(lm), [1]
    for _ in range(5):
        completion = session.generate(text, max_new_tokens=40, ignore_eos=True)
        assert completion.cached_tokens == max(len(text) - 2, 0)
        assert completion.token_ids == lm.generate(text, max_new_tokens=40, ignore_eos=True).token_ids
        text += [*completion.token_ids, 5]


def test_prompt_logprobs_process_the_whole_prompt() -> None:
    lm = tiny()
    session = Session(lm)
    session.generate("Hello")
    completion = session.generate("Hello", prompt_logprobs=2)
    fresh = lm.generate("Hello", prompt_logprobs=2)
    assert (contents(completion), completion.prompt_logprobs, completion.cached_tokens) == (
        contents(fresh),
        fresh.prompt_logprobs,
        0,
    )
    assert session.generate("Hello").cached_tokens == 4


def test_truncate_removes_tokens() -> None:
    session = Session(tiny())
    want = contents(session.generate("Hello", **SAMPLED))
    session.truncate(3)
    assert session.tokens == list(b"Hel")
    again = session.generate("Hello", **SAMPLED)
    assert contents(again) == want
    assert again.cached_tokens >= 3, "what was dropped may still be in the prefix cache"
    session.truncate()
    assert session.tokens == []
    with pytest.raises(RequestError, match="cannot truncate to 1 ids: only 0 are cached"):
        session.truncate(1)
    with pytest.raises(RequestError, match="length must be"):
        session.truncate(-1)


# ── interrupts ────────────────────────────────────────────────────────────────────────────────────────────


@given(at=st.integers(0, 12), error=st.sampled_from((KeyboardInterrupt, RuntimeError, MemoryError)))
@few
def test_an_error_anywhere_in_a_step_keeps_processed_tokens(at: int, error: type[BaseException]) -> None:
    """A scripted model raises after any number of calls; and it reports positions that were never written."""
    calls = 0

    def script(tokens: list[int]) -> int:
        nonlocal calls
        calls += 1
        if calls == at + 8:
            raise error
        return (tokens[-1] + len(tokens)) % 32

    lm = LanguageModel(scripted_model(script), prefill_chunk=3)
    session = Session(lm)
    session.generate([1, 2, 3], max_new_tokens=2)
    calls = 3
    prompt = [1, 2, 9, 9, 8, 8, 7]
    with contextlib.suppress(error):
        session.generate(prompt, max_new_tokens=6)
    calls = 100
    want = lm.generate(prompt, max_new_tokens=9)
    held = session.tokens
    assert held == (prompt + want.token_ids)[: len(held)]
    assert len(held) >= 2
    assert session.generate(prompt, max_new_tokens=9).token_ids == want.token_ids


def test_an_error_in_the_consumer_of_a_stream_loses_nothing() -> None:
    lm = tiny()
    session = Session(lm)

    def consume() -> None:
        for count, _ in enumerate(session.stream("Hello", max_new_tokens=9)):
            if count == 3:
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        consume()
    assert session.tokens == [*b"Hello", *lm.generate("Hello", max_new_tokens=9).token_ids[:3]]


def test_an_unstarted_stream_changes_nothing() -> None:
    session = Session(tiny())
    session.generate("Hello")
    tokens = session.tokens
    stream = session.stream("Something else")
    assert session.tokens == tokens
    stream.close()
    assert session.tokens == tokens


def test_a_stream_overtaken_by_another_call_is_refused() -> None:
    lm = tiny()
    session = Session(lm)
    stream = session.stream("Hello")
    next(stream)
    other = session.generate("Help")
    with pytest.raises(RequestError, match="cannot continue: its session has since begun another request"):
        next(stream)
    assert session.tokens == [*b"Help", *other.token_ids[:-1]]
    assert contents(other) == contents(lm.generate("Help"))


def test_a_cancelled_text_can_be_continued() -> None:
    lm, cancel = tiny(), threading.Event()
    session = Session(lm)
    cancel.set()
    stopped = session.generate("Hello", cancel=cancel)
    assert stopped.finish_reason == "cancelled"
    assert contents(session.generate("Hello")) == contents(lm.generate("Hello"))


# ── the cache ─────────────────────────────────────────────────────────────────────────────────────────────


def test_a_cache_grows_by_doubling() -> None:
    model = tiny_model("qwen3", max_position_embeddings=4096)
    made = []

    def new_cache(batch: int, max_len: int) -> Any:
        made.append(max_len)
        return model.new_cache(batch, max_len)

    lm = LanguageModel(dataclasses.replace(model, new_cache=new_cache, new_blocks=None), TOKENIZER)
    session, text = Session(lm), [1]
    for _ in range(25):
        completion = session.generate([*text, *[5] * 60], max_new_tokens=40, ignore_eos=True)
        assert completion.cached_tokens == max(len(text) - 1, 0)
        text += [5] * 60 + completion.token_ids
    assert made == [256, 512, 1024, 2048, 4096]
    assert session.tokens == text[:-1]
    assert completion.token_ids == lm.generate(text[:-40], max_new_tokens=40, ignore_eos=True).token_ids


def test_a_session_may_fill_the_context_exactly() -> None:
    lm = tiny()
    session = Session(lm)
    text = [1] * 200
    text += session.generate(text, max_new_tokens=20, ignore_eos=True).token_ids
    tokens = session.tokens
    with pytest.raises(
        ContextOverflowError, match=r"prompt \(220 tokens\) \+ max_new_tokens \(37\) = 257, but the context"
    ):
        session.generate(text, max_new_tokens=37)
    with pytest.raises(ContextOverflowError, match="the prompt is 257 tokens long, but the context holds 256"):
        session.stream([1] * 257)
    assert session.tokens == tokens
    brim = session.generate(text, max_new_tokens=36, ignore_eos=True)
    assert (brim.cached_tokens, len(brim.token_ids)) == (219, 36)


def test_a_forward_may_return_a_new_cache() -> None:
    model = tiny().model

    def forward(tokens: Any, offsets: Any, cache: Any, params: Any, **options: Any) -> Any:
        copy = type(cache)(*(tuple(layer.clone() for layer in layers) for layers in cache))
        return model.forward(tokens, offsets, copy, params, **options)

    few_tokens = GenerateOptions(max_new_tokens=10)
    lm = LanguageModel(
        dataclasses.replace(model, forward=forward, new_blocks=None), TOKENIZER, None, few_tokens, compile="eager"
    )
    session = Session(lm)
    text = [*b"Hello", *session.generate("Hello", **SAMPLED).token_ids, *b" again"]
    again = session.generate(text, **SAMPLED)
    assert again.cached_tokens == len(text) - len(b" again") - 1
    assert contents(again) == contents(tiny().generate(text, **SAMPLED))


@pytest.mark.parametrize("layout", ["positions last", "an extra constant", "positions hidden"])
def test_custom_caches(layout: str) -> None:
    """Growing copies the cache if its positions are known, and recomputes it otherwise."""

    def new_cache(batch: int, max_len: int) -> list[dict[str, Any]]:
        shape = (2 * max_len,) if layout == "positions hidden" else (3, max_len)
        constant = {"scale": torch.ones(4)} if layout == "an extra constant" else {}
        return [{"ids": torch.full(shape, -1)} | constant]

    def forward(tokens: Any, offsets: Any, cache: list[dict[str, Any]], params: Any) -> Any:
        offset, count = int(offsets[0]), tokens.shape[1]
        ids = cache[0]["ids"]
        row = ids if layout == "positions hidden" else ids[1]
        assert bool((row[:offset] >= 0).all()), "the entries of the session were written"
        row[offset : offset + count] = tokens[0]
        row[offset + count :] = -1
        sums = row[: offset + count].cumsum(0)[offset:] % 32
        return torch.nn.functional.one_hot(sums, 32).float().unsqueeze(0), cache

    lm = LanguageModel(Model(forward, (), new_cache, vocab_size=32))
    session, text = Session(lm), [3]
    for turn in range(12):
        prompt = [*text, *range(turn, turn + 20)]
        completion = session.generate(prompt, max_new_tokens=30)
        assert completion.token_ids == lm.generate(prompt, max_new_tokens=30).token_ids
        grows = len(text) <= 256 < len(prompt) + 30 or len(text) <= 512 < len(prompt) + 30
        assert completion.cached_tokens == (
            0 if turn == 0 or (grows and layout == "positions hidden") else len(text) - 1
        )
        text = prompt + completion.token_ids


# ── other weights ─────────────────────────────────────────────────────────────────────────────────────────


def test_changed_weights_make_a_session_forget() -> None:
    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.embed = torch.nn.Embedding(32, 8)
            self.head = torch.nn.Linear(8, 32)

        def new_cache(self, batch: int, max_len: int) -> torch.Tensor:
            return torch.zeros(batch, max_len, 8)

        def forward(self, tokens: Any, offsets: Any, cache: torch.Tensor) -> Any:
            begin, end = int(offsets[0]), int(offsets[0]) + tokens.shape[1]
            cache[:, begin:end] = self.embed(tokens.long())
            return self.head(cache[:, :end].cumsum(1)[:, begin:]), cache

    net = Net()
    lm = LanguageModel(Model.from_module(net, vocab_size=32))
    session, prompt = Session(lm), [1, 2, 3, 4]

    def generated() -> tuple[list[int], int]:
        completion = session.generate(prompt, max_new_tokens=6)
        assert completion.token_ids == lm.generate(prompt, max_new_tokens=6).token_ids
        return completion.token_ids, completion.cached_tokens

    before, _ = generated()
    assert generated() == (before, 3)
    optimizer = torch.optim.SGD(net.parameters(), lr=5.0)
    net.embed.weight.sum().backward()
    net.head.weight.square().sum().backward()
    optimizer.step()
    after, again = generated()
    assert again == 0
    assert after != before
    net.load_state_dict({name: tensor.flip(0) for name, tensor in net.state_dict().items()}, assign=True)
    assert generated()[1] == 0
    assert generated()[1] == 3


def test_a_replaced_model_makes_a_session_forget() -> None:
    lm = LanguageModel(tiny().model, TOKENIZER)
    session = Session(lm)
    session.generate("Hello")
    lm.model = tiny(seed=8).model
    completion = session.generate("Hello")
    assert completion.cached_tokens == 0
    assert contents(completion) == contents(lm.generate("Hello"))


# ── errors ────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n": 2, "temperature": 1.0}, "one text at a time"),
        ({"beams": 2}, "one text at a time"),
        ({"temprature": 1}, "unknown option 'temprature'"),
        ({"cache": None}, "cache"),
    ],
)
def test_unsupported_calls_are_refused_and_the_session_is_unchanged(options: Any, message: str) -> None:
    session = Session(tiny())
    session.generate("Hello")
    tokens = session.tokens
    with pytest.raises((RequestError, TypeError), match=message):
        session.generate("Hello", **options)
    assert session.tokens == tokens


def test_a_session_takes_one_prompt() -> None:
    session = Session(tiny())
    for prompts in (["a", "b"], ["a"]):
        with pytest.raises(RequestError, match="one text"):
            session.generate(prompts)


def test_a_session_without_a_chat_template_has_no_chats() -> None:
    with pytest.raises(onward.errors.TokenizerError, match="no chat template"):
        Session(tiny()).chat([{"role": "user", "content": "Hi"}])


def test_defaults_are_those_of_the_language_model() -> None:
    lm = LanguageModel(tiny().model, TOKENIZER, defaults=GenerateOptions(max_new_tokens=3))
    assert len(Session(lm).generate("Hello").token_ids) == 3
