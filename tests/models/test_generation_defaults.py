"""A checkpoint's generation_config.json has the effect that it has in transformers: greedy, sampled, with beams."""

import itertools
import json
import random
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from transformers_reference import CASES, SMALL, TOLERANCE, build, save

import onward
from onward.errors import OnwardWarning
from onward.sampling import History, Sampler

VOCAB = SMALL["vocab_size"]
# min_new_tokens above max_new_tokens, on purpose.
pytestmark = pytest.mark.filterwarnings("ignore:Unfeasible length constraints:UserWarning")


class Judged(NamedTuple):
    model: transformers.PreTrainedModel
    folder: Path


@pytest.fixture(scope="module")
def judged(tmp_path_factory) -> Judged:
    model = build(CASES["qwen3"])
    return Judged(model, save(model, tmp_path_factory.mktemp("checkpoint")))


def sometimes(rng: random.Random, **fields: list[Any]) -> dict[str, Any]:
    """Each field absent, null or one of its values."""
    drawn = {name: rng.choice([..., ..., None, *values]) for name, values in fields.items()}
    return {name: value for name, value in drawn.items() if value is not ...}


def ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(VOCAB) for _ in range(count)]


def penalties(rng: random.Random, eos: list[int]) -> dict[str, Any]:
    """The options that apply in every mode; bad words consist of ids that are likely to follow each other."""
    words = [ids(rng, rng.randint(1, 3)) for _ in range(rng.randint(1, 30))]
    pairs = [[a, b] for a, b in itertools.product(ids(rng, 20), ids(rng, 20))]
    biases = {token: rng.uniform(-2, 2) for token in ids(rng, 10)}
    return sometimes(
        rng,
        repetition_penalty=[1.0, 1.3, 0.8],
        no_repeat_ngram_size=[0, 1, 2, 3],
        bad_words_ids=[words, [*words, [eos[0]]], pairs],
        min_new_tokens=[0, 3, 20],
        suppress_tokens=[ids(rng, 40)],
        sequence_bias=[[[[token], bias] for token, bias in biases.items()]],
    )


def settings(rng: random.Random, mode: str) -> dict[str, Any]:
    eos = rng.sample(range(VOCAB), rng.choice([1, 6, 20]))
    config = {"eos_token_id": eos if len(eos) > 1 else eos[0], "pad_token_id": 0, "max_new_tokens": 14}
    config |= penalties(rng, eos)
    if mode == "beams":
        beams = rng.choice([2, 3, 5])
        config |= {"num_beams": beams} | sometimes(
            rng,
            num_return_sequences=[rng.randint(1, beams)],
            length_penalty=[1.0, 0.0, -0.5, 2.0],
            early_stopping=[True, False, "never"],
        )
    # Filters that greedy decoding and beams have to leave alone.
    filters = sometimes(
        rng, temperature=[0.3, 0.7, 1.0, 1.8], top_k=[0, 1, 5, 30], top_p=[0.3, 0.9, 1.0], min_p=[0.0, 0.05, 0.3],
        typical_p=[0.2, 0.8, 1.0], do_sample=[False],
    )  # fmt: skip
    return config | filters | ({"do_sample": True} if mode == "sample" else {})


def served(folder: Path, config: dict[str, Any]) -> tuple[onward.LanguageModel, transformers.GenerationConfig]:
    """Both read the same file."""
    (folder / "generation_config.json").write_text(json.dumps(config), encoding="utf-8")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OnwardWarning)  # of filters without do_sample
        return onward.load(folder), transformers.GenerationConfig.from_pretrained(folder)


def generated(judged: Judged, config: transformers.GenerationConfig, prompt: list[int]) -> Any:
    judged.model.generation_config = config
    row = torch.tensor([prompt])
    # Without a mask it would take ids of 0 for padding.
    return judged.model.generate(
        row, attention_mask=torch.ones_like(row),
        return_dict_in_generate=True, output_scores=True, output_logits=True,
    )  # fmt: skip


