"""`onward.integrations.lm_eval` gives the harness the numbers of its own class for transformers, with fewer prefills.

Tasks are local: two stories with choices, texts to predict and prompts to complete.
"""

import json
from pathlib import Path

import pytest

pytest.importorskip("lm_eval", reason="lm_eval is not installed: make eval-test")

import onward
from demo_adapters import demo_adapter
from onward.checkpoint import find_folder
from onward.errors import RequestError
from onward.integrations.lm_eval import OnwardLM
from onward.models import Run
from onward.testing import tiny_model

# Log-likelihoods of right float32 forwards differ by 2e-4 a token at most
# (tests/language_model/test_language_model_score.py).
APART = 2e-4
STORIES = [
    "Once upon a time, there was a little robot named Zip. Zip was very",
    "Once upon a time, there was a little robot named Ada. Ada lived in a",
    "The next morning, her grandfather opened the gift. They all",
]
ENDINGS = [
    [" happy.", " happy and proud.", " quantum."],
    [" small house.", " valley", " xyz"],
    [" danced.", " 7", " ran"],
]
TASKS = {
    "choices": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{story}}",
        "doc_to_choice": "{{endings}}",
        "doc_to_target": "{{answer}}",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "texts": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{long}}",
        "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
    },
    "completions": {
        "output_type": "generate_until",
        "doc_to_text": "{{story}}",
        "doc_to_target": "{{endings[0]}}",
        "generation_kwargs": {"until": ["."], "max_gen_toks": 20},
        "metric_list": [{"metric": "exact_match"}],
    },
}


@pytest.fixture(scope="module")
def tasks(tmp_path_factory) -> Path:
    """A folder of tasks over a file of three documents."""
    folder = tmp_path_factory.mktemp("tasks")
    heldout = (Path(__file__).parents[2] / "training" / "heldout.txt").read_text(encoding="utf-8")
    documents = [
        {"story": story, "endings": endings, "answer": 0, "long": heldout[2000 * index : 2000 * index + 700]}
        for index, (story, endings) in enumerate(zip(STORIES, ENDINGS, strict=True))
    ]
    (folder / "documents.json").write_text("\n".join(map(json.dumps, documents)))
    for name, task in TASKS.items():
        of_file = {
            "task": name,
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(folder / "documents.json")}},
            "test_split": "test",
        }
        (folder / f"{name}.yaml").write_text(json.dumps(of_file | task))  # JSON is YAML
    return folder


@pytest.fixture(scope="module", autouse=True)
def _offline(tmp_path_factory):
    """The harness's data sets are local files; their converted form is in a folder of the test."""
    patch = pytest.MonkeyPatch()
    patch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path_factory.mktemp("datasets"))
    patch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    yield
    patch.undo()


def results(lm, tasks, **options):
    import lm_eval
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    return lm_eval.simple_evaluate(lm, tasks=list(TASKS), task_manager=manager, bootstrap_iters=0, **options)


@pytest.mark.filterwarnings("ignore")
def test_numbers_equal_the_harness_class_for_transformers(tasks):
    from lm_eval.models.huggingface import HFLM

    ours = results(OnwardLM("demo", dtype="float32"), tasks)
    theirs = results(HFLM(str(find_folder("demo")), dtype="float32", device="cpu", batch_size=2), tasks)
    for name in TASKS:
        for one, other in zip(ours["samples"][name], theirs["samples"][name], strict=True):
            assert one["arguments"] == other["arguments"]
            if name == "completions":
                assert one["resps"] == other["resps"]
                continue
            for [got], [want] in zip(one["resps"], other["resps"], strict=True):
                tokens = 300  # of the longest text
                if name == "choices":
                    assert got[1] == want[1]
                    got, want, tokens = got[0], want[0], 10
                assert got == pytest.approx(want, abs=APART * tokens)
        metrics = {key: value for key, value in ours["results"][name].items() if isinstance(value, float)}
        assert metrics == {key: pytest.approx(theirs["results"][name][key], rel=1e-3) for key in metrics}


