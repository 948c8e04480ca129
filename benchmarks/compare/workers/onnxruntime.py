"""onnxruntime-genai: its Generator."""

import json

import onnxruntime_genai as og

from benchmarks.compare.workers.serve import Session, serve, timed_steps


class OnnxRuntime(Session):
    def load(self) -> None:
        config = og.Config(self.model_path)
        config.overlay(json.dumps({"model": {"decoder": {"session_options": {"intra_op_num_threads": self.threads}}}}))
        self.model = og.Model(config)

    def begin(self, ids: list[int]) -> int:
        params = og.GeneratorParams(self.model)
        # Its end of text would stop it: a minimum length prevents that.
        params.set_search_options(max_length=self.capacity, min_length=self.capacity, do_sample=False)
        self.generator = og.Generator(self.model, params)
        self.generator.append_tokens(ids)
        return self._step()

    def more(self, count: int) -> list[float]:
        return timed_steps(self._step, count)

    def _step(self) -> int:
        self.generator.generate_next_token()
        return int(self.generator.get_next_tokens()[0])


if __name__ == "__main__":
    serve(OnnxRuntime)
