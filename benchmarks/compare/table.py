"""The report as text of at most 100 columns."""

from collections.abc import Iterator, Mapping, Sequence

from benchmarks.compare.report import (
    DECODES,
    FIGURES,
    Check,
    PrecisionReport,
)

NAME, CELL = 26, 12


def precision_lines(report: PrecisionReport) -> Iterator[str]:
    session, low_high = report.session, sorted(report.session.readings())
    yield (
        f"{report.precision}: read bandwidth {report.bandwidth / 1e9:.1f} GB/s "
        f"({low_high[0] / 1e9:.1f} to {low_high[-1] / 1e9:.1f} over {len(low_high)} readings); tokens/s"
    )
    yield f"{'':{NAME}}" + "".join(f"{heading:>{CELL}}" for heading in ("decode", "decode", "decode", "prefill"))
    headings = ("after 32", "after 512", "after 4,000", "of 512", "load, s", "peak, GB")
    yield f"{'':{NAME}}" + "".join(f"{heading:>{CELL}}" for heading in headings)
    for name, rates in report.figures.items():
        samples = session.samples[name]
        extra = [number(samples.load, 2), number(max(samples.peak.values(), default=0) / 1e9, 2)]
        yield _row(name, [*(number(rates[figure]) for figure in FIGURES), *extra])
    for name, reason in session.failed.items():
        yield f"{name:{NAME}}failed: {reason}"[:100]
    for name in report.figures:
        yield f"{name:{NAME}}instructions: {session.samples[name].instructions}"[:100]
    yield _row("limit: weights and cache", [number(report.limits.get(figure)) for figure in DECODES])
    yield _row("Onward, of the limit", [percent(report.share_of_limit(figure)) for figure in DECODES])
    yield _row("Onward / best peer", [times(report.ratio(figure)) for figure in FIGURES])
    yield _row("wanted", [f">= {report.wanted_ratio(figure):.2f}x" for figure in FIGURES])
    yield _row("", [_verdict(report, figure) for figure in FIGURES])


def _verdict(report: PrecisionReport, figure: str) -> str:
    ratio = report.ratio(figure)
    if ratio is None:
        return "-"
    met = ratio >= report.wanted_ratio(figure)
    if figure == "decode_after_32":
        met = met and (report.share_by_weights() or 0) >= report.wanted_share()
    return "met" if met else "not met"


def check_lines(checks: Sequence[Check], width: int = 64) -> Iterator[str]:
    """Every target in a line; `width` columns say what it is, 35 how it stands."""
    yield f"{'':{width}}{'measured':>12}{'wanted':>14}"
    for check in checks:
        sign = ">=" if check.at_least else "<="
        required = f"{sign} {check.wanted:.2f}{check.unit if check.unit == 'x' else ' ' + check.unit}".rstrip()
        verdict = "met" if check.met else "not met"
        yield f"{check.what:{width}}{check.measured:>12.2f}{required:>14}  {verdict}"


def context_lines(reports: Sequence[PrecisionReport]) -> Iterator[str]:
    """What one more position of context costs a token."""
    for report in reports:
        cost = report.context_cost()
        if cost:
            slope, floor = cost["ns_per_position"], cost["ns_to_read_a_position"]
            yield (
                f"{report.precision}: a position of context costs a token {slope:.0f} ns; "
                f"reading its cache takes {floor:.0f} ns ({cost['ratio']:.2f}x)"
            )
            at = ", ".join(f"{position}: {ms:.2f}" for position, ms in cost["ms_per_token"].items())
            yield f"      ms a token at {at}; off a line by at most {cost['largest_deviation_from_a_line']:.0%}"


def start_lines(seconds: Mapping[str, float]) -> Iterator[str]:
    yield "process start to first token, bf16 (fp16), warm page cache, s:"
    yield "      " + ", ".join(f"{name} {value:.2f}" for name, value in seconds.items())


def _row(name: str, cells: Sequence[str]) -> str:
    return f"{name:{NAME}}" + "".join(f"{cell:>{CELL}}" for cell in cells)


def number(value: float | None, digits: int = 1) -> str:
    return "-" if not value else f"{value:,.{digits}f}"


def times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"


def percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"
