"""The sheets as text of at most 80 columns, and as a page for benchmarks/results."""

import json
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.compare.table import check_lines, number, times
from benchmarks.serve.sheet import Column, Sheet

NAME, ROOM, WIDEST = 20, 60, 12
CHECK = 45


def sheet_lines(sheet: Sheet) -> Iterator[str]:
    yield f"{sheet.precision}, {sheet.title}"
    if sheet.bandwidth:
        readings = sorted(reading / 1e9 for reading in sheet.bandwidth)
        middle = readings[len(readings) // 2]
        yield f"read bandwidth {middle:.1f} GB/s ({readings[0]:.1f} to {readings[-1]:.1f}, {len(readings)} readings)"
    headings = [column.heading.split("\n") for column in sheet.columns]
    if any(len(heading) > 1 for heading in headings):
        yield _row(sheet, "", [heading[0] if len(heading) > 1 else "" for heading in headings])
    yield _row(sheet, "", [heading[-1] for heading in headings])
    for name in sheet.turns:
        yield _row(sheet, name, [number(sheet.value(name, column.name), column.digits) for column in sheet.columns])
    if sheet.limits:
        yield _row(sheet, "limit of the bus", [number(sheet.limit(column.name)) for column in sheet.columns])
    leads = [sheet.best_peer(column) for column in sheet.columns]
    if any(leads):
        yield _row(sheet, f"{_who(sheet)} / best peer", [times(lead[1] if lead else None) for lead in leads])
    if any(column.wanted and lead for column, lead in zip(sheet.columns, leads, strict=True)):
        required = ["" if column.wanted is None else f">={column.wanted:.1f}x" for column in sheet.columns]
        yield _row(sheet, "wanted", required)
        yield _row(sheet, "", [_verdict(column, lead) for column, lead in zip(sheet.columns, leads, strict=True)])
    for reason in sheet.failed.values():
        yield from textwrap.wrap(f"failed: {reason}", NAME + ROOM, subsequent_indent="  ")


def _who(sheet: Sheet) -> str:
    """Onward, or the name of the substitute for its engine."""
    return "Onward" if sheet.champion == sheet.ours[0] else sheet.champion.split()[-1]


def _verdict(column: Column, lead: tuple[str, float] | None) -> str:
    if column.wanted is None or lead is None:
        return ""
    return "met" if lead[1] >= column.wanted else "not met"


def _row(sheet: Sheet, name: str, cells: Sequence[str]) -> str:
    width = min(WIDEST, ROOM // len(sheet.columns))
    return f"{name:{NAME}}" + "".join(f"{cell:>{width}}" for cell in cells)


def summary_lines(sheets: Sequence[Sheet]) -> Iterator[str]:
    """Every target in a line."""
    checks = [check for sheet in sheets for check in sheet.all_checks()]
    if checks:
        yield from check_lines(checks, CHECK)


def markdown(run: Mapping[str, Any], sheets: Sequence[Sheet]) -> str:
    """A page: date, machine and command; the tables; the targets; the JSON lines."""
    machine, rounds = run["machine"], run["plan"]["rounds"]
    tables = "\n\n".join("\n".join(line.rstrip() for line in sheet_lines(sheet)) for sheet in sheets)
    return f"""# Serving, {run["date"]}

`{run["command"]}`
on {machine["threads"]} threads of {machine["processor"]}, kernels for {machine["isa"]}, torch {machine["torch"]},
Python {machine["python"]}; the peers' versions are in benchmarks/compare/peers. Medians over {rounds} turns. Ratios
are taken within a turn, and the read bandwidth is measured between turns: see benchmarks/README.md.

```
{tables}
```

## Targets

```
{chr(10).join(line.rstrip() for line in summary_lines(sheets))}
```

## The JSON

```json
{chr(10).join(json.dumps(line) for line in (run, *(sheet.as_json() for sheet in sheets)))}
```
"""
