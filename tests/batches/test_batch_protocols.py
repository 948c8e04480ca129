"""Lines of every protocol: a result depends only on the line and the model."""

import asyncio
import json
from typing import Any

import pytest

import onward
from onward.batches import EngineReplica
from onward.batches.line import BatchLine
from onward.protocols import BodyReader

SAID = [{"role": "user", "content": "Tell me a story about a fox, an owl and a bear in a wood."}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": SAID, "max_tokens": 5},
    "/v1/completions": {"prompt": "Once upon a time there was a fox", "max_tokens": 5},
    "/v1/responses": {"input": SAID[0]["content"], "max_output_tokens": 5},
    "/v1/messages": {"messages": SAID, "max_tokens": 5},
}


@pytest.mark.parametrize("url", BODIES)
def test_results_do_not_depend_on_the_run(url: str) -> None:
    """The second time the prompt is in the cache."""
    lm = onward.load("demo")
    lines = [json.dumps({"custom_id": "a", "method": "POST", "url": url, "body": body}) for body in (BODIES[url], {})]
    with onward.Engine(lm) as engine:
        replica = EngineReplica(engine, BodyReader(lm, "demo"))
        read = [BatchLine.read(at, line, created=1_700_000_000) for at, line in enumerate(lines)]
        first, again = (asyncio.run(replica.serve(read)) for _ in range(2))
        assert engine.stats().blocks_cached
    assert [result.text for result in first] == [result.text for result in again]
    served, failed = (json.loads(result.text)["response"] for result in first)
    assert served["status_code"] == 200
    assert served["body"]["usage"].get("input_tokens", served["body"]["usage"].get("prompt_tokens")) > 5
    assert failed["status_code"] == 400
    assert (failed["body"].get("type") == "error") == (url == "/v1/messages")
