"""One result of every kind, from a small random model; shared by the tests that disturb, damage and poison them."""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from planted import word

from tl_headmaps import (
    Relation,
    Result,
    TaskItem,
    Tasks,
    ablate,
    association_heads,
    attention_groups,
    compare,
    compare_attention,
    component_map,
    describe_head,
    describe_model,
    grouping_profile,
    head_trust,
    head_worth,
    name_heads,
    relation_scores,
    reproduce,
    salient_operations,
    task_maps,
    token_grid,
    validate,
    value_mixing,
    verify_tasks,
)

TEXT = " word3 word4 word5 word6 word7 word8 word3 word4 word9"
TEXTS = [" ".join(word(20 + (5 * n + i * (n + 1)) % 37) for i in range(8)) for n in range(10)]
PHRASES = {f" word3 word9 {word(n)} {asked}": asked for asked in (word(7), word(8)) for n in range(10, 14)}
NEXT = Relation.from_pairs("next", [(number, number + 1) for number in range(3, 30)])
ASKED = Relation.from_pairs(
    "asked", [(word(n), word(n + 10)) for n in range(20, 28)], k=20, eliciting_templates=(" word18 <X>",)
)


def tasks() -> Tasks:
    """Two functions of ten contents each, told apart by a word."""
    items = [
        TaskItem(f" word{n} {word(40 + n % 10)}", word(30), name, alternatives=(word(31),), content=f"c{i}")
        for i in range(10)
        for n, name in ((10 + i, "retrieval"), (20 + i, "inference"))
    ]
    return Tasks(tuple(items), name="own")


def _verified(model: Any) -> Result:
    return verify_tasks(model, _tasked(model), tasks(), n_items=5, n_random=2, max_heads=1, progress=False)


def _tasked(model: Any) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        return task_maps(model, tasks(), n_null=9, cache_dir=folder, progress=False)


def _reproduced(model: Any) -> Result:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "data" / "own").mkdir(parents=True)
        templates = {"neutral": [" word19 <X>"], "eliciting": [" word18 <X>"]}
        content = {"name": "asked", "k": 20, "pairs": list(ASKED.pairs), "templates": templates}
        (Path(folder) / "data" / "own" / "asked.json").write_text(json.dumps(content))
        return reproduce(model, Path(folder) / "out", data_dir=Path(folder) / "data", n_random=2, progress=False)


def _compared(model: Any) -> Result:
    one, other = (grouping_profile(model, texts, progress=False) for texts in (TEXTS[:5], TEXTS[5:]))
    return compare(one, other)


def _described(model: Any) -> Result:
    options: dict[str, Any] = {"relations": [ASKED], "preset": "folded", "text": TEXT, "texts": TEXTS}
    return describe_head(model, "L1H2", **options, progress=False)


ANALYSES: dict[str, Callable[[Any], Result]] = {
    "token_grid": lambda model: token_grid(model, "L1H0", [3, 4], [5, 6], preset="folded"),
    "relation_scores": lambda model: relation_scores(model, NEXT, progress=False, preset="folded"),
    "relation_scores of QK": lambda model: relation_scores(model, NEXT, circuit="qk", progress=False, preset="folded"),
    "attention_groups": lambda model: attention_groups(model, TEXT),
    "value_mixing": lambda model: value_mixing(model, TEXT, "L1H0"),
    "grouping_profile": lambda model: grouping_profile(model, [TEXT], progress=False),
    "component_map": lambda model: component_map(model, "stable_rank", progress=False),
    "component_map of gradients": lambda model: component_map(model, "contribution", [TEXT], progress=False),
    "component_map by head": lambda model: component_map(model, "stable_rank", by_head=True, progress=False),
    "describe_model": describe_model,
    "salient_operations": lambda model: salient_operations(model, "L1", n_tokens=5, n_targets=2, progress=False),
    "name_heads": lambda model: name_heads(model, progress=False),
    "association_heads": lambda model: association_heads(model, TEXT, "word9", "word7"),
    "compare_attention": lambda model: compare_attention(model, PHRASES, "word9"),
    "head_trust": lambda model: head_trust(model, TEXTS, prompts=[" word5"], n_null=1, progress=False),
    "head_worth": lambda model: head_worth(model, ["L1H2", "L0H3"], TEXTS, progress=False),
    "validate": lambda model: validate(model, ASKED, [" word3 <X> word5"], preset="folded", progress=False),
    "ablate": lambda model: ablate(model, ASKED, ["L0H1"], controls=None, n_random=2, preset="folded", progress=False),
    "compare": _compared,
    "describe_head": _described,
    "task_maps": _tasked,
    "verify_tasks": _verified,
    "reproduce": _reproduced,
}


def plain(result: Result) -> dict[str, Any]:
    """What a result holds, but for the time it was made."""
    values = result.to_dict()
    for made in (values, *(part for part in values.values() if isinstance(part, dict))):
        made.get("provenance", made).pop("created", None)
    return values
