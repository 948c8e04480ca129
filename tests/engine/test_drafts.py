"""Drafts of any length, accepted as far as they are right, in a cache that is allocated block by block."""

import contextlib
import dataclasses
import json

import pytest
import torch
from checked_engine import CheckedEngine
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from onward import LanguageModel, Speculator
from onward.decoding.speculation import ModelDrafter
from onward.errors import DraftError
from onward.ops.heads import BLOCK
from onward.testing import ByteTokenizer, tiny_config, tiny_model

MODEL, OTHER = tiny_model(seed=7), tiny_model(seed=8)
MODEL_CONFIG = tiny_config("qwen3")
LM = LanguageModel(MODEL, ByteTokenizer(), prefix_memory=0)
BLOCK_BYTES = MODEL.new_blocks(1).block_nbytes
SECONDS = 60  # a wait that takes longer never ends
PROMPT = "a prompt that ends near the end of a block of its cache"
SAMPLED = {"max_new_tokens": 170, "temperature": 1.0, "logprobs": 1}


class Prediction:
    """A drafter that knows the text but for every `wrong`-th id."""

    def __init__(self, ids, wrong):
        self.ids, self.wrong = ids, wrong

    def start(self, request):
        return self

    def propose(self, rows):
        return [[self.guess(len(row.output) + at) for at in range(row.limit)] for row in rows]

    def guess(self, at):
        return 0 if at % self.wrong == self.wrong - 1 or at >= len(self.ids) else self.ids[at]


@pytest.mark.parametrize("length", [None, 15, 17, 40, 150])
def test_a_draft_of_any_length_has_room(length):
    """A text that is given blocks as it grows (`overcommit`) has them before a draft is written, and preempted texts
    begin again."""
    assert len(PROMPT) % BLOCK > BLOCK // 2
    alone = [LM.generate(PROMPT, seed=seed, **SAMPLED) for seed in range(3)]
    with CheckedEngine(LM, max_sequences=3, cache_memory=7 * BLOCK_BYTES, overcommit=100.0) as engine:
        generations = []
        for seed, (right, wrong) in enumerate(zip(alone, (7, 45, 1000), strict=True)):
            draft = Speculator(Prediction(right.token_ids, wrong), length=length)
            generations.append(engine.submit(PROMPT, seed=seed, draft=draft, **SAMPLED))
        for generation, right in zip(generations, alone, strict=True):
            completion = generation.result(SECONDS)
            assert (completion.token_ids, completion.logprobs) == (right.token_ids, right.logprobs)
            assert length is None or completion.speculation.rounds
    engine.check()


# ── requests that draft together ──────────────────────────────────────────────────────────────────────────────


class WatchedDrafter(ModelDrafter):
    """Keeps its draftings and the sizes of their batches."""

    def __init__(self, model):
        super().__init__(model)
        self.draftings, self.batches = [], []

    def start(self, target):
        drafting = super().start(target)
        self.draftings.append(drafting)
        propose = drafting.propose
        drafting.propose = lambda rows: self.batches.append(len(rows)) or propose(rows)
        return drafting

    def check(self):
        """Nothing is left of rows that have left."""
        for drafting in self.draftings:
            stats = drafting._slots.stats()
            assert stats.available == stats.total, "a row that left has a slot of the draft model"


class Fails:
    """Drafts nothing, and fails for a text of 20 ids or more."""

    def start(self, target):
        return self

    def propose(self, rows):
        if any(len(row.output) >= 20 for row in rows):
            raise ValueError("no draft")
        return [[] for _ in rows]


