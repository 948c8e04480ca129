"""The prefix index: a trie of blocks that finds the longest cached prefix of a sequence.

A node's path from the root is the preceding tokens, on which its keys and values depend. Tokens are compared, never a
hash alone. A node is a full block, or a leaf with fewer tokens. Keys and values also depend on the row's adapter, and
tenants may not share them, so each adapter and each salt has its own root (`root_of`).
"""

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence

from onward.cache.allocator import Allocator
from onward.cache.block_kinds import SlidingWindow
from onward.cache.slot import PrefixMatch, PrefixNode, Slot, Tokens, tokens_of


class PrefixIndex:
    """Finds blocks by the ids whose keys and values they hold. size: positions of a block."""

    def __init__(self, allocator: Allocator, size: int) -> None:
        self.size = size
        self._allocator = allocator
        self._text = allocator.kinds[0]
        self._windows = [kind for kind in allocator.kinds if isinstance(kind, SlidingWindow)]
        self._roots: dict[str, PrefixNode] = {}

    def __iter__(self) -> Iterator[PrefixNode]:
        """All nodes but the roots, a parent before its children."""
        pending = [node for root in self._roots.values() for node in root.children]
        while pending:
            node = pending.pop()
            yield node
            pending.extend(node.children)

    def root(self, name: str) -> PrefixNode:
        if name not in self._roots:
            # Adapters and tenants come and go: roots without children are dropped.
            self._roots = {name: root for name, root in self._roots.items() if root.children}
            self._roots[name] = PrefixNode((), [], None)
        return self._roots[name]

    def name_of(self, root: PrefixNode) -> str | None:
        """The name of a root; None if it has been dropped."""
        return next((name for name, other in list(self._roots.items()) if other is root), None)

    def match(self, ids: Sequence[int], limit: int, root: str) -> PrefixMatch:
        """The longest prefix of ids[:limit] from whose end a sequence can continue, because its window and recurrent
        states are cached."""
        match = self._found(ids, limit, root)
        while match.positions and not self._is_usable(match):
            blocks = (match.positions - 1) // self.size
            nodes, start = match.nodes[:blocks], blocks * self.size
            parent, tokens = nodes[-1] if nodes else self.root(root), tuple(ids[start : match.positions])
            # Pinned prefixes may end inside the tokens of another node.
            others = [node for node in parent.children if _is_prefix(node.tokens[: len(tokens)], tokens)]
            ends = [PrefixMatch([*nodes, node], start + min(len(node.tokens), len(tokens))) for node in others]
            usable = [end for end in ends if self._is_usable(end)]
            match = max(usable, key=lambda end: end.positions, default=PrefixMatch(nodes, start))
        return match

    def _is_usable(self, match: PrefixMatch) -> bool:
        return all(kind.is_usable(match) for kind in self._allocator.kinds)

    def branch(self, ids: Sequence[int], limit: int, root: str) -> int:
        """The end of the last full block found for ids[:limit], whether or not a sequence can continue from there."""
        return self._found(ids, limit, root).positions // self.size * self.size

    def _found(self, ids: Sequence[int], limit: int, root: str) -> PrefixMatch:
        if limit <= 0:
            return PrefixMatch([], 0)
        node = self.root(root)
        nodes: list[PrefixNode] = []
        while (end := (len(nodes) + 1) * self.size) <= limit:
            child = _starting_with(node, tuple(ids[end - self.size : end]))
            if child is None:
                break
            nodes.append(child)
            node = child
        start = len(nodes) * self.size
        closest, common = _closest(node.children, tuple(ids[start : min(start + self.size, limit)]))
        return PrefixMatch(nodes if closest is None else [*nodes, closest], start + common)

    def nodes(self, slot: Slot) -> list[PrefixNode]:
        """The nodes of the slot's noted blocks."""
        nodes = [self._text.nodes[block] for block in slot.blocks[: slot.noted]]
        return [node for node in nodes if node is not None]

    def insert(self, slot: Slot, ids: Sequence[int]) -> None:
        """Add the slot's full blocks; `ids` are final. If the index already has a block with the same tokens, the slot
        keeps its own outside the index."""
        while slot.noted < len(slot.blocks) and self._text.nodes[slot.blocks[slot.noted]] is not None:
            slot.noted += 1  # by a slot that shares the block
        parent = self._last_noted(slot)
        while slot.noted < len(ids) // self.size:
            tokens = tuple(ids[slot.noted * self.size : (slot.noted + 1) * self.size])
            if _starting_with(parent, tokens) is not None:
                return
            parent = self._add(parent, tokens, slot, slot.noted)
            slot.noted += 1

    def node_at(self, slot: Slot, ids: Sequence[int], blocks: int) -> PrefixNode | None:
        """The node of the last of the slot's first full blocks, or another one with the same tokens."""
        if slot.noted == blocks:
            return self._last_noted(slot)
        found = self._found(ids, blocks * self.size, slot.root)
        return found.nodes[-1] if found.positions == blocks * self.size else None

    def leave(self, slot: Slot, ids: Sequence[int], pin: bool) -> list[PrefixNode]:
        """Add the blocks after the noted ones, also a partial one, unless another slot holds them. Returns the nodes of
        these ids from the first on, which may have other blocks with the same tokens.

        pin: add a partial block also beside a longer one from which these ids cannot be continued.
        """
        nodes, parent = self.nodes(slot), self._last_noted(slot)
        for index in range(slot.noted, -(-len(ids) // self.size)):
            tokens = tuple(ids[index * self.size : (index + 1) * self.size])
            node = _starting_with(parent, tokens)
            if pin and node is not None and len(node.tokens) > len(tokens) and not self._has_all(node):
                node = None
            if node is None:
                if self._text.holders[slot.blocks[index]] > 1:  # its other holder does not hold the parent
                    break
                node = self._add(parent, tokens, slot, index)
            elif len(node.tokens) == len(tokens):  # else the node's blocks hold more than the slot's
                self._publish(slot, index, node)
            nodes.append(node)
            parent = node
        return nodes

    def _has_all(self, node: PrefixNode) -> bool:
        """Whether a sequence can continue from any position of a node. States are those after its last positions."""
        return len(self._allocator.kinds) == 1 + len(self._windows) and None not in node.blocks

    def clear(self) -> None:
        """Remove all nodes."""
        for node in reversed(list(self)):
            self._allocator.remove(node)

    def _last_noted(self, slot: Slot) -> PrefixNode:
        """The node of the slot's last noted block, or else its root."""
        node = self._text.nodes[slot.blocks[slot.noted - 1]] if slot.noted else self.root(slot.root)
        assert node is not None, "a slot's noted blocks are in the prefix index"
        return node

    def _add(self, parent: PrefixNode, tokens: Tokens, slot: Slot, index: int) -> PrefixNode:
        """Add a child with the slot's blocks of this index. It replaces a leaf that holds a proper prefix of its
        tokens, unless the leaf is pinned."""
        at = bisect_left(parent.children, tokens, key=tokens_of)
        # Whatever sorts between a child and a continuation of its tokens starts with its tokens too.
        shorter = parent.children[at - 1] if at else None
        if shorter is not None and shorter in self._text.cached and _is_prefix(shorter.tokens, tokens):
            self._allocator.remove(shorter)
        node = PrefixNode(tokens, [None] * len(self._allocator.kinds), parent)
        self._text.link(node, slot.blocks[index])
        insort(parent.children, node, key=tokens_of)
        self._publish(slot, index, node)
        return node

    def _publish(self, slot: Slot, index: int, node: PrefixNode) -> None:
        for kind in self._windows:
            kind.publish(slot, index, node)


def _starting_with(parent: PrefixNode, tokens: Tokens) -> PrefixNode | None:
    """The child of `parent` whose first tokens are these."""
    at = bisect_left(parent.children, tokens, key=tokens_of)
    if at < len(parent.children) and parent.children[at].tokens[: len(tokens)] == tokens:
        return parent.children[at]
    return None


def _is_prefix(tokens: Tokens, others: Tokens) -> bool:
    return tokens == others[: len(tokens)]


def _closest(children: list[PrefixNode], tokens: Tokens) -> tuple[PrefixNode | None, int]:
    """The child with the longest common prefix with `tokens`, and its length."""
    # It is a neighbour of the place where `tokens` would be: what lies between two sequences shares their prefix.
    at = bisect_left(children, tokens, key=tokens_of)
    best, common = None, 0
    for child in children[max(at - 1, 0) : at + 1]:
        pairs = enumerate(zip(child.tokens, tokens, strict=False))
        length = next((at for at, (a, b) in pairs if a != b), min(len(child.tokens), len(tokens)))
        if length > common:
            best, common = child, length
    return best, common
