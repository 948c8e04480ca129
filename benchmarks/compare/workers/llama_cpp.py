"""llama.cpp through llama-cpp-python's low-level calls: its own C API, with no Python between two tokens but ours.

With flash attention, or in the variant "plain attention" without: on a CPU that one decodes faster in long contexts,
and slower in short ones and in prefill. In the variant "8-bit cache" keys and values are in Q8_0.
"""

import ctypes

import llama_cpp

from benchmarks.compare.workers.serve import LlamaSession, serve, system_instructions


class LlamaCpp(LlamaSession):
    def load(self) -> None:
        # Held for good: llama.cpp keeps the pointer.
        self._silence = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(self._silence, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        self.instructions = system_instructions(llama_cpp.llama_print_system_info())
        self.model = llama_cpp.llama_model_load_from_file(
            self.model_path.encode(), llama_cpp.llama_model_default_params()
        )
        assert self.model, f"llama.cpp cannot load {self.model_path}"
        options = llama_cpp.llama_context_default_params()
        options.n_ctx, options.n_batch, options.n_ubatch = self.capacity, self.CHUNK, self.CHUNK
        options.n_threads = options.n_threads_batch = self.threads
        plain = self.variant == "plain attention"
        options.flash_attn_type = (
            llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED if plain else llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
        )
        if self.variant == "8-bit cache":
            options.type_k = options.type_v = llama_cpp.GGML_TYPE_Q8_0
        options.no_perf = True
        self.context = llama_cpp.llama_init_from_model(self.model, options)
        assert self.context, "llama.cpp cannot make a context"
        self.sampler = llama_cpp.llama_sampler_init_greedy()

    def clear(self) -> None:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.context), True)

    def decode(self, ids: list[int]) -> None:
        tokens = (llama_cpp.llama_token * len(ids))(*ids)
        status = llama_cpp.llama_decode(self.context, llama_cpp.llama_batch_get_one(tokens, len(ids)))
        assert status == 0, f"llama_decode answered {status}"

    def pick(self) -> int:
        self.last = llama_cpp.llama_sampler_sample(self.sampler, self.context, -1)
        return self.last


if __name__ == "__main__":
    serve(LlamaCpp)
