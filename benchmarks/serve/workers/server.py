"""The worker's side: a `Server` answers requests that come and go, and notes when each token came.

    {"do": "run", "requests": [{"ids": [...], "new_tokens": 64, "after": null, "tokens": 0, "delay": 0.0}, ...]}
        -> {"records": [{"sent": 0.0, "tokens": [.2, .23, ...], "first": 17}, ...]}

The clients live in the worker: what is measured is an engine in the process of its user, without a network.
"""

import time
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.compare.workers.serve import Service
from benchmarks.serve.workload import Record, Request, followers


class Server(Service):
    """A contender that answers up to `sequences` requests at a time."""

    @abstractmethod
    def run(self, requests: Sequence[Request]) -> list[Record]:
        """Answer all of them, each in its time."""

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        if request["do"] != "run":
            raise ValueError(f"unknown request {request['do']!r}")
        records = self.run([Request(**fields) for fields in request["requests"]])
        return {"records": [asdict(record) for record in records]}


class Stepped(Server):
    """A server whose user calls each step: clients are looked after between two of them."""

    @abstractmethod
    def add(self, number: int, ids: list[int], new_tokens: int) -> None:
        """A request comes; it may wait for its turn."""

    @abstractmethod
    def step(self) -> Iterable[tuple[int, int]]:
        """Do a step for those that run: the tokens that came, each with the number of its request."""

    def run(self, requests: Sequence[Request]) -> list[Record]:
        records, next_ones = [Record() for _ in requests], followers(requests)
        due = {number: request.delay for number, request in enumerate(requests) if request.after is None}
        running, began = set[int](), time.perf_counter()
        while due or running:
            now = time.perf_counter() - began
            for number in [number for number, at in due.items() if at <= now]:
                records[number].sent = due.pop(number)
                self.add(number, requests[number].ids, requests[number].new_tokens)
                running.add(number)
            if not running:
                time.sleep(min(due.values()) - now)
                continue
            pairs = list(self.step())
            now = time.perf_counter() - began
            for number, token in pairs:
                tokens = records[number].tokens
                tokens.append(now)
                if len(tokens) == 1:
                    records[number].first = token
                for later in next_ones.get((number, len(tokens)), []):
                    due[later] = now + requests[later].delay
                if len(tokens) == requests[number].new_tokens:
                    running.remove(number)
        return records
