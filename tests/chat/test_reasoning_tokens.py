"""The number of reasoning tokens of an answer, wherever the text is cut; marks don't count."""

import json

import pytest
from answers import ASKED, TEMPLATES, Chat, MarkTokenizer, answering
from test_harmony import TEMPLATE as HARMONY

import onward
from onward.batches import BatchLine
from onward.protocols import BodyReader
from onward.testing import ByteTokenizer

CHAT = "/v1/chat/completions"
# The format, the text before the reasoning, the reasoning, its closing mark, the rest.
ANSWERS = {
    "hermes": ("hermes", "<think>", "\nOslo é?\n🦊", "</think>", "\n\nI look."),
    "opened": ("hermes", "", "Oslo é?\n", "</think>", "\n\nI look."),
    "mistral": ("mistral", "[THINK]", "Oslo é?", "[/THINK]", "I look."),
    "harmony": (
        "harmony",
        "<|channel|>analysis<|message|>",
        "Rain é?\n",
        "<|end|>",
        "<|start|>assistant<|channel|>final<|message|>It rains.",
    ),
    "none": ("hermes", "", "", "", "I look."),
}


def chat_of(name: str, tokenizer: ByteTokenizer | None = None) -> Chat:
    format, opening, reasoning, closing, rest = ANSWERS[name]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(TEMPLATES, "harmony", HARMONY)
        return answering(format, f"{opening}{reasoning}{closing}{rest}", tokenizer)


def variables(name: str) -> dict[str, bool]:
    return {"opens_thinking": True} if name == "opened" else {}


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), MarkTokenizer()], ids=["text", "special tokens"])
@pytest.mark.parametrize("name", ANSWERS)
@pytest.mark.stride(2)
def test_reasoning_tokens_are_those_of_the_reasoning_text(name: str, tokenizer: ByteTokenizer) -> None:
    _, opening, reasoning, closing, _ = ANSWERS[name]
    chat = chat_of(name, tokenizer)
    begin, count, mark = (len(tokenizer.encode(text)) for text in (opening, reasoning, closing))
    template = variables(name)
    whole = chat.chat(template=template)
    assert whole.reasoning_tokens == count
    assert (whole.message.reasoning or "").strip() == reasoning.strip()
    for cut in range(1, len(whole.token_ids)):
        # A closing mark that is cut is text of the reasoning.
        expected = count if cut >= begin + count + mark else max(0, cut - begin)
        if expected == 0 and not opening:
            continue
        ended = chat.chat(template=template, max_new_tokens=cut)
        assert ended.reasoning_tokens == expected, cut
    with onward.Engine(chat.lm) as engine:
        served = engine.submit(messages=ASKED, template=template).result()
        resumed = engine.resume(chat.lm.chat_request(ASKED, template=template), emitted=whole.token_ids[: begin + 3])
        assert served.reasoning_tokens == resumed.result().reasoning_tokens == count
    beams = chat.lm.chat(ASKED, beams=2, template=template)
    assert beams.reasoning_tokens == count
    assert chat.lm.generate(chat.lm.chat_prompt(ASKED, template)).reasoning_tokens is None


@pytest.mark.parametrize("stop", ["Oslo é", "\n\nI", "</think>\n\nI", "é?\n🦊</th"])
def test_text_delayed_for_a_stop_string_counts_to_its_tokens(stop: str) -> None:
    _, opening, reasoning, closing, rest = ANSWERS["hermes"]
    stopped = chat_of("hermes").chat(stop=stop)
    visible = f"{opening}{reasoning}{closing}{rest}".partition(stop)[0]
    assert stopped.reasoning_tokens == len(visible.partition(closing)[0].removeprefix(opening).encode())


@pytest.mark.parametrize("name", ANSWERS)
def test_usage_reports_reasoning_tokens(name: str) -> None:
    chat = chat_of(name)
    count = len(ANSWERS[name][2].encode())
    assert chat.lm.tokenizer is not None
    reader = BodyReader(chat.lm, "m", variables=variables(name), streams=True)
    sampled = {"n": 2, "temperature": 1, "seed": 1}
    for fields in ({}, sampled, {"max_tokens": 12}):
        body = {"messages": ASKED, **fields, "stream": True, "stream_options": {"include_usage": True}}
        read = reader.read(CHAT, body)
        (request,) = read.requests
        chat.answers.prompt_length = len(request.prompt)
        completion = chat.lm.generate(request)
        expected = sum(text.reasoning_tokens or 0 for text in completion.choices)
        if "max_tokens" not in fields:
            assert expected == count * request.options.n
        answer = read.protocol.answer(read, [completion])
        details = {"completion_tokens_details": {"reasoning_tokens": expected}} if expected else {}
        assert {
            key: value for key, value in answer["usage"].items() if key.startswith("completion_tokens_d")
        } == details
        stream = read.protocol.events(read)
        stream.begin(0), stream.end(0, completion)
        assert json.loads(stream.finish()[0].removeprefix("data: "))["usage"] == answer["usage"]
        line = BatchLine(1, "a", CHAT, {}).served("batch_req_0", answer)
        assert line["response"]["body"]["usage"].get("completion_tokens_details") == details.get(
            "completion_tokens_details"
        )
    response = reader.read("/v1/responses", {"input": "Rain?"})
    chat.answers.prompt_length = len(response.requests[0].prompt)
    completion = chat.lm.generate(response.requests[0])
    usage = response.protocol.answer(response, [completion])["usage"]
    assert usage["output_tokens_details"] == {"reasoning_tokens": count}
    events = response.protocol.events(response).end(0, completion)
    assert json.loads(events[-1].partition("data: ")[2])["response"]["usage"] == usage
