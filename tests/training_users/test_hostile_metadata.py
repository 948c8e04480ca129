"""A .metadata is a stranger's pickle: nothing of it runs, and what it wants is named."""

import builtins
import os
import pickle
import subprocess

import pytest
import torch
from dcp_folders import rewrite_metadata, save, stock_checkpoint

import onward
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
    assert f"wants {named}, which no checkpoint of tensors needs: it was not run" in str(caught.value)
    assert not trace.exists()


@pytest.mark.parametrize(
    "name", ["Size.__reduce__", "nn.Module", "float32.__class__", "os.system", "serialization._get_layout"]
)
def test_a_dotted_name_is_no_way_around(folder, name):
    # Protocol 4 looks names with dots up part by part, from an admitted module on.
    wanted = b"\x8c" + bytes([len("torch")]) + b"torch" + b"\x8c" + bytes([len(name)]) + name.encode()
    (folder / ".metadata").write_bytes(b"\x80\x04" + wanted + b"\x93.")
    with pytest.raises(CheckpointError) as caught:
        onward.load(folder)
    assert f"wants torch.{name}, which" in str(caught.value)


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
    torch.save(Calls(os.system, f"touch {trace}"), tmp_path / "attack.pt")
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
