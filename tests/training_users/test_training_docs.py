"""The name map in docs/training.md is the tested one. (tests/docs runs the page.)"""

import json
import re
from pathlib import Path

from dcp_folders import META_NAMES

PAGE = (Path(__file__).parents[2] / "docs" / "training.md").read_text(encoding="utf-8")


def test_the_documented_name_map_is_the_tested_one():
    (block,) = re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)
    assert json.loads(block) == META_NAMES
