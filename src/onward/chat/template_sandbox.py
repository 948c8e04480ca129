"""A Jinja sandbox that also limits the work of a template.

Jinja's sandbox protects Python's internals, but does not stop `'x' * 10 ** 10`. Here each operation is charged, before
it runs, for the characters that it reads or makes; the count is the same on every machine. The size of a value counts
shared parts each time: forty lists that each contain the previous one twice are forty objects, but terabytes as text.
"""

import functools
import re
from collections.abc import Callable, ItemsView, Iterator, KeysView, ValuesView
from contextlib import contextmanager
from contextvars import ContextVar
from string import Formatter
from types import GeneratorType
from typing import Any, NoReturn

from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

# A prompt of a hundred pages costs about 1% of this; an empty loop ends after two million iterations.
_CHARACTERS = 2**24
# A long conversation enlarges the budget: each of its characters may be read this many times.
_READINGS = 128
# The cost of an object other than text, and the fixed cost of an operation.
_OBJECT = 8
# The time of arithmetic grows with the square of the numbers' length.
_MAX_BITS = 2**16

_CONTAINERS = (dict, list, tuple, set, frozenset, KeysView, ValuesView, ItemsView)


class TemplateBudget:
    """The number of characters that one rendering may still use."""

    def __init__(self, inputs: Any = ()) -> None:
        # Sizes of containers by id; keeps the containers alive. A template cannot modify them.
        self._sizes: dict[int, tuple[Any, int]] = {}
        self._left = 2**62
        self._left = self._whole = _CHARACTERS + _READINGS * self.size(inputs)

    def spend(self, characters: int) -> None:
        """Charge characters to the budget; raise `SecurityError` if it has too few left."""
        self._left -= characters + _OBJECT
        if self._left < 0:
            raise SecurityError(f"it exceeds the work limit of {self._whole} characters for this conversation")

    def size(self, value: Any) -> int:
        """Return about how many characters a value has as text. A container counts each occurrence of an item."""
        if isinstance(value, str | bytes):
            return len(value) + _OBJECT
        if isinstance(value, int):
            _check_bits(value.bit_length())
            return _OBJECT
        if not isinstance(value, _CONTAINERS):
            return _OBJECT
        entry = self._sizes.get(id(value))
        if entry is None:
            parts = (part for item in value.items() for part in item) if isinstance(value, dict) else value
            entry = self._sizes[id(value)] = (value, _OBJECT + sum(map(self.size, parts)))
        if entry[1] > self._left:
            self.spend(entry[1])
        return entry[1]


def width(value: Any) -> int:
    """Return the length of a text, or a fixed cost per item of a container, without the items' sizes."""
    if isinstance(value, str | bytes):
        return len(value)
    return _OBJECT * len(value) if isinstance(value, (range, *_CONTAINERS)) else _OBJECT


def _check_bits(count: int) -> None:
    if count > _MAX_BITS:
        raise SecurityError(f"a number of {count} bits; at most {_MAX_BITS} are allowed")


_BUDGET: ContextVar[TemplateBudget] = ContextVar("budget of the template that is rendered")


def budget() -> TemplateBudget:
    """Return the budget of the current rendering."""
    return _BUDGET.get()


@contextmanager
def budgeted(inputs: Any = ()) -> Iterator[None]:
    """Use a new budget in the block, enlarged for `inputs`, the template's variables."""
    token = _BUDGET.set(TemplateBudget(inputs))
    try:
        yield
    finally:
        _BUDGET.reset(token)


