"""Whether a model's weights are still those that a cache was filled with."""

import weakref
from typing import final

from torch import Tensor
from torch.utils import _pytree as pytree

from onward.models.model import Model
from onward.models.module import ModuleForward


@final
class WeightsVersion:
    """The weights of a model as they are now: which tensors, and how often each was written to. Compared with ==.

    It keeps none of them in memory. A step of an optimizer, `load_state_dict` and whatever else writes to a tensor
    is seen; writing through `tensor.data`, a NumPy array or a mapped file is not.
    """

    def __init__(self, model: Model) -> None:
        self._model = weakref.ref(model)
        params = model.params
        if isinstance(model.forward, ModuleForward) and params is model.forward.params:
            params = model.forward.look_up()
        tensors = [leaf for leaf in pytree.tree_leaves(params) if isinstance(leaf, Tensor)]
        self._seen = [(weakref.ref(tensor), _writes(tensor)) for tensor in tensors]

    def is_of(self, model: Model) -> bool:
        """Whether they are, or were, the weights of this model."""
        return self._model() is model

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, WeightsVersion) or len(self._seen) != len(other._seen):
            return False
        model = self._model()
        return (
            model is not None
            and other.is_of(model)
            and all(
                one() is two() is not None and written == written_by_then
                for (one, written), (two, written_by_then) in zip(self._seen, other._seen, strict=True)
            )
        )

    __hash__ = None  # type: ignore[assignment]


def _writes(tensor: Tensor) -> int:
    # Tensors made in inference mode do not count theirs.
    return -1 if tensor.is_inference() else tensor._version
