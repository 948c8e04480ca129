"""The result of `mypy --strict` for a user's code. `make types` checks this file; an unnecessary ignore fails."""

from typing import assert_type

import numpy as np
import torch

import onward
from onward import AssistantMessage, Completion, Engine, Generation, LanguageModel, Piece, Request, Score


def one_prompt_gives_one_completion(lm: LanguageModel) -> str:
    assert_type(lm.generate("Once", temperature=0.8, stop=["."], max_new_tokens=None), Completion)
    assert_type(lm.generate([1, 2, 3]), Completion)
    assert_type(lm.generate(torch.tensor([1, 2])), Completion)
    assert_type(lm.generate(np.array([1, 2])), Completion)
    assert_type(lm.request("Once", seed=3), Request)
    assert_type(lm.generate(lm.request("Once")), Completion)
    assert_type(lm.score("Once"), Score)
    assert_type(lm.generate("Once", json_schema={"type": "object"}), Completion)
    assert_type(lm.generate("Once", choice=["a", "b"], beams=2), Completion)
    lm.generate("Once", regex=3)  # type: ignore[call-overload]
    return lm.generate("Once upon a time").text


def several_prompts_give_a_list(lm: LanguageModel) -> None:
    assert_type(lm.generate(["Once", "Then"]), list[Completion])
    assert_type(lm.generate([[1, 2], [3]], per_prompt=[{"temperature": 0.5}, {"seed": 7}]), list[Completion])
    assert_type(lm.generate([lm.request("Once"), lm.request("Then")]), list[Completion])
    assert_type(lm.generate(["Once", "Then"], per_prompt=[{"regex": "a"}, {"grammar": "start: /a/"}]), list[Completion])
    assert_type(lm.score(["Once", "Then"]), list[Score])


def streams_and_chats(lm: LanguageModel, small: LanguageModel) -> None:
    for piece in lm.stream("Once", draft="lookup"):
        assert_type(piece.text, str)
    messages = [{"role": "user", "content": "Hi"}]
    assert_type(lm.chat(messages, tools=[{"name": "search"}, print], enable_thinking=False, draft=small), Completion)
    answer = lm.chat(messages, tool_choice="required", parallel_tool_calls=False).message
    assert_type(answer, AssistantMessage | None)
    if answer is not None:
        lm.chat([*messages, answer, {"role": "tool", "content": str(answer.tool_calls[0].parsed)}])
    assert_type(lm.chat_request(messages, seed=3), Request)
    session = onward.Session(lm)
    assert_type(session.chat(messages, enable_thinking=False, temperature=0.5), Completion)
    assert_type(onward.quantize(lm, "int8"), LanguageModel)


async def an_engine_takes_the_same_options(lm: LanguageModel) -> None:
    with Engine(lm, max_sequences=2) as engine:
        generation = engine.submit("Once", priority=1, client="a", n=2, temperature=0.8, draft="lookup")
        assert_type(generation, Generation)
        assert_type(engine.submit(messages=[{"role": "user", "content": "Hi"}], enable_thinking=False), Generation)
        assert_type(engine.resume("Once", emitted=[1, 2], seed=3), Generation)
        assert_type(generation.result(), Completion)
        assert_type(await generation, Completion)
        assert_type(list(generation), list[Piece])
        assert_type([piece async for piece in generation], list[Piece])
        engine.submit()  # type: ignore[call-overload]
        engine.submit("Once", temprature=1)  # type: ignore[call-overload]
        engine.submit("Once", enable_thinking=False)  # type: ignore[call-overload]
        engine.submit("Once", messages=[])  # type: ignore[call-overload]
        engine.resume("Once", seed=3)  # type: ignore[call-overload]
    Engine(lm, max_sequence=2)  # type: ignore[call-arg]


def a_typo_is_an_error(lm: LanguageModel) -> None:
    lm.generate("Once", temprature=1)  # type: ignore[call-overload]
    lm.generate(["Once"], max_tokens=5)  # type: ignore[call-overload]
    lm.generate("Once", temperature="hot")  # type: ignore[call-overload]
    lm.stream("Once", do_sample=True)  # type: ignore[call-arg]
    lm.chat([{"role": "user", "content": "Hi"}], num_beams=2)  # type: ignore[call-arg]
    lm.generate(["Once"], per_prompt=[{"temprature": 1}])  # type: ignore[typeddict-unknown-key]
    onward.Session(lm).generate("Once", temprature=1)  # type: ignore[call-arg]
    onward.GenerateOptions(temprature=1)  # type: ignore[call-arg]
    onward.GenerateOptions().replace(temprature=1)  # type: ignore[call-arg]
    onward.SamplingParams().replace(max_new_tokens=1)  # type: ignore[call-arg]
    lm.request("Once").replace(temprature=1)  # type: ignore[call-arg]
