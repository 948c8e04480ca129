"""Jinja's sandbox with a bound on work: what a template may touch, and how much it may do.

Jinja keeps a template from Python's insides, but not from `'x' * 10 ** 10`. Here loops, calls, operators, filters and
comparisons pay from a budget (`onward.checkpoint.template_budget`) before they run. A template that stays within the
budget makes the same text as in Jinja.
"""

import functools
import re
from collections.abc import Callable, Iterator
from types import GeneratorType
from typing import Any, NoReturn

from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from onward.checkpoint.template_budget import budget, check_bits, width

# Filters whose time does not depend on their arguments.
_INSTANT = {"length", "count", "first", "last", "default", "d"}
# Filters that read the items of a container, at every depth.
_DEEP = {"string", "tojson", "pprint", "join", "sort", "dictsort", "unique", "groupby", "min", "max", "urlencode"}
_DEEP |= {"safe", "escape", "e", "forceescape", "xmlattr", "replace", "upper", "lower", "title", "capitalize", "trim"}
# Filters with a number as argument that is no length.
_NUMBERS = {"int", "float"}
# Filters whose time grows with the square of the text's length.
_SQUARED = {"striptags", "urlize", "wordwrap"}
# Filters that repeat something for each item: a generator's items have to be counted first.
_COUNTING = {"join", "batch", "slice", "sum", "sort", "unique", "groupby", "min", "max"}
# Methods of text that can make much out of little.
_MULTIPLYING = {"join", "replace", "center", "ljust", "rjust", "zfill", "expandtabs", "translate", "to_bytes", "hex"}

_PERCENT_WIDTHS = re.compile(r"%(?:\([^)]*\))?[-+ #0]*(\*|\d*)(?:\.(\*|\d*))?")
_FORMAT_SPEC = re.compile(r"\{[^{}:]*:([^{}]*)(\{?)")


class SandboxedEnvironment(ImmutableSandboxedEnvironment):
    """A sandboxed environment of Jinja, with its options. Compile and render templates within a `budgeted` block."""

    intercepted_binops = frozenset(["+", "-", "*", "**", "//", "%"])

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, finalize=_pay_read)
        # `_Metered` inserts calls of these into a template.
        self.onward_turn, self.onward_read = _pay_turn, _pay_read
        self.onward_search, self.onward_copy = _pay_search, _pay_copy
        self.globals["lipsum"] = self.filters["random"] = _nothing_random
        self.globals["namespace"] = _Namespace

    def meter(self) -> None:
        """Make the filters and tests pay. Call it when all of them are registered."""
        self.filters = {name: _metered_filter(name, function) for name, function in self.filters.items()}
        self.tests = {name: _metered_test(function) for name, function in self.tests.items()}

    def _generate(self, source: nodes.Template, *rest: Any, **options: Any) -> str:
        metered = _Metered().visit(source)
        metered.set_environment(self)
        return super()._generate(metered, *rest, **options)

    def unsafe_undefined(self, obj: Any, attribute: str) -> NoReturn:
        """Jinja prints a forbidden attribute as nothing; here it is an error at once."""
        raise SecurityError(f"access to attribute {attribute!r} of a {type(obj).__name__}")

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        budget().size(left), budget().size(right)
        if isinstance(left, int) and isinstance(right, int):
            if operator in ("*", "**"):
                bits = left.bit_length(), right.bit_length() if operator == "*" else max(right, 0)
                check_bits(sum(bits) if operator == "*" else bits[0] * bits[1])
            budget().spend(0)
        elif operator == "*":
            count = next((number for number in (left, right) if isinstance(number, int)), 1)
            budget().spend((width(left) + width(right)) * max(count, 1))
        elif operator == "%" and isinstance(left, str):
            _spend_on_percent(left, right)
        else:
            budget().spend(width(left) + width(right))
        return super().call_binop(context, operator, left, right)

    def getitem(self, obj: Any, argument: Any) -> Any:
        budget().size(argument)  # it is hashed
        return super().getitem(obj, argument)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        @functools.wraps(wrapped)
        def formatted(*args: Any, **options: Any) -> str:
            _spend_on_format(value.__self__, (args, options))
            return wrapped(*args, **options)

        return formatted

    def call(__self, __context: Context, __obj: Any, *args: Any, **options: Any) -> Any:  # noqa: N805 (as Jinja has it)
        if __obj is _pay_turn or __obj is _pay_read or __obj is _pay_search or __obj is _pay_copy:
            return __obj(*args)
        owner, name = getattr(__obj, "__self__", None), getattr(__obj, "__name__", "")
        arguments = (*args, *options.values())
        if isinstance(__obj, Macro):
            budget().spend(0)
        elif isinstance(owner, str | bytes | int) and name in _MULTIPLYING:
            budget().spend((width(owner) + 1) * (1 + sum(map(_factor, arguments))))
        elif isinstance(owner, str | bytes | list | tuple | LoopContext):
            budget().spend(budget().size(owner) + sum(map(budget().size, arguments)))
        else:
            for value in arguments:
                budget().size(value)
            budget().spend(sum(map(width, arguments)))
        return super().call(__context, __obj, *args, **options)


# ── what an operation costs ───────────────────────────────────────────────────────────────────────────────────


def _pay_turn(characters: int) -> bool:
    """Pay for a turn of a loop, or for text of the template."""
    budget().spend(characters)
    return True


