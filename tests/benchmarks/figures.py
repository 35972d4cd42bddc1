"""The blocks of the README that hold results: written by the commands above them, or compared with ``--check``.

What stands behind a ``|`` shortens the output, as it would in a shell. Beside them, the table of speed in this folder's
README, out of the last ``make bench``, and the table of three models.
"""

import argparse
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import three_models
from click.testing import CliRunner

from tl_headmaps.cli.app import app

HERE = Path(__file__).parent
README, SPEED = HERE.parents[1] / "README.md", HERE / "README.md"
BENCH = re.compile(r"(<!-- bench -->\n).*?(<!-- end -->)", re.S)
BLOCK = re.compile(r"```console\n\$ tl-headmaps (?P<command>[^\n]*)\n(?P<output>.*?)```", re.S)
_README_COLUMNS = 5
MODELS = re.compile(r"(<!-- three_models -->\n).*?(<!-- end -->)", re.S)


def shortened(output: str, cut: str | None) -> str:
    if cut:
        output = subprocess.run(cut, shell=True, input=output, stdout=subprocess.PIPE, text=True, check=True).stdout
    return output.rstrip() + "\n"


def output_of(line: str) -> str:
    command, _, cut = line.partition(" | ")
    result = CliRunner().invoke(app, shlex.split(command))
    if result.exit_code:
        raise SystemExit(f"tl-headmaps {command} failed: {result.output}{result.exception}")
    return shortened(result.stdout, cut)


def models_table() -> str:
    """What three_models.py measured on models that are not fetched here."""
    return three_models.capitals_table(three_models.stored(), _README_COLUMNS) + "\n"


def bench_table() -> str:
    """The table of speed, out of the last ``make bench``."""
    figures = json.loads((HERE / "figures.json").read_text(encoding="utf-8"))
    ranks, scores = figures["ranks"], figures["relation_scores"]
    rows = [
        ("full exact ranks of 1,400 targets, three layers", f"{ranks['full_ranks_speedup']:.1f} times faster"),
        ("the same against its own matrix products alone", f"{ranks['full_ranks_over_products']:.2f} times their time"),
        ("ranks up to 25, leaving early", f"{ranks['ranks_up_to_25_speedup']:.0f} times faster"),
        (
            f"{scores['relations']} relations, {scores['pairs']:,} pairs, nulls included, one layer in a call",
            ", ".join(f"L{layer}: {ratio:.0f}" for layer, ratio in scores["speedup_by_layer"].items())
            + " times faster",
        ),
        ("memory above the loaded model for that", f"{scores['peak_mib_above_model']:.0f} MiB"),
    ]
    # A bench that has not been run yet has no row.
    if imported := figures.get("import"):
        bare = imported["seconds"]["torch"] - imported["seconds"]["python"]
        figure = f"{imported['import_seconds']:.3f} s, against {bare:.1f} s for import torch"
        rows.append(("import tl_headmaps", figure))
    if second := figures.get("second_call"):
        rows.append(
            ("a second `token_grid` of one model, against weights", f"{second['over_weights']:.2f} times the time")
        )
    if salient := figures.get("salient_operations"):
        rows += [
            (
                "salient operations and names of all 270 heads (the obvious way: without names, scaled up from three)",
                f"{salient['speedup']:.0f} times faster ({salient['speedup_without_names']:.0f} without naming), "
                f"{salient['peak_mib_above_model']:.0f} MiB above the model",
            ),
            ("one head of weights already in use", f"{salient['seconds']['one_head']:.2f} s"),
        ]
    if checked := figures.get("validation"):
        what = (
            f"static against dynamic scores of one relation, {checked['prompts']} prompts, running the model included"
        )
        figure = f"{checked['speedup']:.1f} times faster, {checked['peak_mib_above_model']:.0f} MiB above the model"
        rows.append((what, figure))
    if ablated := figures.get("ablate"):
        what = f"switching off {ablated['heads']} heads in {ablated['prompts']} prompts beside 99 other sets, against 5"
        figure = f"{ablated['over_5_draws_as_passes']:.2f} times the time of whole passes for 5, "
        rows.append((what, f"{figure}{ablated['over_5_draws']:.2f} times ours"))
    if context := figures.get("context"):
        what = f"context vectors of {context['sources']:,} sources behind {context['prompts']} prompts, against plain"
        figure = f"{context['over_plain_pass']:.2f} times their time, {context['peak_mib_above_model']:.0f} MiB on top"
        rows.append((what, figure))
        what = "all relations scored with these vectors (stream and single prompts too), against `folded`"
        rows.append((what, f"{context['scores_over_folded']:.2f} times the time"))
    if spectra := figures.get("spectra"):
        names = ", ".join(name.replace("_", " ") for name in spectra["speedups"])
        what = f"maps of {names} of all {spectra['matrices']} matrices, against svdvals of each"
        ratios = ", ".join(f"{ratio:.1f}" for ratio in spectra["speedups"].values())
        figure = f"{ratios} times faster, within {spectra['largest_relative_difference']:.0e}"
        rows.append((what, figure))
    if gradients := figures.get("contribution"):
        what = f"contribution map of {gradients['tokens']:,} tokens, against plain forward and backward passes"
        rows.append((what, f"{gradients['over_plain']:.2f} times their time"))
    rows += large_rows(figures)
    if tasks := figures.get("task_maps"):
        what = f"task maps of {tasks['items']:,} items with activations on disk: probes, nulls, two halves"
        ratio, spent = tasks["capture_over_forward"], tasks["seconds"]["kept_run"]
        rows.append(("capturing all heads for task maps, against forward passes", f"{ratio:.2f} times their time"))
        rows.append((what, f"{spent:.0f} s"))
    return "| | |\n|---|---|\n" + "".join(f"| {what} | {figure} |\n" for what, figure in rows)


