"""The heads that weights alone do not show: two presets on several models, by evidence that was not used to build them.

    python tests/benchmarks/three_models.py GEMMA_FOLDER QWEN_FOLDER

writes three_models.json beside this file, with the digests of models and relations, and prints its tables. The default
model comes first; folders of others follow. A fixed half of the bundled relations is for decisions, the other half is
read once. For each preset and model:

* scores: the best heads of every relation and how many heads implement it;
* agreement of static scores with what heads write in the relations' own templates, with and without context (other
  prompts than those the tokens are read behind), for every third relation;
* ablation: accuracy on eliciting prompts while the best ten heads are switched off, beside heads of the same layers,
  for every third relation;
* names: how many heads get a name, from the same sample of ordinary words;
* capitals: scores of country to capital on all its pairs, and its accuracy while the best ten heads are switched off.

Finished parts are kept in the folder ``--parts`` and used when the same command is started again.
"""

import argparse
import json
import math
import sys
import time
import zlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformer_lens.model_bridge import TransformerBridge

from tl_headmaps import (
    HeadIndex,
    HeadWeights,
    Relation,
    RelationScores,
    ablate,
    load_default_model,
    load_relations,
    name_heads,
    relation_scores,
    validate,
)
from tl_headmaps.core.files import replacing
from tl_headmaps.core.provenance import package_versions
from tl_headmaps.renderers import Figure, Line, curve

OUT = Path(__file__).with_suffix(".json")
PRESETS = ("folded", "context")
LEAST_PAIRS = 10
N_HEADS = 10
CAPITALS, CAPITALS_TEMPLATE = "country_to_capital", "The capital of <X> is"
N_RANDOM = 2
ONE_RELATION_IN = 3
"""Of which the model is run: an odd step by name, so they alternate between the halves."""

AGREEMENT_PAIRS = 10
ONE_WORD_IN = 4
LARGE = 2 << 30
"""Checkpoints above this many bytes are run in bfloat16, on a third of these relations and a quarter of these words."""


def halves(names: list[str]) -> dict[str, list[str]]:
    """Every other relation, by name: one half for decisions, one to be read once."""
    ordered = sorted(names)
    return {"deciding": ordered[::2], "held_out": ordered[1::2]}


def shortened(relation: Relation, tokenizer: Any, most: int) -> Relation | None:
    """The first pairs of single tokens; None for a relation with too few of them."""
    single = [
        (source, target)
        for source, target in relation.pairs
        if all(len(tokenizer.encode(f" {word}", add_special_tokens=False)) == 1 for word in (str(source), str(target)))
    ]
    return None if len(single) < LEAST_PAIRS else replace(relation, pairs=tuple(single[:most]))


def is_large(folder: str | None) -> bool:
    return folder is not None and sum(path.stat().st_size for path in Path(folder).glob("*.safetensors")) > LARGE


def opened(folder: str | None) -> Any:
    if folder is None:
        return load_default_model()
    return TransformerBridge.boot_transformers(folder, dtype=torch.bfloat16 if is_large(folder) else torch.float32)


def is_sampled_word(text: str, one_in: int) -> bool:
    """A space and three small letters or more, and in a fixed part of such tokens."""
    return (
        len(text) > 3
        and text[0] == " "
        and text[1:].isascii()
        and text[1:].islower()
        and text[1:].isalpha()
        and (zlib.crc32(text.encode()) % one_in == 0)
    )


def summary(scores: RelationScores) -> dict[str, Any]:
    implementing = scores.implements()
    table = {}
    for name in scores.relations:
        number = scores.index_of(name)
        best = scores.top(N_HEADS, name)
        table[name] = {
            "pairs": scores.n_kept[number],
            "k": scores.k[number],
            "best": {str(head): round(score, 3) for head, score in best if score > 0},
            "implementing": [str(entry) for entry in implementing[name]],
        }
        if scores.stream is not None:
            table[name]["stream"] = [round(float(scores.stream[number, head.layer]), 3) for head, _ in best]
    return table


def switched_off(model: Any, relation: Relation, heads: list[HeadIndex]) -> dict[str, Any] | None:
    """Accuracy with 0 to ten heads switched off, and with heads of the same layers instead."""
    curves = ablate(model, relation, heads, controls=None, n_random=N_RANDOM, max_heads=len(heads), progress=False)
    if curves.status != "tested":
        return None
    return {
        "template": curves.template,
        "pairs": curves.n_pairs,
        "accuracy": [round(value, 3) for value in curves.values.tolist()],
        "same_layers": [[round(value, 3) for value in curve.accuracy.tolist()] for curve in curves.random_curves],
    }


