"""The ops with recurrent states compute the recurrence, and the division of a text into calls changes nothing."""

import itertools

import pytest
import torch
from rounding import UNIT, assert_within, random, same_bits

import onward
from onward import native, ops
from onward.errors import RequestError
from onward.ops.gated_delta import state_width
from onward.ops.recurrent_state import STATE_BLOCK
from onward.ops.ssd import ssd_state_width

HEADS, KEY_HEADS, KEY_DIM, VALUE_DIM = 4, 2, 24, 40
TAPS = 4


class Layer:
    """A convolution and a recurrence one after the other, with the states of some slots."""

    channels: int  # of the convolution
    also: tuple[int, ...]  # features of the other inputs
    kept: tuple[int, int]  # the contents of a place: [heads or groups, width]
    vectors: int  # how many numbers are learned for each head

    def __init__(self, slots=1, dtype=torch.float32, seed=0):
        self.weight = random(TAPS, self.channels, dtype=dtype, seed=seed)
        self.learned = [random(HEADS, seed=seed + 1 + at) for at in range(self.vectors)]
        self.inputs = torch.zeros(slots, 2, TAPS - 1 + STATE_BLOCK, self.channels, dtype=dtype)
        self.state = torch.zeros(slots, 2, *self.kept)
        self.block_numbers = torch.zeros(slots, 2, dtype=torch.int32)

    def __call__(self, tokens, offsets, rows=None):
        """tokens: x [B, T, C] and the other inputs"""
        x, *rest = tokens
        offsets = torch.tensor(offsets, dtype=torch.int32)
        rows = None if rows is None else torch.tensor(rows, dtype=torch.int32)
        mixed = ops.short_conv(x, self.weight, self.inputs, self.block_numbers, offsets, rows)
        # The two share `block_numbers`, as layers do: what the first leaves is what the second finds or leaves.
        return self.mix(mixed, *rest, *self.learned, self.state, self.block_numbers, offsets, rows)

    @classmethod
    def tokens(cls, count, batch=1, dtype=torch.float32, seed=5):
        widths = cls.channels, *cls.also
        return tuple(random(batch, count, width, dtype=dtype, seed=seed + at) for at, width in enumerate(widths))

    def recurrence(self, tokens):
        """The same in float64, token by token, as the paper writes it."""
        x, *rest = (t[0].double() for t in tokens)
        padded = torch.cat([torch.zeros(TAPS - 1, self.channels, dtype=torch.float64), x])
        mixed = sum(self.weight.double()[i] * padded[i : i + len(x)] for i in range(TAPS))
        return self.token_by_token(torch.nn.functional.silu(mixed), *rest, *(x.double() for x in self.learned))


