"""Onward through its public API: what users get."""

from collections.abc import Iterator

import onward
from benchmarks.compare.workers.serve import TOKENS_OF_ONE_TEXT, Session, serve, timed_steps
from onward import native


class Onward(Session):
    def load(self) -> None:
        onward.set_num_threads(self.threads)
        self.instructions = native.isa()
        quantize = self.precision if self.precision in ("int8", "int4") else None
        cache_format = "int8" if self.variant == "8-bit cache" else None
        self.lm = onward.load(self.model_path, dtype="bfloat16", quantize=quantize, cache_format=cache_format)
        self.pieces: Iterator[onward.Piece] = iter(())

    def begin(self, ids: list[int]) -> int:
        new = min(TOKENS_OF_ONE_TEXT, self.capacity - len(ids))
        self.pieces = self.lm.stream(ids, max_new_tokens=new, temperature=0.0, ignore_eos=True)
        return next(self.pieces).token_id

    def more(self, count: int) -> list[float]:
        return timed_steps(lambda: next(self.pieces), count)

    def batch(self, prompts: list[list[int]], count: int) -> list[float]:
        completions = self.lm.generate(prompts, max_new_tokens=count, temperature=0.0, ignore_eos=True)
        assert isinstance(completions, list)
        return [milliseconds / 1e3 for milliseconds in completions[0].timing.per_token_ms]


if __name__ == "__main__":
    serve(Onward)
