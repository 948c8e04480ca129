"""A config field that changes the result is read, or is an error: none is ignored."""

import pytest
import torch
from changed_fields import FIRST, changes, their_logits, theirs, written
from transformers_reference import TOLERANCE

from onward.errors import ConfigError
from onward.models import read_config


@pytest.mark.parametrize("name", FIRST.values())
@pytest.mark.stride(3)
def test_fields_ignored_by_a_family_change_nothing_in_transformers(name, tmp_path):
    fields = written(name)
    ours, logits = read_config(fields), their_logits(theirs(name, fields, tmp_path))
    assert logits is not None
    passed_over = [change for change in changes(fields) if _is_passed_over(change, fields, ours)]
    assert passed_over, "such as how weights were drawn"
    for field, value in passed_over:
        other = their_logits(theirs(name, fields | {field: value}, tmp_path))
        same = other is None or torch.allclose(other, logits, rtol=0, atol=TOLERANCE)
        assert same, f"{field} {value!r} changes what transformers computes"


def _is_passed_over(change, fields, ours):
    field, value = change
    try:
        return read_config(fields | {field: value}) == ours
    except ConfigError:
        return False
