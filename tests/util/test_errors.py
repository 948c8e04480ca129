"""The tree of errors in `onward.errors` is the tree of classes."""

import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator

import onward
from onward import errors
from onward.errors import OnwardError

_NODE = re.compile(r"    (?P<branches>[│├└─ ]*)(?P<name>\w+Error)(?: \((?P<built_in>\w+)\))?  ")


def drawn_tree() -> dict[str, tuple[str, str | None]]:
    """Name of a class -> its parent in the drawing, and its built-in base in parentheses."""
    tree: dict[str, tuple[str, str | None]] = {}
    parents = ["OnwardError"]
    for line in inspect.cleandoc(errors.__doc__ or "").splitlines():
        if (node := _NODE.match(line)) and node["branches"]:
            depth = len(node["branches"]) // 4
            tree[node["name"]] = (parents[depth - 1], node["built_in"])
            parents[depth:] = [node["name"]]
    return tree


def subclasses(of: type[Exception]) -> Iterator[type[Exception]]:
    for subclass in of.__subclasses__():
        yield subclass
        yield from subclasses(subclass)


def test_the_documented_tree_has_every_error_with_its_bases():
    for module in pkgutil.walk_packages(onward.__path__, "onward."):
        if not module.name.endswith("__main__"):
            try:
                importlib.import_module(module.name)
            except ModuleNotFoundError as error:  # an extra that is not installed
                if error.name not in ("ray", "lm_eval", "pyarrow", "trl"):
                    raise
    ours = [subclass for subclass in subclasses(OnwardError) if subclass.__module__.startswith("onward.")]
    defined = {error.__name__: [base.__name__ for base in error.__bases__] for error in ours}
    drawn = {name: [parent, *([built_in] if built_in else [])] for name, (parent, built_in) in drawn_tree().items()}
    assert drawn == defined