def test_a_context_is_processed_once_for_all_its_continuations(monkeypatch):
    lm = onward.load("demo")
    evaluated = OnwardLM(lm)
    processed = []
    step = Run.step

    def counted(run, batch, sampler=None):
        processed.append(batch.tokens.numel())
        return step(run, batch, sampler)

    monkeypatch.setattr(Run, "step", counted)
    context = lm.encode(" ".join(STORIES))
    endings = [lm.encode(text, add_special_tokens=False) for text in ENDINGS[0] + ENDINGS[1]]
    evaluated._loglikelihood_tokens([(None, context, ids) for ids in endings], disable_tqdm=True)
    # One id of the context for each, since it predicts the first of the continuation; rows are filled up to one length.
    assert sum(processed) <= len(context) + len(endings) * max(map(len, endings))


def test_long_texts_are_scored_in_windows_and_long_contexts_truncated():
    lm = onward.load("demo")
    short = OnwardLM(lm, max_length=16)
    ids = lm.encode(STORIES[0] + STORIES[1])
    ((cut, _),) = short._loglikelihood_tokens([(None, ids, ids[:3])], disable_tqdm=True)
    assert cut == lm.score_continuations(ids[-13:], [ids[:3]])[0].log_likelihood

    class Text:
        args = (STORIES[0] + STORIES[1],)

    (rolled,) = short.loglikelihood_rolling([Text], disable_tqdm=True)
    assert len(ids) == 35
    begin, middle = lm.score([short.prefix_token_id, *ids[:15]]), lm.score(ids[14:30])
    (end,) = lm.score_continuations(ids[19:30], [ids[30:]])  # as much before them as there is room for
    assert rolled == begin.log_likelihood + middle.log_likelihood + end.log_likelihood


def test_unsupported_tasks_raise_a_clear_error():
    with pytest.raises(RequestError, match="no tokenizer"):
        OnwardLM(onward.LanguageModel(tiny_model()))
    with pytest.raises(RequestError, match="max_length"):
        OnwardLM("demo", max_length=1)
    with pytest.raises(RequestError, match=r"adaptor: options of onward\.load, but the model is loaded already"):
        OnwardLM(onward.load("demo"), adaptor="x")
    with pytest.raises(RequestError, match="leaves no room for a context"):
        OnwardLM("demo", max_length=4)._loglikelihood_tokens([(None, [1], [2] * 4)])


@pytest.mark.filterwarnings("ignore")
def test_the_command_prints_only_a_table_or_json(tasks, tmp_path, monkeypatch, capfd):
    from onward.cli.main import run

    monkeypatch.chdir(tmp_path)  # not a git repository
    ask = ["eval", "choices", "texts", "--include", str(tasks), "--limit", "2"]
    assert run([*ask, "--json"]) == 0
    out, err = capfd.readouterr()
    found = json.loads(out)
    assert 0 <= found["results"]["choices"]["acc,none"] <= 1
    assert not any(noise in err for noise in ("fatal", "%|", "it/s", "examples/s"))
    assert run(ask) == 0
    head, *rows = capfd.readouterr().out.splitlines()
    assert head.split() == ["task", "metric", "filter", "value", "stderr"]
    assert [row.split()[:2] for row in rows] == [
        ["choices", "acc"],
        ["choices", "acc_norm"],
        ["texts", "word_perplexity"],
        ["texts", "bits_per_byte"],
    ]
    assert f"{found['results']['choices']['acc,none']:.4f}" in rows[0]
    assert run(["eval", "no_such_task", "--include", str(tasks)]) == 2
    assert "no task 'no_such_task'" in capfd.readouterr().err


@pytest.mark.filterwarnings("ignore")
def test_results_and_samples_are_written_to_a_file(tasks, tmp_path, capfd):
    from onward.cli.main import run

    file = tmp_path / "results.json"
    ask = ["eval", "choices", "--include", str(tasks), "--limit", "2"]
    assert run([*ask, "--output", str(file)]) == 0
    plain = json.loads(file.read_text())
    assert "samples" not in plain
    assert run([*ask, "--output", str(file), "--log-samples", "--json"]) == 0
    assert json.loads(file.read_text()) == json.loads(capfd.readouterr().out.splitlines()[-1])
    logged = json.loads(file.read_text())
    assert logged["results"] == plain["results"]
    assert [sample["doc"]["story"] for sample in logged["samples"]["choices"]] == STORIES[:2]


SAMPLED = TASKS["completions"] | {
    "task": "sampled",
    "generation_kwargs": {"until": ["."], "max_gen_toks": 12, "do_sample": True, "temperature": 1.0},
    "repeats": 2,
}


