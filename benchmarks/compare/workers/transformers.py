"""transformers: a plain loop of forwards over its dynamic cache.

Its static cache under torch.compile takes 46 s to compile and was 4 % faster when last measured (17.4 against 16.8
tokens/s after 32).
"""

import torch
import transformers
from transformers import AutoModelForCausalLM, DynamicCache

from benchmarks.compare.workers.serve import Session, serve, timed_steps


class Transformers(Session):
    def load(self) -> None:
        torch.set_num_threads(self.threads)
        torch.set_grad_enabled(False)
        transformers.logging.disable_progress_bar()
        self.model = AutoModelForCausalLM.from_pretrained(self.model_path, dtype=torch.bfloat16).eval()

    def begin(self, ids: list[int]) -> int:
        self.cache = DynamicCache(config=self.model.config)
        return self._forward(torch.tensor([ids]))

    def more(self, count: int) -> list[float]:
        return timed_steps(lambda: self._forward(self.last), count)

    def _forward(self, ids: torch.Tensor) -> int:
        out = self.model(ids, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        self.last = out.logits[:, -1].argmax(-1, keepdim=True)
        return int(self.last)


if __name__ == "__main__":
    serve(Transformers)
