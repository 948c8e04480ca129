"""The public methods: any form of prompt, the same text streamed, batched or alone, and helpful errors."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import onward
from onward import Completion, GenerateOptions, LanguageModel, Piece
from onward.chat import ChatTemplate
from onward.checkpoint import find_folder
from onward.errors import ContextOverflowError, RequestError, TokenizerError
from onward.sampling import sample
from onward.testing import ByteTokenizer, poison, scripted_model, tiny_model

TOKENIZER = ByteTokenizer()
EOS = TOKENIZER.eos_id
PROMPTS = ["Once upon a time", "A", "The cat sat on the", "naïve 猫"]
SAMPLED = {"temperature": 1.0, "top_p": 0.95, "seed": 11}


def tiny_lm(family="qwen3", **config) -> LanguageModel:
    """Random weights: its texts are noise, bytes that are no UTF-8 among them."""
    return LanguageModel(tiny_model(family, seed=7, **config), TOKENIZER, defaults=GenerateOptions(max_new_tokens=40))


def saying(replies: dict[str, str], **options) -> LanguageModel:
    """A scripted model that answers each prompt with its reply and an EOS."""
    script = [(TOKENIZER.encode(prompt), [*TOKENIZER.encode(reply), EOS]) for prompt, reply in replies.items()]

    def follow(tokens):
        for prompt, reply in script:
            if tokens[: len(prompt)] == prompt:
                return reply[min(len(tokens) - len(prompt), len(reply) - 1)]
        return 0

    defaults = GenerateOptions(eos=(EOS,))
    return LanguageModel(scripted_model(follow, vocab_size=TOKENIZER.vocab_size, **options), TOKENIZER, None, defaults)


@pytest.fixture(scope="module")
def demo() -> LanguageModel:
    return onward.load("demo")


def contents(completion: Completion) -> tuple:
    """All of a completion but its time."""
    return completion.text, completion.token_ids, completion.finish_reason, completion.prompt_tokens, completion.seed


# ── prompts ───────────────────────────────────────────────────────────────────────────────────────────────


def test_a_text_and_its_ids_are_the_same_prompt():
    lm = tiny_lm()
    of_text = contents(lm.generate("Hello"))
    assert contents(lm.generate(lm.encode("Hello"))) == of_text
    assert contents(lm.generate(tuple(lm.encode("Hello")))) == of_text


def test_a_list_of_prompts_gives_a_list_in_order():
    lm = tiny_lm()
    alone = [contents(lm.generate(prompt)) for prompt in PROMPTS]
    ids = [lm.encode(prompt) for prompt in PROMPTS]
    for prompts in (PROMPTS, ids, tuple(PROMPTS), [PROMPTS[0], ids[1], PROMPTS[2], tuple(ids[3])]):
        assert [contents(one) for one in lm.generate(prompts)] == alone
    assert [contents(one) for one in lm.generate(["A"])] == [alone[1]]


def test_texts_are_encoded_with_a_bos_and_ids_are_unchanged():
    lm = LanguageModel(scripted_model([1], vocab_size=258), ByteTokenizer(add_bos=True))
    lm.generate("a", max_new_tokens=1)
    lm.generate([97], max_new_tokens=1)
    assert [call.tokens for call in lm.model.calls] == [[[256, 97]], [[97]]]


def test_an_empty_text_starts_from_the_bos():
    lm = LanguageModel(scripted_model([1], vocab_size=258), TOKENIZER)
    assert lm.generate("", max_new_tokens=1).prompt_tokens == 1
    assert lm.model.calls[0].tokens == [[TOKENIZER.bos_id]]


# ── one text ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("family", ["qwen3", "llama", "mistral"])
@pytest.mark.parametrize("options", [{}, SAMPLED, {"temperature": 1.5, "seed": 2, "top_k": 30}], ids=str)
def test_batched_rows_equal_each_row_alone(family, options):
    lm = tiny_lm(family, sliding_window=8)
    alone = [contents(lm.generate(prompt, **options)) for prompt in PROMPTS]
    assert [contents(one) for one in lm.generate(PROMPTS, **options)] == alone
    assert [contents(one) for one in lm.generate(PROMPTS[::-1], **options)] == alone[::-1]


@pytest.mark.parametrize("chunk", [1, 2, 7])
@pytest.mark.parametrize("options", [{}, SAMPLED], ids=str)
def test_the_size_of_a_prefill_chunk_changes_no_text(chunk, options):
    lm = tiny_lm()
    whole = [contents(one) for one in lm.generate(PROMPTS, **options)]
    lm.prefill_chunk = chunk
    assert [contents(one) for one in lm.generate(PROMPTS, **options)] == whole


@pytest.mark.parametrize("options", [{}, SAMPLED, {"stop": ["e", "\n"]}, {"max_new_tokens": 0}], ids=str)
@pytest.mark.parametrize("which", ["tiny", "demo"])
def test_streamed_pieces_add_up_to_generate(which, options, demo):
    lm = demo if which == "demo" else tiny_lm()
    options = {"max_new_tokens": 40, "temperature": 0} | options
    pieces, completion = drained(lm.stream("Once upon a time", **options))
    want = lm.generate("Once upon a time", **options)
    assert all(isinstance(piece, Piece) for piece in pieces)
    assert "".join(piece.text for piece in pieces) == want.text
    assert [piece.token_id for piece in pieces] == want.token_ids
    assert contents(completion) == contents(want), "what the generator returns in the end"


def drained(stream):
    """All pieces, and the generator's return value."""
    pieces = []
    while True:
        try:
            pieces.append(next(stream))
        except StopIteration as end:
            return pieces, end.value


