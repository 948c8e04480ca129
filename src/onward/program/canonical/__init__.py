"""Read plain torch as the ops that it spells out.

A forward of somebody's own writes a norm as seven operators and a rotation as five. Each pattern here finds the last of
them and puts one node of `onward.ops` in its place; the others stay, and nobody reads them any more. A pattern holds
only where what is written is the op's definition, with the roundings of the definition at the same places: a
rotation whose products are rounded to bfloat16 one by one stays as it is.

A pattern is a function (graph, node) -> the nodes that take the node's place, or None. A new one is a file and a line.
"""

from collections.abc import Callable

from onward.program.canonical.gates import gate
from onward.program.canonical.graph import Graph
from onward.program.canonical.norms import layer_norm, rms_norm
from onward.program.canonical.products import product
from onward.program.canonical.rotations import rotation
from onward.program.nodes import Node, Trace
from onward.program.packed_params import PackedParams

Pattern = Callable[[Graph, Node], list[Node] | None]

PATTERNS: tuple[Pattern, ...] = (rms_norm, layer_norm, rotation, gate, product)


def canonicalise(trace: Trace, packed: PackedParams | None = None) -> list[Node]:
    """The nodes of a trace, with ops in the place of what spells them out.

    packed: where the copies of matrices go, if params will not change.
    """
    graph = Graph(trace, packed)
    nodes: list[Node] = []
    for node in trace.nodes:
        found = (pattern(graph, node) for pattern in PATTERNS)
        nodes += next((replacement for replacement in found if replacement is not None), [node])
    return nodes