def texts(output: Any, prompt: list[int], eos: tuple[int, ...]) -> list[list[int]]:
    rows = [row[len(prompt) :] for row in output.sequences.tolist()]
    return [row[: next((at + 1 for at, token in enumerate(row) if token in eos), len(row))] for row in rows]


# Seeds are fixed: rounding would choose between two nearly equal ids at random.
@pytest.mark.parametrize("seed", range(40))
def test_greedy_texts_equal_transformers(judged, seed):
    rng = random.Random(seed)
    prompt = ids(rng, rng.randint(1, 9))
    lm, config = served(judged.folder, settings(rng, "greedy"))
    expected = texts(generated(judged, config, prompt), prompt, lm.defaults.eos)
    assert [lm.generate(prompt).token_ids] == expected


@pytest.mark.parametrize("seed", range(1000, 1040))
@pytest.mark.stride(3)
def test_beams_and_their_scores_equal_transformers(judged, seed):
    rng = random.Random(seed)
    prompt = ids(rng, rng.randint(1, 9))
    lm, config = served(judged.folder, settings(rng, "beams"))
    output = generated(judged, config, prompt)
    choices = lm.generate(prompt).choices
    assert [choice.token_ids for choice in choices] == texts(output, prompt, lm.defaults.eos)
    for choice, score in zip(choices, output.sequences_scores.tolist(), strict=True):
        length = len(choice.token_ids)
        # A logprob moves by twice what logits move at most, penalties make 1.3 of it, and a score is a sum of them.
        bound = 1.3 * 2 * TOLERANCE * length / length**lm.defaults.length_penalty
        assert choice.score == pytest.approx(score, abs=bound, rel=0)


@pytest.mark.parametrize("seed", range(2000, 2040))
def test_samples_follow_the_distribution_of_transformers(judged, seed):
    """Of the same logits, after every id that transformers drew."""
    rng = random.Random(seed)
    prompt = ids(rng, rng.randint(1, 9))
    lm, config = served(judged.folder, settings(rng, "sample"))
    torch.manual_seed(seed)
    output = generated(judged, config, prompt)
    sampler, history = Sampler([lm.defaults]), History(prompt)
    drawn = output.sequences[0, len(prompt) :].tolist()
    for token, logits, scores in zip(drawn, output.logits, output.scores, strict=True):
        probabilities = sampler.probabilities(logits, torch.tensor([len(history)]), [history])
        # exp turns an absolute error of a score, some roundings of float32, into the relative one of a probability.
        rounding = 8 * 2**-23 * float(scores[scores.isfinite()].abs().max() + 1)
        torch.testing.assert_close(probabilities, scores.double().softmax(-1), rtol=rounding, atol=1e-9)
        history.append(token)


def test_num_return_sequences_is_the_number_of_samples(judged):
    lm, _ = served(judged.folder, {"do_sample": True, "num_return_sequences": 3, "max_new_tokens": 2})
    assert len(lm.generate([1, 2]).choices) == 3


def test_sampled_beams_are_searched_with_a_warning(judged):
    config = {"do_sample": True, "num_beams": 3, "temperature": 0.5, "eos_token_id": 1, "max_new_tokens": 6}
    (judged.folder / "generation_config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.warns(OnwardWarning, match="samples with beams, which is not supported"):
        lm = onward.load(judged.folder)
    searched, _ = served(judged.folder, config | {"do_sample": False, "temperature": None})
    assert lm.generate([5]).token_ids == searched.generate([5]).token_ids


def test_a_checkpoint_with_beams_streams_and_has_sessions(judged):
    lm, _ = served(judged.folder, {"num_beams": 3, "num_return_sequences": 2, "length_penalty": 2.0})
    greedy = lm.generate([5], beams=1, max_new_tokens=5).token_ids
    assert [piece.token_id for piece in lm.stream([5], max_new_tokens=5)] == greedy
    assert onward.Session(lm).generate([5], max_new_tokens=5).token_ids == greedy
