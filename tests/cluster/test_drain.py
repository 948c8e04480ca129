"""Ctrl-C on `onward deploy`: running streams are not cut."""

import threading

import pytest
from streams import STORY, Stream, deployed, read

pytest.importorskip("ray")

pytestmark = pytest.mark.timeout(240)


def test_running_requests_have_time_to_end() -> None:
    body = STORY | {"n": 16, "ignore_eos": True}
    got: list[Stream] = []
    began = threading.Event()

    def client(port: int) -> None:
        got.append(read(port, body, at=1, act=lambda stream: began.set()))

    with deployed("--drain", "60") as (port, _):
        reading = threading.Thread(target=client, args=(port,))
        reading.start()
        assert began.wait(60)
    reading.join()
    assert got[0].is_whole
    texts, _ = got[0].content
    assert [parts[2] for _, parts in texts] == ["length"] * 16
