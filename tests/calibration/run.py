"""Every p-value, interval and verdict on heads that know nothing: writes table.md, and a JSON for each module of rows.

    python tests/calibration/run.py [--only ANALYSIS ...] [--quick]
    python tests/calibration/run.py --only "task_maps: standing_out"

Rows that were not asked for keep what they had.
"""

import argparse
import json
import sys
import time
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from calibration.rows import ROWS, Bench, Measured, Row
from tl_headmaps.core.files import replacing

HERE = Path(__file__).parent
MODULES = sorted(path.stem for path in HERE.glob("*_rows.py"))


def load_rows() -> list[Row]:
    """All rows: each module beside this file registers its own."""
    for module in MODULES:
        import_module(f"calibration.{module}")
    return ROWS


def stored() -> dict[str, dict[str, Any]]:
    """What was measured so far, by the rows' names."""
    tables = [json.loads(path.read_text()) for path in sorted(HERE.glob("*_rows.json"))]
    return {name: entry for table in tables for name, entry in table.items()}


def store(table: dict[str, dict[str, Any]]) -> None:
    """Write what was measured: a file for each module of rows, and the table for people."""
    files = {HERE / "table.md": markdown(table)}
    for module in MODULES:
        own = {row.name: table[row.name] for row in load_rows() if row.module == module and row.name in table}
        files[HERE / f"{module}.json"] = json.dumps(own, indent=1) + "\n"
    for path, text in files.items():
        with replacing(path) as temporary:
            temporary.write_text(text)


def markdown(table: dict[str, dict[str, Any]]) -> str:
    """The table for people."""
    lines = ["| analysis | statement | tried on | n | P(p <= .05) | P(p <= .01) | coverage | false | |"]
    lines.append("|" + "---|" * 9)
    for row in load_rows():
        if row.name not in table:
            continue
        measured = Measured(**table[row.name]["measured"])
        shown = [measured.at_05, measured.at_01, measured.coverage, measured.false_verdicts]
        figures = " | ".join("" if value is None else f"{value:.3f}" for value in shown)
        verdict = "holds" if measured.holds else row.why or "DOES NOT HOLD"
        lines.append(f"| {row.analysis} | {row.claim} | {row.null} | {measured.n:,} | {figures} | {verdict} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", help="analyses, or beginnings of the rows' names")
    parser.add_argument("--quick", action="store_true", help="the slice that CI runs; nothing is written")
    parser.add_argument("--seed", type=int, default=0, help="other null heads than the table's; nothing is written")
    arguments = parser.parse_args()
    bench = Bench(quick=arguments.quick, seed=arguments.seed)
    rows, before = load_rows(), stored()
    table = {row.name: before[row.name] for row in rows if row.name in before}
    for row in rows:
        if arguments.only and not row.name.startswith(tuple(arguments.only)):
            continue
        start = time.perf_counter()
        measured = row.measure(bench)
        print(f"{row.name}: {measured} in {time.perf_counter() - start:.0f} s", flush=True)
        table[row.name] = {"measured": asdict(measured)}
        if not arguments.quick and arguments.seed == 0:
            store(table)
    print(markdown(table))


if __name__ == "__main__":
    main()