def test_an_abandoned_stream_has_no_effect():
    lm = tiny_lm()
    want = contents(lm.generate("Hello", **SAMPLED))
    stream = lm.stream("Hello", **SAMPLED)
    next(stream)
    stream.close()
    assert torch.is_grad_enabled()
    assert contents(lm.generate("Hello", **SAMPLED)) == want


# ── completions ───────────────────────────────────────────────────────────────────────────────────────────


def test_an_eos_id_is_among_the_ids_and_not_in_the_text():
    completion = saying({"Hi": "Yes."}).generate("Hi")
    assert contents(completion) == ("Yes.", [*b"Yes.", EOS], "stop", 2, None)


def test_a_text_at_its_limit_finishes_with_length():
    completion = saying({"Hi": "Yes."}).generate("Hi", max_new_tokens=2)
    assert contents(completion) == ("Ye", [*b"Ye"], "length", 2, None)


def test_rows_that_end_at_different_times_keep_their_texts():
    lm = saying({"a": "short", "b": "a much longer answer", "c": ""})
    texts = lm.generate(["a", "b", "c"])
    assert [one.text for one in texts] == ["short", "a much longer answer", ""]
    assert [one.finish_reason for one in texts] == ["stop"] * 3
    assert len(lm.model.calls) == len(b"a much longer answer") + 1


def test_eos_ids_may_be_overridden_or_ignored():
    lm = saying({"a": "xyz"})
    assert lm.generate("a", eos=[ord("y"), ord("z")]).text == "x"
    assert lm.generate("a", eos=ord("z")).token_ids == [*b"xyz"]
    ignoring = lm.generate("a", ignore_eos=True, max_new_tokens=6)
    assert (ignoring.token_ids, ignoring.finish_reason) == ([*b"xyz", EOS, EOS, EOS], "length")
    assert lm.generate("a", eos=[], max_new_tokens=6).token_ids == ignoring.token_ids


def test_defaults_are_the_checkpoints_unless_overridden(demo):
    expected = json.loads((find_folder("demo") / "generation_config.json").read_text())
    assert expected["do_sample"]
    sampling = {name: expected[name] for name in ("temperature", "top_k", "top_p", "min_p") if name in expected}
    assert demo.defaults == GenerateOptions(**sampling, eos=expected["eos_token_id"])
    assert demo.generate("Once", max_new_tokens=3).seed is not None
    assert demo.generate("Once", max_new_tokens=3, temperature=0).seed is None


