"""A trie of blocks that finds the longest cached prefix of a sequence.

A node is a block with the tokens whose keys and values it holds. Its path from the root is the preceding tokens, on
which they depend. Tokens are compared, never a hash alone. A node is a full block, or a leaf with fewer tokens.
Keys and values also depend on the row's adapter, so each adapter has its own root.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple

Tokens = tuple[int, ...]


@dataclass(eq=False, slots=True, repr=False)
class PrefixNode:
    """A block in the prefix index.

    children: ordered by their tokens, none of which is a prefix of another child's. window: the sliding-window block
    with the same positions, if it is still cached. state: the slot of the recurrent states of some of its last
    positions, if cached; state_end: the number of positions they have seen.
    """

    tokens: Tokens
    block: int
    parent: "PrefixNode | None"
    children: list["PrefixNode"] = field(default_factory=list)
    window: int | None = None
    state: int | None = None
    state_end: int = 0


class PrefixMatch(NamedTuple):
    """A cached prefix.

    path: its full blocks, from the root on. partial: the node whose first `common` positions follow, if any.
    """

    path: list[PrefixNode]
    partial: PrefixNode | None
    common: int


NO_MATCH = PrefixMatch([], None, 0)
_tokens = attrgetter("tokens")


class PrefixTree:
    """A trie of blocks of `size` positions."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._roots: dict[str, PrefixNode] = {}

    def root(self, adapter: str) -> PrefixNode:
        """The root of an adapter, by its digest; "" is no adapter."""
        if adapter not in self._roots:
            # Adapters come and go: roots without children are dropped.
            self._roots = {digest: root for digest, root in self._roots.items() if root.children}
            self._roots[adapter] = PrefixNode((), -1, None)
        return self._roots[adapter]

    def __iter__(self) -> Iterator[PrefixNode]:
        """All nodes but the roots, a parent before its children."""
        pending = [node for root in self._roots.values() for node in root.children]
        while pending:
            node = pending.pop()
            yield node
            pending.extend(node.children)

    def match(self, ids: Sequence[int], limit: int, adapter: str) -> PrefixMatch:
        """The longest cached prefix of ids[:limit]."""
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
        """The child of `parent` whose first tokens are these."""
        at = bisect_left(parent.children, tokens, key=_tokens)
        if at < len(parent.children) and parent.children[at].tokens[: len(tokens)] == tokens:
            return parent.children[at]
        return None

    def shorter(self, parent: PrefixNode, tokens: Tokens) -> PrefixNode | None:
        """The child of `parent` whose tokens are a proper prefix of these."""
        at = bisect_left(parent.children, tokens, key=_tokens)
        # Whatever sorts between a child and a continuation of its tokens starts with its tokens too.
        if at > 0 and parent.children[at - 1].tokens == tokens[: len(parent.children[at - 1].tokens)]:
            return parent.children[at - 1]
        return None

    def insert(self, parent: PrefixNode, tokens: Tokens, block: int) -> PrefixNode:
        """Add a child; `starting_with` and `shorter` find none for its tokens."""
        node = PrefixNode(tokens, block, parent)
        insort(parent.children, node, key=_tokens)
        return node

    def remove(self, leaf: PrefixNode) -> None:
        assert leaf.parent is not None, "a root stays"
        assert not leaf.children, "a leaf goes before its parent"
        del leaf.parent.children[bisect_left(leaf.parent.children, leaf.tokens, key=_tokens)]


def _closest(children: list[PrefixNode], tokens: Tokens) -> tuple[PrefixNode | None, int]:
    """The child with the longest common prefix with `tokens`, and its length."""
    # It is a neighbour of the place where `tokens` would be: what lies between two sequences shares their prefix.
    at = bisect_left(children, tokens, key=_tokens)
    best, common = None, 0
    for child in children[max(at - 1, 0) : at + 1]:
        pairs = enumerate(zip(child.tokens, tokens, strict=False))
        length = next((at for at, (a, b) in pairs if a != b), min(len(child.tokens), len(tokens)))
        if length > common:
            best, common = child, length
    return best, common
