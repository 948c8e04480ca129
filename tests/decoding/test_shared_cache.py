"""The slots that calls of several threads share: created once, and no call takes the room of another."""

import contextlib
import threading

import pytest
import torch

from onward import LanguageModel, Session
from onward.cache.manager import PagedCacheManager
from onward.decoding import shared_cache as kept_slots
from onward.decoding.shared_cache import SharedCache
from onward.errors import ContextOverflowError, RequestError
from onward.ops.heads import BLOCK
from onward.testing import ByteTokenizer, tiny_model

SECONDS = 60  # a thread that takes longer never ends
MODEL = tiny_model(seed=3)


def at_once(*calls):
    """The results of calls in threads of their own that begin at the same time."""
    results, barrier = [None] * len(calls), threading.Barrier(len(calls))

    def called(at):
        barrier.wait(SECONDS)
        try:
            results[at] = calls[at]()
        except BaseException as error:
            results[at] = error

    threads = [threading.Thread(target=called, args=(at,), daemon=True) for at in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert not any(thread.is_alive() for thread in threads)
    return results


@pytest.fixture
def small(monkeypatch):
    """Shared slots have as much memory as they may keep, as on a GPU."""
    monkeypatch.setattr(kept_slots, "is_lazy", lambda nbytes, device: False)


def memory_of(blocks):
    return blocks * MODEL.new_blocks(1).block_nbytes


def test_concurrent_threads_share_one_memory(monkeypatch):
    """All four threads of each of four models reach the same decision at once."""
    kepts = [(SharedCache(memory_of(64)), tiny_model(seed=seed)) for seed in range(4)]
    made, together = [], threading.Barrier(4)

    def waits(*arguments):
        """A thread that makes a memory waits for others that would make one too. Nobody else may come."""
        with contextlib.suppress(threading.BrokenBarrierError):
            together.wait(0.3)
        made.append(arguments)
        return before(*arguments)

    before = kept_slots.blocks_within
    monkeypatch.setattr(kept_slots, "blocks_within", waits)

    def leased(kept, model):
        with kept.lease(model, 1, BLOCK) as slots:
            return slots

    calls = [lambda kept=kept, model=model: leased(kept, model) for kept, model in kepts for _ in range(4)]
    slots = at_once(*calls)
    assert all(isinstance(each, PagedCacheManager) for each in slots)
    assert len(made) == len(set(map(id, slots))) == 4


def test_memory_reserved_for_one_call_is_not_used_by_another(small):
    shared = SharedCache(memory_of(4))
    with (
        shared.lease(MODEL, 1, 3 * BLOCK) as one,
        shared.lease(MODEL, 1, 2 * BLOCK) as other,
        shared.lease(MODEL, 1, BLOCK) as third,
    ):
        assert other is not one, "one has not taken its blocks yet"
        assert third is one
        taken = [slots.acquire((), length) for slots, length in ((other, 2 * BLOCK), (third, BLOCK))]
        assert all(slot is not None for slot in (*taken, one.acquire((), 3 * BLOCK)))
    with shared.lease(MODEL, 1, BLOCK) as later:
        assert later is not one, "its slots were not released"


def test_a_lease_always_ends_with_its_call(small):
    shared = SharedCache(memory_of(4))
    for _ in range(3):
        with pytest.raises(LookupError), shared.lease(MODEL, 1, 4 * BLOCK) as slots:
            raise LookupError
    with shared.lease(MODEL, 1, 4 * BLOCK) as again:
        assert again is slots


def test_concurrent_calls_never_run_out_of_room(small, monkeypatch):
    """Each thread waits between its lease and its first slot while the others have theirs."""
    lm = LanguageModel(MODEL, ByteTokenizer(), prefix_memory=memory_of(5))
    options = {"max_new_tokens": 2 * BLOCK, "temperature": 1.0, "seed": 1}
    prompts = [f"a prompt of thread {number}" for number in range(4)]
    expected = [LanguageModel(MODEL, ByteTokenizer(), prefix_memory=0).generate(each, **options) for each in prompts]
    between = threading.Barrier(len(prompts))
    lease = SharedCache.lease

    def waits(self, model, rows, length):
        return _Waiting(lease(self, model, rows, length), between)

    monkeypatch.setattr(SharedCache, "lease", waits)
    completions = at_once(*(lambda prompt=prompt: lm.generate(prompt, **options) for prompt in prompts))
    assert [each.token_ids for each in completions] == [each.token_ids for each in expected]
    assert lm._prefix_cache._shared.promised == 0


class _Waiting:
    """A lease that begins when all threads have one."""

    def __init__(self, lease, barrier):
        self._lease, self._barrier = lease, barrier

    def __enter__(self):
        slots = self._lease.__enter__()
        self._barrier.wait(SECONDS)
        return slots

    def __exit__(self, *raised):
        return self._lease.__exit__(*raised)


def test_a_forward_that_drops_tensors_of_its_cache_is_refused():
    with SharedCache(memory_of(4)).lease(MODEL, 1, BLOCK) as slots:
        slot, _ = slots.acquire((), BLOCK)
        view = slots.view([slot], [0], 1)
        slots.accept(view, view.cache)
        leaves = torch.utils._pytree.tree_leaves(view.cache)
        slots.accept(view, tuple(leaves))  # the same tensors
        for fewer in ((), leaves[:-1], leaves[:1]):
            with pytest.raises(RequestError, match="must write to it in place and return it"):
                slots.accept(view, tuple(fewer))


def test_sessions_that_fill_the_cache_are_an_error_without_loss(small):
    lm = LanguageModel(MODEL, ByteTokenizer(), prefix_memory=memory_of(4))
    first, second = Session(lm), Session(lm)
    first.generate([1] * (2 * BLOCK + 5), max_new_tokens=2)
    tokens = first.tokens
    with pytest.raises(ContextOverflowError, match="needs 2 more blocks of the cache, but 1 of 4 are left"):
        second.generate([2] * (BLOCK + 5), max_new_tokens=2)
    assert second.tokens == []
    assert first.tokens == tokens
    assert len(lm.generate([2] * (BLOCK + 5), max_new_tokens=2).token_ids) == 2, "other calls have private slots then"
    longer = first.generate([*tokens, 3], max_new_tokens=BLOCK - 10)
    assert longer.cached_tokens == len(tokens), "a session's own blocks count as room for it"
    del first
    assert len(second.generate([2] * (BLOCK + 5), max_new_tokens=2).token_ids) == 2