@given(
    text=st.text("ab€.", min_size=1, max_size=12),
    stop=st.lists(st.text("ab€.", min_size=1, max_size=3), min_size=1, max_size=2),
)
def test_a_stop_string_ends_the_text_and_is_never_streamed(text, stop):
    lm = saying({"go": text})
    pieces, completion = drained(lm.stream("go", stop=stop))
    generated = TOKENIZER.decode(completion.token_ids)
    begins = [generated.find(one) for one in stop if one in generated]
    assert completion.text == generated[: min(begins, default=None)]
    assert "".join(piece.text for piece in pieces) == completion.text
    assert completion.finish_reason == "stop"
    assert not any(one in completion.text for one in stop)
    assert bool(begins) == any(one in text for one in stop)


def test_partial_characters_are_never_emitted():
    pieces = list(saying({"go": "a€👩‍👩‍👧z"}).stream("go"))
    shown = [piece.text for piece in pieces if piece.text]
    assert shown == list("a€👩‍👩‍👧z")
    assert len(pieces) == len("a€👩‍👩‍👧z".encode()) + 1


def test_a_text_cut_within_a_character_ends_with_a_replacement():
    completion = saying({"go": "a€"}).generate("go", max_new_tokens=2)
    assert completion.text == "a\ufffd"


# ── timing ────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("new", [0, 1, 2, 9])
def test_there_is_a_prefill_time_and_a_time_per_later_token(new):
    timing = tiny_lm().generate("Hello", max_new_tokens=new, ignore_eos=True).timing
    assert len(timing.per_token_ms) == max(new - 1, 0)
    assert (timing.prefill_ms > 0) == (new > 0)
    assert all(ms > 0 for ms in timing.per_token_ms)
    assert timing.total_ms == pytest.approx(timing.prefill_ms + sum(timing.per_token_ms))
    if new > 1:
        assert timing.tokens_per_second == pytest.approx(1000 * (new - 1) / sum(timing.per_token_ms))
    else:
        assert timing.tokens_per_second == 0


def test_each_row_has_the_times_of_its_own_tokens():
    long, short = saying({"a": "long answer", "b": "x"}).generate(["a", "b"])
    for one in (long, short):
        assert len(one.timing.per_token_ms) == len(one.token_ids) - 1
    assert long.timing.per_token_ms[: len(short.token_ids) - 1] == short.timing.per_token_ms
    assert long.timing.prefill_ms == short.timing.prefill_ms


# ── seeds ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_one_seed_gives_one_text():
    lm = tiny_lm()
    one = lm.generate("Hello", temperature=1.0, seed=5)
    assert one.seed == 5
    assert contents(lm.generate("Hello", temperature=1.0, seed=5)) == contents(one)
    assert lm.generate("Hello", temperature=1.0, seed=6).token_ids != one.token_ids


def test_the_reported_seed_reproduces_the_text():
    lm = tiny_lm()
    first, second = lm.generate(["Hello", "Hello"], temperature=1.0)
    assert first.token_ids != second.token_ids
    for one in (first, second):
        assert lm.generate("Hello", temperature=1.0, seed=one.seed).token_ids == one.token_ids


def test_torch_manual_seed_determines_unseeded_texts():
    lm = tiny_lm()
    texts = []
    for _ in range(2):
        torch.manual_seed(9)
        texts.append([lm.generate("Hello", temperature=1.0).token_ids for _ in range(2)])
    assert texts[0] == texts[1]
    assert texts[0][0] != texts[0][1]


# ── logits ────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_logits_are_one_float32_row_per_id(dtype):
    lm = LanguageModel(tiny_model(dtype=dtype), TOKENIZER)
    logits = lm.logits(lm.encode("Hello"))
    assert logits.shape == (5, 258)
    assert logits.dtype == torch.float32
    assert not logits.requires_grad