class Delta(Layer):
    channels = 2 * KEY_HEADS * KEY_DIM + HEADS * VALUE_DIM
    also = HEADS, HEADS
    kept = HEADS, state_width(KEY_DIM, VALUE_DIM)
    vectors = 2

    @staticmethod
    def mix(*inputs):
        return ops.gated_delta(*inputs, key_heads=KEY_HEADS, key_dim=KEY_DIM)

    @staticmethod
    def token_by_token(mixed, decay, beta, A_log, decay_bias):
        q, k, v = mixed.split([KEY_HEADS * KEY_DIM] * 2 + [HEADS * VALUE_DIM], -1)
        q, k = (y.view(-1, KEY_HEADS, KEY_DIM).repeat_interleave(HEADS // KEY_HEADS, 1) for y in (q, k))
        q, k = (y / (y.square().sum(-1, keepdim=True) + 1e-6).sqrt() for y in (q, k))
        v = v.view(-1, HEADS, VALUE_DIM)
        g = -A_log.exp() * torch.nn.functional.softplus(decay + decay_bias)
        state, out = torch.zeros(HEADS, KEY_DIM, VALUE_DIM, dtype=torch.float64), []
        for t in range(len(mixed)):
            state = g[t].exp()[:, None, None] * state
            error = beta[t].sigmoid()[:, None] * (v[t] - torch.einsum("hkv,hk->hv", state, k[t]))
            state = state + k[t].unsqueeze(-1) * error.unsqueeze(1)
            out.append(torch.einsum("hkv,hk->hv", state, q[t]) * KEY_DIM**-0.5)
        return torch.stack(out)


class Ssd(Layer):
    channels = HEADS * VALUE_DIM + 2 * KEY_HEADS * KEY_DIM
    also = (HEADS,)
    kept = KEY_HEADS, ssd_state_width(HEADS // KEY_HEADS, KEY_DIM, VALUE_DIM)
    vectors = 3
    limits = 0.3, 1.1

    @classmethod
    def mix(cls, *inputs):
        return ops.ssd(*inputs, groups=KEY_HEADS, state_dim=KEY_DIM, limits=cls.limits)

    @classmethod
    def token_by_token(cls, mixed, dt, A_log, step_bias, skip):
        x, b, c = mixed.split([HEADS * VALUE_DIM] + [KEY_HEADS * KEY_DIM] * 2, -1)
        b, c = (y.view(-1, KEY_HEADS, KEY_DIM).repeat_interleave(HEADS // KEY_HEADS, 1) for y in (b, c))
        x = x.view(-1, HEADS, VALUE_DIM)
        dt = torch.nn.functional.softplus(dt + step_bias).clamp(*cls.limits)
        assert all((dt == limit).any() for limit in cls.limits)
        state, out = torch.zeros(HEADS, KEY_DIM, VALUE_DIM, dtype=torch.float64), []
        for t in range(len(mixed)):
            state = (-A_log.exp() * dt[t]).exp()[:, None, None] * state
            state = state + b[t].unsqueeze(-1) * (dt[t].unsqueeze(-1) * x[t]).unsqueeze(1)
            out.append(torch.einsum("hnp,hn->hp", state, c[t]) + skip.unsqueeze(-1) * x[t])
        return torch.stack(out)


@pytest.fixture(params=[Delta, Ssd], ids=["gated_delta", "ssd"])
def kind(request):
    return request.param


def part(tokens, first, last):
    return tuple(x[:, first:last] for x in tokens)


def in_chunks(layer, tokens, cuts):
    outs = [layer(part(tokens, first, last), [first]) for first, last in itertools.pairwise(cuts)]
    return torch.cat(outs, 1)


@pytest.mark.parametrize("dtype", list(UNIT))
def test_the_op_equals_the_recurrence(kind, dtype):
    layer, tokens = kind(dtype=dtype), kind.tokens(75, dtype=dtype)
    exact = layer.recurrence(tokens)
    # The convolution's output is rounded to the dtype, and so is what comes out. A rounded key, query or value (three
    # factors) moves what a token adds by as much, relatively; what is added decays, and at most accumulates: under the
    # delta rule the norms of keys are 1 and later tokens correct it, so |S^T k| and |S^T q| stay below the sum of
    # |d| so far. Of float32 itself there are up to 75 positions of K + 16 roundings each.
    unit = 3 * UNIT[dtype] + (KEY_DIM + STATE_BLOCK) * UNIT[torch.float32]
    bound = 75 * unit * exact.abs().max()
    assert_within(layer(tokens, [0])[0], exact, bound)


def test_chunked_equals_whole(kind, form):
    tokens = kind.tokens(75)
    whole = kind()(tokens, [0])
    for cuts in ([0, 1, 75], [0, 16, 32, 75], [0, 15, 17, 48, 49, 75], range(76)):
        got = in_chunks(kind(), tokens, cuts)
        if form == "definition":  # torch's products have no one order
            torch.testing.assert_close(
                got, whole, rtol=0, atol=75 * 40 * UNIT[torch.float32] * float(whole.abs().max())
            )
        else:
            assert same_bits(got, whole), cuts


KERNELS = pytest.mark.skipif(not native.available_isas(), reason="no kernels")


def assert_same(form, got, want):
    if form == "definition":
        torch.testing.assert_close(got, want, rtol=0, atol=75 * 40 * UNIT[torch.float32] * float(want.abs().max()))
    else:
        assert same_bits(got, want)


@pytest.mark.parametrize("first", [0, 3, 15, 16, 31, 40])
@pytest.mark.parametrize("taken_back", [1, 7, 15])
def test_lowering_an_offset_truncates_positions(kind, form, first, taken_back):
    tokens, others = kind.tokens(80), kind.tokens(80, seed=50)
    want = in_chunks(kind(), tokens, [0, *([first] if first else []), 80])
    layer = kind()
    if first:
        layer(part(tokens, 0, first), [0])
    layer(part(tokens, first, first + 1), [first])
    layer(part(others, 0, taken_back), [first + 1])  # ids of a draft that are not accepted
    assert_same(form, layer(part(tokens, first + 1, 80), [first + 1]), want[:, first + 1 :])


@pytest.mark.parametrize("first", [0, 5, 16, 32])
def test_a_call_may_be_repeated(kind, form, first):
    """A failed step of any length is retried."""
    tokens, others = kind.tokens(80), kind.tokens(80, seed=50)
    layer = kind()
    if first:
        layer(part(tokens, 0, first), [0])
    want = layer(part(tokens, first, 80), [first])
    for count in (1, 11, 48, 75):
        layer(part(others, 0, count), [first])
        assert_same(form, layer(part(tokens, first, 80), [first]), want)


def test_rows_are_independent(kind, form):
    """Each row has its own offset, slot and padding."""
    texts = [kind.tokens(60, seed=seed) for seed in (5, 6, 7)]
    lengths, rows = [33, 1, 16], [2, 0, 3]
    layer = kind(slots=4)
    for text, length, row in zip(texts, lengths, rows, strict=True):
        layer(part(text, 0, length), [0], [row])
    own = [9, 2, 14]  # of 14 tokens; the others are padding
    cut = [part(text, n, n + 14) for text, n in zip(texts, lengths, strict=True)]
    together = [torch.cat(inputs) for inputs in zip(*cut, strict=True)]
    outs = layer(tuple(together), lengths, rows)
    for text, length, count, row, out in zip(texts, lengths, own, rows, outs, strict=True):
        alone = kind()
        alone(part(text, 0, length), [0])
        assert_same(form, out[:count], alone(part(text, length, length + count), [length])[0])
        after = part(text, length + count, length + count + 5)
        assert_same(form, layer(after, [length + count], [row]), alone(after, [length + count]))


def test_threads_change_nothing(kind):
    tokens = kind.tokens(50)
    outs = []
    for threads in (1, 2, 3):
        native.set_num_threads(threads)
        outs.append(kind()(tokens, [0]))
    assert same_bits(outs[0], outs[1])
    assert same_bits(outs[0], outs[2])


def test_a_missing_state_gives_nan(kind):
    tokens = kind.tokens(60)
    layer = kind()
    layer(part(tokens, 0, 40), [0])
    before = layer.state.clone(), layer.inputs.clone(), layer.block_numbers.clone()
    assert layer(part(tokens, 20, 21), [20]).isnan().all()  # the state of position 20 is no longer stored
    assert kind()(part(tokens, 20, 21), [20]).isnan().all()
    for now, then in zip((layer.state, layer.inputs, layer.block_numbers), before, strict=True):
        assert same_bits(now, then)
    assert layer(part(tokens, 40, 41), [40]).isfinite().all()


def test_a_convolution_with_bias_and_without_silu():
    x, weight, bias = random(2, 9, 5), random(3, 5, seed=1), random(5, seed=2)
    state, block_numbers = torch.zeros(2, 2, 2 + STATE_BLOCK, 5), torch.zeros(2, 2, dtype=torch.int32)
    got = ops.short_conv(x, weight, state, block_numbers, torch.zeros(2, dtype=torch.int32), bias=bias, silu=False)
    padded = torch.cat([torch.zeros(2, 2, 5), x], 1).double()
    exact = bias.double() + sum(weight[i].double() * padded[:, i : i + 9] for i in range(3))
    assert_within(got, exact, 4 * UNIT[torch.float32] * (bias.abs().max() + weight.abs().sum(0).max() * x.abs().max()))


@KERNELS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_programs_equal_the_eager_forward(kind, form, dtype):
    if form == "definition":
        pytest.skip("programs are of kernels")
    layer = kind(dtype=dtype)
    widths = [kind.channels, *kind.also]
    params = {
        "table": random(32, sum(widths), dtype=dtype, seed=9), "weight": layer.weight, "learned": layer.learned,
    }  # fmt: skip

    def forward(tokens, offsets, cache, params):
        x, *rest = ops.embedding(tokens, params["table"]).split(widths, -1)
        x = ops.short_conv(x, params["weight"], cache["inputs"], cache["block_numbers"], offsets)
        out = kind.mix(x, *rest, *params["learned"], cache["state"], cache["block_numbers"], offsets, None)
        return out.flatten(2), cache

    def cache():
        fresh = kind(dtype=dtype)
        return {"inputs": fresh.inputs, "state": fresh.state, "block_numbers": fresh.block_numbers}

    ids = torch.randint(0, 32, (1, 40), dtype=torch.int32, generator=torch.Generator().manual_seed(3))
    eager, traced = cache(), cache()
    program = onward.compile(forward, params=params, cache=traced, fallback="raise")
    for first, last in itertools.pairwise([0, 20, 21, 22, 30, 33, 40]):
        offsets = torch.tensor([first], dtype=torch.int32)
        want, _ = forward(ids[:, first:last], offsets, eager, params)
        got, traced = program(ids[:, first:last], offsets, traced)
        assert same_bits(got, want)


def test_mismatched_arguments_are_refused(kind):
    layer, (x, *rest) = kind(slots=2), kind.tokens(3, batch=2)
    offsets = torch.zeros(2, dtype=torch.int32)
    with pytest.raises(RequestError, match="a weight"):
        ops.short_conv(x, layer.weight[:, 1:], layer.inputs, layer.block_numbers, offsets)
    with pytest.raises(RequestError, match=r"a state \[N, 2, 19, "):
        ops.short_conv(x, layer.weight, layer.inputs[:, :, 1:], layer.block_numbers, offsets)
    rest = *rest, *layer.learned, layer.state, layer.block_numbers, offsets
    with pytest.raises(RequestError, match="H a multiple of G"):
        kind.mix(x[..., 1:], *rest)
    with pytest.raises(RequestError, match="float32"):
        kind.mix(x.bfloat16(), *rest)


def test_states_of_any_layout_are_read_and_written(kind):
    """The kernel reads contiguous states: for others the definition runs, within the rounding of two float32 forms."""
    tokens, layer, other = kind.tokens(75), kind(), kind()
    layer(part(tokens, 0, 20), [0])
    for name in ("inputs", "state", "block_numbers"):
        tensor = getattr(layer, name)
        setattr(other, name, torch.stack([tensor, tensor], -1)[..., 0])
    for first, last in ((20, 21), (21, 75)):
        got, want = (each(part(tokens, first, last), [first]) for each in (other, layer))
        torch.testing.assert_close(got, want, rtol=0, atol=75 * 40 * UNIT[torch.float32] * float(want.abs().max()))


def test_rows_that_share_a_slot_are_refused(kind, form):
    layer, tokens = kind(slots=2), kind.tokens(3, batch=2)
    with pytest.raises(RequestError, match="a different slot"):
        layer(tokens, [0, 0], [1, 1])
    with pytest.raises(RequestError, match="0 or more"):
        layer(tokens, [0, -1], [0, 1])
