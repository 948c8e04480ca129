"""Cached taps: values at taps that the cache stores for every position, in addition to keys and values."""

from dataclasses import replace

import pytest
import torch

import onward
from onward.decoding import BatchSchedule, DecodeStep, SamplerCache, Sequence, decode_loop
from onward.decoding.shared_cache import SharedCache, slots_for
from onward.models import Run, architecture_of, build_model
from onward.models.families import read_config
from onward.ops.kv_format import format_of
from onward.testing import random_checkpoint
from onward.testing.tiny import tiny_config

CPU = torch.device("cpu")
IDS = torch.randint(3, 250, (150,), generator=torch.Generator().manual_seed(5)).tolist()
NEW = 9


def storing(lm, *taps, format=None):
    """The model with cached taps."""
    architecture = replace(architecture_of(lm.model), cached_taps=taps)
    return build_model(architecture, lm.model.params, lm.model.max_seq_len, format)


def values(slots, slot, model, tap, count):
    rows = slots.read_keys(slot, architecture_of(model).tap_layers[tap], 0, count)
    return format_of(rows.dtype).load(rows).transpose(0, 1).flatten(1)


def processed(model, slots, ids=IDS, chunk=512):
    """The ids of a text, and the sequence with its slot."""
    sequence = Sequence(ids, NEW, sampling=onward.SamplingParams(temperature=0.0))
    step = DecodeStep(Run(model), slots, SamplerCache(CPU), CPU)
    schedule = BatchSchedule(slots, [sequence], chunk)
    for _ in decode_loop(step, schedule, slots):
        if sequence.finish_reason is not None:
            break
    return sequence


@pytest.mark.parametrize("family", ["llama", "gemma3", "deepseekv3", "qwen3next", "gptoss"])
@pytest.mark.parametrize("chunk", [512, 7])
@pytest.mark.parametrize("paged", [True, False])
def test_the_cache_has_the_hidden_states(family, chunk, paged, tmp_path):
    lm = onward.load(random_checkpoint(tmp_path, family, seed=3))
    model = storing(lm, "layers.0", "norm")
    if not paged:
        model = replace(model, new_blocks=None)
    sequence = processed(model, slots := slots_for(model, 1, len(IDS) + NEW), chunk=chunk)
    assert sequence.token_ids == lm.generate(IDS, max_new_tokens=NEW, temperature=0, ignore_eos=True).token_ids
    count = len(IDS) + NEW - 1
    states = lm.hidden_states([*IDS, *sequence.token_ids], ["layers.0", "norm"])
    for tap in ("layers.0", "norm"):
        assert torch.equal(values(slots, sequence.slot, model, tap, count), states[tap][:count]), tap
    some = slots.read_keys(sequence.slot, architecture_of(model).tap_layers["norm"], 61, 130)
    assert torch.equal(some.transpose(0, 1).flatten(1), states["norm"][61:130])


def test_prefix_hits_and_forks_include_the_values(tmp_path):
    lm = onward.load(random_checkpoint(tmp_path, "llama", seed=3))
    model = storing(lm, "norm")
    with SharedCache(1 << 26).lease(model, 2, 256) as slots:
        first = processed(model, slots)
        want = values(slots, first.slot, model, "norm", len(IDS) - 1)
        fork = slots.fork(first.slot, len(IDS) - 1, 200)
        assert torch.equal(values(slots, fork, model, "norm", len(IDS) - 1), want)
        slots.release(fork)
        first.release(slots)
        again = processed(model, slots)
        assert again.cached == len(IDS) - 1
        assert torch.equal(values(slots, again.slot, model, "norm", len(IDS) - 1), want)
        again.release(slots)


def test_an_int8_cache_stores_them_with_a_scale_per_part(tmp_path):
    lm = onward.load(random_checkpoint(tmp_path, "llama", seed=3), cache_format="int8")
    model = storing(lm, "layers.0", format=format_of(torch.int8))
    sequence = processed(model, slots := slots_for(model, 1, len(IDS) + NEW))
    want = lm.hidden_states([*IDS, *sequence.token_ids], "layers.0")[: len(IDS)]
    parts = want.unflatten(-1, (-1, architecture_of(model).cached[-1].key_dim))
    # Half a step of the scale, which is the largest of a part / 127; and the roundings of float32.
    bound = parts.abs().amax(-1, keepdim=True) / 127 * 0.501
    got = values(slots, sequence.slot, model, "layers.0", len(IDS)).view_as(parts)
    assert bool(((got - parts).abs() <= bound).all())


def test_the_shapes_follow_those_of_attention():
    decoder = replace(read_config(tiny_config("llama")), cached_taps=("norm",))
    plain = read_config(tiny_config("llama"))
    assert decoder.cached[:-1] == plain.cached
    assert decoder.cached[-1].num_kv_heads * decoder.cached[-1].key_dim == decoder.hidden_size
