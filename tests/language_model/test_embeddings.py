"""Embeddings and relevance scores: equal to sentence-transformers, and the same alone and in a batch."""

import base64
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import Qwen3Config, Qwen3ForSequenceClassification, Qwen3Model

import onward
from onward import Engine, LanguageModel
from onward.checkpoint import find_folder
from onward.errors import ConfigError, ContextOverflowError, RequestError, UnsupportedArchitectureError
from onward.protocols import BodyError, BodyReader

TEXTS = ["Once upon a time", "A", "The little dog went home and was happy.", "The dog was happy."]
QUERY = "Instruct: find it. Query:"
WIDTH = 64
# float32 rounding of hidden states of order 1, as in tests/models/transformers_reference.py, in vectors of length 1.
TOLERANCE = 1e-5
POOLINGS = ("lasttoken", "mean", "weightedmean")
SIZES: dict[str, Any] = {
    "vocab_size": 2048, "hidden_size": WIDTH, "intermediate_size": 96, "num_hidden_layers": 3, "head_dim": 16,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "tie_word_embeddings": False,
    "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0,
}  # fmt: skip

transformers.utils.logging.disable_progress_bar()


def save(folder: Path, module: Any, **files: Any) -> Path:
    """A checkpoint with the demo model's tokenizer, and JSON files whose names have "__" for "/"."""
    module.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(find_folder("demo") / name, folder)
    for name, content in files.items():
        path = folder / f"{name.replace('__', '/')}.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(content))
    return folder