def adapter_folder(folder):
    """A LoRA adapter of the model's first layer."""
    generator = torch.Generator().manual_seed(3)
    name = "base_model.model.model.layers.0.mlp.up_proj.lora_{}.weight"
    shape = {"A": (2, MODEL_CONFIG["hidden_size"]), "B": (MODEL_CONFIG["intermediate_size"], 2)}
    save_file(
        {name.format(part): torch.randn(size, generator=generator) for part, size in shape.items()},
        folder / "adapter_model.safetensors",
    )
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 8, "target_modules": ["up_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.fixture(scope="module")
def adapted(tmp_path_factory):
    """The model with an adapter, and what every request gives alone, without a draft."""
    lm = LanguageModel(MODEL, ByteTokenizer(), prefix_memory=0)
    lm.load_adapter("other", adapter_folder(tmp_path_factory.mktemp("adapter")))
    known = {}

    def alone(prompt, options):
        key = prompt, tuple(sorted((name, repr(value)) for name, value in options.items()))
        if key not in known:
            known[key] = lm.generate(prompt, draft=None, **options)
        return known[key]

    return lm, alone


PROMPTS = [PROMPT[:8], PROMPT, PROMPT[:50] + "another end", "x"]
KINDS = [
    {},
    {"temperature": 1.0, "seed": 5},
    {"temperature": 0.7, "seed": 6, "n": 2},
    {"temperature": 1.0, "seed": 7, "repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
    {"temperature": 1.0, "seed": 8, "regex": r"([a-f]|[g-z]{2})*"},
    {"json_schema": {"type": "object", "properties": {"name": {"enum": ["Anna", "Otto"]}}, "required": ["name"]}},
    {"temperature": 1.0, "seed": 9, "adapter": "other"},
    {"adapter": "other", "logprobs": 1},
]
DRAFTERS = ["right", "right", "right", "other", "adaptive", "short", "lookup", "suffix", "fails", None]
request = st.fixed_dictionaries(
    {
        "prompt": st.sampled_from(PROMPTS),
        "options": st.sampled_from(KINDS),
        "new": st.sampled_from([1, 5, 30, 90]),
        "draft": st.sampled_from(DRAFTERS),
        "at": st.integers(0, 12),
        "cancel": st.none() | st.none() | st.integers(0, 9),
    }
)


@settings(max_examples=25)
@given(
    st.lists(request, min_size=2, max_size=9),
    st.sampled_from([3, 8]),
    st.sampled_from([None, 6, 9]),
    st.booleans(),
)
def test_drafted_requests_equal_each_request_alone(adapted, requests, rows, blocks, dense):
    """They join and leave at any step, are preempted and cancelled, and draft with several drafters at once; one that
    fails ends its own requests alone."""
    lm, alone = adapted
    without_blocks = {"new_blocks": None} if dense else {}
    models = {
        "right": WatchedDrafter(dataclasses.replace(MODEL, **without_blocks)),
        "other": WatchedDrafter(dataclasses.replace(OTHER, **without_blocks)),
        "short": WatchedDrafter(dataclasses.replace(OTHER, max_seq_len=40)),
    }
    drafts = {name: Speculator(drafter, length=3) for name, drafter in models.items()}
    drafts |= {"adaptive": Speculator(models["right"]), "fails": Speculator(Fails(), length=2), None: None}
    drafts |= {name: Speculator(name, length=4) for name in ("lookup", "suffix")}
    limits = {} if blocks is None else {"cache_memory": blocks * BLOCK_BYTES, "overcommit": 100.0}
    served, coming, step = [], sorted(requests, key=lambda one: one["at"]), 0

    def submit(one):
        options = one["options"] | {"max_new_tokens": one["new"]}
        served.append((one, options, step, engine.submit(one["prompt"], draft=drafts[one["draft"]], **options)))

    def between():
        nonlocal step
        step += 1
        while coming and coming[0]["at"] <= step:
            submit(coming.pop(0))
        for one, _, began, generation in served:
            if one["cancel"] is not None and step - began >= one["cancel"]:
                generation.cancel()

    with CheckedEngine(lm, max_sequences=rows, **limits) as engine:
        engine.between_steps(between)
        while coming or not all(generation.done for *_, generation in served):
            if coming and all(generation.done for *_, generation in served):
                submit(coming.pop(0))
            for *_, generation in list(served):
                with contextlib.suppress(DraftError):
                    generation.result(SECONDS)
    engine.check()
    for drafter in models.values():
        drafter.check()
    for one, options, _, generation in served:
        right = alone(one["prompt"], options)
        try:
            completion = generation.result(0)
        except DraftError:
            assert one["draft"] == "fails"
            continue
        for text, expected in zip(completion.choices, right.choices, strict=True):
            assert text.token_ids == expected.token_ids[: len(text.token_ids)], one
            if text.finish_reason != "cancelled":
                assert (text.token_ids, text.logprobs) == (expected.token_ids, expected.logprobs), one
                assert one["draft"] != "fails" or len(text.token_ids) <= 20 + 2


def test_a_draft_model_drafts_for_all_requests_in_one_batch():
    drafter = WatchedDrafter(MODEL)
    draft = Speculator(drafter, length=3)
    options = {"max_new_tokens": 60, "temperature": 1.0, "draft": draft}
    with CheckedEngine(LM, max_sequences=8) as engine:
        generations = [engine.submit(f"{seed} {2 * PROMPT}", seed=seed, **options) for seed in range(8)]
        for generation in generations:
            assert generation.result(SECONDS).speculation.acceptance > 0.9
        again = engine.submit(f"0 {2 * PROMPT}", seed=0, **options)
        again.result(SECONDS)
    assert len(drafter.draftings) == 1, "one cache of the draft model serves all"
    assert max(drafter.batches) == 8
    assert drafter.draftings[0]._slots.stats().hits >= BLOCK, "a prompt that was drafted for before is cached"
    drafter.check()


def test_a_drafter_that_fails_to_leave_is_restarted():
    started, joined = [], []

    class Stays:
        def start(self, target):
            started.append(target)
            return self

        def join(self, rows):
            assert all(row.state is None for row in rows)
            joined.extend(rows)

        def propose(self, rows):
            for row in rows:
                row.state = "known"
            return [[row.output[-1]] * row.limit for row in rows]

        def leave(self, rows):
            raise ValueError("no end")

    draft = Speculator(Stays(), length=2)
    alone = [LM.generate(PROMPT, seed=seed, max_new_tokens=10 * seed) for seed in (1, 2, 3)]
    with pytest.warns(UserWarning, match=r"the drafter Stays failed \(ValueError: no end\); it drafts"):
        completions = LM.generate([PROMPT] * 3, per_prompt=[{"max_new_tokens": 10 * n} for n in (1, 2, 3)], draft=draft)
    assert [one.token_ids for one in completions] == [one.token_ids for one in alone]
    assert len(started) == 3
    assert len(joined) == 3 + 2 + 1


def test_rows_without_room_in_the_draft_cache_get_no_draft():
    """The draft model's cache is as large as the engine's; here the system gives it less."""
    drafter = WatchedDrafter(MODEL)
    start = drafter.start

    def tight(target):
        return start(dataclasses.replace(target, positions=2 * BLOCK, rows=1))

    drafter.start = tight
    draft = Speculator(drafter, length=3)
    alone = [LM.generate(PROMPT, seed=seed, **SAMPLED) for seed in range(4)]
    with CheckedEngine(LM, max_sequences=4) as engine:
        generations = [engine.submit(PROMPT, seed=seed, draft=draft, **SAMPLED) for seed in range(4)]
        completions = [generation.result(SECONDS) for generation in generations]
    assert [one.token_ids for one in completions] == [one.token_ids for one in alone]
    assert any(one.speculation.drafted for one in completions)
    assert not all(one.speculation.drafted > 150 for one in completions)
    drafter.check()
