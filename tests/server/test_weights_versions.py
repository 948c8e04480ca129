"""The versions of the weights over HTTP, beside the ids of the tokens."""

from collections.abc import Callable

from live_server import MESSAGES, LiveServer, deltas

import onward

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def test_tokens_have_the_version_of_their_weights(start: Callable[..., LiveServer]) -> None:
    lm = onward.load("demo")
    server = start({"demo": lm}, engine={"max_sequences": 4})
    weights = dict(onward.load("demo", trainable=True).named_parameters())
    for body, path in (({"messages": MESSAGES}, CHAT), ({"prompt": "The fox"}, TEXT)):
        asked = {**body, "max_tokens": 6, "return_token_ids": True, "n": 2, "seed": 1}
        before = server.post(path, asked).json()["choices"]
        updated = server.engines["demo"].weights_version > 0  # else they are those that it was started with
        assert all(("weights_versions" in choice) == updated for choice in before)
        version = server.engines["demo"].update_weights(weights)
        assert server.engines["demo"].weights_version == version
        for options in ({}, {"beams": 2, "seed": None, "n": 1}):
            choices = server.post(path, asked | options).json()["choices"]
            chunks = server.stream(path, asked | options).chunks
            for choice in choices:
                assert choice["weights_versions"] == [version] * len(choice["token_ids"])
                parts = [part for part in deltas(chunks, choice["index"]) if "token_ids" in part]
                assert [each for part in parts for each in part["weights_versions"]] == choice["weights_versions"]
        assert server.post(path, asked).json()["choices"][0]["token_ids"] == before[0]["token_ids"]
