"""Whether boxes tile a tensor: they lie inside it, apart from each other, and leave nothing out."""

import math
from collections.abc import Sequence

# A box: its offsets and its sizes, one of each for every dimension.
Box = tuple[tuple[int, ...], tuple[int, ...]]

# Meshes cut a tensor once for each of their dimensions. Boxes that no cut divides are compared each with each.
_MOST_CUTS = 64
_MOST_COMPARED = 64


def covers_once(shape: tuple[int, ...], boxes: Sequence[Box]) -> bool:
    """Whether every element of `shape` is in exactly one box.

    Time grows as the sorting of the boxes: they are divided where a plane cuts through none of them, again and again,
    as whoever made the shards did.

    Raises:
        ValueError: a box of another number of dimensions; or boxes so interlocked that no sharding makes them.
    """
    if any(len(offsets) != len(shape) or len(sizes) != len(shape) for offsets, sizes in boxes):
        raise ValueError(f"a tensor of {len(shape)} dimensions has a chunk of another number")
    ends_inside = all(offset + size <= end for box in boxes for offset, size, end in zip(*box, shape, strict=True))
    # An empty shard, as the last ranks have of a small tensor, covers nothing.
    full = [box for box in boxes if math.prod(box[1])]
    volume = sum(math.prod(sizes) for _, sizes in full)
    return ends_inside and volume == math.prod(shape) and _apart(full)


def _apart(boxes: list[Box]) -> bool:
    groups = [boxes]
    for _ in range(_MOST_CUTS):
        groups = [group for group in groups if len(group) > 1]
        if not groups:
            return True
        divided = [part for group in groups for part in _divided(group)]
        if len(divided) == len(groups):
            break
        groups = divided
    if any(len(group) > _MOST_COMPARED for group in groups):
        raise ValueError(f"{max(map(len, groups))} chunks of one tensor interlock as no sharding makes them")
    return not any(_overlap(one, other) for group in groups for at, one in enumerate(group) for other in group[:at])


def _divided(boxes: list[Box]) -> list[list[Box]]:
    """The boxes in groups between which planes run that cut none of them; one group where there is no such plane."""
    for dim in range(len(boxes[0][0])):
        groups: list[list[Box]] = []
        reached = -1
        for box in sorted(boxes, key=lambda box: box[0][dim]):
            start = box[0][dim]
            if not groups or start >= reached:
                groups.append([])
            groups[-1].append(box)
            reached = max(reached, start + box[1][dim])
        if len(groups) > 1:
            return groups
    return [boxes]


def _overlap(one: Box, other: Box) -> bool:
    return all(max(a, b) < min(a + n, b + m) for a, n, b, m in zip(*one, *other, strict=True))