# Filters that do not read the value, and filters that read only its items. All others, and all methods, are charged for
# the whole value and their arguments.
_INSTANT = {"length", "count", "first", "last", "default", "d"}
_SHALLOW = {"attr", "list", "items", "reverse", "map", "select", "reject", "selectattr", "rejectattr"}
# Filters and methods with large results: charged for the value times the size of the arguments.
_MULTIPLYING = {"join", "replace", "center", "ljust", "rjust", "zfill", "expandtabs", "translate", "to_bytes"}
_MULTIPLYING |= {"indent", "batch", "slice", "round", "tojson"}
# Filters that compare items or print each on a line; the items of a text are its characters.
_BY_ITEM = {"sort", "dictsort", "groupby", "unique", "min", "max", "pprint", "title"}
# Filters with quadratic time.
_SQUARED = {"striptags", "urlize", "wordwrap", "sum"}

# The widths and precisions of a %-format, and some other numbers, which cost little. A scan stops before the next such
# character, so all scans of a text take linear time.
_PERCENT_WIDTHS = re.compile(r"[%).][-+ #0]*(\d+)")
_DIGITS = re.compile(r"\d+")


class SandboxedEnvironment(ImmutableSandboxedEnvironment):
    """A sandboxed Jinja environment. Compile and render templates in a `budgeted` block."""

    intercepted_binops = frozenset(["+", "-", "*", "**", "//", "%"])

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, finalize=functools.partial(_pay, "read"))
        self.onward_pay = _pay  # `_Metered` inserts calls to it
        self.globals["lipsum"] = self.filters["random"] = _nothing_random
        self.globals["namespace"] = _Namespace

    def meter(self) -> None:
        """Charge filters and tests; call this after all of them are registered."""
        self.filters = {name: _metered_filter(name, function) for name, function in self.filters.items()}
        self.tests = {name: _metered_test(function) for name, function in self.tests.items()}

    def _generate(self, source: nodes.Template, *rest: Any, **options: Any) -> str:
        metered = _Metered().visit(source)
        metered.set_environment(self)
        return super()._generate(metered, *rest, **options)

    def unsafe_undefined(self, obj: Any, attribute: str) -> NoReturn:
        """Raise for a forbidden attribute, which Jinja would print as nothing."""
        raise SecurityError(f"access to attribute {attribute!r} of a {type(obj).__name__}")

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        budget().size(left), budget().size(right)
        if isinstance(left, int) and isinstance(right, int):
            if operator in ("*", "**"):
                bits = left.bit_length(), right.bit_length() if operator == "*" else max(right, 0)
                _check_bits(sum(bits) if operator == "*" else bits[0] * bits[1])
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

    def call(__self, __context: Context, __obj: Any, *args: Any, **options: Any) -> Any:  # noqa: N805 (Jinja's names)
        if __obj is _pay:
            return _pay(*args)
        if isinstance(__obj, Macro):
            budget().spend(0)
        else:
            owner = getattr(__obj, "__self__", None)
            read = width(owner) if isinstance(owner, dict) else budget().size(owner)
            _spend_on(getattr(__obj, "__name__", ""), read, (*args, *options.values()))
        return super().call(__context, __obj, *args, **options)


# The operations that `_Metered` charges: an iteration, literal text, reading a value, a slice, a search in a container.
_COSTS: dict[str, Callable[[Any], int]] = {
    "turn": lambda _: 0,
    "text": int,
    "read": lambda value: budget().size(value),
    "slice": width,
    "search": lambda value: budget().size(value) if isinstance(value, list | tuple) else width(value),
}


def _pay(kind: str, value: Any) -> Any:
    budget().spend(_COSTS[kind](value))
    return value


def _factor(value: Any) -> int:
    """Return how often an argument can repeat a text; a number is a length."""
    return abs(value) if isinstance(value, int) else budget().size(value)


def _spend_on(name: str, read: int, arguments: tuple[Any, ...]) -> None:
    """Charge a filter or method that reads `read` characters of its value."""
    if name in _MULTIPLYING:
        budget().spend((read + 1) * (1 + sum(map(_factor, arguments))))
    else:
        squared = read**2 // 64 if name in _SQUARED else 0
        budget().spend(read + squared + sum(map(budget().size, arguments)))


