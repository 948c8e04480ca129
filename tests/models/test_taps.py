"""Taps: the identity that exposes a forward's values, without changing its bits."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from test_tiny_models import FAMILIES, IDS
from tiny_families import tiny_model as tiny_module
from torch import nn
from transformers import AutoModelForCausalLM
from transformers_reference import TOLERANCE

import onward
from onward.errors import RequestError
from onward.models import Run, pack_params
from onward.program import ForwardBatch
from onward.testing import random_checkpoint, tiny_model


def theirs(module: nn.Module, ids: list[int]) -> dict[str, torch.Tensor]:
    """The hidden states of transformers, by the names of taps. Its last one follows the final norm."""
    count = module.config.get_text_config().num_hidden_layers
    (layers,) = (x for x in module.modules() if isinstance(x, nn.ModuleList) and len(x) == count)
    last = []
    handle = layers[-1].register_forward_hook(lambda _, __, out: last.append(out[0] if isinstance(out, tuple) else out))
    with torch.no_grad():
        states = module(torch.tensor([ids]), output_hidden_states=True, use_cache=False).hidden_states
    handle.remove()
    names = ["embedding", *(f"layers.{number}" for number in range(count - 1)), "norm"]
    return {name: state[0] for name, state in zip(names, states, strict=True)} | {f"layers.{count - 1}": last[0][0]}


def assert_equal_to(lm: onward.LanguageModel, want: dict[str, torch.Tensor], ids: list[int]) -> None:
    assert set(lm.model.taps) == set(want)
    for name, state in lm.hidden_states(ids, list(want)).items():
        # The tolerance is for values of order 1, and rounding is relative to the largest.
        tolerance = TOLERANCE * max(1.0, float(want[name].abs().max()))
        torch.testing.assert_close(state, want[name], rtol=0, atol=tolerance, msg=lambda text, name=name: name + text)


@pytest.mark.parametrize("family", FAMILIES)
def test_hidden_states_equal_transformers(family, tmp_path):
    folder = random_checkpoint(tmp_path, family, seed=3, sliding_window=7)
    module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    assert_equal_to(onward.load(folder), theirs(module, IDS), IDS)


@pytest.mark.parametrize("family", ["gpt2", "opt", "stablelm", "gemma2", "phi", "mixtral"])
@pytest.mark.parametrize("via", ["transformers", "from_module"])
def test_transformers_models_have_the_taps_of_families(family, via, tmp_path):
    module, ids = tiny_module(family), [token % 100 for token in IDS]
    want = theirs(module, ids)
    if via == "transformers":
        module.save_pretrained(tmp_path)
        lm = onward.load(tmp_path, via="transformers")
    else:
        lm = onward.LanguageModel(onward.Model.from_module(module))
    hooks = sum(len(part._forward_hooks) for part in module.modules())  # of transformers itself
    assert_equal_to(lm, want, ids)
    assert sum(len(part._forward_hooks) for part in module.modules()) == hooks


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tap_changes_no_bit_and_equals_the_eager_forward(family):
    model = tiny_model(family, dtype=torch.bfloat16 if family == "qwen3" else torch.float32)
    model = replace(model, params=pack_params(model.params))  # eager calls then multiply with the kernels too
    names = tuple(model.taps)

    def run(compile: str, taps: tuple[str, ...], chunks: list[int]) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        cache, at, logits, values = model.new_cache(1, 64), 0, [], {name: [] for name in taps}
        stepper = Run(model, compile)
        for count in chunks:
            tokens = torch.tensor([IDS[at : at + count]], dtype=torch.int32)
            last = torch.tensor([[count - 1]])
            result = stepper.step(ForwardBatch(tokens, torch.tensor([at], dtype=torch.int32), cache, last, taps))
            assert result.taps.keys() == set(taps)
            at, cache = at + count, result.cache
            logits.append(result.logits)
            for name in taps:
                values[name].append(result.taps[name])
        return {name: torch.cat(parts, 1) for name, parts in values.items()}, logits[-1]

    want, logits = run("auto", names, [len(IDS)])
    for compile, taps, chunks in (
        ("auto", (), [23]), ("auto", names[1:2], [23]), ("auto", names, [1] * 23), ("auto", names, [5, 3, 15]),
        ("eager", names, [23]), ("eager", names[:1], [7, 16]),
    ):  # fmt: skip
        values, others = run(compile, taps, chunks)
        assert torch.equal(others, logits)
        assert all(torch.equal(values[name], want[name]) for name in taps)


def test_unused_taps_leave_a_program_unchanged(monkeypatch):
    def image(model: onward.Model, rows: int, tokens: int) -> list[np.ndarray]:
        cache = model.new_cache(rows, 64)
        program = onward.compile(model.forward, params=model.params, cache=cache, tokens=0)
        image = program.executable.prepare(rows, tokens, cache).image
        return [image.words, image.places, image.bases, image.offsets, image.slot_bytes]

    model, shapes = tiny_model(), [(1, 1), (3, 1), (2, 40)]
    with_taps = [image(model, *shape) for shape in shapes]
    monkeypatch.setattr("onward.models.blocks.decoder.tap", lambda x, name: x)
    without = [image(model, *shape) for shape in shapes]
    for one, other in zip(with_taps, without, strict=True):
        assert all(map(np.array_equal, one, other))


def own_forward(tokens, offsets, cache, params):
    x = onward.tap(params["table"][tokens.long()], "table")
    y = x * 1
    y += 1
    return onward.tap(y, "more") @ params["head"], cache


def test_custom_functions_have_taps_too():
    generator = torch.Generator().manual_seed(1)
    params = {name: torch.randn(*size, generator=generator) for name, size in (("table", (50, 8)), ("head", (8, 50)))}
    model = onward.Model(own_forward, params, lambda batch, max_len: torch.zeros(batch, 1), vocab_size=50)
    lm = onward.LanguageModel(model)
    values = lm.hidden_states([3, 4, 5], ["table", "more"])
    assert torch.equal(values["table"], params["table"][[3, 4, 5]])
    assert torch.equal(values["more"], params["table"][[3, 4, 5]] + 1)


@pytest.mark.parametrize(
    ("tapped", "problem"),
    [
        (lambda x: onward.tap(x[0], "x"), r"must be \[B, T, \.\.\.\], here \[1, 3, '\.\.\.'\]; got \[3, 8\] at 'x'"),
        (lambda x: onward.tap(onward.tap(x, "x"), "x"), "two taps with the name 'x'"),
    ],
)
@pytest.mark.parametrize("compile", ["auto", "eager"])
def test_an_invalid_tap_is_an_error_where_it_is_read(tapped, problem, compile):
    def forward(tokens, offsets, cache, params):
        x = params[tokens.long()]
        tapped(x)
        return x @ params.T, cache

    model = onward.Model(forward, torch.randn(50, 8), lambda batch, max_len: torch.zeros(batch, 1), vocab_size=50)
    batch = ForwardBatch(torch.ones(1, 3, dtype=torch.int32), torch.zeros(1, dtype=torch.int32), torch.zeros(1, 1))
    Run(model, compile).step(batch)
    with pytest.raises(RequestError, match=problem):
        Run(model, compile).step(batch._replace(taps=("x",)))


def test_a_forward_compiled_by_torch_reads_taps_eagerly():
    model = tiny_model()
    batch = ForwardBatch(
        torch.tensor([IDS], dtype=torch.int32), torch.zeros(1, dtype=torch.int32), model.new_cache(1, 64)
    )
    program = onward.compile(model.forward, params=model.params, cache=batch.cache, tokens=0, backend="inductor")
    result = program.executable.step(batch._replace(taps=("layers.0",)))
    want = Run(model, "eager").step(batch._replace(taps=("layers.0",)))
    assert torch.equal(result.taps["layers.0"], want.taps["layers.0"])
