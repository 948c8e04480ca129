"""A .metadata file is an untrusted pickle: none of it runs, and the error contains the refused name."""

import builtins
import contextlib
import io
import os
import pickle
import random
import subprocess
import zipfile

import pytest
import torch
from dcp_folders import rewrite_metadata, save, stock_checkpoint, write_sharded
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

import onward
from onward.checkpoint.dcp import covers_once
from onward.errors import CheckpointError


class Calls:
    """Pickles to a call of `function` with `arguments`."""

    def __init__(self, function, *arguments):
        self.call = (function, arguments)

    def __reduce__(self):
        return self.call


@pytest.fixture
def folder(tmp_path):
    stock, tensors = stock_checkpoint(tmp_path / "stock")
    return save(tmp_path / "run", stock, tensors)


@pytest.mark.parametrize("where", ["root", "planner_data", "a tensor's size"])
@pytest.mark.parametrize(
    ("function", "named"),
    [
        (os.system, "posix.system"),
        (builtins.eval, "builtins.eval"),
        (builtins.getattr, "builtins.getattr"),
        (subprocess.Popen, "subprocess.Popen"),
        (torch.load, "torch.serialization.load"),
        (torch.hub.load, "torch.hub.load"),
    ],
)
def test_a_call_is_refused_by_name_and_does_not_run(folder, tmp_path, function, named, where):
    trace = tmp_path / "trace"
    attack = Calls(function, f"touch {trace}" if function is not eval else f"open({str(trace)!r}, 'w')")
    if where == "root":
        (folder / ".metadata").write_bytes(pickle.dumps(attack))
    elif where == "planner_data":
        rewrite_metadata(folder, lambda metadata: setattr(metadata, "planner_data", attack))
    else:
        rewrite_metadata(
            folder, lambda metadata: setattr(metadata.state_dict_metadata["lm_head.weight"], "size", attack)
        )
    with pytest.raises(CheckpointError) as caught:
        onward.load(folder)
    assert f"uses {named}, which no checkpoint of tensors needs: it was not run" in str(caught.value)
    assert not trace.exists()


@pytest.mark.parametrize(
    "name", ["Size.__reduce__", "nn.Module", "float32.__class__", "os.system", "serialization._get_layout"]
)
def test_dotted_names_are_refused_too(folder, name):
    # Protocol 4 looks names with dots up part by part, from an admitted module on.
    needle = b"\x8c" + bytes([len("torch")]) + b"torch" + b"\x8c" + bytes([len(name)]) + name.encode()
    (folder / ".metadata").write_bytes(b"\x80\x04" + needle + b"\x93.")
    with pytest.raises(CheckpointError) as caught:
        onward.load(folder)
    assert f"uses torch.{name}, which" in str(caught.value)


def test_admitted_classes_are_not_pytorchs_own(folder):
    """Their methods, attributes and constructors are out of a pickle's reach: only data comes out of it."""
    module = b"ctorch.distributed.checkpoint.metadata\nMetadata\n"
    before = dict(vars(torch.distributed.checkpoint.metadata.Metadata))
    # BUILD on the class itself, which would set its attributes.
    (folder / ".metadata").write_bytes(b"\x80\x02" + module + b"}(X\x01\x00\x00\x00aK\x01ub.")
    with pytest.raises(CheckpointError):
        onward.load(folder)
    assert dict(vars(torch.distributed.checkpoint.metadata.Metadata)) == before


def test_a_shard_that_is_a_program_is_refused(folder, tmp_path):
    trace = tmp_path / "trace"
    shard = folder / "__0_0.distcp"
    torch.save([Calls(os.system, f"touch {trace}"), torch.zeros(500 * 500)], tmp_path / "attack.pt")
    attack = (tmp_path / "attack.pt").read_bytes()

    def point_at_it(metadata):
        for info in metadata.storage_data.values():
            info.offset, info.length = len(whole), len(attack)

    whole = shard.read_bytes()
    shard.write_bytes(whole + attack)
    rewrite_metadata(folder, point_at_it)
    with pytest.raises(CheckpointError, match="cannot be read"):
        onward.load(folder)
    assert not trace.exists()


# ── few bytes that ask for much ───────────────────────────────────────────────────────────────────────────────


