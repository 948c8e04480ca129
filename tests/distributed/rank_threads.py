"""Ranks as threads of the test's process: they start in milliseconds, and otherwise behave as processes."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import onward
from onward.distributed import run_rank

PROMPTS = [list(range(5, 5 + count)) for count in (3, 9, 70, 130)]
ASKED: dict[str, Any] = {"max_new_tokens": 12, "ignore_eos": True, "logprobs": 2}


@contextmanager
def over_ranks(source: Path, world: int, **options: Any) -> Iterator[onward.LanguageModel]:
    """The model of a folder, divided into `world` ranks."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    failed: list[BaseException] = []
    before = threading.enumerate()

    def follow(rank: int) -> None:
        try:
            run_rank(rank, world, address)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=follow, args=(rank,), daemon=True) for rank in range(1, world)]
    for thread in threads:
        thread.start()
    lm = onward.load(source, pipeline=world, address=address, **options)
    yield lm
    lm.model.forward.group.close()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert not failed
    started = [thread for thread in threading.enumerate() if thread not in before]
    assert not [thread for thread in started if thread.name == "onward-beat"], "a rank beats no longer"


def same(one: onward.LanguageModel, split: onward.LanguageModel, **options: Any) -> bool:
    """Whether both give the same ids with the same logprobs."""
    ours, theirs = (lm.generate(PROMPTS, **{**ASKED, **options}) for lm in (one, split))
    return all(
        a.token_ids == b.token_ids and a.logprobs == b.logprobs and a.prompt_logprobs == b.prompt_logprobs
        for a, b in zip(ours, theirs, strict=True)
    )
