"""docs/checkpoint-fields.md lists each field with the effect that it has in the code."""

import re

import pytest
from doc_pages import ROOT

from onward.checkpoint import peft as peft_folder
from onward.checkpoint.formats import bitsandbytes, compressed_tensors, fp8, gptq, mxfp4, torchao
from onward.checkpoint.formats.settings import COMMON_FIELDS
from onward.language_model import generation_config
from onward.language_model.options import BEAM_OPTIONS
from onward.models.fields import GENERATION_FIELDS

PAGE = (ROOT / "docs" / "checkpoint-fields.md").read_text(encoding="utf-8")
METHODS = {
    "GPTQ": gptq.FIELDS,
    "AutoRound": gptq.AUTO_ROUND_FIELDS,
    "AWQ": gptq.AWQ_FIELDS,
    "compressed-tensors": compressed_tensors.FIELDS,
    "FP8": fp8.FIELDS,
    "bitsandbytes": bitsandbytes.FIELDS,
    "MXFP4": mxfp4.FIELDS,
    "torchao": torchao.FIELDS,
}


def listed(heading, label):
    """The fields that a section's list of this label names."""
    section = re.split(r"^#+ ", PAGE.partition(f"# {heading}\n")[2], maxsplit=1, flags=re.MULTILINE)[0]
    match = re.search(rf"^- {label}: (.*?)\.$", section, flags=re.MULTILINE | re.DOTALL)
    return set() if match is None else set(re.findall(r"`(\w+)`", match[1]))


@pytest.mark.parametrize("method", METHODS)
def test_fields_of_each_quantizer_are_listed(method):
    fields = METHODS[method]
    assert listed(method, "Read") == set(fields.read)
    assert listed(method, "Refused") == set(fields.refused)
    assert listed(method, "No effect") == set(fields.ignored)


def test_other_fields_are_listed():
    assert listed("quantization_config", "No effect") == COMMON_FIELDS
    assert listed("adapter_config.json", "Read") == set(peft_folder.FIELDS.read)
    assert listed("adapter_config.json", "Refused") == set(peft_folder.FIELDS.refused)
    assert listed("adapter_config.json", "No effect") == set(peft_folder.FIELDS.ignored)


def test_each_generation_field_has_one_effect():
    read, warned, idle = (
        listed("generation_config.json", label) for label in ("Read", "Named in a warning", "No effect")
    )
    config = generation_config
    assert warned == {*config._UNSUPPORTED, *config._UNSUPPORTED_SAMPLING, *config._UNSUPPORTED_BEAMS}
    assert read >= {*config._COMMON_FIELDS, *config._SAMPLING_FIELDS, *BEAM_OPTIONS}
    assert read | warned | idle == GENERATION_FIELDS
    assert len(read) + len(warned) + len(idle) == len(GENERATION_FIELDS)