@pytest.mark.parametrize("options", [{}, SAMPLED], ids=str)
def test_generate_chooses_from_these_logits(options):
    lm = tiny_lm()
    prompt = lm.encode("Hello")
    made = lm.generate(prompt, **options).token_ids
    ids = prompt + made
    logits = lm.logits(ids[:-1])[len(prompt) - 1 :]
    positions = torch.arange(len(prompt), len(ids))
    assert sample(logits, **({"temperature": 0} | options), positions=positions).tolist() == made


def test_logits_do_not_depend_on_later_ids():
    lm = tiny_lm()
    ids = lm.encode("Hello world")
    torch.testing.assert_close(lm.logits(ids)[:5], lm.logits(ids[:5]), rtol=0, atol=1e-5)


# ── caches ────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_cache_can_be_reused_with_any_contents():
    lm = tiny_lm()
    want = [contents(one) for one in lm.generate(PROMPTS, **SAMPLED)]
    cache = lm.new_cache(len(PROMPTS), 80)
    for _ in range(2):
        lm.generate([prompt[::-1] for prompt in PROMPTS], cache=cache)
        assert [contents(one) for one in lm.generate(PROMPTS, cache=cache, **SAMPLED)] == want
    assert [contents(one) for one in lm.generate(PROMPTS, cache=poison(cache), **SAMPLED)] == want


def test_a_new_cache_is_as_long_as_the_context_by_default():
    lm = tiny_lm()
    assert (lm.new_cache().batch, lm.new_cache().max_len) == (1, 256)
    assert (lm.new_cache(3, 17).batch, lm.new_cache(3, 17).max_len) == (3, 17)


def test_a_prompt_and_its_new_tokens_may_fill_the_cache():
    lm = tiny_lm()
    completion = lm.generate("12345", cache=lm.new_cache(1, 15), max_new_tokens=10, ignore_eos=True)
    assert len(completion.token_ids) == 10
    brim = lm.generate([1] * 250, max_new_tokens=6, ignore_eos=True)
    assert len(brim.token_ids) == 6


# ── errors ────────────────────────────────────────────────────────────────────────────────────────────────

REFUSED = [
    ("", {}, RequestError, "the prompt is empty and this model has no BOS token"),
    ([], {}, RequestError, "empty list of ids"),
    ([258], {}, RequestError, "from 0 to 257; got 258"),
    ([1, -1], {}, RequestError, "from 0 to 257; got -1"),
    ([1, True], {}, RequestError, "from 0 to 257; got True"),
    ([1.0], {}, RequestError, "from 0 to 257; got 1.0"),
    ([1, "a"], {}, RequestError, "from 0 to 257; got 'a'"),
    ([{"role": "user", "content": "Hi"}], {}, RequestError, "messages are for chat"),
    (None, {}, RequestError, r"a prompt is a str, ids \(a list, .*; got NoneType"),
    (7, {}, RequestError, "got int"),
    (b"abc", {}, RequestError, "got bytes"),
    ("x" * 21, {}, ContextOverflowError, "the prompt is 21 tokens long, but the context holds 20"),
    ("x" * 20, {}, ContextOverflowError, r"prompt \(20 tokens\) .* = 24, but the context holds 20: shorten the prompt"),
    ("x" * 17, {}, ContextOverflowError, r"prompt \(17 tokens\) \+ max_new_tokens \(4\) = 21, .* at most 3"),
    ("x", {"temprature": 1}, RequestError, "unknown option 'temprature': did you mean temperature\\?"),
    ("x", {"temperature": -1}, RequestError, "temperature must be"),
    ("x", {"top_p": -0.1}, RequestError, "top_p must be a number in"),
    ("x", {"max_new_tokens": -1}, RequestError, "max_new_tokens must be"),
    ("x", {"eos": 258}, RequestError, "eos names id 258, but the vocabulary ends at 257"),
]