def _pay_read(value: Any) -> Any:
    """Pay for reading all of a value."""
    budget().spend(budget().size(value))
    return value


def _pay_search(container: Any) -> Any:
    """Pay for the search of an item in a container."""
    budget().spend(budget().size(container) if isinstance(container, list | tuple) else width(container))
    return container


def _pay_copy(value: Any) -> Any:
    """Pay for a slice."""
    budget().spend(width(value))
    return value


def _factor(value: Any) -> int:
    """How often an argument can make a text be repeated: a number counts as a length."""
    return abs(value) if isinstance(value, int) else budget().size(value)


def _spend_on_percent(text: str, values: Any) -> None:
    widths = [number for pair in _PERCENT_WIDTHS.findall(text) for number in pair if number]
    if "*" in widths:
        raise SecurityError("a format whose width is a value")
    budget().spend(len(text) + text.count("%") * budget().size(values) + sum(map(int, widths)))


def _spend_on_format(text: str, values: Any) -> None:
    specs = _FORMAT_SPEC.findall(text)
    if any(nested for _, nested in specs):
        raise SecurityError("a format whose width is a value")
    widths = [int(number) for spec, _ in specs for number in re.findall(r"\d+", spec)]
    budget().spend(len(text) + text.count("{") * budget().size(values) + sum(widths))


def _metered_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    at = 1 if hasattr(function, "jinja_pass_arg") else 0  # Jinja puts its context in front

    @functools.wraps(function)
    def run(*args: Any, **options: Any) -> Any:
        if name in _COUNTING and len(args) > at and isinstance(args[at], Iterator):
            args = (*args[:at], list(args[at]), *args[at + 1 :])
        value, rest = (args[at] if len(args) > at else None), (*args[at + 1 :], *options.values())
        _spend_on_filter(name, value, rest, options)
        result = function(*args, **options)
        return _pay_each(result) if isinstance(result, GeneratorType) else result

    return run


def _spend_on_filter(name: str, value: Any, rest: tuple[Any, ...], options: dict[str, Any]) -> None:
    read = 0 if name in _INSTANT else budget().size(value) if name in _DEEP else width(value)
    if name == "format":
        _spend_on_percent(str(value), options or rest)
    elif name in _SQUARED or (name == "sum" and any(isinstance(start, list | tuple) for start in rest)):
        budget().spend(budget().size(value) ** 2 // 64 + sum(map(_factor, rest)))
    else:
        budget().spend(read * (1 + sum(map(width if name in _NUMBERS else _factor, rest))))


def _pay_each(items: Iterator[Any]) -> Iterator[Any]:
    for item in items:
        budget().spend(0)
        yield item


def _metered_test(function: Any) -> Callable[..., Any]:
    @functools.wraps(function)
    def run(*args: Any, **options: Any) -> Any:
        arguments = (*args, *options.values())
        budget().spend(sum(map(budget().size, arguments)) if len(arguments) > 1 else 0)
        return function(*args, **options)

    return run


class _Metered(NodeTransformer):
    """Inserts calls into a template, by which its loops, texts and comparisons pay."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_called("turn", nodes.Const(0), node)).set_lineno(node.lineno))
        if node.test is not None:
            node.test = nodes.And(_called("turn", nodes.Const(0), node), node.test).set_lineno(node.lineno)
        return node

    def visit_Output(self, node: nodes.Output) -> list[nodes.Node]:  # noqa: N802
        self.generic_visit(node)
        characters = sum(len(part.data) for part in node.nodes if isinstance(part, nodes.TemplateData))
        turn = _called("turn", nodes.Const(characters), node)
        return [nodes.ExprStmt(turn).set_lineno(node.lineno), node] if characters else [node]

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.nodes = [_paid("read", part) for part in node.nodes]
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        parts = [node.expr, *(operand.expr for operand in node.ops)]
        contains = any(operand.op in ("in", "notin") for operand in node.ops)
        if contains or not any(isinstance(part, nodes.Const) for part in parts):
            node.expr = _paid("read", node.expr)
            for operand in node.ops:
                operand.expr = _paid("search" if operand.op in ("in", "notin") else "read", operand.expr)
        return node

    def visit_Pair(self, node: nodes.Pair) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.key = _paid("read", node.key)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):
            node.node = _paid("copy", node.node)
        return node


def _paid(kind: str, node: nodes.Expr) -> nodes.Expr:
    return node if isinstance(node, nodes.Const | nodes.TemplateData) else _called(kind, node, node)


def _called(kind: str, argument: nodes.Expr, at: nodes.Node) -> nodes.Expr:
    function = nodes.EnvironmentAttribute(f"onward_{kind}")
    call = nodes.Call(function, [argument], [], None, None)
    for node in (function, argument, call):
        node.set_lineno(at.lineno)
    return call


# ── what a template may call ──────────────────────────────────────────────────────────────────────────────────


def _nothing_random(*args: Any, **options: Any) -> NoReturn:
    raise SecurityError("lipsum and the filter random write text by chance, so the prompt would not be the same again")


class _Namespace(Namespace):
    """Jinja's namespace, without names by which an object could pass for one of another class."""

    def __init__(self, /, *pairs: Any, **attributes: Any) -> None:
        super().__init__()
        for name, value in dict(*pairs, **attributes).items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise SecurityError(f"a namespace takes no name that begins with an underscore; got {name!r}")
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        """Its values do not appear: it may hold itself, or more than was measured."""
        return "<Namespace>"
