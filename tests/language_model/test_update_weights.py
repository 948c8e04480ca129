"""`LanguageModel.update_weights`: an updated model equals a freshly loaded one, or nothing has changed."""

import copy
import pickle
import threading

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import onward
from onward.errors import OptionError, RequestError
from onward.models import FAMILIES
from onward.models.linear import float_weight
from onward.program.leaves import leaves_of
from onward.testing import random_checkpoint

FAMILIES_BY_NAME = sorted(
    {name.removesuffix("ForCausalLM").lower() for name in FAMILIES if name.endswith("ForCausalLM")}
)
PROMPT = [5, 6, 7] * 30
WEIGHT = "model.layers.0.self_attn.q_proj.weight"


def folders(tmp_path, family="qwen3", dtype=torch.float32, **overrides):
    """Two checkpoints of one architecture."""
    return [random_checkpoint(tmp_path / str(seed), family, seed=seed, dtype=dtype, **overrides) for seed in (0, 1)]


def tensors(folder):
    return load_file(folder / "model.safetensors")


def texts(lm, **options):
    chosen = {"max_new_tokens": 20, "temperature": 1.0, "seed": 0, "logprobs": 2, "ignore_eos": True, **options}
    completion = lm.generate(PROMPT, **chosen)
    return completion.token_ids, completion.logprobs


def bits(model):
    return [leaf.clone() for leaf in leaves_of(model.params) if isinstance(leaf, Tensor)]


def are_equal(mine, theirs):
    return len(mine) == len(theirs) and all(map(torch.equal, mine, theirs))


def assert_same(lm, loaded):
    assert are_equal(bits(lm.model), bits(loaded.model))
    assert texts(lm) == texts(loaded)


@pytest.mark.parametrize("family", FAMILIES_BY_NAME)
def test_an_updated_model_equals_the_loaded_one(tmp_path, family):
    first, second = folders(tmp_path, family, torch.bfloat16)
    lm, other = onward.load(first), onward.load(second)
    before = texts(lm)
    assert lm.update_weights(tensors(second)) == lm.weights_version == 1
    assert_same(lm, other)
    assert lm.update_weights(tensors(first)) == 2
    assert texts(lm) == before


