"""A trie of blocks: finds the longest prefix of a text whose keys and values lie in some block already.

A node is a block and the tokens whose keys and values it holds. Its path from the root is the text before them, on
which they depend. Tokens are compared, never a hash alone. A node is full, or it is a leaf that holds fewer tokens.
Keys and values depend on the row's adapter too, so the texts of each have a root of their own.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import NamedTuple

Tokens = tuple[int, ...]


class PrefixNode:
    """A block that can be found.

    children: ordered by their tokens, none of which are the first tokens of another child. window: the block of the
    sliding layers with the same positions; None where there are none, or it is kept no more. state: the slot of the
    recurrent states of some of its last positions, None where none are kept; state_end: how many positions of the text
    they have seen.
    """

    __slots__ = ("block", "children", "parent", "state", "state_end", "tokens", "window")

    def __init__(self, tokens: Tokens, block: int, parent: "PrefixNode | None") -> None:
        self.tokens = tokens
        self.block = block
        self.parent = parent
        self.children: list[PrefixNode] = []
        self.window: int | None = None
        self.state: int | None = None
        self.state_end = 0


class PrefixMatch(NamedTuple):
    """A prefix that blocks hold.

    path: the full blocks, from the root on. partial: the node whose block holds what follows, and common: its number of
    positions that do; None and 0 where there is none.
    """

    path: list[PrefixNode]
    partial: PrefixNode | None
    common: int


NO_MATCH = PrefixMatch([], None, 0)
_tokens = attrgetter("tokens")


class PrefixTree:
    """Blocks of `size` positions by the text that they hold."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._roots: dict[str, PrefixNode] = {}

    def root(self, adapter: str) -> PrefixNode:
        """Where the texts of an adapter begin, by its digest; "" for those without one."""
        if adapter not in self._roots:
            # Adapters come and go: those whose texts are all gone leave nothing behind.
            self._roots = {digest: root for digest, root in self._roots.items() if root.children}
            self._roots[adapter] = PrefixNode((), -1, None)
        return self._roots[adapter]

    def __iter__(self) -> Iterator[PrefixNode]:
        """All nodes, a parent before its children; roots are none of them."""
        pending = [node for root in self._roots.values() for node in root.children]
        while pending:
            node = pending.pop()
            yield node
            pending.extend(node.children)

    def match(self, ids: Sequence[int], limit: int, adapter: str) -> PrefixMatch:
        """The longest prefix of ids[:limit] that blocks hold for an adapter."""
        node = self.root(adapter)
        path: list[PrefixNode] = []
        while (end := (len(path) + 1) * self.size) <= limit:
            child = self.starting_with(node, tuple(ids[end - self.size : end]))
            if child is None:
                break
            path.append(child)
            node = child
        start = len(path) * self.size
        return PrefixMatch(path, *_closest(node.children, tuple(ids[start : min(start + self.size, limit)])))

    def starting_with(self, parent: PrefixNode, tokens: Tokens) -> PrefixNode | None:
        """The child of `parent` whose first tokens are these; all its tokens, where they fill a block."""
        at = bisect_left(parent.children, tokens, key=_tokens)
        if at < len(parent.children) and parent.children[at].tokens[: len(tokens)] == tokens:
            return parent.children[at]
        return None

    def shorter(self, parent: PrefixNode, tokens: Tokens) -> PrefixNode | None:
        """The child of `parent` that holds the first of these tokens and no others."""
        at = bisect_left(parent.children, tokens, key=_tokens)
        # Whatever sorts between a child and a continuation of its tokens starts with its tokens too.
        if at > 0 and parent.children[at - 1].tokens == tokens[: len(parent.children[at - 1].tokens)]:
            return parent.children[at - 1]
        return None

    def insert(self, parent: PrefixNode, tokens: Tokens, block: int) -> PrefixNode:
        """Add a child; `starting_with` and `shorter` know none for its tokens."""
        node = PrefixNode(tokens, block, parent)
        insort(parent.children, node, key=_tokens)
        return node

    def remove(self, leaf: PrefixNode) -> None:
        assert leaf.parent is not None, "a root stays"
        assert not leaf.children, "a leaf goes before its parent"
        del leaf.parent.children[bisect_left(leaf.parent.children, leaf.tokens, key=_tokens)]


def _closest(children: list[PrefixNode], tokens: Tokens) -> tuple[PrefixNode | None, int]:
    """The child that has the longest prefix in common with `tokens`, and its length."""
    # It is a neighbour of the place where `tokens` would be: what lies between two texts shares what they share.
    at = bisect_left(children, tokens, key=_tokens)
    best, common = None, 0
    for child in children[max(at - 1, 0) : at + 1]:
        length = _common_length(child.tokens, tokens)
        if length > common:
            best, common = child, length
    return best, common


def _common_length(tokens: Tokens, others: Tokens) -> int:
    for length, (token, other) in enumerate(zip(tokens, others, strict=False)):
        if token != other:
            return length
    return min(len(tokens), len(others))