def test_a_value_of_nested_tuples_is_not_printed(folder):
    """Nor is one in place of a size or a name."""
    nested = ("x",)
    for _ in range(60):
        nested = (nested, nested)

    def change(metadata):
        metadata.state_dict_metadata["lm_head.weight"].size = nested

    rewrite_metadata(folder, change)
    with pytest.raises(CheckpointError, match="sizes must be non-negative integers"):
        onward.load(folder)


def test_no_memory_is_allocated_for_missing_bytes(folder):
    (folder / ".metadata").write_bytes(b"\x80\x05N\x96" + (2**50).to_bytes(8, "little"))
    with pytest.raises(CheckpointError, match="cannot be read"):
        onward.load(folder)


def test_a_file_longer_than_any_metadata_is_not_read(folder):
    with (folder / ".metadata").open("r+b") as file:
        file.truncate(2**30 + 1)  # a hole: it takes no room on the disk
    with pytest.raises(CheckpointError, match="more than the limit of"):
        onward.load(folder)


def test_one_list_of_chunks_for_many_tensors_is_refused(folder):
    def share(metadata):
        one = metadata.state_dict_metadata["lm_head.weight"]
        one.chunks *= 50
        metadata.state_dict_metadata |= {f"again.{i}": one for i in range(50)}

    rewrite_metadata(folder, share)
    with pytest.raises(CheckpointError, match="more chunks than the files hold"):
        onward.load(folder)


def test_a_tensor_larger_than_its_bytes_is_refused_before_allocation(folder):
    """The config agrees to a vocabulary that would be terabytes."""
    rows = 2**31 - 1

    def enlarge(metadata):
        for name in ("lm_head.weight", "model.embed_tokens.weight"):
            tensor = metadata.state_dict_metadata[name]
            tensor.size = torch.Size([rows, 32])
            half = rows // 2
            offsets = [(0, 0), (half, 0)]
            tensor.chunks = [
                ChunkStorageMetadata(torch.Size(at), torch.Size([size, 32]))
                for at, size in zip(offsets, (half, rows - half), strict=True)
            ]
            info = metadata.storage_data.pop(MetadataIndex(name, [0, 0]))
            metadata.storage_data |= {MetadataIndex(name, at): info for at in offsets}

    rewrite_metadata(folder, enlarge)
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(config.replace('"vocab_size": 258', f'"vocab_size": {rows}'))
    assert str(rows) in (folder / "config.json").read_text()
    with pytest.raises(CheckpointError, match=r"bytes of __0_0\.distcp cannot hold torch\.float32"):
        onward.load(folder)


@pytest.mark.parametrize("seed", range(30))
def test_boxes_that_tile_a_tensor_and_boxes_that_nearly_do(seed):
    """Cut at random, in up to four dimensions; then one box moved, resized, doubled or taken away."""
    random_ = random.Random(seed)
    shape = tuple(random_.randint(1, 9) for _ in range(random_.randint(1, 4)))
    boxes = [((0,) * len(shape), shape)]
    for _ in range(random_.randint(0, 40)):
        offsets, sizes = boxes.pop(random_.randrange(len(boxes)))
        dim = random_.randrange(len(shape))
        at = random_.randint(0, sizes[dim])  # an empty shard now and then
        for start, size in ((offsets[dim], at), (offsets[dim] + at, sizes[dim] - at)):
            boxes.append((replaced(offsets, dim, start), replaced(sizes, dim, size)))
    random_.shuffle(boxes)
    assert covers_once(shape, boxes)
    at = next(at for at, (_, sizes) in enumerate(boxes) if 0 not in sizes)
    offsets, sizes = boxes[at]
    dim = random_.randrange(len(shape))
    rest = boxes[:at] + boxes[at + 1 :]
    assert not covers_once(shape, rest)
    assert not covers_once(shape, [*boxes, boxes[at]])
    assert not covers_once(shape, [*rest, (replaced(offsets, dim, offsets[dim] + 1), sizes)])
    assert not covers_once(shape, [*rest, (offsets, replaced(sizes, dim, sizes[dim] + 1))])


def replaced(numbers, at, number):
    return (*numbers[:at], number, *numbers[at + 1 :])


def test_boxes_that_no_plane_divides():
    wheel = [((0, 0), (1, 2)), ((0, 2), (2, 1)), ((2, 1), (1, 2)), ((1, 0), (2, 1)), ((1, 1), (1, 1))]
    assert covers_once((3, 3), wheel)
    assert not covers_once((3, 3), [*wheel[:-1], ((0, 0), (1, 1))])


