"""Onward's engine: a thread for each client, as in a program that uses it.

In the variant "short steps" a step takes twice as long as one in which 8 rows decode, and no longer.
"""

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import onward
from benchmarks.compare.workers.serve import serve
from benchmarks.serve.workers.server import Server
from benchmarks.serve.workload import Record, Request, followers

BYTES_OF_A_POSITION = 114_688

_ROWS = 8


def _step_ms(lm: onward.LanguageModel) -> float:
    """How long a step takes in which some rows decode."""
    prompts = [[row + 1] * 32 for row in range(_ROWS)]
    times = []
    for tokens in (2, 34):
        lm.generate(prompts, max_new_tokens=tokens, temperature=0, ignore_eos=True)  # programs are made
        began = time.perf_counter()
        lm.generate(prompts, max_new_tokens=tokens, temperature=0, ignore_eos=True)
        times.append(time.perf_counter() - began)
    return 1000 * (times[1] - times[0]) / 32


class Onward(Server):
    def load(self) -> None:
        onward.set_num_threads(self.threads)
        quantize = self.precision if self.precision in ("int8", "int4") else None
        lm = onward.load(self.model_path, dtype="bfloat16", quantize=quantize)
        # Twice what runs at once, so that the first round has written all of it: a fresh page costs a virtual machine
        # as much as the tokens that it holds, and a server that runs for a while has none.
        memory = 2 * self.sequences * self.capacity * BYTES_OF_A_POSITION
        step = 2 * _step_ms(lm) if self.variant == "short steps" else None
        self.engine = onward.Engine(lm, max_sequences=self.sequences, cache_memory=memory, max_step_ms=step)

    def run(self, requests: Sequence[Request]) -> list[Record]:
        records, next_ones = [Record() for _ in requests], followers(requests)
        ready = [threading.Event() for _ in requests]
        failed = threading.Event()

        def send(number: int, at: float) -> None:
            records[number].sent = at
            ready[number].set()

        def client(number: int) -> None:
            request, record = requests[number], records[number]
            ready[number].wait()
            time.sleep(max(0.0, record.sent - (time.perf_counter() - began)))
            if failed.is_set():
                return
            pieces = self.engine.submit(
                request.ids, max_new_tokens=request.new_tokens, temperature=0.0, ignore_eos=True
            )
            for piece in pieces:
                now = time.perf_counter() - began
                record.tokens.append(now)
                record.first = piece.token_id if record.first is None else record.first
                for later in next_ones.get((number, len(record.tokens)), []):
                    send(later, now + requests[later].delay)

        def client_or_failure(number: int) -> None:
            try:
                client(number)
            except BaseException:
                failed.set()
                for event in ready:  # who waits for this one would wait for ever
                    event.set()
                raise

        with ThreadPoolExecutor(len(requests)) as pool:
            clients = [pool.submit(client_or_failure, number) for number in range(len(requests))]
            began = time.perf_counter()
            for number, request in enumerate(requests):
                if request.after is None:
                    send(number, request.delay)
        for each in clients:
            each.result()
        return records


if __name__ == "__main__":
    serve(Onward)