def layout(
    pooling: str, *, older: bool = False, include_prompt: bool = True, default: str | None = None
) -> dict[str, Any]:
    """The files of sentence-transformers, as version 6 and older ones write them."""
    flags = {"lasttoken": "lasttoken", "mean": "mean_tokens", "weightedmean": "weightedmean_tokens", "cls": "cls_token"}
    modes = {f"pooling_mode_{flag}": name == pooling for name, flag in flags.items()}
    config = (
        modes | {"word_embedding_dimension": WIDTH}
        if older
        else {"pooling_mode": pooling, "embedding_dimension": WIDTH}
    )
    return {
        "modules": [
            {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
            {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
            {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"},
        ],
        "1_Pooling__config": config | {"include_prompt": include_prompt},
        "config_sentence_transformers": {"prompts": {"query": QUERY, "document": ""}, "default_prompt_name": default},
    }


@pytest.fixture(scope="module")
def base() -> Qwen3Model:
    torch.manual_seed(0)
    return Qwen3Model(Qwen3Config(**SIZES)).eval()


@torch.no_grad()
def pooled_by_definition(base: Qwen3Model, ids: list[int], pooling: str, skip: int = 0) -> torch.Tensor:
    """The pooling of sentence-transformers, in double precision."""
    states = base(torch.tensor([ids])).last_hidden_state[0].double()
    weights = torch.arange(1, len(ids) + 1) if pooling == "weightedmean" else torch.ones(len(ids))
    weights = weights[skip:, None].double()
    pooled = states[-1] if pooling == "lasttoken" else (states[skip:] * weights).sum(0) / weights.sum()
    return (pooled / pooled.norm()).float()


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("older", [False, True])
def test_pooling_prompts_and_dimensions_are_read_from_the_files(base, pooling, older, tmp_path):
    lm = onward.load(save(tmp_path, base, **layout(pooling, older=older)))
    embeddings = lm.embed(TEXTS)
    assert embeddings.dtype == torch.float32
    assert embeddings.shape == (len(TEXTS), WIDTH)
    want = torch.stack([pooled_by_definition(base, lm.encode(text), pooling) for text in TEXTS])
    torch.testing.assert_close(embeddings, want, rtol=0, atol=TOLERANCE)
    asked = lm.embed(TEXTS, prompt_name="query")
    want = torch.stack([pooled_by_definition(base, lm.encode(QUERY + text), pooling) for text in TEXTS])
    torch.testing.assert_close(asked, want, rtol=0, atol=TOLERANCE)
    assert torch.equal(asked, lm.embed(TEXTS, prompt=QUERY))
    assert torch.equal(
        embeddings, lm.embed(TEXTS, prompt_name="document") if "document" in lm.embedding.prompts else embeddings
    )
    short = lm.embed(TEXTS, dimensions=16)  # truncated, then normalized
    torch.testing.assert_close(short, embeddings[:, :16] / embeddings[:, :16].norm(dim=1, keepdim=True))
    plain = lm.embed(TEXTS, normalize=False)
    torch.testing.assert_close(plain / plain.norm(dim=1, keepdim=True), embeddings)


@pytest.mark.parametrize("pooling", ["mean", "weightedmean"])
def test_an_excluded_prompt_is_left_out_of_the_mean(base, pooling, tmp_path):
    lm = onward.load(save(tmp_path, base, **layout(pooling, include_prompt=False, default="query")))
    skip = len(lm.encode(QUERY))
    want = torch.stack([pooled_by_definition(base, lm.encode(QUERY + text), pooling, skip) for text in TEXTS])
    torch.testing.assert_close(lm.embed(TEXTS), want, rtol=0, atol=TOLERANCE)  # with the default prompt


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("include_prompt", [False, True])
def test_embeddings_equal_sentence_transformers(base, pooling, include_prompt, tmp_path):
    library = pytest.importorskip("sentence_transformers")
    folder = save(tmp_path, base, **layout(pooling, include_prompt=include_prompt))
    theirs, lm = library.SentenceTransformer(str(folder), device="cpu"), onward.load(folder)
    for options in ({}, {"prompt_name": "query"}):
        want = torch.tensor(theirs.encode(TEXTS, **options))
        torch.testing.assert_close(lm.embed(TEXTS, **options), want, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("pooling", POOLINGS)
def test_embeddings_are_equal_alone_batched_chunked_and_in_an_engine(base, pooling, tmp_path):
    lm = onward.load(save(tmp_path, base, **layout(pooling)))
    together = lm.embed(TEXTS)
    lm.prefill_chunk = 3
    assert all(torch.equal(lm.embed(text), row) for text, row in zip(TEXTS, together, strict=True))
    assert all(torch.equal(lm.embed([lm.encode(text)])[0], row) for text, row in zip(TEXTS, together, strict=True))
    read = BodyReader(lm, "m").read("/v1/embeddings", {"input": TEXTS})
    with Engine(lm) as engine:
        done = [engine.submit(request).result() for request in read.requests]
    assert all(torch.equal(each.embedding, row) for each, row in zip(done, together, strict=True))
    answer = read.protocol.answer(read, done)
    assert np.array_equal(np.array([each["embedding"] for each in answer["data"]], np.float32), together.numpy())
    assert answer["usage"]["prompt_tokens"] == sum(len(lm.encode(text)) for text in TEXTS)


def test_bodies_of_embeddings(base, tmp_path):
    lm = onward.load(save(tmp_path, base))
    reader = BodyReader(lm, "m")

    def answer(**body: Any) -> list[Any]:
        read = reader.read("/v1/embeddings", body)
        made = read.protocol.answer(read, [lm.generate(request) for request in read.requests])
        assert [each["index"] for each in made["data"]] == list(range(len(made["data"])))
        return [each["embedding"] for each in made["data"]]

    (whole,) = answer(input="A dog")
    assert answer(input=lm.encode("A dog")) == answer(input=[lm.encode("A dog")]) == [whole]
    (encoded,) = answer(input="A dog", encoding_format="base64", dimensions=8)
    assert np.array_equal(np.frombuffer(base64.b64decode(encoded), "<f4"), lm.embed("A dog", dimensions=8).numpy())
    for body, problem in (
        ({"input": []}, "input must be a string"),
        ({"input": "a", "dimensions": 65}, "dimensions is 65, but embeddings of this model have 64"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "stream": True}, "stream is not supported"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": [1, 2], "prompt": "x"}, "prompt goes before a text"),
        ({"input": "a", "prompt_name": "poem"}, "prompt_name names no prompt .* none; got 'poem'"),
        ({"input": "a dog " * 99}, "context"),
        ({"input": [2048]}, "from 0 to 2047"),
        ({"input": "a", "temperature": 1}, "temperature"),
    ):
        with pytest.raises(BodyError, match=problem):
            reader.read("/v1/embeddings", body)


@pytest.fixture(scope="module")
def ranker(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, LanguageModel]:
    torch.manual_seed(1)
    module = Qwen3ForSequenceClassification(Qwen3Config(**SIZES, num_labels=1)).eval()
    return module, onward.load(save(tmp_path_factory.mktemp("ranker"), module))


def test_a_classifier_ranks_with_its_head(ranker):
    module, lm = ranker
    template = "query {query} document {document}"
    scores = lm.rerank("a {document}", TEXTS, template=template)
    for text, score in zip(TEXTS, scores, strict=True):
        ids = lm.encode(f"query a {{document}} document {text}")
        with torch.no_grad():
            want = module(torch.tensor([ids])).logits.sigmoid().item()
        assert abs(score - want) <= TOLERANCE
        assert lm.rerank("a {document}", [text], template=template) == [score]
    read = BodyReader(lm, "m").read(
        "/v1/rerank", {"query": "a", "documents": [*TEXTS[:3], {"text": TEXTS[3]}], "top_n": 2, "template": template}
    )
    made = read.protocol.answer(read, [lm.generate(request) for request in read.requests])
    want = lm.rerank("a", TEXTS, template=template)
    best = sorted(range(4), key=lambda index: -want[index])[:2]
    assert [(each["index"], each["relevance_score"], each["document"]["text"]) for each in made["results"]] == [
        (index, want[index], TEXTS[index]) for index in best
    ]


def test_a_decoder_ranks_by_the_logits_of_two_ids(tmp_path):
    torch.manual_seed(2)
    module = transformers.Qwen3ForCausalLM(Qwen3Config(**SIZES)).eval()
    answers = {
        "modules": [{"path": "1_L", "type": "x.LogitScore"}],
        "1_L__config": {"true_token_id": 7, "false_token_id": 9},
    }
    lm = onward.load(save(tmp_path, module, **answers))
    (score,) = lm.rerank("dog", TEXTS[:1], template="{query}: {document}")
    with torch.no_grad():
        logits = module(torch.tensor([lm.encode(f"dog: {TEXTS[0]}")])).logits[0, -1]
    assert abs(score - (logits[7] - logits[9]).sigmoid().item()) <= TOLERANCE


def test_a_checkpoint_without_a_head_generates_nothing(ranker, base, tmp_path):
    for lm in (ranker[1], onward.load(save(tmp_path, base))):
        for call in (
            lm.generate,
            lm.score,
            lambda text, lm=lm: lm.logits([1, 2]),
            lambda text, lm=lm: next(lm.stream(text)),
        ):
            with pytest.raises(RequestError, match="has no head over the vocabulary"):
                call("Hello you")


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        (layout("cls"), "pools with cls, whose first token has seen no other"),
        (layout("mean") | {"1_Pooling__config": {"pooling_mode": ["mean", "max"]}}, r"pools with mean \+ max"),
        ({"modules": [{"path": "2_Dense", "type": "sentence_transformers.models.Dense"}]}, "lists a Dense"),
        ({"sentence_bert_config": {"do_lower_case": True}}, "lowers the case"),
        ({"sentence_bert_config": {"modality_config": {"message": {}}}}, "makes chat messages"),
    ],
)
def test_files_with_unsupported_modules_are_refused_by_name(base, files, problem, tmp_path):
    lm = onward.load(save(tmp_path, base, **files))
    with pytest.raises(RequestError, match=problem):
        lm.embed("a")


def test_bad_input_is_one_clear_error(base, ranker, tmp_path):
    lm = onward.load(save(tmp_path, base, **layout("mean"), sentence_bert_config={"max_seq_length": 5}))
    for call, problem in (
        (lambda: lm.embed("a", dimensions=65), "dimensions is 65"),
        (lambda: lm.embed("a", prompt="x", prompt_name="query"), "exclude each other"),
        (lambda: lm.embed("a", prompt_name="poem"), "has 'query'; got 'poem'"),
        (lambda: lm.embed([[1, 2]], prompt="x"), "given as ids"),
        (lambda: lm.embed(TEXTS[2]), "embeds at most 5: shorten it"),
        (lambda: lm.rerank("a", TEXTS), "no head over the vocabulary"),
    ):
        with pytest.raises((RequestError, ContextOverflowError), match=problem):
            call()
    (tmp_path / "modules.json").write_text('[{"kind": 1}]')
    with pytest.raises(ConfigError, match="files of sentence-transformers cannot be read"):
        onward.load(tmp_path)


@pytest.mark.parametrize(
    "config",
    [
        {"architectures": ["BertModel"], "model_type": "bert"},
        {"architectures": ["XLMRobertaForSequenceClassification"], "model_type": "xlm-roberta"},
        {"architectures": ["Gemma3TextModel"], "model_type": "gemma3_text", "use_bidirectional_attention": True},
    ],
)
def test_encoders_are_refused_by_name(config, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedArchitectureError, match=f"{config['architectures'][0]} is an encoder: .* decoders"):
        onward.load(tmp_path)
