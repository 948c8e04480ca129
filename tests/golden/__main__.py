"""See the package's docstring."""

import argparse
import difflib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.golden import RECORD, __doc__, bits, cache, http, programs, recorded_isa


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["record", "check", "definitions"])
    parser.add_argument("old", nargs="?", type=Path, help="definitions: the folder src of the other tree")
    options = parser.parse_args()
    if options.action == "definitions":
        if options.old is None:
            parser.error("definitions needs the folder src of the other tree")
        return _report("definitions", _definitions(options.old), _definitions(Path(bits.onward.__file__).parents[1]))
    records = _records()
    if options.action == "record":
        RECORD.mkdir(exist_ok=True)
        for name, value in records.items():
            _file(name).write_text(_text(value))
        return 0
    return max(_report(name, json.loads(_file(name).read_text()), value) for name, value in records.items())


def _records() -> dict[str, Any]:
    """The results of this tree, by the name of their file."""
    with http.server() as port:
        streams, statuses = http.all_streams(port), http.all_statuses(port)
    isa = recorded_isa()
    return {
        f"bits-{isa}": bits.all_bits(),
        "programs": programs.all_programs(),
        f"streams-{isa}": streams,
        "statuses": statuses,
        "cache": cache.all_counts(),
    }


def _definitions(source: Path) -> Any:
    """The bits of the definition path of a tree, in float32: it takes minutes."""
    root = Path(__file__).parents[2]
    code = f"""
import json, sys
sys.meta_path[:] = [each for each in sys.meta_path if "editable" not in type(each).__module__]
sys.path[:0] = [{str(source)!r}, {str(root)!r}]
import onward
assert onward.__file__.startswith({str(source)!r}), onward.__file__
from tests.golden import bits
print(json.dumps(bits.all_bits(["float32"])))
"""
    environment = os.environ | {"ONWARD_OPS": "definition"}
    return json.loads(subprocess.run([sys.executable, "-c", code], env=environment, check=True, stdout=-1).stdout)


def _report(name: str, recorded: Any, now: Any) -> int:
    """Print what differs; 1 if anything does."""
    left, right = _text(recorded).splitlines(), _text(now).splitlines()
    lines = list(difflib.unified_diff(left, right, "recorded", "now", lineterm="", n=2))
    print(f"{name}: {'equal' if not lines else 'differs'}", *lines[:200], sep="\n")
    return int(bool(lines))


def _text(value: Any) -> str:
    return json.dumps(value, indent=1, ensure_ascii=False) + "\n"


def _file(name: str) -> Path:
    return RECORD / f"{name}.json"


if __name__ == "__main__":
    sys.exit(main())
