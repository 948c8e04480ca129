"""Onward without its engine: those that wait when a batch has ended are the next batch of one `generate`.

In the variant "dense" the cache is one tensor a layer instead of blocks.
"""

import dataclasses
import itertools
import time
from collections.abc import Sequence

import onward
from benchmarks.compare.workers.serve import serve
from benchmarks.serve.workers.server import Server
from benchmarks.serve.workload import Record, Request, followers


class OnwardGenerate(Server):
    def load(self) -> None:
        onward.set_num_threads(self.threads)
        quantize = self.precision if self.precision in ("int8", "int4") else None
        self.lm = onward.load(self.model_path, dtype="bfloat16", quantize=quantize)
        if self.variant == "dense":
            self.lm = self.lm.with_model(dataclasses.replace(self.lm.model, new_blocks=None))

    def run(self, requests: Sequence[Request]) -> list[Record]:
        records, next_ones = [Record() for _ in requests], followers(requests)
        due = {number: request.delay for number, request in enumerate(requests) if request.after is None}
        began = time.perf_counter()
        while due:
            now = time.perf_counter() - began
            batch = [number for number, at in due.items() if at <= now][: self.sequences]
            if not batch:
                time.sleep(min(due.values()) - now)
                continue
            for number in batch:
                records[number].sent = due.pop(number)
            self._generate(batch, requests, records, now)
            for number in batch:
                for count, at in enumerate(records[number].tokens, 1):
                    due |= {later: at + requests[later].delay for later in next_ones.get((number, count), [])}
        return records

    def _generate(self, batch: list[int], requests: Sequence[Request], records: list[Record], now: float) -> None:
        # All run until the longest has ended: a `generate` has one length for all.
        count = max(requests[number].new_tokens for number in batch)
        prompts = [requests[number].ids for number in batch]
        completions = self.lm.generate(prompts, max_new_tokens=count, temperature=0.0, ignore_eos=True)
        for number, completion in zip(batch, completions, strict=True):
            laps = [completion.timing.prefill_ms, *completion.timing.per_token_ms]
            times = [now + milliseconds / 1e3 for milliseconds in itertools.accumulate(laps)]
            records[number].tokens = times[: requests[number].new_tokens]
            records[number].first = completion.token_ids[0]


if __name__ == "__main__":
    serve(OnwardGenerate)
