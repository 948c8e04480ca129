"""The declarations in Python are those of the C++ sources: functions, structures and enums, name by name."""

import ast
import ctypes
import functools
import importlib
import re
from pathlib import Path
from typing import Any

import pytest

from onward.native.generic import Binary, Reduce, Unary
from onward.native.interface import SIGNATURES, Code, Double, DType, Element, Float, Format, Int, Pointer, Status
from onward.ops.experts import ACTIVATIONS
from onward.ops.router import SCORES

ROOT = Path(__file__).parents[2]
PACKAGE, NATIVE = ROOT / "src" / "onward", ROOT / "native" / "src"
SCALARS = {"int32_t": Code, "int64_t": Int, "float": Float, "double": Double}

Fields = list[tuple[str, str]]  # (name, type) of parameters or fields, in order


# ── C++ ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def cpp_sources(folder: Path) -> str:
    """All sources, without comments."""
    text = "\n".join(path.read_text() for path in sorted(folder.rglob("*")) if path.suffix in (".h", ".cpp"))
    return re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL)


def c_type(base: str, pointer: bool) -> str:
    """A name for a C type: pointers to data are all `Pointer`, except those to structures and strings."""
    base = base.replace("const", "").strip()
    if base in SCALARS and not pointer:
        return SCALARS[base].__name__
    if base == "char" and pointer:
        return ctypes.c_char_p.__name__
    if base.startswith("Onward"):
        return base + "*" * pointer
    assert pointer, f"unknown C type {base!r}"
    return Pointer.__name__


def cpp_functions(sources: str) -> dict[str, tuple[str, Fields]]:
    """name -> (type of the result, parameters) of every exported function."""
    functions = {}
    for base, star, name, parameters in re.findall(
        r"ONWARD_API\s+([\w\s]+?)\s*(\*?)\s*\b(onward_\w+)\s*\(([^()]*)\)\s*\{", sources
    ):
        fields = []
        for parameter in filter(None, (part.strip() for part in parameters.split(","))):
            found = re.fullmatch(r"([\w\s]+?)\s*(\*?)\s*(\w+)", parameter)
            assert found, f"{name}: cannot parse the parameter {parameter!r}"
            fields.append((found[3], c_type(found[1], bool(found[2]))))
        functions[name] = c_type(base, bool(star)), fields
    assert len(functions) == len(re.findall(r"^ONWARD_API\b", sources, flags=re.MULTILINE)), "a prototype is not parsed"
    return functions


def cpp_structures(sources: str) -> dict[str, Fields]:
    """name -> fields of every structure of the interface; an embedded structure is replaced by its fields."""
    structures: dict[str, Fields] = {}
    for name, body in re.findall(r"^struct (Onward\w+) \{(.*?)^\};", sources, flags=re.DOTALL | re.MULTILINE):
        fields: Fields = []
        for declaration in filter(None, (part.strip() for part in body.split(";"))):
            found = re.fullmatch(r"((?:const )?\w+)\s*(\*?)\s*(\w.*)", declaration, flags=re.DOTALL)
            assert found, f"{name}: cannot parse the field {declaration!r}"
            base, star, names = found.groups()
            for each in re.split(r"\s*,\s*", star + names):
                declared = re.fullmatch(r"(\*?)(\w+)(?:\[(\d+)\])?", each)
                assert declared, f"{name}: cannot parse the field {each!r}"
                kind = c_type(base, bool(declared[1]))
                fields.append((declared[2], f"{kind}[{declared[3]}]" if declared[3] else kind))
        structures[name] = fields
    for name, fields in structures.items():
        assert not any(kind in structures for _, kind in fields[:-1]), f"{name}: a structure must be the last field"
        if fields[-1][1] in structures:
            structures[name] = fields[:-1] + structures[fields[-1][1]]
    return structures


def cpp_enum(sources: str, name: str) -> dict[str, int]:
    """name -> value, without the k in front, and without a last name that counts the others."""
    found = re.search(rf"^enum {name} : int32_t \{{([^}}]*)\}};", sources, flags=re.MULTILINE)
    assert found, f"no enum {name}"
    values: dict[str, int] = {}
    for entry in filter(None, (part.strip() for part in found[1].split(","))):
        constant, _, value = (part.strip() for part in entry.partition("="))
        values[constant.removeprefix("k")] = int(value) if value else max(values.values(), default=-1) + 1
    return values


# ── Python ────────────────────────────────────────────────────────────────────────────────────────────────────────


