"""The corpus is consistent, the rebuild runs end to end, and the shipped demo model is sound."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from tokenizers import Tokenizer
from transformers import AutoTokenizer, Qwen3ForCausalLM

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

from training.corpus import KINDS, Document, documents, tool_chats  # noqa: E402
from training.corpus.chat import Conversation, make_chat  # noqa: E402
from training.corpus.documents import JSON_HEADERS, QA_HEADERS  # noqa: E402
from training.corpus.extraction import make_extraction, make_note  # noqa: E402
from training.corpus.grammar import expand  # noqa: E402
from training.corpus.offered_tools import OfferedTool  # noqa: E402
from training.corpus.openings import make_opened_story  # noqa: E402
from training.corpus.story import make_story  # noqa: E402
from training.corpus.tool_topics import TOPICS  # noqa: E402
from training.data import IGNORED, LENGTHS, AnswerFinder, batches, tokenize  # noqa: E402
from training.evaluate import evaluate, generate, kind_of, load_exported, read_heldout  # noqa: E402
from training.first_contact import LIKELY, OPENINGS, continuations, is_story  # noqa: E402
from training.tool_calls import asked_in, calls_of  # noqa: E402

DEMO = REPOSITORY / "src" / "onward" / "demo"
HELDOUT = REPOSITORY / "training" / "heldout.txt"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(DEMO / "target" / "tokenizer.json"))


# The corpus


def test_expand_draws_choices_then_fills_slots_then_polishes() -> None:
    rng = random.Random(0)
    texts = {
        expand(rng, "[a|the] {kind} [|quietly ]sang. {he} slept.", {"kind": "owl", "he": "she"}) for _ in range(99)
    }
    assert texts == {
        "An owl sang. She slept.",
        "An owl quietly sang. She slept.",
        "The owl sang. She slept.",
        "The owl quietly sang. She slept.",
    }


def test_stories_are_clean_text() -> None:
    rng = random.Random(1)
    flaws = re.compile(r"[\[\]{}|]|\.\.|[?!,]\.|,,|  | [.,!?]|\b[Aa] (?=[aeiou])|(?<![.!?\"])\n\n")
    for _ in range(2000):
        text = make_story(rng).text
        assert not flaws.search(text), (flaws.search(text), text)


def test_a_story_states_every_answer_and_field() -> None:
    """Answers are in the words of the text, so an answer can be copied and never has to be guessed."""
    rng = random.Random(2)
    for _ in range(1000):
        story = make_story(rng, short=True)
        hero, friend = story.facts.hero, story.facts.friend
        assert hero.name in story.text
        assert friend.name in story.text
        assert hero.name != friend.name
        for key in ("name", "kind", "trait", "friend", "friend_kind", "object", "color", "weather", "feeling"):
            assert story.fields[key] in story.text, (key, story.fields, story.text)
        for question in story.questions:
            assert question.full.endswith(".")
            assert question.text.endswith("?")


def test_a_character_keeps_its_pronoun() -> None:
    """A story of two characters of one pronoun never uses the other."""
    rng = random.Random(3)
    seen = 0
    for _ in range(1000):
        story = make_story(rng)
        pronouns = {story.facts.hero.pronouns["he"], story.facts.friend.pronouns["he"]}
        if len(pronouns) == 1:
            seen += 1
            wrong = r"\b(he|him|his|himself)\b" if pronouns == {"she"} else r"\b(she|her|herself)\b"
            assert not re.search(wrong, story.text, re.IGNORECASE), story.text
    assert seen > 100


def test_extractions_are_json_of_stated_facts() -> None:
    rng = random.Random(4)
    for _ in range(1000):
        source = make_note(rng) if rng.random() < 0.5 else make_story(rng)
        extraction = make_extraction(rng, source)
        for value in _leaves(json.loads(extraction.answer)):
            # A home may open its sentence; a problem is a summary ("had no boards") and not a quotation.
            assert str(value).lower() in source.text.lower() or value == source.fields.get("problem")


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, dict | list):
        inner = value.values() if isinstance(value, dict) else value
        return [leaf for part in inner for leaf in _leaves(part)]
    return [value]


def test_the_corpus_depends_only_on_its_seed() -> None:
    assert list(documents(7, 50)) == list(documents(7, 50))
    assert list(documents(7, 50)) != list(documents(8, 50))


def test_validation_text_is_not_in_the_training_text() -> None:
    train = frozenset(document.text for document in documents(7, 300))
    assert not train & {document.text for document in documents(7, 300, exclude=train)}


def test_texts_followed_by_questions_are_not_trained_as_story_openings() -> None:
    """Without a mark at its start a document is a story, or a prompt up to its first answer."""
    kinds = set()
    for document in documents(7, 400):
        kinds.add(document.kind)
        learned = document.text[document.prompt :]
        if document.kind in ("chat", "tools"):
            assert document.prompt == 0
            assert document.text.startswith("<|im_start|>")
        elif document.kind != "story":
            header = document.text[: document.prompt]
            assert document.prompt > 0
            assert header in (*QA_HEADERS, *JSON_HEADERS) or learned.startswith((" ", "{"))
        else:
            assert is_story(learned), learned
    assert kinds == {"story", "qa", "json", "chat", "tools"}


def test_a_story_follows_any_user_message() -> None:
    rng = random.Random(8)
    prompts = [make_opened_story(rng) for _ in range(500)]
    assert all(prompt and is_story(story) for prompt, story in prompts)
    assert len({prompt for prompt, _ in prompts}) > 400


def test_conversations_alternate_and_end_with_an_answer() -> None:
    rng = random.Random(5)
    for _ in range(300):
        roles = re.findall(r"<\|im_start\|>(\w+)\n", make_chat(rng))
        turns = roles[1:] if roles[0] == "system" else roles
        assert turns
        assert turns == ["user", "assistant"] * (len(turns) // 2)


def test_tool_arguments_are_the_users_words_and_results_are_repeated() -> None:
    rng = random.Random(6)
    for topic in TOPICS * 40:
        tool = OfferedTool(rng, topic)
        schema, use = tool.schema(), tool.use()
        assert calls_of(use.call) == [{"name": schema["name"], "arguments": use.arguments}]
        properties = schema["parameters"]["properties"]
        assert set(use.arguments) <= set(properties)
        assert set(schema["parameters"].get("required", ())) <= set(use.arguments)
        for name, value in use.arguments.items():
            assert str(value) in use.request, (use.request, use.arguments)
            kind = properties[name].get("type", "string")
            assert isinstance(value, str if kind == "string" else int)
            assert value in properties[name].get("enum", [value])
        if topic.gives:
            result = json.loads(use.result) if use.result.startswith("{") else use.result.split(", ")[0].split()[-1]
            values = list(result.values()) if isinstance(result, dict) else [result]
            assert any(str(value) in use.answer for value in values), (use.result, use.answer)


def test_conversations_with_tools_equal_the_rendered_template() -> None:
    peer = AutoTokenizer.from_pretrained(DEMO / "target")
    turn = re.compile(r"<\|im_start\|>(\w+)\n(.*?)<\|im_end\|>\n", re.DOTALL)
    kinds = set()
    for text in tool_chats(7, 200):
        (_, system), *turns = turn.findall(text)
        start, _, lines = system.rpartition("Tools:\n")
        tools = [{"type": "function", "function": json.loads(line)} for line in lines.split("\n")]
        messages: list[dict[str, Any]] = [{"role": "system", "content": start.strip()}] if start else []
        for role, content in turns:
            calls = calls_of(content)
            assert calls is not None
            rendered = [{"type": "function", "function": call} for call in calls]
            messages.append(
                {"role": role, "content": None, "tool_calls": rendered} if calls else {"role": role, "content": content}
            )
        assert peer.apply_chat_template(messages, tools=tools, tokenize=False) == text
        kinds |= {each.kind for each in asked_in(text)}
        assert all(each.is_right(each.wanted) for each in asked_in(text))
    assert kinds == {"call", "calls", "result", "talk"}


# Batches


def test_batches_hold_whole_documents_shifted_by_one(tokenizer: Tokenizer) -> None:
    source = list(documents(9, 60))
    whole = set()
    for document in source:
        halves = (document.text[: document.prompt], document.text[document.prompt :])
        ids = [*(i for half in halves for i in tokenizer.encode(half).ids), 0]
        whole.add(tuple(ids[: LENGTHS[-1]]))
        if document.kind == "story" and not document.prompt:
            whole.add((0, *ids)[: LENGTHS[-1]])
    rows = batches(tokenize(tokenizer, source), 2048, 1, end_id=0, finder=AnswerFinder(tokenizer), text_share=1.0)
    for inputs, targets in (next(rows) for _ in range(20)):
        assert inputs.shape == targets.shape
        assert inputs.shape[1] in LENGTHS
        for row, target in zip(inputs.tolist(), targets.tolist(), strict=True):
            count = max(i for i, t in enumerate(target) if t != IGNORED) + 1
            learned = [i for i, t in enumerate(target) if t != IGNORED]
            assert all(target[i] == row[i + 1] for i in learned if i + 1 < count)
            assert learned == list(range(learned[0], count)), "all but the prompt"
            assert tuple([*row[:count], target[count - 1]][: LENGTHS[-1]]) in whole


def test_prompts_are_no_targets_and_only_stories_begin_with_the_bos(tokenizer: Tokenizer) -> None:
    source = list(documents(9, 200))
    corpus = tokenize(tokenizer, source)
    opened = 0
    for index, document in enumerate(source):
        ids, prompt = corpus.document(index), int(corpus.prompts[index])
        assert tokenizer.decode(ids[:prompt], skip_special_tokens=False) == document.text[: document.prompt]
        if ids[0] == 0:
            opened += 1
            assert document.kind == "story"
            assert not document.prompt
    assert opened > 10
    prompted = Document(
        "qa", "Tom ran.\n\nQuestion: Who ran?\nAnswer: Tom\n", len("Tom ran.\n\nQuestion: Who ran?\nAnswer:")
    )
    row = batches(tokenize(tokenizer, [prompted]), 64, 1, 0, AnswerFinder(tokenizer), text_share=1.0)
    _, targets = next(row)
    assert tokenizer.decode([t for t in targets[0].tolist() if t != IGNORED], skip_special_tokens=False) == (
        " Tom\n<|endoftext|>"
    )


def test_answers_are_found_in_chats_questions_and_json(tokenizer: Tokenizer) -> None:
    finder = AnswerFinder(tokenizer)
    texts = {
        "<|im_start|>user\nWho?<|im_end|>\n<|im_start|>assistant\nTom.<|im_end|>\n": "Tom.<|im_end|>",
        "Tom ran.\n\nQuestion: Who ran?\nAnswer: Tom\n": " Tom\n",
        'Tom ran.\n\nReturn JSON with name.\n{"name": "Tom"}\n': '{"name": "Tom"}\n',
        "Once upon a time, Tom ran.\n": "Once upon a time, Tom ran.\n",
    }
    for text, answer in texts.items():
        ids = tokenizer.encode(text).ids
        answers = [token for token, flag in zip(ids, finder.flags(ids), strict=True) if flag]
        assert tokenizer.decode(answers, skip_special_tokens=False) == answer


def test_thinning_keeps_every_answer_and_a_share_of_the_text(tokenizer: Tokenizer) -> None:
    corpus, finder = tokenize(tokenizer, list(documents(9, 60))), AnswerFinder(tokenizer)
    whole, thin = (batches(corpus, 2048, 1, 0, finder, share) for share in (1.0, 0.25))
    flagged = total = 0
    for _ in range(20):
        (inputs, targets), (same, fewer) = next(whole), next(thin)
        assert torch.equal(inputs, same)
        assert torch.equal(fewer[fewer != IGNORED], targets[fewer != IGNORED])
        flagged, total = flagged + int((fewer != IGNORED).sum()), total + int((targets != IGNORED).sum())
    assert 0.4 < flagged / total < 0.8


# The rebuild


@pytest.mark.stride(0)
def test_a_smoke_run_rebuilds_everything(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "training", "--smoke", str(tmp_path)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("target", "draft"):
        folder = tmp_path / "demo" / name
        made = {path.name for path in folder.iterdir()}
        assert made == {path.name for path in (DEMO / name).iterdir()}
        Qwen3ForCausalLM.from_pretrained(folder)
    card = (tmp_path / "demo" / "README.md").read_text(encoding="utf-8")
    assert "## Held-out loss" in card
    assert "## First contact" in card
    assert max(len(line) for line in card.splitlines() if not line.startswith("|")) <= 100
    assert "| all |" in card
    assert re.search(r"\| one call [^|]+\| \d+ \| \d+ \|", card)
    losses = json.loads((tmp_path / "work" / "metrics.json").read_text(encoding="utf-8"))
    # ln 512 = 6.24 is what knowing nothing costs; ten steps must have learned something.
    assert losses["loss"] < 6.2
    before = (tmp_path / "demo" / "target" / "model.safetensors").read_bytes()
    further = subprocess.run(
        [*command, "--stage", "train", "--further"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert further.returncode == 0, further.stdout + further.stderr
    assert (tmp_path / "demo" / "target" / "model.safetensors").read_bytes() != before


# The shipped demo model


def test_both_models_share_the_tokenizer_and_the_draft_is_small() -> None:
    files = ("tokenizer.json", "tokenizer_config.json")
    for file in files:
        assert (DEMO / "target" / file).read_bytes() == (DEMO / "draft" / file).read_bytes()
    sizes = {name: _parameters(DEMO / name) for name in ("target", "draft")}
    assert 2_800_000 <= sizes["target"] <= 3_500_000
    assert sizes["draft"] * 4 < sizes["target"]


def _parameters(folder: Path) -> int:
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        tensors = [file.get_tensor(name) for name in list(file.keys())]
    assert {tensor.dtype for tensor in tensors} == {torch.bfloat16}
    return sum(tensor.numel() for tensor in tensors)


@given(st.text())
def test_any_text_makes_the_round_trip(text: str) -> None:
    tokenizer = Tokenizer.from_file(str(DEMO / "target" / "tokenizer.json"))
    ids = tokenizer.encode(text).ids
    if not any(token in text for token in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")):
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_the_chat_template_renders_the_training_format() -> None:
    peer = AutoTokenizer.from_pretrained(DEMO / "target")
    conversation = Conversation(random.Random(0))
    conversation.say("Hello!", "Hi! Shall I tell you a story?")
    conversation.say("Yes, please.", "Once upon a time, there was a fox.")
    messages = [{"role": role, "content": content} for role, content in conversation.turns]
    assert peer.apply_chat_template(messages, tokenize=False) == conversation.text()
    opened = peer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert opened == conversation.text() + "<|im_start|>assistant\n"


@pytest.mark.parametrize("name", ["target", "draft"])
def test_the_training_model_equals_transformers(name: str, tokenizer: Tokenizer) -> None:
    """Float32 sums over at most 512 products in another order: 1e-3 on logits of up to about 30."""
    ids = torch.tensor([tokenizer.encode(HELDOUT.read_text(encoding="utf-8")).ids[:1024]])
    peer = Qwen3ForCausalLM.from_pretrained(DEMO / name, dtype=torch.float32)
    with torch.no_grad():
        difference = (peer(ids).logits - load_exported(DEMO / name)(ids)).abs().max()
    assert difference < 1e-3


def test_validation_loss_equals_the_model_card(tokenizer: Tokenizer) -> None:
    """On every fourth document, within a tenth: a damaged file or tokenizer is off by far more."""
    target, draft = (load_exported(DEMO / name) for name in ("target", "draft"))
    found = evaluate(target, draft, tokenizer, read_heldout(HELDOUT)[::4])
    row = re.search(r"^\| all \|.*$", (DEMO / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert row is not None
    loss, _, draft_loss, _, agreement = row[0].strip("| ").split(" | ")[3:8]
    assert found.target["all"].loss == pytest.approx(float(loss), rel=0.1)
    assert found.draft["all"].loss == pytest.approx(float(draft_loss), rel=0.1)
    assert found.agreement["all"] == pytest.approx(float(agreement.rstrip("%")) / 100, abs=0.03)


def test_validation_text_has_every_kind() -> None:
    kinds = [kind for kind, _ in read_heldout(HELDOUT)]
    assert all(kinds.count(kind) >= 10 for kind in KINDS)
    assert kind_of("Once upon a time") == "story"


def test_the_model_copies_an_unseen_name(tokenizer: Tokenizer) -> None:
    text = "Rikala bought 37 pears at the market on Friday.\n\nExtract name, count, item and day as JSON.\n"
    ids = generate(DEMO / "target", tokenizer.encode(text).ids, eos=(0,), temperature=0.0, top_p=1.0, seed=0, most=60)
    answer = tokenizer.decode(ids).split("\n")[0]
    assert json.loads(answer) == {"name": "Rikala", "count": 37, "item": "pears", "day": "Friday"}


@pytest.mark.parametrize(
    ("temperature", "openings", "seeds", "share"),
    [(0.0, OPENINGS, 1, 1.0), (0.8, LIKELY, 8, 1.0), (1.0, LIKELY, 8, 0.95)],
)
def test_the_first_user_message_gives_a_story(
    tokenizer: Tokenizer, temperature: float, openings: tuple[str, ...], seeds: int, share: float
) -> None:
    """At temperature 1 a fiftieth of the continuations has a token that no story has; the card counts them."""
    drawn = continuations(DEMO / "target", tokenizer, openings, temperature, 1, seeds)
    others = [each for each in drawn if not is_story(each[1])]
    assert len(others) <= (1 - share) * len(drawn), others
