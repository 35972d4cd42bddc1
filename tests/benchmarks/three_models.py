"""The heads that weights alone do not show: two presets on several models, by evidence that was not used to build them.

    python tests/benchmarks/three_models.py GEMMA_FOLDER QWEN_FOLDER --out tests/benchmarks/three_models.json

The default model comes first; folders of others follow. A fixed half of the bundled relations is for decisions, the
other half is read once. For each preset and model: the best head of every relation and how many heads implement it;
agreement of static scores with what heads write in the relations' own neutral templates (other prompts than those the
tokens are met behind); accuracy on eliciting prompts while the best ten heads are switched off, beside as many heads
drawn from the same layers. Finished parts are kept beside the output and used when the same command is started again.
"""

import argparse
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tl_headmaps import (
    HeadIndex,
    HeadWeights,
    Relation,
    RelationScores,
    ablate,
    load_model,
    load_relations,
    relation_scores,
    validate,
)
from tl_headmaps.core.files import replacing

PRESETS = ("folded", "met")
LEAST_PAIRS = 10
N_SWITCHED_OFF = 10
N_DRAWS = 3
VALIDATED = (
    "country_to_capital",
    "country_to_language",
    "name_copying",
    "past_tense",
    "comparative",
    "present_participle",
)


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


def summary(scores: RelationScores) -> dict[str, Any]:
    implementing = scores.implements()
    table = {}
    for name in scores.relations:
        head, score = scores.top(1, name)[0]
        table[name] = {
            "best_head": str(head),
            "best_score": round(score, 3),
            "implementing": [str(entry) for entry in implementing[name]],
        }
    return table


def switched_off(model: Any, relation: Relation, heads: list[HeadIndex]) -> dict[str, Any] | None:
    """Accuracy with 0 to ten heads switched off, and with heads drawn from the same layers instead."""
    own = ablate(model, relation, heads, controls=None, n_random=0, max_heads=len(heads), progress=False)
    if own.status != "tested":
        return None
    n_heads = HeadWeights.from_model(model).n_heads
    drawn_accuracy = []
    for draw in range(N_DRAWS):
        generator = random.Random(draw)
        drawn = []
        for layer, n in Counter(head.layer for head in heads).items():
            taken = {head.head for head in heads if head.layer == layer}
            others = [head for head in range(n_heads) if head not in taken] or list(range(n_heads))
            drawn += [HeadIndex(layer, head) for head in generator.sample(others, min(n, len(others)))]
        curve = ablate(model, relation, drawn, controls=None, n_random=0, max_heads=len(drawn), progress=False)
        drawn_accuracy.append(round(float(curve.values[-1]), 3))
    accuracy = [round(value, 3) for value in own.values.tolist()]
    return {"template": own.template, "n_pairs": own.n_pairs, "accuracy": accuracy, "same_layers": drawn_accuracy}


def measured(folder: str | None, most: int, keep: Callable[[str, Callable[[], Any]], Any]) -> dict[str, Any]:
    model = load_model(folder)
    weights = HeadWeights.from_model(model)
    listed = (shortened(relation, model.tokenizer, most) for relation in load_relations())
    relations = {relation.name: relation for relation in listed if relation is not None}
    entry: dict[str, Any] = {
        "model": weights.model_name if folder is None else Path(folder).name,
        "fingerprint": weights.fingerprint,
        "n_heads": weights.n_layers * weights.n_heads,
        "halves": halves(list(relations)),
    }
    for preset in PRESETS:

        def scored(preset: Any = preset) -> Any:
            return summary(relation_scores(weights, list(relations.values()), preset=preset, progress=False))

        table = entry[f"{preset}_scores"] = keep(f"{preset} scores", scored)
        chosen = [relations[name] for name in VALIDATED if name in relations]

        def agreeing(preset: Any = preset, chosen: Any = chosen) -> Any:
            result = validate(model, chosen, preset=preset, progress=False)
            return {name: round(result.mean(name), 3) for name in ("pearson_without", "pearson_with")}

        entry[f"{preset}_agreement"] = keep(f"{preset} agreement", agreeing)

        def without(preset: Any = preset, chosen: Any = chosen, table: Any = table) -> Any:
            curves = {}
            for relation in chosen:
                if relation.eliciting_templates and table[relation.name]["best_score"] > 0:
                    best = relation_scores(weights, relation, preset=preset, progress=False).top(N_SWITCHED_OFF)
                    curve = switched_off(model, relation, [head for head, score in best if score > 0])
                    if curve is not None:
                        curves[relation.name] = curve
            return curves

        entry[f"{preset}_ablation"] = keep(f"{preset} ablation", without)
    return entry


def table_of(entries: list[dict[str, Any]]) -> str:
    lines = ["| model, half | preset | relations with a head | implementing cells | mean best score |"]
    lines += ["|---|---|---|---|---|"]
    for entry in entries:
        for half, names in entry["halves"].items():
            for preset in PRESETS:
                rows = [entry[f"{preset}_scores"][name] for name in names]
                with_head = sum(bool(row["implementing"]) for row in rows)
                n_cells = sum(len(row["implementing"]) for row in rows)
                mean = sum(row["best_score"] for row in rows) / len(rows)
                lines.append(
                    f"| {entry['model']}, {half} | {preset} | {with_head} of {len(rows)} | {n_cells} | {mean:.2f} |"
                )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="*", help="folders of further models")
    parser.add_argument("--out", type=Path, default=Path("tests/benchmarks/three_models.json"))
    parser.add_argument("--max-pairs", type=int, default=25, help="pairs of each relation at most")
    arguments = parser.parse_args()
    entries = []
    for folder in (None, *arguments.folders):
        name = "default" if folder is None else Path(folder).name
        beside = arguments.out.with_suffix(f".{name}.{arguments.max_pairs}.part.json")
        parts: dict[str, Any] = json.loads(beside.read_text()) if beside.exists() else {}

        def keep(part: str, compute: Callable[[], Any], parts: Any = parts, beside: Path = beside) -> Any:
            if part not in parts:
                start = time.perf_counter()
                with torch.no_grad():
                    parts[part] = compute()
                print(f"{beside.name}: {part} in {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
                with replacing(beside) as temporary:
                    temporary.write_text(json.dumps(parts))
            return parts[part]

        entries.append(measured(folder, arguments.max_pairs, keep))
    with replacing(arguments.out) as temporary:
        temporary.write_text(json.dumps({"max_pairs": arguments.max_pairs, "models": entries}, indent=1) + "\n")
    print(table_of(entries))


if __name__ == "__main__":
    main()
