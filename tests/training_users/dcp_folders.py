"""Training checkpoints: written by torch.distributed.checkpoint, or in its format with tensors split at will."""

import io
import json
import pickle
import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from onward.testing import random_checkpoint


def stock_checkpoint(folder: Path, family: str = "llama", **overrides: object) -> tuple[Path, dict[str, torch.Tensor]]:
    """A folder in the Hugging Face layout to compare with, and its weights."""
    path = random_checkpoint(folder, family, **overrides)
    return path, load_file(path / "model.safetensors")


def save(folder: Path, stock: Path, state: dict) -> Path:
    """A checkpoint of a trainer with one process, and the config of `stock` in the same folder."""
    with warnings.catch_warnings():
        # It tells everyone without a process group that there is none, who says so (no_dist) too.
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        dcp.save(state, checkpoint_id=folder, no_dist=True)
    (folder / "config.json").write_text((stock / "config.json").read_text())
    return folder


def write_sharded(folder: Path, stock: Path, tensors: dict[str, torch.Tensor], cuts: dict[str, list]) -> Path:
    """The same format with every tensor cut into boxes over several files, as the ranks of a mesh save it.

    cuts: a tensor's boxes, (file, offsets, sizes); those that are not named are one box in "__0_0.distcp".
    """
    folder.mkdir(parents=True)
    files: dict[str, io.BytesIO] = {}
    entries, storage = {}, {}
    for name, tensor in tensors.items():
        chunks = []
        for file, offsets, sizes in cuts.get(name, [("__0_0.distcp", [0] * tensor.dim(), tensor.shape)]):
            box = tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))
            out = files.setdefault(file, io.BytesIO())
            start = out.tell()
            part = io.BytesIO()
            torch.save(tensor[box].clone(), part)
            out.write(part.getvalue())
            storage[MetadataIndex(name, offsets)] = _StorageInfo(file, start, out.tell() - start)
            chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
        entries[name] = TensorStorageMetadata(TensorProperties(dtype=tensor.dtype), tensor.shape, chunks)
    for file, out in files.items():
        (folder / file).write_bytes(out.getvalue())
    (folder / ".metadata").write_bytes(pickle.dumps(Metadata(entries, None, storage)))
    (folder / "config.json").write_text((stock / "config.json").read_text())
    return folder


def rewrite_metadata(folder: Path, change) -> None:
    """Apply `change` to the unpickled metadata (our own, so it may be unpickled) and write it back."""
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def write_map(file: Path, entries: dict) -> Path:
    file.write_text(json.dumps(entries))
    return file


# Meta's names of a Llama, as torchtitan keeps them.
META_NAMES = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "layers.{}.attention.wq.weight": {"to": "model.layers.{}.self_attn.q_proj.weight", "rope": "interleaved"},
    "layers.{}.attention.wk.weight": {"to": "model.layers.{}.self_attn.k_proj.weight", "rope": "interleaved"},
    "layers.{}.attention.wv.weight": "model.layers.{}.self_attn.v_proj.weight",
    "layers.{}.attention.wo.weight": "model.layers.{}.self_attn.o_proj.weight",
    "layers.{}.feed_forward.w1.weight": "model.layers.{}.mlp.gate_proj.weight",
    "layers.{}.feed_forward.w3.weight": "model.layers.{}.mlp.up_proj.weight",
    "layers.{}.feed_forward.w2.weight": "model.layers.{}.mlp.down_proj.weight",
    "layers.{}.attention_norm.weight": "model.layers.{}.input_layernorm.weight",
    "layers.{}.ffn_norm.weight": "model.layers.{}.post_attention_layernorm.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


def interleaved(weight: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Rows of queries or keys in halves, put in pairs: row 2i of a head is row i, row 2i + 1 is row i + E/2."""
    out = torch.empty_like(weight)
    for head in range(0, weight.shape[0], head_dim):
        for i in range(head_dim // 2):
            out[head + 2 * i] = weight[head + i]
            out[head + 2 * i + 1] = weight[head + i + head_dim // 2]
    return out


def in_metas_names(tensors: dict[str, torch.Tensor], head_dim: int) -> dict[str, torch.Tensor]:
    """Hugging Face's weights under Meta's names and in Meta's order of rows."""
    stock_names = {}
    for ours, target in META_NAMES.items():
        stock_names[target if isinstance(target, str) else target["to"]] = ours
    named = {}
    for name, tensor in tensors.items():
        parts = name.split(".")
        layer = parts[2] if parts[1] == "layers" else ""
        pattern = ".".join(["model", "layers", "{}", *parts[3:]]) if layer else name
        rotated = parts[-2] in ("q_proj", "k_proj")
        named[stock_names[pattern].replace("{}", layer)] = interleaved(tensor, head_dim) if rotated else tensor
    return named