def test_a_hundred_thousand_chunks_are_not_compared_pairwise():
    grid = [((row, column), (1, 1)) for row in range(400) for column in range(250)]
    assert covers_once((400, 250), grid)
    assert not covers_once((400, 250), [((0, 0), (1, 1))] * 100_000)
    diagonal = [((at, at), (1, 1)) for at in range(5000)]
    with pytest.raises(ValueError, match="interlock"):
        covers_once((5000, 5000), [*diagonal, ((0, 0), (4999, 5000))])


# ── entries that are no dense tensors ─────────────────────────────────────────────────────────────────────────


@pytest.mark.filterwarnings("ignore:.*(Sparse|prototype).*:UserWarning")
@pytest.mark.parametrize(
    ("make", "layout"),
    [
        (lambda dense: dense.to_sparse(), "sparse_coo"),
        (lambda dense: dense.to_sparse_csr(), "sparse_csr"),
        (lambda dense: dense.to_sparse_csc(), "sparse_csc"),
        (lambda dense: dense.to("meta"), "device meta"),
        (lambda dense: torch.nested.nested_tensor([dense]), "nested tensor"),
    ],
    ids=["COO", "CSR", "CSC", "meta", "nested"],
)
def test_weights_other_than_dense_tensors_are_refused_by_layout(folder, make, layout):
    replace_entry(folder, "lm_head.weight", make(torch.ones(258, 32)))
    with pytest.raises(CheckpointError) as caught:
        onward.load(folder)
    message = str(caught.value)
    assert "tensor 'lm_head.weight' is" in message
    assert layout in message
    assert "dense" in message


def replace_entry(folder, name, value):
    """Replace a tensor's bytes by something else, with padding to its length."""
    part = io.BytesIO()
    torch.save(value, part)
    with zipfile.ZipFile(part, "a") as archive:
        archive.writestr("archive/padding", bytes(258 * 32 * 4))
    shard = folder / "__0_0.distcp"
    start = shard.stat().st_size
    shard.write_bytes(shard.read_bytes() + part.getvalue())

    def point_at_it(metadata):
        info = next(info for index, info in metadata.storage_data.items() if index.fqn == name)
        info.offset, info.length = start, len(part.getvalue())

    rewrite_metadata(folder, point_at_it)


def test_a_compressed_shard_is_refused_before_it_is_unpacked(folder):
    """A million zeros are a thousand bytes in it."""
    part = io.BytesIO()
    torch.save(torch.zeros(258, 32), part)
    packed = io.BytesIO()
    with zipfile.ZipFile(part) as archive, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as out:
        for record in archive.infolist():
            out.writestr(record.filename, archive.read(record))
        out.writestr("padding", random.Random(0).randbytes(258 * 32 * 4))
    shard = folder / "__0_0.distcp"
    start = shard.stat().st_size
    shard.write_bytes(shard.read_bytes() + packed.getvalue())

    def point_at_it(metadata):
        info = next(info for index, info in metadata.storage_data.items() if index.fqn == "lm_head.weight")
        info.offset, info.length = start, len(packed.getvalue())

    rewrite_metadata(folder, point_at_it)
    with pytest.raises(CheckpointError, match=r"'lm_head\.weight' cannot be read: it is compressed"):
        onward.load(folder)


def test_a_file_with_a_too_long_name_is_missing(tmp_path):
    stock, tensors = stock_checkpoint(tmp_path / "stock")
    folder = write_sharded(tmp_path / "run", stock, tensors, {})

    def rename(metadata):
        for info in metadata.storage_data.values():
            info.relative_path = "n" * 1000

    rewrite_metadata(folder, rename)
    with pytest.raises(CheckpointError, match="is missing, though the metadata lists it"):
        onward.load(folder)


def test_a_changed_byte_is_refused_or_harmless(folder):
    """Whatever torch's reader of it raises is an error of ours."""
    random_ = random.Random(11)
    for name in (".metadata", "__0_0.distcp"):
        whole = (folder / name).read_bytes()
        for _ in range(150):
            changed = bytearray(whole)
            for _ in range(random_.randint(1, 4)):
                changed[random_.randrange(len(whole))] = random_.randrange(256)
            (folder / name).write_bytes(changed)
            with contextlib.suppress(CheckpointError):
                onward.load(folder)
        (folder / name).write_bytes(whole)