def capitals(model: Any, weights: HeadWeights, preset: Any) -> dict[str, Any]:
    """Country to capital on all its pairs: the best heads, and what is left when they are switched off."""
    scores = relation_scores(weights, CAPITALS, preset=preset, progress=False)
    best = [head for head, score in scores.top(N_HEADS) if score > 0]
    curves = ablate(model, CAPITALS, best, template=CAPITALS_TEMPLATE, controls=None, preset=preset, progress=False)
    return {
        **summary(scores)[CAPITALS],
        "accuracy": [round(value, 3) for value in curves.values.tolist()],
        "same_layers": [[round(value, 3) for value in curve.accuracy.tolist()] for curve in curves.random_curves],
        "p_value": None if curves.verdict is None else round(curves.verdict.p_value, 4),
        "n_sets": 0 if curves.verdict is None else len(curves.verdict.sets),
    }


class Parts:
    """Finished parts of one model, in a file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.parts: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}

    def __call__(self, part: str, compute: Callable[[], Any]) -> Any:
        if part not in self.parts:
            start = time.perf_counter()
            with torch.no_grad():
                self.parts[part] = compute()
            print(f"{self.path.stem}: {part} in {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(self.path) as temporary:
                temporary.write_text(json.dumps(self.parts))
        return self.parts[part]


def measured(folder: str | None, most: int, parts: Path) -> dict[str, Any]:
    keep = Parts(parts / f"{'default' if folder is None else Path(folder).name}-{most}.json")
    model = opened(folder)
    weights = HeadWeights.from_model(model)
    listed = (shortened(relation, model.tokenizer, most) for relation in load_relations())
    relations = {relation.name: relation for relation in listed if relation is not None}
    entry: dict[str, Any] = {
        "model": weights.model_name if folder is None else Path(folder).name,
        "fingerprint": weights.fingerprint,
        "dtype": str(model.cfg.dtype).removeprefix("torch."),
        "heads": weights.n_layers * weights.n_heads,
        "halves": halves(list(relations)),
    }
    every = ONE_RELATION_IN * (3 if is_large(folder) else 1)
    asked = [relations[name] for name in sorted(relations)[::every] if relations[name].eliciting_templates]
    words = partial(is_sampled_word, one_in=ONE_WORD_IN * (4 if is_large(folder) else 1))
    for preset in PRESETS:

        def scored(preset: Any = preset) -> Any:
            scores = relation_scores(weights, list(relations.values()), preset=preset, progress=False)
            return {"digests": scores.provenance.data, "relations": summary(scores)}

        def agreeing(preset: Any = preset) -> Any:
            fewer = [replace(relation, pairs=relation.pairs[:AGREEMENT_PAIRS]) for relation in asked]
            result = validate(model, fewer, preset=preset, progress=False)
            columns = ("pearson_without", "pearson_with")
            table = {name: [round(float(value), 3) for value in result.agreement[name]] for name in columns}
            return {"relations": list(result.relations), **table}

        table = keep(f"{preset} scores", scored)

        def without(table: Any = table) -> Any:
            best = {relation.name: table["relations"][relation.name]["best"] for relation in asked}
            curves = {
                relation.name: switched_off(model, relation, [HeadIndex.parse(head) for head in best[relation.name]])
                for relation in asked
                if best[relation.name]
            }
            return {name: curve for name, curve in curves.items() if curve is not None}

        def named(preset: Any = preset) -> Any:
            names = name_heads(weights, preset=preset, vocabulary=words, progress=False)
            return {name: [str(head) for head in heads] for name, heads in names.named().items()}

        entry[preset] = {
            "scores": table,
            "ablation": keep(f"{preset} ablation", without),
            "agreement": keep(f"{preset} agreement", agreeing),
            "names": keep(f"{preset} names", named),
            "capitals": keep(f"{preset} capitals", partial(capitals, model, weights, preset)),
        }
    return entry


def mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else float("nan")


def correlated(agreement: dict[str, Any]) -> set[str]:
    """Relations with a correlation in both kinds of prompts: there is none where all static scores are 0."""
    both = zip(agreement["relations"], agreement["pearson_without"], agreement["pearson_with"], strict=True)
    return {name for name, *values in both if not any(value is None or math.isnan(value) for value in values)}


def table_of(entries: list[dict[str, Any]]) -> str:
    """Both halves of the relations by both presets, and the names; in brackets, of how many relations."""
    titles = "model, half | preset | relations with a head | implementing cells | mean best score"
    titles += " | agreement without, with context (relations)"
    titles += " | accuracy: all heads, without ten, without ten of the same layers (relations)"
    lines = [f"| {titles} |", "|" + "---|" * 7]
    for entry in entries:
        for half, names in entry["halves"].items():
            title = f"{entry['model']}, {half.replace('_', ' ')}"
            for preset in PRESETS:
                found = entry[preset]
                rows = [found["scores"]["relations"][name] for name in names]
                with_head = sum(bool(row["implementing"]) for row in rows)
                n_cells = sum(len(row["implementing"]) for row in rows)
                best = mean([next(iter(row["best"].values()), 0.0) for row in rows])
                # Only relations that were asked, or switched off, with both presets can be compared.
                asked = set.intersection(*(correlated(entry[each]["agreement"]) for each in PRESETS))
                agreement = found["agreement"]
                inside = [at for at, name in enumerate(agreement["relations"]) if name in asked.intersection(names)]
                pearson = [mean([agreement[f"pearson_{w}"][at] for at in inside]) for w in ("without", "with")]
                agreed = f"{pearson[0]:.2f}, {pearson[1]:.2f} ({len(inside)})" if inside else "-"
                both = [name for name in names if all(name in entry[each]["ablation"] for each in PRESETS)]
                curves = [found["ablation"][name] for name in both]
                accuracy = [
                    mean([curve["accuracy"][0] for curve in curves]),
                    mean([curve["accuracy"][-1] for curve in curves]),
                    mean([mean([drawn[-1] for drawn in curve["same_layers"]]) for curve in curves]),
                ]
                lines.append(
                    f"| {title} | {preset} | {with_head} of {len(rows)} | {n_cells} | {best:.2f} | "
                    f"{agreed} | "
                    f"{', '.join(f'{value:.2f}' for value in accuracy)} ({len(both)}) |"
                )
    lines += ["", "| model | heads | named by folded | named by context |", "|---|---|---|---|"]
    for entry in entries:
        counts = [sum(map(len, entry[preset]["names"].values())) for preset in PRESETS]
        lines.append(f"| {entry['model']} | {entry['heads']} | {counts[0]} | {counts[1]} |")
    return "\n".join(lines)


def capitals_table(entries: list[dict[str, Any]], n_columns: int | None = None) -> str:
    """The finding in a line for each model: country to capital by both presets, and without the heads context finds."""
    titles = ["country to capital", "best head, folded", "best head, context", "accuracy, ten best by context off"]
    titles += ["ten others of their layers", "heads that implement it", "best by folded off", "pairs, k"]
    rows = []
    for entry in entries:
        folded, context = (entry[preset]["capitals"] for preset in PRESETS)
        others = [drawn[-1] for drawn in context["same_layers"]]
        cells = [
            entry["model"],
            *(
                " ".join(next(((f"{s:.2f}", head) for head, s in row["best"].items()), ["0.00"]))
                for row in (folded, context)
            ),
            fall(context["accuracy"]),
            f"{min(others):.2f} to {max(others):.2f}",
            f"{len(folded['implementing'])} → {len(context['implementing'])} of {entry['heads']}",
            # Fewer than ten where fewer heads score above 0.
            f"{fall(folded['accuracy'])} ({len(folded['accuracy']) - 1})",
            f"{context['pairs']}, {context['k']}",
        ]
        rows.append(cells)
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join(f"| {' | '.join(line[:n_columns])} |" for line in lines)


def fall(accuracy: list[float]) -> str:
    return f"{accuracy[0]:.2f} → {accuracy[-1]:.2f}"


def stored(path: Path = OUT) -> list[dict[str, Any]]:
    """What was measured and kept, model by model."""
    models: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["models"]
    return models


def capitals_figure(entries: list[dict[str, Any]]) -> Figure:
    """Accuracy on the capitals while the best heads are switched off, by both presets, model by model."""
    lines = []
    for entry in entries:
        for preset in reversed(PRESETS):
            accuracy = entry[preset]["capitals"]["accuracy"]
            lines.append(Line(f"{entry['model']}, {preset}", accuracy, x=list(range(len(accuracy)))))
    return curve(
        list(range(N_HEADS + 1)),
        lines,
        title="Capitals without the heads that know them",
        x_name="heads switched off, best score first",
        y_name="accuracy of the next token",
        y_limits=(0.0, 1.0),
        note=f"Prompt: {CAPITALS_TEMPLATE}",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", help="folders of further models")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--parts", type=Path, default=Path("build/three_models"), help="where finished parts are kept")
    parser.add_argument("--max-pairs", type=int, default=25, help="pairs of each relation at most")
    parser.add_argument("--show", choices=("all", "capitals"), help="only print tables of what was written")
    parser.add_argument("--figure", type=Path, help="only draw the ablation curves of what was written")
    arguments = parser.parse_args()
    if arguments.show or arguments.figure:
        entries = stored(arguments.out)
        if arguments.figure:
            capitals_figure(entries).save(arguments.figure)
        if arguments.show:
            print(table_of(entries) if arguments.show == "all" else capitals_table(entries))
        return
    if arguments.out == OUT and 1 + len(arguments.folders) < len(stored()):
        parser.error(f"{OUT.name} holds {len(stored())} models; give the folders of the others, or another --out")
    entries = []
    for folder in (None, *arguments.folders):
        entries.append(measured(folder, arguments.max_pairs, arguments.parts))
    written = {"versions": package_versions(), "max_pairs": arguments.max_pairs, "models": entries}
    with replacing(arguments.out) as temporary:
        temporary.write_text(json.dumps(written, indent=1) + "\n")
    print(table_of(entries))
    print(capitals_table(entries))


if __name__ == "__main__":
    main()
