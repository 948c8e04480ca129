"""There is one loop, and one place that decides that a row has ended: read from the source."""

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
    """`state, emitted = step(state)`, whatever the step is called."""
    return called(node) in ("step", "_step") and [ast.unparse(argument) for argument in node.args] == ["state"]


def test_only_the_loop_runs_steps_until_rows_end():
    found = [
        (module, type(loop).__name__)
        for module, loop in code()
        if isinstance(loop, LOOPS)
        if any(runs_a_step(node) for node in ast.walk(loop))
    ]
    # A draft is so many steps long: no row ends there, and what it emits is only a guess.
    assert sorted(found) == [("decoding/loop.py", "While"), ("speculation/model_drafter.py", "For")]


def test_every_way_to_decode_consumes_the_loop():
    consumers = {module for module, node in code() if called(node) == "decode_loop"}
    assert consumers >= {"requests/runner.py", "decoding/driver.py", "decoding/inferencer.py", "decoding/tensors.py"}
    defined = [module for module, node in code() if isinstance(node, ast.FunctionDef) and node.name == "decode_loop"]
    assert defined == ["decoding/loop.py"]


def test_only_a_row_ends_a_row():
    def targets(node):
        return node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]

    assigned = {
        module
        for module, node in code()
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign)
        for target in targets(node)
        if isinstance(target, ast.Attribute) and target.attr == "finish_reason"
    }
    assert assigned == {"decoding/row.py"}
    assert "decoding/row.py" not in {module for module, node in code() if called(node) in ("setattr", "__setattr__")}


def test_rows_take_tokens_from_the_loop_alone_and_their_forks_from_beams():
    accepting = {
        module
        for module, node in code()
        if called(node) == "accept" and isinstance(node.func, ast.Attribute) and "row" in ast.unparse(node.func.value)
    }
    assert accepting == {"decoding/loop.py", "decoding/beam.py"}
    taking_over = {module for module, node in code() if called(node) == "take_over"}
    assert taking_over == {"decoding/beam.py"}