REFUSED_IN_A_LIST = [
    ([[]], {}, RequestError, "empty list of ids"),
    (["ok", []], {}, RequestError, "empty list of ids"),
    (["x", "x" * 17], {}, ContextOverflowError, r"prompt \(17 tokens\)"),
    (["x", [258]], {}, RequestError, "from 0 to 257; got 258"),
]


@pytest.mark.parametrize(
    ("verb", "prompt", "options", "error", "message"),
    [("generate", *case) for case in REFUSED + REFUSED_IN_A_LIST] + [("stream", *case) for case in REFUSED],
)
def test_unsupported_requests_are_refused_before_any_work(verb, prompt, options, error, message):
    model = scripted_model([1], vocab_size=258, max_seq_len=20)
    lm = LanguageModel(model, ByteTokenizer(bos_id=None), defaults=GenerateOptions(max_new_tokens=4))
    with pytest.raises(error, match=message):
        getattr(lm, verb)(prompt, **options)
    assert model.calls == []


def test_a_too_small_cache_is_refused_with_its_size():
    lm = tiny_lm()
    with pytest.raises(ContextOverflowError, match=r"prompt \(5 tokens\) .* \(11\) = 16, but the cache holds 15"):
        lm.generate("12345", cache=lm.new_cache(1, 15), max_new_tokens=11)
    with pytest.raises(ContextOverflowError, match="the prompt is 5 tokens long, but the cache holds 4"):
        lm.stream("12345", cache=lm.new_cache(1, 4))


def test_a_cache_of_another_batch_is_refused():
    lm = tiny_lm()
    with pytest.raises(RequestError, match="made for 2 rows, but there are 3 prompts"):
        lm.generate(["a", "b", "c"], cache=lm.new_cache(2))


@pytest.mark.parametrize(("batch", "max_len"), [(0, 5), (1, 0), (-1, 5)])
def test_an_empty_cache_is_refused(batch, max_len):
    with pytest.raises(RequestError, match="a batch and a max_len of 1 or more"):
        tiny_lm().new_cache(batch, max_len)


def test_a_model_without_a_context_needs_a_length_for_its_cache():
    with pytest.raises(RequestError, match="give max_len"):
        LanguageModel(scripted_model([1])).new_cache()


def test_stream_takes_one_prompt():
    with pytest.raises(RequestError, match="stream takes one prompt; got a list of 2: use generate"):
        tiny_lm().stream(["a", "b"])


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([], "empty list"),
        ([258], "from 0 to 257"),
        ([1] * 257, "257 tokens"),
        ("Once", "ids are a list, .*; got str \\(encode takes a text\\)"),
        (7, "ids are a list, .*; got int"),
    ],
)
def test_logits_refuse_the_same_input_as_generate(ids, message):
    with pytest.raises(RequestError, match=message):
        tiny_lm().logits(ids)


@pytest.mark.parametrize("ids", [7, torch.tensor(7), "Once"])
def test_decode_refuses_input_other_than_lists_of_ids(ids):
    with pytest.raises(RequestError, match=r"ids to decode are a list, .*; got (7|'Once')"):
        tiny_lm().decode(ids)


@pytest.mark.parametrize("thing", ["demo", torch.nn.Linear(2, 2), tiny_lm()], ids=lambda thing: type(thing).__name__)
def test_invalid_models_are_refused(thing):
    lm = tiny_lm()
    with pytest.raises(RequestError, match=f"got {type(thing).__name__}: onward.load reads a checkpoint"):
        LanguageModel(thing)
    with pytest.raises(RequestError, match=f"got {type(thing).__name__}: onward.load reads a checkpoint"):
        lm.model = thing


def test_a_session_needs_a_language_model():
    with pytest.raises(RequestError, match=r"a session needs a LanguageModel; got str: see onward\.load"):
        onward.Session("demo")


