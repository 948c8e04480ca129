"""A folder of safetensors whose tensors a name map gives Hugging Face's names."""

from pathlib import Path

import torch
from torch import Tensor

from onward.checkpoint.mapped_tensors import MappedTensors
from onward.checkpoint.name_map import NameMap
from onward.checkpoint.safetensors_folder import SafetensorsFolder
from onward.errors import RequestError
from onward.models import Architecture


class MappedSafetensors(MappedTensors):
    """The tensors of a folder of safetensors by a name map. Whole tensors stay views of the mapped file.

    Raises:
        RequestError: the weights are quantized. CheckpointError: see `MappedTensors`.
    """

    def __init__(
        self, folder: Path, config: Architecture, dtype: torch.dtype | None, device: torch.device, name_map: NameMap
    ) -> None:
        files = SafetensorsFolder(folder, dtype, device)
        if files.is_quantized():
            raise RequestError(f"a name map is for weights in floats, and config.json of {folder} says quantized ones")
        self._tensors = files.named()
        super().__init__(folder, config, dtype, device, self._tensors, name_map)

    def _read_tensor(self, name: str) -> Tensor:
        return self._tensors[name]
