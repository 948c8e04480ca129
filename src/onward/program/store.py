"""A cache of the programs of forwards that are called repeatedly, as `onward.stream` does for each prompt.

A trace takes milliseconds, as long as a few tokens, so programs are cached for the next call with the same forward and
the same tensors in params. They reference neither, and are freed with either. As with any tracing, values that a
forward reads from elsewhere are read once. However, the forward is traced again if a number, string or flag in its
closure or its module's globals changes.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from onward.ops import choice
from onward.program.compiled import ProgramCache
from onward.util.process import module_lock

_PLAIN = (int, float, complex, str, bytes, bool, type(None))
# The maximum number of entries per forward, which differ in params (an adapter swapped in and out) or settings.
_MAX_ENTRIES = 4


@dataclass(eq=False)
class _Entry:
    """key: the inputs of the trace. programs: None once a tensor of params was freed, as the references report."""

    key: tuple[Any, ...]
    programs: ProgramCache | None
    references: "list[weakref.ref[Tensor]]" = field(default_factory=list)


_entries: "weakref.WeakKeyDictionary[Any, list[_Entry]]" = weakref.WeakKeyDictionary()
_lock = module_lock(globals())


def programs_of(forward: Callable[..., Any], params: Any) -> ProgramCache:
    """The `ProgramCache` of this forward with these params; an empty one at first."""
    tensors: list[Tensor] = []
    described: list[Any] = []
    if not _describe(params, tensors, described):
        return ProgramCache()
    key = (described, _settings(forward), choice())
    with _lock:
        try:
            entries = _entries.setdefault(forward, [])
        except TypeError:  # it is not hashable, or supports no weak references
            return ProgramCache()
        entries[:] = [entry for entry in entries if entry.programs is not None]
        for entry in entries:
            if entry.programs is not None and entry.key == key:
                return entry.programs
        programs = ProgramCache()
        entry = _Entry(key, programs)
        entry.references += [weakref.ref(leaf, partial(_forget, weakref.ref(entry))) for leaf in tensors]
        entries.append(entry)
        del entries[:-_MAX_ENTRIES]
        return programs


def _forget(reference: "weakref.ref[_Entry]", _: object) -> None:
    """Free an entry's programs when a tensor of its params is freed.

    It takes no lock, because this thread may hold it. It uses no globals, because the interpreter may be exiting.
    """
    entry = reference()
    if entry is not None:
        entry.programs = None


def _describe(tree: Any, tensors: list[Tensor], described: list[Any]) -> bool:
    """List the dependencies of a trace on params: tensors by identity and address, plain values, and the structure.

    Returns False for any other leaf, because changes of it can't be detected.
    """
    if isinstance(tree, Tensor):
        tensors.append(tree)
        described.append((id(tree), tree.data_ptr(), tree.shape, tree.stride(), tree.dtype))
        return True
    if isinstance(tree, _PLAIN):
        described.append((type(tree), tree))
        return True
    if isinstance(tree, tuple | list):
        described.append((type(tree), len(tree)))
        return all(_describe(item, tensors, described) for item in tree)
    if type(tree) is dict:
        described.append((dict, *tree))
        return all(_describe(item, tensors, described) for item in tree.values())
    leaves, structure = pytree.tree_flatten(tree)
    described.append(structure)
    return not any(leaf is tree for leaf in leaves) and _describe(leaves, tensors, described)


def _settings(forward: Callable[..., Any]) -> tuple[Any, ...]:
    """The plain values that a Python function reads apart from its arguments: closure, defaults and globals."""
    if isinstance(forward, partial):
        return (*_plain([*forward.args, *forward.keywords.values()]), *_settings(forward.func))
    code = getattr(forward, "__code__", None)
    if code is None:
        return ()
    closure = [_content(cell) for cell in forward.__closure__ or ()]
    global_values = [forward.__globals__.get(name) for name in code.co_names]
    defaults = [*(forward.__defaults__ or ()), *(forward.__kwdefaults__ or {}).values()]
    return _plain([*closure, *global_values, *defaults])


def _plain(values: list[Any]) -> tuple[Any, ...]:
    return tuple((type(value), value) if isinstance(value, _PLAIN) else None for value in values)


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # the name has no value yet
        return None
