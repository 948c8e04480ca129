"""Check that boxes tile a tensor: they lie inside it, do not overlap and leave nothing out."""

import math
from collections.abc import Sequence
from itertools import combinations

# A box: its offsets and its sizes, one of each for every dimension.
Box = tuple[tuple[int, ...], tuple[int, ...]]

# A device mesh cuts a tensor once for each of its dimensions. Boxes that no plane divides are compared pair by pair.
_MOST_CUTS = 64
_MOST_COMPARED = 64


def covers_once(shape: tuple[int, ...], boxes: Sequence[Box]) -> bool:
    """Whether every element of `shape` is in exactly one box.

    It takes about the time of sorting the boxes: planes that cut through no box divide them, again and again.

    Raises:
        ValueError: a box has another number of dimensions, or the boxes interlock as no sharding makes them.
    """
    if any(len(offsets) != len(shape) or len(sizes) != len(shape) for offsets, sizes in boxes):
        raise ValueError(f"a tensor of {len(shape)} dimensions has a chunk of another number")
    ends_inside = all(offset + size <= end for box in boxes for offset, size, end in zip(*box, shape, strict=True))
    # An empty shard, as the last ranks have of a small tensor, covers nothing.
    full = [box for box in boxes if math.prod(box[1])]
    volume = sum(math.prod(sizes) for _, sizes in full)
    return ends_inside and volume == math.prod(shape) and _are_disjoint(full)


def _are_disjoint(boxes: list[Box]) -> bool:
    groups = [boxes]
    for _ in range(_MOST_CUTS):
        groups = [group for group in groups if len(group) > 1]
        if not groups:
            return True
        parts = [part for group in groups for part in _split_by_planes(group)]
        if len(parts) == len(groups):
            break
        groups = parts
    if any(len(group) > _MOST_COMPARED for group in groups):
        raise ValueError(f"{max(map(len, groups))} chunks of one tensor interlock as no sharding makes them")
    return not any(_overlap(*pair) for group in groups for pair in combinations(group, 2))


def _split_by_planes(boxes: list[Box]) -> list[list[Box]]:
    """The boxes in groups, separated by planes that cut no box; one group where there is no such plane."""
    for dim in range(len(boxes[0][0])):
        groups: list[list[Box]] = []
        group_end = -1
        for box in sorted(boxes, key=lambda box: box[0][dim]):
            start = box[0][dim]
            if not groups or start >= group_end:
                groups.append([])
            groups[-1].append(box)
            group_end = max(group_end, start + box[1][dim])
        if len(groups) > 1:
            return groups
    return [boxes]


def _overlap(first: Box, second: Box) -> bool:
    return all(max(a, b) < min(a + n, b + m) for a, n, b, m in zip(*first, *second, strict=True))
