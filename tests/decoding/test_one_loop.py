"""There is one loop, and one place that decides that a text has ended: read from the source."""

import ast
from functools import cache
from pathlib import Path

import onward

ROOT = Path(onward.__file__).parent
LOOPS = ast.For | ast.While | ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp


@cache
def code() -> list[tuple[str, ast.AST]]:
    """Every node of every module, with the module's path."""
    return [
        (path.relative_to(ROOT).as_posix(), node)
        for path in sorted(ROOT.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
    ]


def called(node: ast.AST) -> str | None:
    """The last name of what a call calls."""
    if not isinstance(node, ast.Call):
        return None
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", None)


def runs_a_step(node: ast.AST) -> bool:
    """`emitted = step(work)` or `self._run_step(step, work)`, whatever the step and its work are called."""
    arguments = {"step": 1, "_step": 1, "_run_step": 2}.get(called(node) or "")
    if arguments is None or len(node.args) != arguments:
        return False
    work = ast.unparse(node.args[-1]).lower()
    return "work" in work or "scheduledsequence" in work


def test_only_the_loop_runs_steps_until_texts_end():
    loops = [
        (module, type(loop).__name__)
        for module, loop in code()
        if isinstance(loop, LOOPS)
        if any(runs_a_step(node) for node in ast.walk(loop))
    ]
    drafting = [
        # A draft is so many steps long: no text ends there, and what it emits is only a guess.
        ("decoding/speculation/model_drafter.py", "For"),
        # It begins with what has been said since the last one.
        ("decoding/speculation/model_drafter.py", "While"),
    ]
    # One step is made of one step for each kind of sequence, whose tokens are put where they belong.
    of_kinds = [("language_model/runner.py", "For")] * 2
    assert sorted(loops) == sorted([("decoding/loop.py", "While"), *of_kinds, *drafting])


def test_every_way_to_decode_consumes_the_loop():
    consumers = {module for module, node in code() if called(node) == "decode_loop"}
    assert consumers >= {
        "decoding/api.py",
        "inferencer.py",
        "language_model/runner.py",
        "language_model/scoring.py",
    }
    defined = [module for module, node in code() if isinstance(node, ast.FunctionDef) and node.name == "decode_loop"]
    assert defined == ["decoding/loop.py"]


def test_only_a_sequence_ends_a_sequence():
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


def test_sequences_take_tokens_from_the_loop_alone_and_their_forks_from_beams():
    accepting = {module for module, node in code() if called(node) == "accept" and isinstance(node.func, ast.Attribute)}
    # The texts of a draft model are guesses of its own. What a constrained text's constraint accepts is no sequence's.
    # Ids that a loop elsewhere has emitted are taken again.
    texts = accepting - {"sampling/constraint.py", "decoding/sequence.py"}
    assert texts == {"decoding/loop.py", "decoding/beam.py", "decoding/speculation/model_drafter.py"}
    replaying = {module for module, node in code() if called(node) == "replay"}
    assert replaying - {"program/cuda_graph.py"} == {"language_model/job.py", "engine/engine.py"}
    taking_over = {module for module, node in code() if called(node) == "take_over"}
    assert taking_over == {"decoding/beam.py"}