@functools.cache
def python_modules() -> list[tuple[str, ast.Module]]:
    return [
        (".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts), ast.parse(path.read_text()))
        for path in sorted(PACKAGE.rglob("*.py"))
    ]


def is_named(node: ast.expr, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def python_declarations() -> dict[str, tuple[str, list[str]]]:
    """name -> (module, names of the parameters) of every function that is declared with `@kernel`."""
    return {
        node.name: (module, [argument.arg for argument in node.args.args])
        for module, tree in python_modules()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and any(is_named(each, "kernel") for each in node.decorator_list)
    }


def python_type(kind: Any) -> str:
    if isinstance(kind, type) and issubclass(kind, ctypes.Array):
        return f"{python_type(kind._type_)}[{kind._length_}]"
    if isinstance(kind, type) and issubclass(kind, ctypes._Pointer):
        return f"{c_name(kind._type_)}*"
    return str(kind.__name__)


def c_name(structure: type[ctypes.Structure]) -> str:
    assert structure.__name__.endswith("Arguments"), structure
    return f"Onward{structure.__name__.removesuffix('Arguments')}"


@functools.cache
def python_functions() -> dict[str, tuple[str, Fields]]:
    functions = {}
    for name, (module, names) in python_declarations().items():
        importlib.import_module(module)
        result, kinds = SIGNATURES[name]
        functions[name] = python_type(result), list(zip(names, map(python_type, kinds), strict=True))
    return functions


@functools.cache
def python_structures() -> dict[str, Fields]:
    """C name -> fields, of every class of structures."""
    structures = {}
    for module, tree in python_modules():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and any(is_named(base, "Structure") for base in node.bases):
                structure = getattr(importlib.import_module(module), node.name)
                structures[c_name(structure)] = [(name, python_type(kind)) for name, kind, *_ in structure._fields_]
    return structures


def words(name: str) -> str:
    """A constant's name as both languages write it: C++ k, and Packed for formats, camel case; Python capitals."""
    return name.removeprefix("Packed").replace("_", "").upper()


# The enums, and the names of those that Python passes as the index of an option's value. Those of `Element` begin with
# the names of `DType`.
ENUMS: dict[str, dict[str, int]] = {
    **{
        enum.__name__: {each.name: each.value for each in enum}
        for enum in (DType, Unary, Binary, Reduce, Format, Status)
    },
    "Element": {each.name: each.value for each in Element if each.name not in DType.__members__},
    "Activation": {name: code for code, name in enumerate(ACTIVATIONS)},
    "Score": {name: code for code, name in enumerate(SCORES)},
}
# The last name of a C++ enum that counts the others.
COUNTS = {"Elements", "Unaries", "Binaries", "Reductions", "Formats", "Activations", "Scores"}


def differences(sources: str) -> list[str]:
    """Everything in which the declarations in Python differ from these sources."""
    found = []

    def compare(what: str, python: dict[str, Any], cpp: dict[str, Any]) -> None:
        for name in sorted(python.keys() | cpp.keys()):
            if python.get(name) != cpp.get(name):
                found.append(f"{what} {name}: {python.get(name)} in Python, {cpp.get(name)} in C++")

    compare("function", python_functions(), cpp_functions(sources))
    compare("structure", python_structures(), cpp_structures(sources))
    for enum, values in ENUMS.items():
        cpp = {words(name): value for name, value in cpp_enum(sources, enum).items() if name not in COUNTS}
        compare(f"enum {enum}", {words(name): value for name, value in values.items()}, cpp)
    return found


@pytest.fixture(scope="module")
def sources() -> str:
    return cpp_sources(NATIVE)


def test_the_declarations_equal_those_of_the_sources(sources: str) -> None:
    assert differences(sources) == []
    assert set(SIGNATURES) == set(python_declarations())
    assert DType.__members__.items() <= {name: Element[name] for name in Element.__members__}.items()


@pytest.mark.parametrize(
    ("old", "new", "difference"),
    [
        ("onward_argmax(int64_t rows, int64_t columns", "onward_argmax(int64_t columns, int64_t rows", "onward_argmax"),
        ("onward_argmax(int64_t rows,", "onward_argmax(int32_t rows,", "onward_argmax"),
        ("ONWARD_API int32_t onward_argmax(", "ONWARD_API int64_t onward_argmax(", "onward_argmax"),
        ("ONWARD_API int32_t onward_argmax(", "ONWARD_API int32_t onward_greatest(", "onward_greatest"),
        ("const OnwardHeads* parts", "const OnwardLora* parts", "onward_heads"),
        ("float eps, weight_offset;", "float weight_offset, eps;", "OnwardHeads"),
        ("int64_t q_strides[3]", "int64_t q_strides[4]", "OnwardAttention"),
        ("int32_t bias_dtype, out_dtype;", "int32_t bias_dtype; int64_t out_dtype;", "OnwardLinear"),
        ("int64_t held_stride;", "", "OnwardSsd"),
        ("kFloorDiv, kRemainder", "kRemainder, kFloorDiv", "enum Binary REMAINDER"),
        ("kBf16 = 1", "kBf16 = 7", "enum DType BF16"),
        ("kPackedNf4, kFormats", "kPackedNf4, kPackedNf3, kFormats", "enum Format NF3"),
        ("kClampedSwiglu, kRelu2", "kRelu2, kClampedSwiglu", "enum Activation RELU2"),
    ],
)  # fmt: skip
def test_a_change_of_only_the_sources_is_detected(sources: str, old: str, new: str, difference: str) -> None:
    changed = sources.replace(old, new)
    assert changed != sources
    assert any(difference in each for each in differences(changed))
