"""The machine's limit: reading memory, with as many threads as the contenders have."""

import torch

from benchmarks.compare.workers.serve import Session, serve
from benchmarks.machine import bandwidth_buffer, read_bandwidth


class Bandwidth(Session):
    def load(self) -> None:
        torch.set_num_threads(self.threads)
        self.buffer = bandwidth_buffer()
        read_bandwidth(self.buffer)

    def begin(self, ids: list[int]) -> int:
        raise NotImplementedError("there is no prompt here")

    def more(self, count: int) -> list[float]:
        """Seconds of reading a gigabyte, `count` times over."""
        return [1e9 / read_bandwidth(self.buffer) for _ in range(count)]


if __name__ == "__main__":
    serve(Bandwidth)
