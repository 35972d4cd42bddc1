"""The blocks of the README that hold results: written by the commands above them, or compared with ``--check``."""

import argparse
import json
import re
import shlex
import sys
from pathlib import Path

from typer.testing import CliRunner

from tl_headmaps.cli.app import app

README = Path(__file__).parents[2] / "README.md"
BENCH_FILE = Path(__file__).parent / "figures.json"
BENCH = re.compile(r"(<!-- bench -->\n).*?(<!-- end -->)", re.S)
BLOCK = re.compile(r"```console\n\$ tl-headmaps (?P<command>[^\n]*)\n(?P<output>.*?)```", re.S)


def output_of(command: str) -> str:
    result = CliRunner().invoke(app, shlex.split(command))
    if result.exit_code:
        raise SystemExit(f"tl-headmaps {command} failed: {result.output}{result.exception}")
    return result.stdout.rstrip() + "\n"


def bench_table() -> str:
    """The README's table of speed, out of the last ``make bench``."""
    figures = json.loads(BENCH_FILE.read_text(encoding="utf-8"))
    ranks, scores, largest = figures["ranks"], figures["relation_scores"], figures["largest_entries"]
    shares = [entry["share_scanned"] for name, entry in largest.items() if name.endswith("maps")]
    speedups = [entry["speedup"] for entry in largest.values()]
    rows = [
        ("full exact ranks of 1,400 targets, three layers", f"{ranks['full_ranks_speedup']:.1f} times faster"),
        ("the same against its own matrix products alone", f"{ranks['full_ranks_over_products']:.2f} times their time"),
        ("ranks up to 25, leaving early", f"{ranks['ranks_up_to_25_speedup']:.0f} times faster"),
        (
            f"{scores['relations']} relations, {scores['pairs']:,} pairs, nulls included, one layer in a call",
            ", ".join(f"L{layer}: {ratio:.0f}" for layer, ratio in scores["speedup_by_layer"].items())
            + " times faster",
        ),
        (
            "memory above the loaded model for that",
            f"{scores['peak_mib_above_model']:.0f} MiB",
        ),
        (
            f"largest entries of a whole map (preset maps: {min(shares):.0%} to {max(shares):.0%} multiplied out)",
            f"{min(speedups):.0f} to {max(speedups):.0f} times faster than all blocks",
        ),
    ]
    # A bench that has not been run yet has no row.
    if checked := figures.get("validation"):
        what = (
            f"static against dynamic scores of one relation, {checked['prompts']} prompts, running the model included"
        )
        figure = f"{checked['speedup']:.1f} times faster, {checked['peak_mib_above_model']:.0f} MiB above the model"
        rows.append((what, figure))
    return "| | |\n|---|---|\n" + "".join(f"| {what} | {figure} |\n" for what, figure in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; fail if a block would change")
    check = parser.parse_args().check
    text = README.read_text(encoding="utf-8")
    written = BLOCK.sub(
        lambda match: f"```console\n$ tl-headmaps {match['command']}\n{output_of(match['command'])}```", text
    )
    written = BENCH.sub(lambda match: match[1] + bench_table() + match[2], written)
    changed = written != text
    if check and changed:
        sys.exit("README.md shows results that its commands no longer print; run 'make figures'.")
    if changed:
        README.write_text(written, encoding="utf-8")
    print(f"{len(BLOCK.findall(text))} blocks, {'rewritten' if changed else 'unchanged'}")


if __name__ == "__main__":
    main()