@pytest.fixture
def sampled(tasks):
    """A task whose answers are sampled, twice a document."""
    file = tasks / "sampled.yaml"
    file.write_text(json.dumps(json.loads((tasks / "completions.yaml").read_text()) | SAMPLED))
    yield "sampled"
    file.unlink()


@pytest.mark.filterwarnings("ignore")
def test_pairs_have_the_same_documents_and_seeds_and_are_reproducible(tasks, sampled, tmp_path, capfd):
    from onward.cli.main import run

    file = tmp_path / "results.json"
    ask = ["eval", "choices", "texts", sampled, "--include", str(tasks), "--output", str(file), "--log-samples"]
    assert run([*ask, "--paired", "quantize=int4"]) == 0
    head, *rows = capfd.readouterr().out.splitlines()
    first = json.loads(file.read_text())
    assert run([*ask, "--paired", "quantize=int4", "--json"]) == 0
    assert json.loads(capfd.readouterr().out.splitlines()[-1]) == first == json.loads(file.read_text())
    assert run([*ask, "--seed", "1"]) == 0
    other = json.loads(file.read_text())
    assert head.split()[:6] == ["task", "metric", "filter", "n", "first", "second"]
    assert [row.split()[:2] for row in rows] == [["choices", "acc"], ["choices", "acc_norm"], [sampled, "exact_match"]]
    models = first["manifest"]["models"]
    assert [model.get("quantize") for model in models] == [None, "int4"]
    assert models[0]["fingerprint"] != models[1]["fingerprint"]
    answers = [[sample["resps"] for sample in each["samples"][sampled]] for each in (first, other)]
    assert answers[0] != answers[1], "another seed draws other answers"
    assert any(one != two for [[one, two]] in answers[0]), "repeats have seeds of their own"
    for row in first["paired"]:
        of_task = first["results"][row["task"]], first["other"]["results"][row["task"]]
        values = [each[f"{row['metric']},{row['filter']}"] for each in of_task]
        assert [row["first"], row["second"]] == pytest.approx(values)
        assert row["documents"] == 3


@pytest.mark.filterwarnings("ignore")
def test_two_copies_of_a_model_draw_the_same_answers(tasks, sampled):
    import lm_eval
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    ask = {"tasks": [sampled], "task_manager": manager, "bootstrap_iters": 0}
    one, two = (
        lm_eval.simple_evaluate(OnwardLM("demo", seed=5, batch_size=size), **ask)["samples"][sampled] for size in (1, 8)
    )
    assert [each["resps"] for each in one] == [each["resps"] for each in two]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--paired", "demo"], "--paired compares two models, but this is the same"),
        (["--paired", "quantise=int4"], "got 'quantise=int4'. Names: cache-format, compile"),
        (["--paired", "demo,int4"], "got 'int4'. Names"),
        (["--paired", ""], "got ''. Names"),
        (["--log-samples"], "--log-samples needs --output or --json: add one"),
        (["--output", "no/such/folder/results.json"], "is not a folder that you can write to"),
        (["--output", "."], "cannot be written: it is a folder"),
    ],
)
def test_the_results_file_is_checked_before_the_work(flags, message, tmp_path, monkeypatch, capfd):
    from onward.cli.main import run

    monkeypatch.chdir(tmp_path)
    assert run(["eval", "choices", *flags]) == 2
    assert message in capfd.readouterr().err


def test_an_adapter_applies_to_every_request(tasks, tmp_path):
    folder = demo_adapter(tmp_path / "adapter", 0)
    lm = onward.load("demo", adapters={"poet": folder})
    adapted = results(OnwardLM(lm, adapter="poet"), tasks)["results"]
    assert adapted != results(OnwardLM(lm), tasks)["results"]
    with_flag = OnwardLM("demo", adapters={"poet": folder}, adapter="poet")
    assert results(with_flag, tasks)["results"] == adapted
    with pytest.raises(RequestError, match="nobody"):
        OnwardLM(lm, adapter="nobody")


def test_all_prompts_have_one_date():
    lm = onward.load("demo")
    template = onward.chat.ChatTemplate("{{ strftime_now('%X.%f') }} {{ messages[0].content }}", {})
    dated = OnwardLM(onward.LanguageModel(lm.model, lm.tokenizer, template))
    chat = [{"role": "user", "content": "Hi"}]
    assert dated.apply_chat_template(chat) == dated.apply_chat_template(chat)
