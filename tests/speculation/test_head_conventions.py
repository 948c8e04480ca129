"""The positions of heads: the features and the token of each input, the drafted position, and the inputs at positions
that the target has not processed."""

import math
from functools import partial
from itertools import pairwise

import pytest
import torch
from head_checkpoints import LAYERS, MTP, eagle3_checkpoint, mtp_checkpoint, mtp_names
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention, silu, softmax

import onward
from onward import Speculator
from onward.decoding.speculation import DraftRow, DraftTarget
from onward.models import architecture_of
from onward.testing import random_checkpoint

V = 32  # ids, each with a feature of its own
FOLLOWS = torch.randperm(V, generator=torch.Generator().manual_seed(3))  # the id after each
STEPS = torch.eye(V)[FOLLOWS]  # [V, V]: row t is the unit vector of the id after t


def chain(first: int, count: int) -> list[int]:
    ids = [first]
    while len(ids) < count:
        ids.append(int(FOLLOWS[ids[-1]]))
    return ids


def without_mixing(tensors: dict[str, Tensor], offset: float) -> None:
    """A model whose hidden states are the unit vectors of its tokens, so that each id has one successor."""
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
            tensor.zero_()
        elif name.endswith(("norm.weight", "pre_fc_norm_embedding.weight", "pre_fc_norm_hidden.weight")):
            tensor.fill_(1 - offset)
        elif name.endswith("embed_tokens.weight"):
            tensor.copy_(torch.eye(V))
        elif name.endswith(("lm_head.weight", "shared_head.head.weight")):
            tensor.copy_(4 * STEPS.T)


def drafted(lm, length, **options):
    lm.draft = Speculator(lm.draft.drafter, length=length)
    prompts = [chain(first, count) for first, count in ((1, 2), (7, 40), (9, 70))]
    return [lm.generate(ids, max_new_tokens=1 + 4 * (length + 1), **options) for ids in prompts]


@pytest.mark.parametrize("family", MTP)
@pytest.mark.parametrize("source", ["features", "token"])
def test_all_drafts_of_a_correct_mtp_head_are_accepted(family, source, tmp_path):
    def right(tensors):
        without_mixing(tensors, offset=1.0 if family.startswith("qwen") else 0.0)
        root, _, _ = mtp_names(family, 3)
        projection = tensors[f"{root}{'fc' if family.startswith('qwen') else 'eh_proj'}.weight"]
        # The next token is as good as the one after the features' own.
        nothing = torch.zeros(V, V)
        projection.copy_(torch.cat([nothing, STEPS.T] if source == "features" else [torch.eye(V), nothing], 1))

    fields = {"vocab_size": V, "hidden_size": V, "num_hidden_layers": 3}
    lm = onward.load(mtp_checkpoint(tmp_path, family, change=right, **fields), draft="mtp")
    for length in (1, 3, 8):
        for completion in drafted(lm, length, temperature=0.0):
            assert all(int(FOLLOWS[one]) == other for one, other in pairwise(completion.token_ids))
            assert completion.speculation.acceptance == 1.0
            assert completion.speculation.rounds == 4


@pytest.mark.parametrize("family", ["deepseekv3", "qwen3next"])
def test_a_correct_head_draws_the_same_as_its_model(family, tmp_path):
    """With the distribution of the model and the noise of the drafted position, all samples are equal."""

    def right(tensors):
        without_mixing(tensors, offset=1.0 if family.startswith("qwen") else 0.0)
        root, _, _ = mtp_names(family, 3)
        projection = tensors[f"{root}{'fc' if family.startswith('qwen') else 'eh_proj'}.weight"]
        projection.copy_(torch.cat([torch.eye(V), torch.zeros(V, V)], 1))
        tensors["lm_head.weight"].copy_(torch.randn(V, V, generator=torch.Generator().manual_seed(1)))

    fields = {"vocab_size": V, "hidden_size": V, "num_hidden_layers": 3}
    lm = onward.load(mtp_checkpoint(tmp_path, family, change=right, **fields), draft="mtp")
    for completion in drafted(lm, 3, temperature=1.0, repetition_penalty=1.2, seed=3):
        assert completion.speculation.acceptance == 1.0
        assert len(set(completion.token_ids)) > 5