@pytest.mark.parametrize(
    "options",
    [
        {"quantize": "int8"}, {"quantize": "int4"}, {"quantize": "iq4_nl"}, {"dtype": "bfloat16"}, {"dtype": "float16"},
        {"cache_format": "int8"}, {"quantize": "int8", "cache_format": "int8"}, {"compile": "eager"},
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("family", ["qwen3", "mixtral"])
def test_an_updated_model_with_options_equals_the_loaded_one(tmp_path, family, options):
    first, second = folders(tmp_path, family)
    lm = onward.load(first, **options)
    texts(lm)
    lm.update_weights(tensors(second).items())
    assert_same(lm, onward.load(second, **options))


@pytest.mark.parametrize("tied", [True, False])
def test_weights_come_from_parameters_and_state_dicts(tmp_path, tied):
    first, second = folders(tmp_path, tie_word_embeddings=tied)
    trained = onward.load(second, trainable=True)
    lm = onward.load(first)
    lm.update_weights(trained.named_parameters())
    assert_same(lm, trained)
    lm = onward.load(first)
    weights = tensors(second)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"] if tied else weights["lm_head.weight"]
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    lm.update_weights(weights)
    assert_same(lm, trained)
    if tied:
        with pytest.raises(RequestError, match="the model's head is tied to its embedding, but"):
            lm.update_weights(weights | {"lm_head.weight": weights["lm_head.weight"] + 1})


def test_updates_of_a_trained_model_change_its_parameters(tmp_path):
    first, second = folders(tmp_path)
    lm = onward.load(first, trainable=True)
    optimizer = torch.optim.AdamW(lm.parameters(), lr=1e-3)
    lm.update_weights(tensors(second))
    assert_same(lm, onward.load(second))
    assert all(torch.equal(parameter, tensors(second)[name]) for name, parameter in lm.named_parameters())
    version = lm.weights_version
    lm.logprobs(PROMPT).sum().backward()
    optimizer.step()
    assert lm.weights_version == version + 1
    assert lm.generate(PROMPT, max_new_tokens=4).weights_versions == [(0, version + 1)]
    assert lm.update_weights(lm.named_parameters()) == version + 1  # its own: nothing has changed


def test_prefixes_of_older_weights_are_not_reused(tmp_path):
    first, second = folders(tmp_path)
    lm = onward.load(first)
    lm.generate(PROMPT, max_new_tokens=2)
    assert lm.generate(PROMPT, max_new_tokens=2).cached_tokens > 0
    for folder in (second, first):
        lm.update_weights(tensors(folder))
        assert lm.generate(PROMPT, max_new_tokens=2).cached_tokens == 0


def test_tokens_have_the_version_of_their_step(tmp_path):
    first, second = folders(tmp_path)
    lm = onward.load(first)
    stream, pieces = lm.stream(PROMPT, max_new_tokens=8, ignore_eos=True), []
    completions = []

    def streamed():
        completions.append((yield from stream))

    for piece in streamed():
        pieces.append(piece)
        if len(pieces) == 3:
            lm.update_weights(tensors(second), version=7)
    assert [piece.weights_version for piece in pieces] == [0] * 3 + [7] * 5
    assert completions[0].weights_versions == [(0, 0), (3, 7)]
    assert lm.generate(PROMPT, max_new_tokens=0).weights_versions == []
    assert lm.generate(PROMPT, max_new_tokens=4, beams=2).weights_versions == [(0, 7)]
    assert pieces[0] == pieces[0]._replace(weights_version=9)


def test_copies_are_updated_independently(tmp_path):
    first, second = folders(tmp_path)
    lm = onward.load(first)
    lm.update_weights(tensors(first), version=3)
    before = texts(lm)
    for other in (copy.deepcopy(lm), pickle.loads(pickle.dumps(lm))):
        assert other.weights_version == 3
        other.update_weights(tensors(second))
        assert texts(other) != texts(lm) == before
    assert lm.weights_version == 3


def test_an_update_waits_for_the_forwards_of_other_threads(tmp_path):
    """Every logprob is one of the old or of the new weights, never of both."""
    checkpoints = folders(tmp_path)
    lm = onward.load(checkpoints[0], compile="eager")
    weights = [tensors(folder) for folder in checkpoints]
    expected = [onward.load(folder).score(PROMPT).logprobs for folder in checkpoints]
    stop, found = threading.Event(), []

    def score():
        while not stop.is_set():
            found.append(lm.score(PROMPT).logprobs)

    threads = [threading.Thread(target=score) for _ in range(2)]
    for thread in threads:
        thread.start()
    for turn in range(20):
        lm.update_weights(weights[1 - turn % 2])
    stop.set()
    for thread in threads:
        thread.join()
    assert found
    assert all(logprobs in expected for logprobs in found)


def nan(weights):
    weights[WEIGHT][0, 0] = torch.nan
    return weights


def without(weights, name):
    del weights[name]
    return weights


BAD = [
    (lambda w: without(w, WEIGHT), "1 of [0-9]+ weights are missing, such as 'model.layers.0.self_attn.q_proj.weight'"),
    (lambda w: {}, "[0-9]+ of [0-9]+ weights are missing"),
    (lambda w: w | {"extra": torch.ones(2)}, "1 tensors are not weights of the model, such as 'extra'"),
    (lambda w: w | {WEIGHT: w[WEIGHT].T.contiguous()[1:]}, "q_proj.weight' has the shape .* and the model's is"),
    (nan, "values that are not finite in the model's torch.float16"),
    (lambda w: w | {WEIGHT: w[WEIGHT] * 1e30}, "values that are not finite in the model's torch.float16"),
    (lambda w: w | {WEIGHT: w[WEIGHT].to(torch.int8)}, "must be a dense tensor of floats; got torch.int8"),
    (lambda w: w | {WEIGHT: w[WEIGHT].to_sparse()}, "must be a dense tensor of floats"),
    (lambda w: w | {WEIGHT: w[WEIGHT].to("meta")}, "must be a dense tensor of floats; .* on meta"),
    (lambda w: w | {WEIGHT: w[WEIGHT].numpy()}, "is of type ndarray"),
    (lambda w: [*w.items(), (WEIGHT, w[WEIGHT])], "is there twice"),
    (lambda w: list(w.values()), "got an item of type Tensor"),
    (lambda w: list(w), "got an item of type str"),
    (lambda w: w[WEIGHT], "got Tensor"),
    (lambda w: "weights", "got str"),
    (lambda w: None, "got NoneType"),
]


@pytest.mark.parametrize("trained", [False, True])
def test_invalid_weights_change_nothing(tmp_path, trained):
    first, second = folders(tmp_path)
    lm = onward.load(first, dtype="float16", trainable=trained)
    before, weights = bits(lm.model), tensors(second)
    for change, message in BAD:
        with pytest.raises(RequestError, match=message):
            lm.update_weights(change({name: tensor.clone() for name, tensor in weights.items()}))
        assert are_equal(bits(lm.model), before)
        assert lm.weights_version == 0
    for version in (0, -1, True, 1.5, "2"):
        with pytest.raises(OptionError, match="version"):
            lm.update_weights(weights, version=version)
    assert lm.update_weights(weights, version=5) == 5
    with pytest.raises(OptionError, match="above that of the current weights, 5; got 5"):
        lm.update_weights(weights, version=5)


def test_models_that_cannot_be_updated(tmp_path, tmp_path_factory):
    first, _ = folders(tmp_path)
    weights = tensors(first)
    module = torch.nn.Embedding(8, 8)
    of_module = onward.Model.from_module(
        module,
        vocab_size=8,
        new_cache=lambda *_: (),
        call=lambda module, tokens, offsets, cache: (module(tokens), cache),
    )
    with pytest.raises(RequestError, match="needs a model of a built-in family"):
        onward.LanguageModel(of_module).update_weights({"weight": torch.ones(8, 8)})
    with pytest.raises(RequestError, match="needs a model of a built-in family"):
        onward.load(first, pipeline=2).update_weights(weights)


def test_an_update_inside_a_forward_is_refused(tmp_path):
    first, _ = folders(tmp_path)
    lm, weights = onward.load(first, compile="eager"), tensors(first)
    forward, errors = lm.model.forward, []

    def calling(*args, **options):
        with pytest.raises(RequestError, match="inside a forward") as error:
            lm.update_weights(weights)
        errors.append(error)
        return forward(*args, **options)

    object.__setattr__(lm.model, "forward", calling)
    lm.generate(PROMPT, max_new_tokens=1)
    assert errors
    object.__setattr__(lm.model, "forward", forward)
    lm.update_weights(weights)


def test_a_tied_head_stays_tied(tmp_path):
    first, second = folders(tmp_path, tie_word_embeddings=True)
    lm = onward.load(first)
    lm.update_weights(tensors(second))
    embedding, head = lm.model.params.embed_tokens.weight, lm.model.params.lm_head.weight
    assert torch.equal(float_weight(embedding), float_weight(head))
    assert leaves_of(embedding)[0] is leaves_of(head)[0]
