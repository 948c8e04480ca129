"""The name map in docs/training.md is the tested one. (tests/docs runs the page.)"""

import json
import re
from pathlib import Path

from dcp_folders import META_NAMES

PAGE = (Path(__file__).parents[2] / "docs" / "training.md").read_text(encoding="utf-8")


def test_the_map_of_the_page_is_the_one_that_is_tested():
    (block,) = re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)
    assert json.loads(block) == META_NAMES
