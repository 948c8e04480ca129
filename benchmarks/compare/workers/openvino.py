"""OpenVINO GenAI: its LLMPipeline, which on a CPU runs paged attention with a prefix cache.

The prefix cache is what `more` rests on: the same prompt and the tokens so far are sent again, only the last block of
them is processed again, and that is not timed. A prompt that is timed is always a fresh one. The times of tokens are
the pipeline's own. It stores keys and values in 8 bits (u8) by default; the variant "8-bit cache" says so.
"""

import itertools

import numpy as np
import openvino
import openvino_genai

from benchmarks.compare.workers.serve import Session, serve

CACHE_GB = 2


class OpenVino(Session):
    def load(self) -> None:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.enable_prefix_caching = True
        scheduler.cache_size = CACHE_GB
        scheduler.max_num_batched_tokens = self.capacity
        options: dict[str, object] = {"INFERENCE_NUM_THREADS": self.threads, "PERFORMANCE_HINT": "LATENCY"}
        if self.variant == "8-bit cache":
            options["KV_CACHE_PRECISION"] = openvino.Type.u8
        self.pipeline = openvino_genai.LLMPipeline(self.model_path, "CPU", scheduler_config=scheduler, **options)

    def begin(self, ids: list[int]) -> int:
        self.ids = list(ids)
        return self._generate(1).tokens[0][0]

    def more(self, count: int) -> list[float]:
        results = self._generate(count + 1)
        times = results.perf_metrics.raw_metrics.m_new_token_times
        return [(after - before) / 1e3 for before, after in itertools.pairwise(times)]

    def _generate(self, count: int) -> openvino_genai.EncodedResults:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = count, True, False
        config.apply_chat_template = False
        ids = np.array([self.ids], dtype=np.int64)
        inputs = openvino_genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids)))
        results = self.pipeline.generate(inputs, config)
        self.ids += results.tokens[0]
        return results


if __name__ == "__main__":
    serve(OpenVino)
