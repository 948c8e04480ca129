"""Print the size and structure of src/onward, and fail if a limit is exceeded. `make structure` runs it.

python .ci/structure.py                     print the figures
python .ci/structure.py --old-names FILE    also fail if an old class name of a table (kind, file, old, new) remains
"""

import argparse
import ast
import csv
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "onward"
MAX_LINES, MAX_FILES, MAX_LAYERS, MAX_FILE_LINES = 72_780, 381, 11, 400
# Names that something else has now: `constraints.Choice` is a grammar.
KEPT_NAMES = {"Choice"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--old-names", type=Path, metavar="FILE", help="a table of names that must not remain")
    options = parser.parse_args()
    sources = {str(path.relative_to(PACKAGE)): path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}
    trees = {name: ast.parse(source) for name, source in sources.items()}

    lengths = {name: source.count("\n") for name, source in sources.items()}
    layers = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"][0]["layers"]
    circles = list(cycles({name: set(imports(tree, sources)) for name, tree in trees.items()}))
    long = sorted(name for name in lengths if lengths[name] > MAX_FILE_LINES)
    faults = [f"{name} has {lengths[name]} lines, at most {MAX_FILE_LINES}" for name in long]
    faults += [f"these files import each other: {', '.join(circle)}" for circle in circles]
    figures = (
        ("lines", sum(lengths.values()), MAX_LINES),
        ("files", len(sources), MAX_FILES),
        ("layers", len(layers), MAX_LAYERS),
        ("circles", len(circles), 0),
        ("long files", len(long), 0),
    )
    for what, count, limit in figures:
        print(f"{what:<10} {count:>6,}  (at most {limit:,})")
        if count > limit and what in ("lines", "files", "layers"):
            faults.append(f"src/onward has {count:,} {what}, at most {limit:,}")
    if options.old_names is not None:
        faults += old_names(options.old_names, trees)
    print(*(f"error: {fault}" for fault in faults), sep="\n", end="\n" if faults else "", file=sys.stderr)
    return 1 if faults else 0


def imports(tree: ast.Module, sources: dict[str, str]) -> Iterator[str]:
    """The files of the package that a file imports anywhere: at its top, in functions, and only for type checkers."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "onward":
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.startswith("onward.")]
        else:
            continue
        for name in names:
            parts = name.split(".")[1:]
            for path in (parts, parts[:-1]):
                found = [file for file in ("/".join(path) + ".py", "/".join([*path, "__init__.py"])) if file in sources]
                if found and found != ["__init__.py"]:
                    yield found[0]
                    break


def cycles(graph: dict[str, set[str]]) -> Iterator[list[str]]:
    """The strongly connected components of two files or more (Tarjan, 1972)."""
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    path: list[str] = []

    def visit(file: str) -> Iterator[list[str]]:
        order[file] = low[file] = len(order)
        path.append(file)
        for other in sorted(graph[file]):
            if other not in order:
                yield from visit(other)
                low[file] = min(low[file], low[other])
            elif other in path:
                low[file] = min(low[file], order[other])
        if low[file] == order[file]:
            component = path[path.index(file) :]
            del path[path.index(file) :]
            if len(component) > 1:
                yield sorted(component)

    for file in graph:
        if file not in order:
            yield from visit(file)


def old_names(table: Path, trees: dict[str, ast.Module]) -> Iterator[str]:
    """Top-level definitions whose name is in the table's column of old names."""
    rows = list(csv.DictReader(table.open(), delimiter="\t"))
    old = {row["old"] for row in rows if row["kind"] == "class"} - KEPT_NAMES
    for file, tree in trees.items():
        for node in tree.body:
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            names = {getattr(node, "name", ""), *(each.id for each in targets if isinstance(each, ast.Name))}
            yield from (f"{file}:{node.lineno}: {name} is an old name" for name in sorted(names & old))


if __name__ == "__main__":
    sys.exit(main())
