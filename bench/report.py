"""The figures as a table: on a terminal, and as Markdown."""

from collections.abc import Sequence

from bench.summary import BASELINE, Result, Row, Spread, rows

MISSING = "–"


def cells(row: Row) -> dict[str, str]:
    """By column, in the order they are shown; a column that nobody has a value for is left out by `grid`."""
    return {
        "rival": row.title,
        "CPU ms": _milliseconds(row.cpu),
        f"× {BASELINE}": _times(row.cpu_ratio),
        "wall ms": _milliseconds(row.wall),
        f"× {BASELINE} ": _times(row.wall_ratio),
        "peak MiB": MISSING if row.peak_bytes is None else f"{row.peak_bytes / 2**20:.1f}",
        f"× {BASELINE}  ": _times(row.peak_ratio),
        "collectives": _count(row.collectives),
        "operators": _count(row.operators),
        "wire ms": _plain(row.wire),
        "waited for": _plain(row.exposed),
        "MB sent": MISSING if row.sent is None else f"{row.sent / 1e6:.1f}",
        "simulated ms": _plain(row.simulated),
        "first step, cold": _seconds(row.cold),
        "warm": _seconds(row.warm),
    }


def _milliseconds(spread: Spread | None) -> str:
    """``12.3 (12.1 to 12.9)``: the median and the quartiles."""
    if spread is None:
        return MISSING
    low, middle, high = (1e3 * value for value in (spread.low, spread.middle, spread.high))
    digits = 1 if middle < 100 else 0
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def _plain(seconds: float | None) -> str:
    return MISSING if seconds is None else f"{1e3 * seconds:.1f}"


def _times(value: float | None) -> str:
    return MISSING if value is None else f"{value:.2f}"


def _count(value: int | None) -> str:
    return MISSING if value is None else f"{value:,}"


def _seconds(value: float | None) -> str:
    return MISSING if value is None else f"{value:.1f} s"


def grid(result: Result) -> tuple[list[str], list[list[str]]]:
    """Header and lines, without the columns that are empty."""
    table = [cells(row) for row in rows(result)]
    names = [name for name in table[0] if any(line[name] != MISSING for line in table)]
    return [name.strip() for name in names], [[line[name] for name in names] for line in table]


def markdown(result: Result) -> str:
    header, lines = grid(result)
    rule = ["---", *("---:" for _ in header[1:])]
    return "\n".join("| " + " | ".join(line) + " |" for line in [header, rule, *lines])


def show(result: Result) -> None:
    """Prints the table; with rich where it is installed and the output is a terminal."""
    header, lines = grid(result)
    try:
        from rich import box
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        print(aligned([header, *lines]))
        return
    console = Console(highlight=False)
    if not console.is_terminal:
        print(aligned([header, *lines]))
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for index, name in enumerate(header):
        table.add_column(name, justify="left" if index == 0 else "right", overflow="fold")
    for line, row in zip(lines, rows(result)):
        table.add_row(*line, style="bold" if row.name.startswith("ours") else None)
    console.print(table)


def aligned(table: Sequence[Sequence[str]]) -> str:
    """Columns of equal width: the first to the left, the others to the right."""
    widths = [max(len(line[index]) for line in table) for index in range(len(table[0]))]
    made = []
    for line in table:
        first, *rest = (
            cell.ljust(width) if not index else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(line, widths))
        )
        made.append("  ".join([first, *rest]))
    return "\n".join([made[0], "─" * len(made[0]), *made[1:]])


def describe(result: Result) -> str:
    """What was run, on what: a line or two under a table."""
    conditions, preset = result["conditions"], result["preset"]
    network = conditions["network"]
    steps = f"{preset['steps']} step{'s' if preset['steps'] > 1 else ''}"
    wire = "" if network is None else f", on a simulated network of {network['gigabits per second']} Gbit/s"
    if network is not None and "hosts" in network:
        wire = f" in {network['hosts']} hosts with network cards of {network['gigabits per second']} Gbit/s"
        wire += f" and {network['latency ms']} ms between them"
    if network is not None and "inner" in network:
        wire += f", {network['inner']} Gbit/s inside of nodes of {network['ranks of a node']} ranks"
    before, after = conditions["load average before and after"]
    kind = "Llama" if preset["llama"] else "GPT"
    return (
        f"{kind}, {preset['layers']} layers of width {preset['width']}, {preset['batch']} × {preset['context']} tokens "
        f"a rank; {conditions['world']} ranks × {conditions['threads a rank']} thread on {conditions['device']}{wire}; "
        f"{preset['rounds']} rounds of {steps}; {result['hardware']}, torch "
        f"{result['versions']['torch']}, load average {before} before and {after} after"
    )
