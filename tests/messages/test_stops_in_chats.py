"""A stop string anywhere in a chat's answer: reasoning, content or a call. Clients see one consistent state."""

import json
from typing import Any

import pytest
from answers import ASKED, CLOCK, TEMPLATES, WEATHER, Chat, answering
from test_cut_calls import ANSWERS
from test_harmony import TEMPLATE as HARMONY

from onward.completion import Completion, Piece
from onward.openai import AnswerStream, BodyReader, answer_body
from onward.speculation import PredictedText, Speculator

CHAT = "/v1/chat/completions"
TOOLS = [WEATHER, CLOCK]
FORMATS = ["hermes", "mistral", "mistral-args", "llama3", "harmony"]


def answering_with(format: str) -> Chat:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(TEMPLATES, "harmony", HARMONY)
        return answering(format, ANSWERS[format])


def streamed(chat: Chat, stop: str) -> tuple[list[Piece], Completion]:
    pieces = []
    stream = chat.lm.stream_chat(ASKED, tools=TOOLS, stop=stop, logprobs=0)
    while True:
        try:
            pieces.append(next(stream))
        except StopIteration as end:
            return pieces, end.value


def joined(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that the deltas of chunks add up to."""
    said: dict[str, Any] = {"content": "", "reasoning": "", "tool_calls": []}
    for delta in (chunk["delta"] for chunk in chunks):
        said["content"] += delta.get("content") or ""
        said["reasoning"] += delta.get("reasoning") or ""
        for call in delta.get("tool_calls", ()):
            if call["index"] == len(said["tool_calls"]):
                said["tool_calls"].append(dict(call["function"]))
            else:
                said["tool_calls"][call["index"]]["arguments"] += call["function"]["arguments"]
    return said


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("format", FORMATS)
def test_a_stop_anywhere_leaves_a_consistent_answer(format: str) -> None:
    chat, text = answering_with(format), ANSWERS[format]
    assert chat.lm.tokenizer is not None
    reader = BodyReader(chat.lm, "m", streams=True)
    predicted = Speculator(PredictedText(chat.lm.encode(text, add_special_tokens=False)))
    ends = set()
    for begin in range(0, len(text) - 3, 7):
        stop = text[begin : begin + 3]
        body = reader.read(CHAT, {"messages": ASKED, "tools": TOOLS, "stop": stop, "stream": True, "logprobs": True})
        (request,) = body.requests
        chat.answers.prompt_length = len(request.prompt)
        pieces, completion = streamed(chat, stop)
        assert completion.stopped_by == stop
        drafted = chat.lm.generate(request.replace(draft=predicted))
        assert (drafted.message, drafted.token_ids) == (completion.message, completion.token_ids)
        assert (drafted.stopped_by, drafted.reasoning_tokens) == (completion.stopped_by, completion.reasoning_tokens)

        (choice,) = answer_body(body, [completion], chat.lm.tokenizer, "0")["choices"]
        stream = AnswerStream(body, chat.lm.tokenizer, "0")
        events = [*stream.begin(0), *(chunk for piece in pieces for _, chunk in stream.pieces(0, [piece]))]
        chunks = [json.loads(event)["choices"][0] for event in [*events, *stream.end(0, completion)]]
        said, message = joined(chunks), choice["message"]
        assert said["content"] == (message["content"] or "")
        assert said["reasoning"] == (message.get("reasoning") or "")
        assert said["tool_calls"] == [call["function"] for call in message.get("tool_calls", ())]
        entries = [entry for chunk in chunks if chunk["logprobs"] for entry in chunk["logprobs"]["content"]]
        assert [entry["id"] for entry in entries] == completion.token_ids
        assert stop not in said["content"] + said["reasoning"]

        whole = [is_json(call["arguments"]) for call in said["tool_calls"]]
        assert all(whole[:-1])
        assert chunks[-1]["finish_reason"] == choice["finish_reason"]
        assert choice["finish_reason"] == ("tool_calls" if whole and whole[-1] else "stop")
        ends.add((bool(whole), choice["finish_reason"]))
    assert ends >= {(False, "stop"), (True, "stop")}


def test_a_call_that_the_model_ends_itself_is_to_be_run_whatever_its_arguments_are() -> None:
    chat = answering("hermes", '<tool_call>\n{"name": "clock", "arguments": {"at": ')
    body = BodyReader(chat.lm, "m").read(CHAT, {"messages": ASKED, "tools": TOOLS})
    chat.answers.prompt_length = len(body.requests[0].prompt)
    assert chat.lm.tokenizer is not None
    (choice,) = answer_body(body, [chat.lm.generate(body.requests[0])], chat.lm.tokenizer, "0")["choices"]
    assert choice["finish_reason"] == "tool_calls"