def _spend_on_percent(text: str, values: Any) -> None:
    widths = sum(map(int, _PERCENT_WIDTHS.findall(text)))
    if "*" in text:  # any value may be a width
        each = values if isinstance(values, tuple) else (values,)
        widths += sum(abs(value) for value in each if isinstance(value, int))
    budget().spend(len(text) + text.count("%") * budget().size(values) + widths)


def _spend_on_format(text: str, values: Any) -> None:
    specs = [spec for _, _, spec, _ in Formatter().parse(text) if spec]
    if any("{" in spec for spec in specs):
        raise SecurityError("a format whose width is a value")
    widths = sum(int(number) for spec in specs for number in _DIGITS.findall(spec))
    budget().spend(len(text) + text.count("{") * budget().size(values) + widths)


def _metered_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    at = 1 if hasattr(function, "jinja_pass_arg") else 0  # Jinja passes its context first

    @functools.wraps(function)
    def run(*args: Any, **options: Any) -> Any:
        value, rest = (args[at] if len(args) > at else None), args[at + 1 :]
        if name in _INSTANT:
            budget().spend(0)
        elif name in _SHALLOW:
            budget().spend(width(value))
        else:
            if isinstance(value, Iterator):  # to count its items
                value = list(value)
                args = (*args[:at], value, *rest)
            if name == "format":
                budget().spend(budget().size(value))
                _spend_on_percent(str(value), options or rest)
            read = budget().size(value) * (8 if name in _BY_ITEM else 1)
            _spend_on(name, read, (*rest, *options.values()))
        result = function(*args, **options)
        return _pay_each(result) if isinstance(result, GeneratorType) else result

    return run


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
    """Inserts calls that charge for loops, texts and comparisons."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        turn = _paid("turn", nodes.Const(True), node)
        node.body.insert(0, nodes.ExprStmt(turn).set_lineno(node.lineno))
        if node.test is not None:
            node.test = nodes.And(turn, node.test).set_lineno(node.lineno)
        return node

    def visit_Output(self, node: nodes.Output) -> list[nodes.Node]:  # noqa: N802
        self.generic_visit(node)
        characters = sum(len(part.data) for part in node.nodes if isinstance(part, nodes.TemplateData))
        text = _paid("text", nodes.Const(characters), node)
        return [nodes.ExprStmt(text).set_lineno(node.lineno), node] if characters else [node]

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.nodes = [_paid("read", part, node) for part in node.nodes]
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        if all(operand.op not in ("in", "notin") and isinstance(operand.expr, nodes.Const) for operand in node.ops):
            return node  # reads no more than the constants
        node.expr = _paid("read", node.expr, node)
        for operand in node.ops:
            operand.expr = _paid("search" if operand.op in ("in", "notin") else "read", operand.expr, node)
        return node

    def visit_Pair(self, node: nodes.Pair) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.key = _paid("read", node.key, node)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):
            node.node = _paid("slice", node.node, node)
        return node


def _paid(kind: str, value: nodes.Expr, at: nodes.Node) -> nodes.Expr:
    call = nodes.Call(nodes.EnvironmentAttribute("onward_pay"), [nodes.Const(kind), value], [], None, None)
    for node in (call.node, *call.args, call):
        node.set_lineno(at.lineno)
    return call


def _nothing_random(*args: Any, **options: Any) -> NoReturn:
    raise SecurityError("lipsum and the filter random are not allowed: a prompt must be reproducible")


class _Namespace(Namespace):
    """Jinja's namespace, without private names, which could disguise an object's class."""

    def __init__(self, /, *pairs: Any, **attributes: Any) -> None:
        super().__init__()
        for name, value in dict(*pairs, **attributes).items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise SecurityError(f"a namespace must not have names that begin with an underscore; got {name!r}")
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        """Omit the values: they may be recursive, or larger than measured."""
        return "<Namespace>"