def large_rows(figures: dict[str, Any]) -> list[tuple[str, str]]:
    """Models larger than memory, as far as they were measured."""
    rows = []
    if disk := figures.get("default_from_checkpoint"):
        mib = {name: values["peak"] for name, values in disk["mib"].items()}
        rows += [
            (
                "the default model from its checkpoint instead of loaded, the same scores",
                f"{disk['checkpoint_over_loaded']:.2f} times the time, {disk['memory_over_loaded_with_scores']:.2f} "
                "times the peak memory",
            ),
            (
                f"peak memory of that: {mib['checkpoint_with_scores']:.0f} MiB, of it `import torch` "
                f"{mib['bare_torch']:.0f}; loading alone {mib['loading']:.0f} MiB",
                f"{disk['memory_over_loading_above_bare_torch']:.2f} times loading alone above `import torch`, "
                f"{disk['memory_over_loading']:.2f} with it",
            ),
        ]
    if workers := figures.get("workers"):
        rows.append(("two worker processes instead of one, one thread each", f"{workers['speedup']:.2f} times faster"))
    if large := figures.get("llama_70b_shape"):
        rows += [
            (
                "Llama-3.1-70B's shapes, 1,000 sources: peak resident memory",
                f"{large['peak_resident_gib']:.1f} GiB, of it {large['peak_anonymous_gib']:.1f} anonymous",
            ),
            (
                "the same: time per layer, and for 80 layers by extrapolation",
                f"{large['seconds_per_layer']:.0f} s, {large['hours_for_80_layers']:.1f} h",
            ),
        ]
    return rows


def written(text: str, only: str) -> str:
    """The README with new blocks."""
    text = BLOCK.sub(
        lambda match: (
            f"```console\n$ tl-headmaps {match['command']}\n{output_of(match['command'])}```"
            if only in match["command"]
            else match[0]
        ),
        text,
    )
    return MODELS.sub(lambda match: match[1] + models_table() + match[2], text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; fail if a block would change")
    parser.add_argument("--only", metavar="TEXT", default="", help="only blocks whose command contains this text")
    parser.add_argument("--speed", action="store_true", help="only the table of speed")
    options = parser.parse_args()
    texts = {path: path.read_text(encoding="utf-8") for path in (README, SPEED)}
    new = {SPEED: BENCH.sub(lambda match: match[1] + bench_table() + match[2], texts[SPEED])}
    if not options.speed:
        new[README] = written(texts[README], options.only)
    changed = [path for path, text in new.items() if text != texts[path]]
    if options.check and changed:
        names = " and ".join(str(path.relative_to(HERE.parents[1])) for path in changed)
        sys.exit(f"{names}: results that the commands no longer print; run 'make figures'.")
    for path in changed:
        path.write_text(new[path], encoding="utf-8")
    print(f"{len(BLOCK.findall(texts[README]))} blocks, {'rewritten' if changed else 'unchanged'}")


if __name__ == "__main__":
    main()
