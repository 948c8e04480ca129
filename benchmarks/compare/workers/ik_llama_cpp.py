"""ik_llama.cpp through the C API of its wheel, which is built for AVX2: no Python between two tokens but ours.

Its sampling takes a list of candidates, so the greatest logit is found here, by numpy.
"""

import ctypes

import numpy as np
from ik_llama_cpp import _ctypes_api as api

from benchmarks.compare.workers.serve import LlamaSession, serve, system_instructions


class IkLlamaCpp(LlamaSession):
    def load(self) -> None:
        api._lib.llama_print_system_info.restype = ctypes.c_char_p
        self.instructions = system_instructions(api._lib.llama_print_system_info())
        api.llama_backend_init()
        options = api.llama_model_default_params()
        options.n_gpu_layers = 0
        self.model = api.llama_model_load_from_file(self.model_path.encode(), options)
        assert self.model, f"ik_llama.cpp cannot load {self.model_path}"
        self.vocab_size = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self.model))
        options = api.llama_context_default_params()
        options.n_ctx, options.n_batch, options.n_ubatch = self.capacity, self.CHUNK, self.CHUNK
        options.n_threads = options.n_threads_batch = self.threads
        options.flash_attn = True
        self.context = api.llama_init_from_model(self.model, options)
        assert self.context, "ik_llama.cpp cannot make a context"
        self.batch_of_chunk = api.llama_batch_init(self.CHUNK, 0, 1)

    def clear(self) -> None:
        api.llama_kv_cache_clear(self.context)
        self.position = 0

    def decode(self, ids: list[int]) -> None:
        batch = self.batch_of_chunk
        batch.n_tokens = len(ids)
        for at, token in enumerate(ids):
            batch.token[at], batch.pos[at] = token, self.position + at
            batch.n_seq_id[at], batch.seq_id[at][0], batch.logits[at] = 1, 0, at == len(ids) - 1
        status = api.llama_decode(self.context, batch)
        assert status == 0, f"llama_decode answered {status}"
        self.position += len(ids)
        self.at = len(ids) - 1

    def pick(self) -> int:
        logits = api.llama_get_logits_ith(self.context, self.at)
        self.last = int(np.ctypeslib.as_array(logits, (self.vocab_size,)).argmax())
        return self.last


if __name__ == "__main__":
    serve(IkLlamaCpp)
