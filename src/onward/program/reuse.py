"""Programs of forwards that are called again and again, as `onward.stream` is once a prompt.

A trace takes milliseconds, as long as a few tokens, so its result is kept for the next call with the same forward and
the same tensors in params. It holds neither of them: it is gone when either is. As with any tracing, what a forward
reads from elsewhere is read once; numbers, strings and flags among its closure and its module's globals are compared,
and where one has changed the forward is traced anew.
"""

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from onward.forks import call_in_forks
from onward.ops import choice
from onward.program.compiled import Programs

_PLAIN = (int, float, complex, str, bytes, bool, type(None))
# Of one forward: with other params (an adapter swapped in and out) or other settings.
_KEPT = 4


@dataclass(eq=False)
class _Entry:
    """seen: what the forward was traced with. lives: whether the tensors in it do, which the references tell."""

    seen: tuple[Any, ...]
    programs: Programs
    lives: bool = True
    references: "list[weakref.ref[Tensor]]" = field(default_factory=list)


_entries: "weakref.WeakKeyDictionary[Any, list[_Entry]]" = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def _renew_lock() -> None:
    global _lock
    _lock = threading.Lock()


call_in_forks(_renew_lock)


def programs_of(forward: Callable[..., Any], params: Any) -> Programs:
    """The programs made so far of this forward with these params; new ones, empty yet, where there are none."""
    tensors: list[Tensor] = []
    described: list[Any] = []
    if not _describe(params, tensors, described):
        return Programs()
    seen = (described, _settings(forward), choice())
    with _lock:
        try:
            entries = _entries.setdefault(forward, [])
        except TypeError:  # no hash, or no weak reference: then nothing says when it is gone
            return Programs()
        entries[:] = [entry for entry in entries if entry.lives]
        for entry in entries:
            if entry.seen == seen:
                return entry.programs
        entry = _Entry(seen, Programs())
        entry.references += [weakref.ref(leaf, partial(_forget, weakref.ref(entry))) for leaf in tensors]
        entries.append(entry)
        del entries[:-_KEPT]
        return entry.programs


def _forget(reference: "weakref.ref[_Entry]", _: object) -> None:
    """A tensor of params is gone: free the memory that its programs take. (No lock: this thread may hold it.)"""
    entry = reference()
    if entry is not None:
        entry.lives, entry.programs = False, Programs()


def _describe(tree: Any, tensors: list[Tensor], described: list[Any]) -> bool:
    """List what a trace depends on in params: the tensors by identity and place, other leaves by value, and the
    structure. False for a leaf of which nobody can tell whether it has changed."""
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
    """The plain values that a function of Python's sees around it: its closure, defaults and globals."""
    if isinstance(forward, partial):
        return (*_plain([*forward.args, *forward.keywords.values()]), *_settings(forward.func))
    code = getattr(forward, "__code__", None)
    if code is None:
        return ()
    closure = [_content(cell) for cell in forward.__closure__ or ()]
    names = forward.__globals__
    around = [names.get(name) for name in code.co_names]
    defaults = [*(forward.__defaults__ or ()), *(forward.__kwdefaults__ or {}).values()]
    return _plain([*closure, *around, *defaults])


def _plain(values: list[Any]) -> tuple[Any, ...]:
    return tuple((type(value), value) if isinstance(value, _PLAIN) else None for value in values)


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a name that has no value yet
        return None
