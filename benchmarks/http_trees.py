"""The servers of two source trees compared: time to the first token and tokens per second of many streams.

    python -m benchmarks.http_trees OLD [--old-native DIR] [--pairs 10] [--clients 32] [--tokens 128]

OLD is a checkout. Its native libraries come from --old-native, or are those of this tree. Each tree runs `onward serve
demo` in a separate process, and a client process for each opens all streams at once. The two alternate, and the order
changes from pair to pair. Ratios are new over old for tokens per second, and old over new for the time to the first
token, pair by pair: above 1 the new tree is better. The last line is one JSON object.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

# `import onward` must find the tree that PYTHONPATH names, not an editable install.
_SERVE = """
import sys
sys.meta_path[:] = [each for each in sys.meta_path if "editable" not in type(each).__module__]
source = sys.argv.pop(1)
sys.path.insert(0, source)
import onward
assert onward.__file__.startswith(source), onward.__file__
from onward.cli.main import main
main()
"""


class Tree:
    """A tree's server, and the process of its clients."""

    def __init__(self, source: Path, native: Path, clients: int, tokens: int) -> None:
        command = [sys.executable, "-c", _SERVE, str(source), "serve", "demo", "--port", "0", "--no-access-log"]
        environment = os.environ | {"ONWARD_NATIVE_DIR": str(native)}
        self._server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
        assert self._server.stderr is not None
        line = next(line for line in self._server.stderr if '"serves"' in line)
        client = [sys.executable, "-m", "benchmarks.http", "--client", json.loads(line)["url"]]
        client += ["--clients", str(clients), "--tokens", str(tokens)]
        self._client = subprocess.Popen(client, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._tokens = clients * tokens

    def turn(self) -> tuple[float, float]:
        """Median seconds to the first token, and tokens per second of all streams."""
        assert self._client.stdin is not None
        assert self._client.stdout is not None
        began = time.perf_counter()
        self._client.stdin.write("go\n")
        self._client.stdin.flush()
        first = json.loads(self._client.stdout.readline())["first_token_ms"] / 1e3
        return first, self._tokens / (time.perf_counter() - began)

    def close(self) -> None:
        self._client.communicate()
        self._server.terminate()
        self._server.communicate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path, help="a checkout of the old tree")
    parser.add_argument("--old-native", type=Path, help="the folder of its native libraries")
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=128)
    options = parser.parse_args()

    from onward.native.loader import library_folder

    new_native = library_folder()
    sources = {"old": (options.old / "src", options.old_native or new_native)}
    sources["new"] = (Path(__file__).parents[1] / "src", new_native)
    trees = {
        name: Tree(source.resolve(), native.resolve(), options.clients, options.tokens)
        for name, (source, native) in sources.items()
    }
    turns: dict[str, list[tuple[float, float]]] = {name: [] for name in trees}
    for pair in range(options.pairs + 1):
        for name in list(trees) if pair % 2 else list(reversed(trees)):
            turn = trees[name].turn()
            if pair:  # the first does not count
                turns[name].append(turn)
    for tree in trees.values():
        tree.close()
    print(json.dumps({"clients": options.clients, "tokens": options.tokens, **_report(turns)}))


def _report(turns: dict[str, list[tuple[float, float]]]) -> dict[str, Any]:
    report: dict[str, Any] = {}
    for at, figure in enumerate(("first_token_s", "tokens_per_s")):
        old, new = ([turn[at] for turn in turns[name]] for name in ("old", "new"))
        ratios = [
            before / after if figure == "first_token_s" else after / before
            for before, after in zip(old, new, strict=True)
        ]
        report[figure] = {
            "old": round(statistics.median(old), 4),
            "new": round(statistics.median(new), 4),
            "ratio": round(statistics.median(ratios), 3),
            "ratios": [round(ratio, 3) for ratio in sorted(ratios)],
        }
    return report


if __name__ == "__main__":
    main()