@pytest.mark.parametrize("some", [False, True], ids=["all ids", "some ids"])
def test_all_drafts_of_a_correct_eagle3_head_are_accepted(some, tmp_path):
    target = random_checkpoint(
        tmp_path / "target", "llama", vocab_size=V, hidden_size=V, num_hidden_layers=LAYERS, rms_norm_eps=1e-5
    )
    tensors = load_file(target / "model.safetensors")
    without_mixing(tensors, 0.0)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    # The texts of the model have no other ids.
    ids = torch.tensor(sorted({*chain(1, 70), *chain(7, 70), *chain(9, 70)})) if some else torch.arange(V)
    assert len(ids) < V or not some

    def right(tensors):
        head = tensors.pop("lm_head.weight")
        without_mixing(tensors, 0.0)
        tensors["lm_head.weight"] = head.copy_(STEPS.T[ids])
        tensors["d2t"].copy_(ids - torch.arange(len(ids)))
        eye = torch.eye(V)
        tensors["fc.weight"].copy_(torch.cat([0.25 * eye, 0.5 * eye, 0.25 * eye], 1))
        # x + down(silu(gate) * up) is the unit vector of the next id: the normalised x has one feature of sqrt(V).
        large = math.sqrt(V)
        for name in ("gate_proj", "up_proj"):
            tensors[f"midlayer.mlp.{name}.weight"].zero_()[:V] = eye
        tensors["midlayer.mlp.down_proj.weight"].zero_()[:, :V] = (STEPS.T - eye) / (silu(torch.tensor(large)) * large)

    head = eagle3_checkpoint(tmp_path / "head", target, change=right, draft_vocab_size=len(ids), intermediate_size=V)
    lm = onward.load(target, draft=head)
    for length in (1, 3, 8):
        for completion in drafted(lm, length, temperature=0.0):
            assert all(int(FOLLOWS[one]) == other for one, other in pairwise(completion.token_ids))
            assert completion.speculation.acceptance == 1.0
            assert completion.speculation.rounds == 4


# ── references in plain torch, after the modelling code of vLLM and SGLang ──