def test_a_model_without_a_tokenizer_takes_ids_and_gives_ids():
    lm = LanguageModel(tiny_model())
    completion = lm.generate([1, 2, 3], max_new_tokens=5)
    assert completion.text == ""
    assert len(completion.token_ids) == 5
    for call in (lambda: lm.generate("text"), lambda: lm.encode("text"), lambda: lm.decode([1])):
        with pytest.raises(TokenizerError, match=r"no tokenizer\.json: give ids"):
            call()
    with pytest.raises(TokenizerError, match="use eos with ids"):
        lm.generate([1], stop="x")


# ── chat ──────────────────────────────────────────────────────────────────────────────────────────────────

HI = [{"role": "user", "content": "Hi"}]


def test_a_chat_is_rendered_with_the_demos_template(demo):
    messages = [{"role": "system", "content": "Be brief."}, *HI, {"role": "assistant", "content": "Hello!"}, *HI]
    rendered = (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\nHello!<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    ids = demo.chat_prompt(messages)
    assert ids == demo.encode(rendered, add_special_tokens=False)
    assert ids.count(1) == 5, "<|im_start|> is one id"
    assert ids.count(2) == 4, "<|im_end|> is one id"


def test_an_answer_equals_the_completion_of_the_rendered_chat(demo):
    options = {"max_new_tokens": 30, "seed": 3}
    answer = demo.chat(HI, **options)
    assert contents(answer) == contents(demo.generate(demo.chat_prompt(HI), **options))
    pieces, completion = drained(demo.stream_chat(HI, **options))
    assert "".join(piece.text for piece in pieces) == answer.text
    assert contents(completion) == contents(answer)


def test_a_chat_has_only_the_special_tokens_of_its_template():
    lm = LanguageModel(tiny_model(), ByteTokenizer(add_bos=True), ChatTemplate("{{ messages[0].content }}", {}))
    assert lm.chat_prompt(HI) == [*b"Hi"]


def test_variables_reach_the_template():
    template = ChatTemplate("{{ messages[0].content }}{% if loud %}!{% endif %}", {})
    lm = LanguageModel(scripted_model([1], vocab_size=258), TOKENIZER, template)
    assert lm.decode(lm.chat_prompt(HI)) == "Hi"
    assert lm.decode(lm.chat_prompt(HI, {"loud": True})) == "Hi!"
    for unread in ("louder", "messages", "strftime_now", "bos_token", "stop"):
        for ask in (lambda variables: lm.chat_prompt(HI, variables), lambda variables: lm.chat(HI, template=variables)):
            with pytest.raises(RequestError, match=f"does not read {unread}; it reads loud"):
                ask({unread: "x"})
    lm.chat(HI, template={"loud": True}, max_new_tokens=1)
    assert lm.model.calls[-1].tokens == [[*b"Hi!"]]


def test_a_chat_needs_a_template_messages_and_known_options(demo):
    with pytest.raises(TokenizerError, match="no chat template"):
        tiny_lm().chat(HI)
    with pytest.raises(RequestError, match="messages must be a list"):
        demo.chat("Hi")
    with pytest.raises(RequestError, match="with a 'role'"):
        demo.chat([{"content": "Hi"}])
    with pytest.raises(RequestError, match="unknown option 'role'"):
        demo.chat(HI, role="user")


def test_common_prefixes_are_cached_within_a_configurable_budget():
    lm = LanguageModel(tiny_model("qwen3"))
    prompt = [token % 60 + 1 for token in range(150)]
    first = lm.generate(prompt, max_new_tokens=8, temperature=0)
    again = lm.generate([*prompt, 5], max_new_tokens=8, temperature=0)
    assert (first.cached_tokens, again.cached_tokens) == (0, 150)
    lm.prefix_memory = 0
    for _ in range(2):
        completion = lm.generate([*prompt, 5], max_new_tokens=8, temperature=0)
        assert (completion.token_ids, completion.cached_tokens) == (again.token_ids, 0)
    with pytest.raises(RequestError, match="prefix_memory"):
        lm.prefix_memory = -1
