"""Which command is which call, and what some commands do beside calling."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..core.errors import UsageError
from ..core.options import Count, Draws
from .build import Command, Run
from .output import check_folder, say

if TYPE_CHECKING:
    from ..data.relations import Relation


def relations(run: Run, *, list_: bool = False, category: str | None = None, side_by_side: bool = False) -> None:
    """The bundled relations, and the maps of several ones.

    Args:
        run: The command.
        list_: List the bundled relations and exit.
        category: Bundled relations of one category.
        side_by_side: In figures of --out, draw the maps of all relations side by side.
    """
    from .. import load_relations

    named = run.written.get("relations")
    if named and (category is not None or list_):
        option = "--list" if category is None else "--category"
        raise UsageError(
            f"{option} is about the bundled relations, and {named[0]} was named. Leave out {option}, or the name."
        )
    if list_:
        unused = next((name for name in run.written if name not in _OF_LISTS), None)
        if unused is not None:
            option = f"--{unused.replace('_', '-')}"
            raise UsageError(
                f"--list only lists, with --category, --model, --checkpoint or --device, and has no use for {option}. "
                f"Leave out --list, or {option}."
            )
        say(_listed(load_relations(category), run.model))
        return
    chosen = {}
    if category is not None:
        chosen = {"relations": load_relations(category, model=run.model)}
    run.show(run.result(**chosen), side_by_side=side_by_side)


_OF_LISTS = {"list_", "category", "model", "checkpoint", "device"}


def _listed(listed: "list[Relation]", model: Any) -> str:
    from ..data.relations import kept_pairs
    from ..renderers.text import table_text

    rows = [
        [
            relation.category,
            relation.name,
            len(relation.pairs),
            "-" if model.tokenizer is None else kept_pairs(relation, model.tokenizer),
            relation.k,
            relation.title,
        ]
        for relation in listed
    ]
    titles = ["category", "relation", "pairs", "single-token", "k", "title"]
    columns = [(title, "right" if title in ("pairs", "single-token", "k") else "left") for title in titles]
    return table_text(columns, rows)


def salient(run: Run, *, all_: bool = False) -> None:
    """Thousands of lines only when asked for.

    Args:
        run: The command.
        all_: All heads of the model.
    """
    if all_ == bool({"heads", "layers"} & set(run.options)):
        raise UsageError("Say which heads: L23H4,L23H2 (or --heads L23H4,L23H2), --layers 12, or --all.")
    run.show(run.result())


def mixing(run: Run, *, against: str | None = None, control: Sequence[str] = ()) -> None:
    """Dimensions of values.

    Args:
        run: The command.
        against: Compare the dimensions that --query and this token use.
        control: With --against: a token to compare with. May be repeated.
    """
    missing = [f"--{name}" for name in ("query", "key") if run.options.get(name) is None]
    if run.options.get("head") is None and (missing or against is not None):
        raise UsageError(
            "Without a head, one association is mapped over all heads: give a head, or --query and --key"
            + (". --against is about one head." if against is not None else f" ({' and '.join(missing)} missing).")
        )
    if against is None:
        if control:
            raise UsageError("--control is compared with --query beside --against. Give --against, too.")
        run.show(run.result())
        return
    words = {name: run.options.pop(name, None) for name in ("query", "key")}
    if None in words.values():
        raise UsageError("--against compares two words that are associated with a key. Give --query and --key, too.")
    if run.outputs:
        raise UsageError("--against is answered in a sentence, which is printed. Leave --out out.")
    say(run.result().dimensions(*words.values(), against=against, control=control))


def components(run: Run, *, metric: str | None = None) -> None:
    """What a matrix is measured by.

    Args:
        run: The command.
        metric: What to measure: from text contribution, sensitivity or gradient_ratio; from the weights
            alone frobenius, spectral, stable_rank, effective_rank or tail_exponent; from two models relative_change,
            changed_share or subspace_overlap; default: sensitivity, or relative_change with --against.
    """
    from ..scorers.components import find_metric

    if metric is None and "against" in run.options:
        # Comparing is what a second model is for.
        metric = "relative_change"
    if metric is not None:
        find_metric(metric)
    run.show(run.result(**({} if metric is None else {"metric": metric})))


def ablate(run: Run) -> None:
    """Prompts are looked for before the model is opened."""
    from ..analyses.ablate import eliciting_templates

    eliciting_templates(run.options["relation"], run.options.get("template"))
    run.show(run.result())


def reproduce(run: Run, *, out: Path) -> None:
    """A folder of results.

    Args:
        run: The command.
        out: Folder to write to; an interrupted run resumes.
    """
    folder = check_folder(out)
    result = run.result(out=folder)
    click.echo(f"Wrote {folder}", err=True)
    say(str(result))


def tasks(
    run: Run,
    *,
    data: Path | None = None,
    functions: Sequence[str] = (),
    drop_duplicates: bool = False,
    sample: int | None = None,
    verify: bool = False,
    n_items: Count | None = None,
    n_random: Draws | None = None,
    max_heads: Count | None = None,
) -> None:
    """The items, and what becomes of them without the heads of a function.

    Args:
        run: The command.
        data: Items of your own: .json, .jsonl, .csv, .tsv.
        functions: Only these functions; two or more, separated by commas.
        drop_duplicates: Keep the first of equal prompts in --data.
        sample: About this many items of each function, for a quick look.
        verify: Then ablate each function's heads (minutes).
        n_items: With --verify: items of each function; default: 10.
        n_random: With --verify: draws of other heads of the same layers; default: 39.
        max_heads: With --verify: heads to ablate at most; default: 10.
    """
    from .. import Tasks, load_tasks, verify_tasks

    counts = {"n_items": n_items, "n_random": n_random, "max_heads": max_heads}
    of_verify: dict[str, Any] = {name: count for name, count in counts.items() if count is not None}
    if of_verify and not verify:
        option = f"--{next(iter(of_verify)).replace('_', '-')}"
        raise UsageError(f"{option} is an option of the verification; add --verify, or leave it out.")
    if data is None:
        if drop_duplicates:
            raise UsageError("--drop-duplicates is about the file of --data; give the file too.")
        chosen = load_tasks(functions or None)
    else:
        chosen = Tasks.from_file(data, duplicates="drop" if drop_duplicates else "refuse")
        chosen = chosen.select(functions) if functions else chosen
        for name, count in chosen.unknown_labels.items():
            click.echo(f"Left out {count} items labelled {name!r}, which is not one of the functions.", err=True)
    if sample is not None:
        chosen = chosen.sample(sample, **({"seed": run.options["seed"]} if "seed" in run.options else {}))
    maps = run.result(tasks=chosen)
    run.show(maps)
    if verify:
        say("")
        verified = verify_tasks(run.model, maps, chosen, **of_verify)
        run.show(verified, [path.with_suffix(f".verified{path.suffix}") for path in run.outputs])


COMMANDS = {
    "grid": Command("token_grid", ("head",)),
    "relations": Command("relation_scores", ("relations",), relations),
    "head": Command("describe_head", ("head",)),
    "model": Command("describe_model"),
    "salient": Command("salient_operations", ("heads",), salient),
    "name-heads": Command("name_heads"),
    "groups": Command("attention_groups", ("heads",)),
    "profile": Command("grouping_profile", ("heads",)),
    "mixing": Command("value_mixing", ("head",), mixing),
    "association": Command("association_heads"),
    "compare-attention": Command("compare_attention"),
    "compare": Command("compare", ("first", "second")),
    "components": Command("component_map", (), components),
    "tasks": Command("task_maps", (), tasks),
    "validate": Command("validate", ("relations",)),
    "trust": Command("head_trust", ("heads",)),
    "worth": Command("head_worth", ("heads",)),
    "ablate": Command("ablate", ("relation",), ablate),
    "reproduce": Command("reproduce", (), reproduce),
}
"""Commands that are public calls: a new call needs its line here, and nothing else."""
