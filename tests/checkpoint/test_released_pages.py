"""Pages of a mapped checkpoint leave memory after their last read: memory has the weights once."""

import re
import sys
from pathlib import Path

import pytest
import torch

import onward
from tiny_checkpoint import make_checkpoint, split_into_shards

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere no page is released")
WIDE = {"hidden_size": 512, "intermediate_size": 2048}


def resident(folder: Path) -> int:
    """Bytes of the folder's files that this process's maps hold in memory."""
    size, inside = 0, False
    for line in Path("/proc/self/smaps").read_text(errors="surrogateescape").splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            inside = str(folder) in line
        elif inside and line.startswith("Rss:"):
            size += 1024 * int(line.split()[1])
    return size


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize(
    "options", [{"dtype": "bfloat16"}, {"quantize": "int8"}, {"quantize": "int4"}, {"quantize": "iq4_nl"}]
)
def test_a_loaded_model_leaves_no_file_pages_in_memory(tmp_path, options, shards):
    make_checkpoint(tmp_path, dtype=torch.bfloat16, **WIDE)
    if shards > 1:
        split_into_shards(tmp_path)
    nbytes = sum(file.stat().st_size for file in tmp_path.glob("*.safetensors"))
    lm = onward.load(tmp_path, **options)
    # Norms stay the file's own, and reading one brings the pages around it (64 KB by default) with it.
    assert resident(tmp_path) < nbytes / 4
    assert lm.generate([5, 6, 7], max_new_tokens=2, temperature=0, ignore_eos=True).token_ids
