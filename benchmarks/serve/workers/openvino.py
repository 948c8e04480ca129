"""OpenVINO GenAI: its ContinuousBatchingPipeline with its own defaults, and its prefix cache."""

from collections.abc import Iterator

import numpy as np
import openvino
import openvino_genai

from benchmarks.compare.workers.serve import serve
from benchmarks.serve.workers.server import Stepped

BYTES_OF_A_POSITION = 114_688  # in 16 bits; its own choice is 8


class OpenVino(Stepped):
    def load(self) -> None:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.enable_prefix_caching = True
        scheduler.max_num_seqs = self.sequences
        scheduler.cache_size = 1 + self.sequences * self.capacity * BYTES_OF_A_POSITION // 2**30
        options = {"INFERENCE_NUM_THREADS": self.threads, "PERFORMANCE_HINT": "LATENCY"}
        self.pipeline = openvino_genai.ContinuousBatchingPipeline(self.model_path, scheduler, "CPU", options)
        self.handles: dict[int, openvino_genai.GenerationHandle] = {}
        self.left: dict[int, int] = {}
        self.added = 0

    def add(self, number: int, ids: list[int], new_tokens: int) -> None:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = new_tokens, True, False
        config.apply_chat_template = False
        tensor = openvino.Tensor(np.array([ids], dtype=np.int64))
        self.handles[number] = self.pipeline.add_request(self.added, tensor, config)
        self.left[number] = new_tokens
        self.added += 1

    def step(self) -> Iterator[tuple[int, int]]:
        self.pipeline.step()
        for number, handle in list(self.handles.items()):
            while handle.can_read():
                for output in handle.read().values():
                    for token in output.generated_ids:
                        self.left[number] -= 1
                        yield number, token
            if not self.left[number]:
                del self.handles[number], self.left[number]


if __name__ == "__main__":
    serve(OpenVino)
