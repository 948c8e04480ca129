"""llama.cpp through its own C API: a step is one `llama_decode` of all sequences, as in its server.

A step takes the next token of each sequence that decodes and fills the rest of CHUNK tokens with prompts, in their
order. Each sequence has a cache of its own (kv_unified off: with texts that share nothing that is the faster one). A
sequence that has ended leaves its text in its cache; a request takes the free one that shares most of its prompt.
"""

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass, field

import llama_cpp
import numpy as np

from benchmarks.compare.workers.serve import serve
from benchmarks.serve.workers.server import Stepped

CHUNK = 512


@dataclass
class Slot:
    """A sequence's cache. ids: its text so far, of which `computed` are in the cache. left: tokens still to come."""

    sequence: int
    number: int = 0
    ids: list[int] = field(default_factory=list)
    computed: int = 0
    left: int = 0


class LlamaCpp(Stepped):
    def load(self) -> None:
        # Held for good: llama.cpp keeps the pointer.
        self._silence = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(self._silence, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        model = llama_cpp.llama_model_load_from_file(self.model_path.encode(), llama_cpp.llama_model_default_params())
        assert model, f"llama.cpp cannot load {self.model_path}"
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        options = llama_cpp.llama_context_default_params()
        options.n_seq_max, options.n_ctx = self.sequences, self.sequences * self.capacity
        options.n_batch = options.n_ubatch = CHUNK
        options.n_threads = options.n_threads_batch = self.threads
        options.kv_unified, options.no_perf = False, True
        options.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
        self.context = llama_cpp.llama_init_from_model(model, options)
        assert self.context, "llama.cpp cannot make a context"
        self.memory = llama_cpp.llama_get_memory(self.context)
        self.batch = llama_cpp.llama_batch_init(CHUNK, 0, 1)
        self.free = [Slot(sequence) for sequence in range(self.sequences)]
        self.running: list[Slot] = []
        self.waiting: list[tuple[int, list[int], int]] = []

    def add(self, number: int, ids: list[int], new_tokens: int) -> None:
        self.waiting.append((number, ids, new_tokens))

    def step(self) -> Iterator[tuple[int, int]]:
        while self.waiting and self.free:
            self._admit(*self.waiting.pop(0))
        self.batch.n_tokens = 0
        # Those that decode have one token to process: they come first.
        outputs = [output for slot in sorted(self.running, key=_decodes_last) if (output := self._put(slot))]
        status = llama_cpp.llama_decode(self.context, self.batch)
        assert status == 0, f"llama_decode answered {status}"
        for slot, place in outputs:
            logits = llama_cpp.llama_get_logits_ith(self.context, place)
            slot.ids.append(int(np.ctypeslib.as_array(logits, (self.vocab_size,)).argmax()))
            slot.left -= 1
            yield slot.number, slot.ids[-1]
        self.free += [slot for slot in self.running if not slot.left]
        self.running = [slot for slot in self.running if slot.left]

    def _admit(self, number: int, ids: list[int], new_tokens: int) -> None:
        slot = max(self.free, key=lambda slot: _shared(slot.ids[: slot.computed], ids))
        self.free.remove(slot)
        # At least the last id is processed again, for its logits.
        slot.computed = min(_shared(slot.ids[: slot.computed], ids), len(ids) - 1)
        slot.number, slot.ids, slot.left = number, list(ids), new_tokens
        llama_cpp.llama_memory_seq_rm(self.memory, slot.sequence, slot.computed, -1)
        self.running.append(slot)

    def _put(self, slot: Slot) -> tuple[Slot, int] | None:
        """Put what fits of the slot's ids into the batch; with the last of them, where its logits will be."""
        batch, first = self.batch, self.batch.n_tokens
        ids = slot.ids[slot.computed : slot.computed + CHUNK - first]
        for place, token in enumerate(ids, first):
            batch.token[place], batch.pos[place] = token, slot.computed
            batch.n_seq_id[place], batch.seq_id[place][0], batch.logits[place] = 1, slot.sequence, 0
            slot.computed += 1
        batch.n_tokens += len(ids)
        if not ids or slot.computed < len(slot.ids):
            return None
        batch.logits[batch.n_tokens - 1] = 1
        return slot, batch.n_tokens - 1


def _decodes_last(slot: Slot) -> bool:
    return len(slot.ids) - slot.computed > 1


def _shared(left: list[int], right: list[int]) -> int:
    """How many ids both begin with."""
    return next((n for n, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))


if __name__ == "__main__":
    serve(LlamaCpp)
