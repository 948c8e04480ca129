"""A step samples the next ids in the same native call: the ids that the sampler picks from its logits."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import onward
from onward import Sampler, SamplingParams, native
from onward.decoding.api import chooser_of
from onward.models import Run
from onward.program import ForwardBatch, SamplingKernel
from onward.sampling import greedy
from onward.sampling.draw import GREEDY
from onward.testing import ByteTokenizer, tiny_model

pytestmark = pytest.mark.skipif(native.library() is None, reason="no native library was built")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
rows = st.builds(
    SamplingParams,
    temperature=st.sampled_from((0.0, 0.7, 1.0, 3.0)),
    top_k=st.sampled_from((0, 1, 5, 10**6)),
    top_p=st.sampled_from((0.3, 0.95, 1.0)),
    min_p=st.sampled_from((0.0, 0.2)),
    seed=st.integers(0, 2**64 - 1),
)
RUNS = {dtype: Run(tiny_model("qwen3", dtype=dtype)) for dtype in DTYPES}


def sampled(run: Run, sampler: SamplingKernel, seed: int, batch: int) -> tuple[Tensor, Tensor | None, Tensor]:
    """Logits [B, V], ids, and positions, after a random token a row."""
    drawn = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, run.model.vocab_size, (batch, 1), generator=drawn).int()
    offsets = torch.randint(0, 20, (batch,), generator=drawn).int()
    logits, ids, *_ = run.step(ForwardBatch(tokens, offsets, run.model.new_cache(batch, 32)), sampler)
    return logits[:, 0], ids, offsets + 1


@settings(max_examples=60, deadline=None)
@given(params=st.lists(rows, min_size=1, max_size=5), dtype=st.sampled_from(DTYPES), seed=st.integers(0, 2**32))
def test_ids_equal_those_of_the_sampler(params: list[SamplingParams], dtype: torch.dtype, seed: int) -> None:
    sampler = Sampler(params)
    assert sampler.pick is not None
    for _ in range(2):  # nothing of one call is left for the next
        logits, ids, positions = sampled(RUNS[dtype], sampler.pick, seed, len(params))
        assert ids is not None
        assert torch.equal(ids, sampler(logits, positions))


@pytest.mark.parametrize("batch", [1, 4])
def test_greedy_ids_equal_argmax(batch: int) -> None:
    logits, ids, *_ = sampled(RUNS[torch.bfloat16], GREEDY, 1, batch)
    assert ids is not None
    assert torch.equal(ids, logits.argmax(-1))


@pytest.mark.parametrize(
    "options", [{"typical_p": 0.9}, {"xtc_probability": 0.5}, {"logit_bias": {3: 1.0}}, {"repetition_penalty": 1.2}]
)
def test_options_beyond_the_kernel_are_left_to_the_sampler(options: dict[str, object]) -> None:
    assert (
        Sampler([SamplingParams(temperature=1.0, seed=0), SamplingParams(**{"temperature": 1.0} | options)]).pick
        is None
    )


def test_custom_select_functions_are_called() -> None:
    device = torch.device("cpu")
    assert chooser_of(greedy, 1, device)[0].kernel([]) is GREEDY.pick
    assert chooser_of(lambda logits: logits.argmin(-1), 1, device)[0].kernel([]) is None


def test_unsupported_samplers_get_the_logits() -> None:
    class Narrow:
        kernel, most_ids = "onward_argmax", 3

        def operands(self, positions: Tensor) -> tuple[Tensor, ...]:
            raise AssertionError("not to be asked")

    for run in (RUNS[torch.float32], Run(tiny_model("qwen3"), "eager")):
        logits, ids, *_ = sampled(run, Narrow(), 2, 2)
        assert ids is None
        # torch multiplies the eager run's plain weights in another order: 64 inputs and some layers of rounding.
        torch.testing.assert_close(logits, sampled(RUNS[torch.float32], GREEDY, 2, 2)[0])


def test_a_program_with_an_operator_of_torch_samples_too() -> None:
    def forward(tokens: Tensor, offsets: Tensor, cache: Tensor, params: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        return torch.special.i0(params["table"][tokens]), cache

    params = {"table": torch.randn(11, 7, generator=torch.Generator().manual_seed(0))}
    program = onward.compile(forward, params=params, cache=torch.zeros(2, 3))
    tokens, offsets = torch.tensor([[4], [9]], dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    logits, ids, *_ = program.executable.step(ForwardBatch(tokens, offsets, torch.zeros(2, 3)), GREEDY)
    assert ids is not None
    assert program.explain(torch.zeros(2, 3), batch=2).missing
    assert torch.equal(ids, logits[:, 0].argmax(-1))


def test_logits_of_chosen_positions_and_of_prompts_are_left_to_the_sampler() -> None:
    run, cache = RUNS[torch.float32], RUNS[torch.float32].model.new_cache(1, 32)
    offsets = torch.zeros(1, dtype=torch.int32)
    prompt, token = torch.tensor([[3, 1, 4]], dtype=torch.int32), torch.tensor([[3]], dtype=torch.int32)
    last = ForwardBatch(prompt, offsets, cache, torch.tensor([[2]]))
    for batch in (last, last._replace(logits_at=None), ForwardBatch(token, offsets, cache, torch.tensor([[0]]))):
        result = run.step(batch, GREEDY)
        assert result.ids is None
        assert torch.equal(result.logits, run.step(batch).logits)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_rows_with_nonfinite_logits_are_left_to_the_sampler(dtype: torch.dtype, bad: float) -> None:
    def forward(tokens: Tensor, offsets: Tensor, cache: Tensor, params: Tensor) -> tuple[Tensor, Tensor]:
        return params[tokens], cache

    table = torch.tensor([[1.0, 3.0, -2.0], [1.0, bad, bad], [-3e38, -3e38, -3e38]]).to(dtype)
    if bad < 0:
        table[1] = bad
    executable = onward.compile(forward, params=table, cache=torch.zeros(2, 3)).executable
    batch = ForwardBatch(torch.zeros((2, 1), dtype=torch.int32), torch.zeros(2, dtype=torch.int32), torch.zeros(2, 3))
    for sampler in (GREEDY, Sampler([SamplingParams(temperature=0.5, seed=1)] * 2).pick):
        assert executable.step(batch, sampler).ids is not None
        for row in (0, 1):
            tokens = torch.zeros((2, 1), dtype=torch.int32)
            tokens[row] = 1
            assert executable.step(batch._replace(tokens=tokens), sampler).ids is None
        large = executable.step(batch._replace(tokens=torch.full((2, 1), 2, dtype=torch.int32)), sampler)
        assert (large.ids is None) == (dtype is torch.float16), "-3e38 is finite in the others"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_python_samples_no_token_after_the_prompt(monkeypatch: pytest.MonkeyPatch, temperature: float) -> None:
    lm = onward.LanguageModel(tiny_model("qwen3"), ByteTokenizer())
    plain = onward.LanguageModel(tiny_model("qwen3"), ByteTokenizer(), compile="eager")
    calls = []
    call = Sampler.__call__

    def counted(self: Sampler, *args: object) -> Tensor:
        calls.append(args)
        return call(self, *args)  # type: ignore[arg-type]

    options = {"max_new_tokens": 12, "temperature": temperature, "seed": 5, "ignore_eos": True}
    expected = plain.generate(["ab", "c"], **options)
    monkeypatch.setattr(Sampler, "__call__", counted)
    got = lm.generate(["ab", "c"], **options)
    assert len(calls) == 1  # the token after the prompts
    assert [completion.token_ids for completion in got] == [completion.token_ids for completion in expected]
