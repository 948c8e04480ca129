"""The accounts of `PagedCacheManager`: each block is free, cached or held, and nobody sees what another may write."""

from collections import Counter
from itertools import pairwise

from onward.cache.slot import digest_of


def check_accounts(slots):
    """Assert that the accounts of `PagedCacheManager` add up, and that slots share no block that one may write."""
    with slots.lock:
        slots._mend()
        held, budget, states = list(slots._slots), slots._budget, slots._states
        check_slots(slots._pool, held, slots.block)
        check_windows(slots._pool, slots._windows, held)
        assert budget._used <= budget.total, f"{budget._used} units are used of {budget.total}"
        assert budget.available >= 0, f"{-budget.available} units are reserved that are not there"
        check_states(states, [slot.state for slot in held])


def check_states(states, held):
    """Each slot of recurrent states is free, kept by a node or held, once."""
    kept = [node.state for node in states.kept]
    assert len(kept) <= states.max_kept, f"nodes keep {len(kept)} states, above {states.max_kept}"
    if states.memory is not None:
        slots = [slot for slot in (*states.free, *kept, *held) if slot is not None]
        assert sorted(slots) == list(range(states.memory.count)), "a slot of states is not had once"


def check_pool(pool, held):
    """Each block is free, cached or held, once; what can be found is ordered so that leaves are evicted first."""
    holders = Counter(block for blocks in held for block in blocks)
    assert pool.holders == [holders[block] for block in range(len(pool.holders))], "holders are counted wrong"
    cached = [node.block for node in pool.cached]
    states = Counter([*pool.warm, *pool.cold, *cached, *holders])
    assert sorted(states) == list(range(len(pool.holders))), "a block is neither free nor cached nor held"
    assert max(states.values(), default=1) == 1, "a block is in two of free, cached and held"
    kept = len(cached) * pool.price
    most = pool._budget.max_cached
    assert kept <= most, f"{kept} blocks are cached, above {most}"
    assert len(pool.warm) <= 2 * pool.warm_blocks, f"{len(pool.warm)} free blocks keep their memory"
    order = {node: place for place, node in enumerate(pool.cached)}
    nodes = list(pool.trie)
    assert sum(node is not None for node in pool.nodes) == len(nodes), "a block can be found that has no node"
    for node in nodes:
        parent = node.parent
        assert parent is not None, "only a root has no parent"
        assert pool.nodes[node.block] is node, f"block {node.block} has two nodes"
        assert holders[node.block] or node in order, f"block {node.block} can be found, but is free"
        assert 0 < len(node.tokens) <= pool.trie.size, f"a block cannot hold {len(node.tokens)} positions"
        full = len(node.tokens) == pool.trie.size
        assert full or not (node.children or holders[node.block]), "a block that is part full is shared"
        keys = [child.tokens for child in node.children]
        for tokens, following in pairwise(keys):
            assert tokens < following, "children are out of order"
            assert tokens != following[: len(tokens)], "a child holds no more than another"
        if parent.parent is not None:
            assert holders[parent.block] >= holders[node.block], f"block {node.block} is held without its parent"
            assert node not in order or parent not in order or order[node] < order[parent], "a parent goes first"


def check_slots(pool, slots, size):
    """`check_pool`, and: what a slot may write is its alone and cannot be found; what it noted can be."""
    check_pool(pool, [slot.blocks for slot in slots])
    for slot in slots:
        assert len(slot.blocks) == -(-slot.length // size), f"{slot} has blocks for another length"
        assert len(set(slot.blocks)) == len(slot.blocks), f"{slot} has a block twice"
        assert slot.noted <= slot.sealed <= len(slot.blocks), f"{slot} noted what it may write"
        for block in slot.blocks[slot.sealed :]:
            assert pool.holders[block] == 1, f"{slot} may write block {block}, which others hold"
            assert pool.nodes[block] is None, f"{slot} may write block {block}, which can be found"
        parent = pool.trie.root(digest_of(slot.adapter))
        for block in slot.blocks[: slot.noted]:
            node = pool.nodes[block]
            assert node is not None, f"{slot} noted block {block}, which cannot be found"
            assert node.parent is parent, f"{slot} noted block {block}, which follows another"
            parent = node
        assert slot.findable or all(pool.nodes[block] is None for block in slot.blocks), f"{slot} is not to be found"


def check_windows(pool, windows, slots):
    """Each window block is free, cached or held, once; slots have no more than is reserved, and write their own."""
    holders = Counter(block for slot in slots for block in slot.windows.values())
    assert windows.holders == [holders[block] for block in range(len(windows.holders))], "holders are counted wrong"
    cached = [node.window for node in windows.cached]
    states = Counter([*windows.warm, *windows.cold, *(block for block in cached if block is not None), *holders])
    assert sorted(states) == list(range(len(windows.holders))), "a window block is neither free nor cached nor held"
    assert max(states.values(), default=1) == 1, "a window block is in two of free, cached and held"
    assert list(windows.cached.values()) == sorted(windows.cached.values()), "the oldest does not go first"
    kept = {node.window: node for node in pool.trie if node.window is not None}
    found = {block: node for block, node in enumerate(windows.nodes) if node is not None}
    assert kept == found, "a node has a window block that is not known as its own"
    assert windows.reserved == sum(slot.max_windows for slot in slots), "what is reserved is counted wrong"
    for slot in slots:
        assert len(slot.windows) <= slot.max_windows, f"{slot} has more window blocks than are reserved"
        assert all(0 <= index < len(slot.blocks) for index in slot.windows), f"{slot} has window blocks past its end"
        for index, block in slot.windows.items():
            if index >= slot.sealed:
                assert windows.holders[block] == 1, f"{slot} may write window block {block}, which others hold"
                assert windows.nodes[block] is None, f"{slot} may write window block {block}, which can be found"
