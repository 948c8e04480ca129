"""Models of transformers in Onward: their logits and tokens, as programs, in chunks and in ragged batches."""

from pathlib import Path

import pytest
import torch
import transformers
from tiny_families import NEW_TOKENS, TOLERANCE, attempt, greedy, prompts_for, through_onward, tiny_model
from transformers_table import PAGE, outcome, outcomes_of

import onward
from onward import native
from onward.errors import CheckpointError, RequestError, UnsupportedArchitectureError
from onward.models.transformers.forward import _window
from onward.models.transformers.linears import UnsupportedModuleError

pytestmark = pytest.mark.filterwarnings("ignore:.*runs eagerly")
# Experts, learned positions, windows in some layers and rotations of neighbouring pairs, an attention of its own, and
# positions counted from behind padding.
FEW = ("afmoe", "biogpt", "cohere2", "bloom", "roberta")


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    model = tiny_model("llama")
    return model, through_onward(model, tmp_path_factory.mktemp("llama"))


@pytest.mark.skipif(native.library() is None, reason="no native library was built")
@pytest.mark.parametrize("family", FEW)
def test_each_family_runs_as_documented(family):
    page = PAGE.read_text(encoding="utf-8")
    if f"transformers {transformers.__version__}." not in page:
        pytest.skip("the page was written with another version of transformers")
    assert outcome(attempt(family)) == outcomes_of(page)[family]


def test_rows_join_and_leave(llama):
    model, lm = llama
    cases = prompts_for(model)
    with onward.Engine(lm) as engine:
        asked = [
            engine.submit(prompt, max_new_tokens=NEW_TOKENS, temperature=0, ignore_eos=True)
            for prompt, _ in (*cases, *cases)
        ]
        assert [one.result().token_ids for one in asked] == [text for _, text in (*cases, *cases)]


def test_a_common_prefix_is_not_processed_again(llama):
    model, lm = llama
    prompt = torch.randint(2, 100, (90,), generator=torch.Generator().manual_seed(5)).tolist()
    expected = greedy(model, prompt)
    options = {"max_new_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True}
    assert lm.generate(prompt, **options).token_ids == expected
    again = lm.generate(prompt, **options)
    assert again.token_ids == expected
    assert again.cached_tokens > 0


def test_a_rows_bits_do_not_depend_on_its_neighbors(llama):
    _, lm = llama
    prompts = [list(range(2, 2 + length)) for length in (17, 5, 30)]
    options = {"max_new_tokens": 20, "temperature": 1.0, "seed": 3, "logprobs": 3, "ignore_eos": True}
    together = lm.generate(prompts, **options)
    for prompt, one in zip(prompts, together, strict=True):
        alone = lm.generate(prompt, **options)
        assert alone.token_ids == one.token_ids
        assert alone.logprobs == one.logprobs


def test_weights_may_be_quantized(tmp_path):
    model = tiny_model("llama")
    model.save_pretrained(tmp_path)
    lm = onward.load(tmp_path, via="transformers", quantize="int8")
    ids = list(range(2, 30))
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0]
    # Rounding to 8 bits moves a weight by 1/254 of its row's largest; a wrong scale would move logits by themselves.
    assert (lm.logits(ids) - expected).abs().max() < 0.1 * expected.abs().max()
    assert lm.model.nbytes < 0.5 * onward.load(tmp_path, via="transformers").model.nbytes


def test_built_in_families_take_precedence(tmp_path, llama):
    llama[0].save_pretrained(tmp_path)
    ours = onward.load(tmp_path)
    assert type(ours.model.forward) is not type(llama[1].model.forward)
    ids = list(range(2, 40))
    torch.testing.assert_close(ours.logits(ids), llama[1].logits(ids), rtol=0, atol=TOLERANCE)


def test_auto_uses_transformers_for_other_families(tmp_path):
    tiny_model("gpt_neox").save_pretrained(tmp_path)
    assert onward.load(tmp_path).generate([1, 2, 3], max_new_tokens=2).token_ids
    with pytest.raises(UnsupportedArchitectureError, match="GPTNeoXForCausalLM"):
        onward.load(tmp_path, via="onward")


def test_bad_arguments(tmp_path, llama):
    with pytest.raises(RequestError, match="via must be one of"):
        onward.load(tmp_path, via="torch")
    llama[0].save_pretrained(tmp_path)
    with pytest.raises(RequestError, match="name_map="):
        onward.load(tmp_path, via="transformers", name_map={})


def test_mismatched_weights_are_named(tmp_path, llama):
    from safetensors.torch import load_file, save_file

    llama[0].save_pretrained(tmp_path)
    file = Path(tmp_path) / "model.safetensors"
    weights = load_file(file)
    lost = {name: weight for name, weight in weights.items() if "layers.1.mlp.up_proj" not in name}
    save_file(lost, file)
    with pytest.raises(
        CheckpointError, match=r"lack 1 tensors of the model, such as model\.layers\.1\.mlp\.up_proj\.weight"
    ):
        onward.load(tmp_path, via="transformers")
    save_file(weights | {"stray": torch.zeros(3)}, file)
    with pytest.raises(CheckpointError, match="does not use, such as stray"):
        onward.load(tmp_path, via="transformers")


def test_recurrent_models_are_refused_with_the_reason(tmp_path):
    tiny_model("mamba").save_pretrained(tmp_path)
    with pytest.raises(RequestError, match="MambaForCausalLM cannot be decoded as it is"):
        onward.load(tmp_path, via="transformers")


def test_masks_are_recognized_by_their_values():
    from transformers import masking_utils as masks

    assert _window(masks.causal_mask_function, None) is None
    for size in (1, 5, 100):
        assert _window(masks.sliding_window_causal_mask_function(size), size) == size
    chunked = masks.chunked_causal_mask_function(4, torch.zeros(1, dtype=torch.int64))
    for strange in (masks.bidirectional_mask_function, chunked):
        with pytest.raises(UnsupportedModuleError, match="neither causal nor"):
            _window(strange, 4)