def rms(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * (offset + weight)


def rotated(x: Tensor, dims: int, theta: float, positions: Tensor) -> Tensor:
    """x [H, N, E], of which the first `dims` features rotate in halves."""
    angles = positions[:, None] * theta ** (-torch.arange(0, dims, 2) / dims)
    cos, sin = torch.cat([angles, angles], -1).cos(), torch.cat([angles, angles], -1).sin()
    part, rest = x[..., :dims], x[..., dims:]
    first, second = part.chunk(2, -1)
    return torch.cat([part * cos + torch.cat([-second, first], -1) * sin, rest], -1)


def attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """[H, N, E] and two of [G, N, E] -> [N, H E], each position over itself and those before."""
    k, v = (x.repeat_interleave(len(q) // len(x), 0) for x in (k, v))
    mixed = scaled_dot_product_attention(q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0), is_causal=True)
    return mixed.squeeze(0).transpose(0, 1).flatten(1)


def eagle3_logits(tensors: dict[str, Tensor], embedding: Tensor, features: Tensor, ids: list[int]) -> Tensor:
    """The head's logits after each id of `ids[1:]`. features [N, 3 D] of the ids before."""
    layer = {name.removeprefix("midlayer."): tensor for name, tensor in tensors.items()}
    positions = torch.arange(len(ids) - 1)
    x = linear(features, tensors["fc.weight"])
    embedded = rms(embedding[ids[1:]], layer["input_layernorm.weight"], 1e-5)
    pair = torch.cat([embedded, rms(x, layer["hidden_norm.weight"], 1e-5)], -1)
    q, k, v = (
        linear(pair, layer[f"self_attn.{name}_proj.weight"]).unflatten(-1, (heads, 8)).transpose(0, 1)
        for name, heads in (("q", 4), ("k", 2), ("v", 2))
    )
    q, k = (rotated(part, 8, 10000.0, positions) for part in (q, k))
    x = x + linear(attended(q, k, v), layer["self_attn.o_proj.weight"])
    normed = rms(x, layer["post_attention_layernorm.weight"], 1e-5)
    gate, up = (linear(normed, layer[f"mlp.{name}_proj.weight"]) for name in ("gate", "up"))
    x = x + linear(silu(gate) * up, layer["mlp.down_proj.weight"])
    logits = linear(rms(x, tensors["norm.weight"], 1e-5), tensors["lm_head.weight"])
    scattered = torch.full((len(logits), len(embedding)), -math.inf)
    scattered[:, tensors["d2t"] + torch.arange(len(tensors["d2t"]))] = logits
    return scattered


def qwen_mtp_logits(tensors: dict[str, Tensor], features: Tensor, ids: list[int], sparse: bool) -> Tensor:
    """As `eagle3_logits`. features [N, D]: normalised hidden states."""
    layer = {name.removeprefix("mtp.layers.0."): tensor for name, tensor in tensors.items()}
    positions = torch.arange(len(ids) - 1)
    embedded = tensors["model.embed_tokens.weight"][ids[1:]]
    embedded = rms(embedded, tensors["mtp.pre_fc_norm_embedding.weight"], 1e-6, 1.0)
    hidden = rms(features, tensors["mtp.pre_fc_norm_hidden.weight"], 1e-6, 1.0)
    x = linear(torch.cat([embedded, hidden], -1), tensors["mtp.fc.weight"])
    normed = rms(x, layer["input_layernorm.weight"], 1e-6, 1.0)
    q, gate = linear(normed, layer["self_attn.q_proj.weight"]).unflatten(-1, (4, 32)).chunk(2, -1)
    k, v = (linear(normed, layer[f"self_attn.{name}_proj.weight"]).unflatten(-1, (2, 16)) for name in "kv")
    q, k = (
        rotated(rms(part, layer[f"self_attn.{name}_norm.weight"], 1e-6, 1.0).transpose(0, 1), 4, 10000.0, positions)
        for name, part in (("q", q), ("k", k))
    )
    mixed = attended(q, k, v.transpose(0, 1)) * gate.flatten(1).sigmoid()
    x = x + linear(mixed, layer["self_attn.o_proj.weight"])
    normed = rms(x, layer["post_attention_layernorm.weight"], 1e-6, 1.0)
    x = x + (experts(layer, normed) if sparse else gated(layer, "mlp", normed))
    return linear(rms(x, tensors["mtp.norm.weight"], 1e-6, 1.0), tensors["lm_head.weight"])


def gated(layer: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    gate, up = (linear(x, layer[f"{name}.{part}_proj.weight"]) for part in ("gate", "up"))
    return linear(silu(gate) * up, layer[f"{name}.down_proj.weight"])


def experts(layer: dict[str, Tensor], x: Tensor) -> Tensor:
    shares, chosen = softmax(linear(x, layer["mlp.gate.weight"]), -1).topk(2, -1)
    shares = shares / shares.sum(-1, keepdim=True)
    rows = [
        sum(share * gated(layer, f"mlp.experts.{int(expert)}", row) for share, expert in zip(*pair, strict=True))
        for row, pair in zip(x, zip(shares, chosen, strict=True), strict=True)
    ]
    shared = linear(x, layer["mlp.shared_expert_gate.weight"]).sigmoid() * gated(layer, "mlp.shared_expert", x)
    return torch.stack(rows) + shared


def deepseek_mtp_logits(tensors: dict[str, Tensor], features: Tensor, ids: list[int]) -> Tensor:
    """As `qwen_mtp_logits`. DeepSeek's attention in its expanded form, with rotated pairs of neighbours."""
    layer = {name.removeprefix("model.layers.3."): tensor for name, tensor in tensors.items()}
    positions = torch.arange(len(ids) - 1)

    def neighbours(x: Tensor) -> Tensor:
        return rotated(torch.cat([x[..., ::2], x[..., 1::2]], -1), 8, 10000.0, positions)

    def normed(name: str, x: Tensor) -> Tensor:
        return rms(x, layer[f"{name}.weight"], 1e-6)

    embedded = normed("enorm", tensors["model.embed_tokens.weight"][ids[1:]])
    x = linear(torch.cat([embedded, normed("hnorm", features)], -1), layer["eh_proj.weight"])
    attention = {name.removeprefix("self_attn."): tensor for name, tensor in layer.items()}
    inputs = normed("input_layernorm", x)
    q = normed("self_attn.q_a_layernorm", linear(inputs, attention["q_a_proj.weight"]))
    content, rotary = linear(q, attention["q_b_proj.weight"]).unflatten(-1, (4, 20)).transpose(0, 1).split([12, 8], -1)
    latent, key = linear(inputs, attention["kv_a_proj_with_mqa.weight"]).split([16, 8], -1)
    latent = normed("self_attn.kv_a_layernorm", latent)
    keys, values = linear(latent, attention["kv_b_proj.weight"]).unflatten(-1, (4, 24)).transpose(0, 1).split(12, -1)
    q = torch.cat([content, neighbours(rotary)], -1)
    k = torch.cat([keys, neighbours(key).unsqueeze(0).expand(4, -1, -1)], -1)
    x = x + linear(attended(q, k, values), attention["o_proj.weight"])
    inputs = normed("post_attention_layernorm", x)
    scores = linear(inputs, layer["mlp.gate.weight"]).sigmoid()
    chosen = (scores + layer["mlp.gate.e_score_correction_bias"]).topk(2, -1).indices
    shares = scores.gather(1, chosen)
    shares = 2.5 * shares / (shares.sum(-1, keepdim=True) + 1e-20)
    rows = [
        sum(share * gated(layer, f"mlp.experts.{int(expert)}", row) for share, expert in zip(*pair, strict=True))
        for row, pair in zip(inputs, zip(shares, chosen, strict=True), strict=True)
    ]
    x = x + torch.stack(rows) + gated(layer, "mlp.shared_experts", inputs)
    return linear(normed("shared_head.norm", x), tensors["lm_head.weight"])


IDS = torch.randint(3, 250, (70,), generator=torch.Generator().manual_seed(5)).tolist()
# Logits of order 1, each of a few hundred roundings of 6e-8 whose order differs.
TOLERANCE = 1e-4


def features_of(lm, ids: list[int]) -> Tensor:
    taps = architecture_of(lm.model).cached_taps
    states = lm.hidden_states(ids, list(taps))
    return torch.cat([states[name] for name in taps], -1)


def assert_drafts_as(lm, logits_of) -> None:
    """The first drafted id of texts of several lengths has the logits of a reference, on the position after the text;
    so has the second, in the place of a text that has grown by one."""
    seen: list[Tensor] = []

    def select(logits: Tensor, positions: Tensor) -> Tensor:
        assert positions.tolist() == [len(row)]
        seen.append(logits[0])
        return logits.argmax(-1)

    target = DraftTarget(lm.model.vocab_size, lm.model.device, 1, 200, 200, 1, select, lm.model)
    drafting = lm.draft.drafter.start(target)
    for count in (2, 5, 69):
        ids = IDS[: count + 1]
        features = features_of(lm, ids)
        row = DraftRow(IDS[: count - 1], [IDS[count - 1]], features=lambda first, last, x=features: x[first:last])
        drafting.join([row])
        drafting.propose([row])
        row.output.append(IDS[count])
        drafting.propose([row])
        drafting.leave([row])
        for logits, length in zip(seen, (count, count + 1), strict=True):
            want = logits_of(features[: length - 1], ids[:length])[-1]
            torch.testing.assert_close(logits, want, rtol=0, atol=TOLERANCE)
        seen.clear()


def test_an_eagle3_head_has_the_logits_of_its_reference(tmp_path):
    target = random_checkpoint(tmp_path / "target", "llama", num_hidden_layers=LAYERS)
    head = eagle3_checkpoint(tmp_path / "head", target)
    tensors, embedding = load_file(head / "model.safetensors"), load_file(target / "model.safetensors")
    lm = onward.load(target, draft=head)
    assert architecture_of(lm.model).cached_taps == ("layers.1", "layers.3", "layers.4")
    assert_drafts_as(lm, partial(eagle3_logits, tensors, embedding["model.embed_tokens.weight"]))


@pytest.mark.parametrize("family", ["qwen3next", "qwen3_5", "qwen3_5moe", "deepseekv3"])
def test_an_mtp_head_has_the_logits_of_its_reference(family, tmp_path):
    folder = mtp_checkpoint(tmp_path, family, num_hidden_layers=3)
    tensors = load_file(folder / "model.safetensors")
    reference = partial(qwen_mtp_logits, tensors, sparse=family != "qwen3_5")
    if family == "deepseekv3":
        reference = partial(deepseek_mtp_logits, tensors)
    assert_drafts_as(onward.load(folder, draft="mtp"), reference)
