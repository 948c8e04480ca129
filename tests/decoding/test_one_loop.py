"""There is one loop, and one place that decides that a text has ended."""

import ast
import sys
from functools import cache
from pathlib import Path

import pytest
import torch

import onward
from onward.decoding import decode_loop
from onward.decoding.speculation import ModelDrafter, PromptLookup, Speculator
from onward.inferencer import ModelInferencer, speculate
from onward.models import Run
from onward.testing import ByteTokenizer, tiny_model

ROOT = Path(onward.__file__).parent


# ── every forward of a model is a step of the loop ────────────────────────────────────────────────────────────


def stack():
    """The code objects of the caller's callers, without torch's decorators."""
    frame = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_name != "decorate_context":
            yield frame.f_code
        frame = frame.f_back


def is_step(code) -> bool:
    """Whether it is the call of a `Step`: `__call__(self, work)`, or a function `step(work)`."""
    arguments = code.co_varnames[: code.co_argcount]
    return (code.co_name, *arguments) in {("__call__", "self", "work"), ("step", "work")}


@pytest.fixture(scope="module")
def model():
    return tiny_model("qwen3", max_position_embeddings=128)


@pytest.fixture(scope="module")
def lm(model):
    return onward.LanguageModel(model, ByteTokenizer())


def plainly(lm):
    model = lm.model

    def forward(tokens, offsets, cache, params):
        return model.forward(tokens, offsets, cache, params)

    onward.decode(forward, params=model.params, cache=model.new_cache(1, 32), prompt=[1, 2, 3], max_new_tokens=3)


def inferred(lm):
    inferencer = ModelInferencer(lm.model)
    query, filled = torch.tensor([[1, 2, 3]]), inferencer.new_cache(1, 32)
    token = inferencer.prefill(query, filled, onward.greedy).token_ids
    inferencer.decode(token, filled, 3, onward.greedy)
    speculate(inferencer, ModelInferencer(lm.model), query, 4)


def served(lm):
    with onward.Engine(lm) as engine:
        engine.submit("ab", max_new_tokens=3).result()
        engine.submit("cd", max_new_tokens=3, n=2, temperature=1.0).result()


PROMPT = {"max_new_tokens": 4, "ignore_eos": True}
WAYS = {
    "generate": lambda lm: lm.generate(["ab", "c"], **PROMPT, n=2, temperature=1.0, logprobs=1, prompt_logprobs=1),
    "stream": lambda lm: list(lm.stream("ab", **PROMPT)),
    "beams": lambda lm: lm.generate("ab", **PROMPT, beams=2),
    "session": lambda lm: onward.Session(lm).generate("ab", **PROMPT),
    "drafts": lambda lm: lm.generate("abab", **PROMPT, draft=PromptLookup(1)),
    "draft model": lambda lm: lm.generate("ab", **PROMPT, draft=Speculator(ModelDrafter(lm.model), length=2)),
    "a regular expression": lambda lm: lm.generate("ab", max_new_tokens=4, regex="abc"),
    "score": lambda lm: lm.score(["ab", "cd"]),
    "continuations": lambda lm: lm.score_continuations("x", ["ab", "cd"]),
    "logits": lambda lm: lm.logits([1, 2, 3]),
    "onward.generate": lambda lm: onward.generate(lm.model, torch.tensor([[1, 2], [3, 4]]), 3),
    "onward.decode": lambda lm: onward.decode(lm.model, prompt=[1, 2, 3], max_new_tokens=3),
    "a bare forward": plainly,
    "inferencers": inferred,
    "an engine": served,
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_only_the_loop_calls_steps_and_only_steps_call_a_run(way, lm, monkeypatch):
    callers = []
    step = Run.step

    def watched(self, batch, sampler=None):
        codes = list(stack())
        outermost = max((at for at, code in enumerate(codes) if is_step(code)), default=None)
        callers.append(codes[0].co_qualname if outermost is None else codes[outermost + 1])
        return step(self, batch, sampler)

    monkeypatch.setattr(Run, "step", watched)
    way(lm)
    assert set(callers) == {decode_loop.__code__}


def test_only_steps_build_forward_batches():
    """So nothing else calls `Run.step`, but the ranks of a pipeline, for their parts of one forward. (What is in
    `program` knows no runs.)"""
    made = {module for module, node in code() if called(node) == "ForwardBatch"}
    makers = {module for module in made if not module.startswith("program/")}
    assert makers == {"decoding/batch.py", "distributed/group.py", "distributed/pipeline.py"}


# ── read from the source ──────────────────────────────────────────────────────────────────────────────────────


@cache
def code() -> list[tuple[str, ast.AST]]:
    """Every node of every module, with the module's path."""
    return [
        (path.relative_to(ROOT).as_posix(), node)
        for path in sorted(ROOT.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
    ]


def called(node: ast.AST) -> str | None:
    """The last name of a called function."""
    if not isinstance(node, ast.Call):
        return None
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", None)


def test_only_a_sequence_sets_its_finish_reason():
    def targets(node):
        return node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]

    assigned = {
        module
        for module, node in code()
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign)
        for target in targets(node)
        if isinstance(target, ast.Attribute) and target.attr == "finish_reason"
    }
    assert assigned == {"decoding/sequence.py"}
    assert "decoding/sequence.py" not in {
        module for module, node in code() if called(node) in ("setattr", "__setattr__")
    }


def test_only_the_loop_and_beams_add_tokens_to_sequences():
    accepting = {module for module, node in code() if called(node) == "accept" and isinstance(node.func, ast.Attribute)}
    # What a constrained text's constraint accepts is no sequence's. Ids that a loop elsewhere has emitted, or
    # that a replay verifies, are taken again. And a batch's cache is accepted by its manager.
    texts = accepting - {
        "sampling/constraint.py",
        "language_model/reasoning.py",
        "decoding/sequence.py",
        "decoding/batch.py",
        "decoding/replay.py",
    }
    assert texts == {"decoding/beam.py"}
    taking = {module for module, node in code() if called(node) == "take_step"}
    # A search takes a step like any sequence. The texts of a draft model are guesses of its own.
    assert taking == {"decoding/loop.py", "decoding/beam.py", "decoding/speculation/model_drafter.py"}
    replaying = {module for module, node in code() if called(node) == "replay"}
    assert replaying - {"program/cuda_graph.py"} == {
        "language_model/runner.py",
        "language_model/verification.py",
        "engine/request.py",
    }
    taking_over = {module for module, node in code() if called(node) == "take_over"}
    assert taking_over == {"decoding/beam.py"}
