"""Checks of `PagedCacheManager`: each block is free, cached or referenced, and no slot writes to a visible block."""

from collections import Counter
from itertools import pairwise

from onward.cache.block_kinds import RecurrentStates, SlidingWindow


def counts(slots):
    """The numbers of free, cached and referenced blocks."""
    stats = slots.stats()
    return stats.available - stats.cached, stats.cached, stats.total - stats.available


def check_accounts(slots):
    """Assert that the accounts of `PagedCacheManager` add up, and that slots share no block that one may write."""
    with slots.lock:
        slots.stats()  # earlier releases come first
        live, allocator, index = list(slots._slots), slots._allocator, slots._index
        nodes = list(index)
        for kind in allocator.kinds:
            check_kind(kind, live, nodes)
        check_nodes(allocator.kinds[0], nodes, index.size)
        used = sum(kind.used * kind.price for kind in allocator.kinds)
        assert used <= allocator.total, f"{used} units are used of {allocator.total}"
        assert allocator.available >= 0, f"{-allocator.available} units are reserved that are not there"
        cached = sum(len(kind.cached) * kind.price for kind in allocator.kinds if kind.max_cached is None)
        assert cached <= allocator.max_cached, f"{cached} units are cached, above {allocator.max_cached}"
        for slot in live:
            check_slot(slot, allocator.kinds[0], index)
        for window in slots._windows:
            check_windows(window, live)


def blocks_of(slot, kind):
    """The blocks of a kind that a slot holds."""
    if isinstance(kind, SlidingWindow):
        return list(slot.windows.values())
    if isinstance(kind, RecurrentStates):
        return [] if slot.state is None else [slot.state]
    return slot.blocks


def check_kind(kind, slots, nodes):
    """Each block is free, cached or referenced exactly once; the oldest is evicted first; nodes own their blocks."""
    holders = Counter(block for slot in slots for block in blocks_of(slot, kind))
    assert kind.holders == [holders[block] for block in range(kind.count)], "holders are counted wrong"
    cached = [node.blocks[kind.number] for node in kind.cached]
    states = Counter([*kind.warm, *kind.cold, *cached, *holders])
    assert sorted(states) == list(range(kind.count)), "a block is neither free nor cached nor in use"
    assert max(states.values(), default=1) == 1, "a block is in two of free, cached and in use"
    assert list(kind.cached.values()) == sorted(kind.cached.values()), "the oldest does not go first"
    linked = {block: node for node in nodes if (block := node.blocks[kind.number]) is not None}
    found = {block: node for block, node in enumerate(kind.nodes) if node is not None}
    assert linked == found, "a node has a block that is not known as its own"
    assert all(holders[block] or node in kind.cached for block, node in found.items()), "a block that is found is free"
    if kind.max_cached is None:
        assert len(kind.warm) <= 2 * kind.warm_blocks, f"{len(kind.warm)} free blocks keep their memory"
    else:
        assert len(kind.cached) <= kind.max_cached, f"{len(kind.cached)} are cached, above {kind.max_cached}"


def check_nodes(text, nodes, size):
    """Cached blocks are ordered so that leaves are evicted first."""
    order = {node: place for place, node in enumerate(text.cached)}
    for node in nodes:
        parent, block = node.parent, node.blocks[0]
        assert parent is not None, "only a root has no parent"
        assert block is not None, "a node has no block"
        assert 0 < len(node.tokens) <= size, f"a block cannot hold {len(node.tokens)} positions"
        assert len(node.tokens) == size or not node.children, "something follows a block that is part full"
        keys = [child.tokens for child in node.children]
        for tokens, following in pairwise(keys):
            assert tokens < following, "children are out of order"
        if parent.parent is not None:
            assert text.holders[parent.blocks[0]] >= text.holders[block], f"block {block} is in use without its parent"
            assert node not in order or parent not in order or order[node] < order[parent], "a parent goes first"


def check_slot(slot, text, index):
    """A slot shares the blocks of its beginning alone, and what it noted can be found."""
    assert len(slot.blocks) == -(-slot.length // index.size), f"{slot} has blocks for another length"
    assert len(set(slot.blocks)) == len(slot.blocks), f"{slot} has a block twice"
    assert slot.noted <= len(slot.blocks), f"{slot} noted what it does not have"
    for block, following in pairwise(slot.blocks):
        assert text.holders[block] >= text.holders[following], f"{slot} shares block {following}, which it may write"
    parent = index.root(slot.root)
    for block in slot.blocks[: slot.noted]:
        node = text.nodes[block]
        assert node is not None, f"{slot} noted block {block}, which cannot be found"
        assert node.parent is parent, f"{slot} noted block {block}, which follows another"
        parent = node
    assert slot.findable or all(text.nodes[block] is None for block in slot.blocks), f"{slot} is not to be found"


def check_windows(windows, slots):
    """Slots have no more than is reserved."""
    assert windows.claimed == sum(slot.max_windows for slot in slots), "what is reserved is counted wrong"
    for slot in slots:
        assert len(slot.windows) <= slot.max_windows, f"{slot} has more window blocks than are reserved"
        assert all(0 <= index < len(slot.blocks) for index in slot.windows), f"{slot} has window blocks past its end"


def check_private(slots, slot, computed):
    """The blocks that a slot writes from a position on are not shared, and not in the index."""
    text, first = slots._kinds[0], computed // slots.block
    for block in slot.blocks[first:]:
        assert text.holders[block] == 1, f"{slot} may write block {block}, which others hold"
        assert text.nodes[block] is None, f"{slot} may write block {block}, which can be found"
    for windows in slots._windows:
        for index, block in slot.windows.items():
            if index >= first:
                assert windows.holders[block] == 1, f"{slot} may write window block {block}, which others hold"
                assert windows.nodes[block] is None, f"{slot} may write window block {block}, which can be found"
