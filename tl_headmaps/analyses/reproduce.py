"""The published experiments end to end: agreement with activations, and ablation, relation by relation.

The folder is a run folder (:mod:`tl_headmaps.core.store`): each relation is one piece per experiment, computed alone,
so what is computed after an interruption does not depend on when that was. Everything a reader opens is written from
the pieces at the end.
"""

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeVar

import torch
from torch import Tensor

from ..core.files import home_expanded, replacing, sha256_of
from ..core.options import Between, public
from ..core.provenance import Provenance
from ..core.store import Store, identity_of, open_run
from ..core.types import MOST_DRAWS, Model
from ..data.relations import Relation, RelationLike, load_relations, relations_in, resolve_relations, writable
from ..renderers.figure import Figure
from ..renderers.listing import table_figure
from ..renderers.tables import Table
from ..renderers.text import number, percent
from ..results import Result
from ..results.codec import annotations_of, plain, typed
from ..results.table import frozen_result
from .ablate import Ablation, AblationCurves
from .study import Study
from .validate import Validation, validate

if TYPE_CHECKING:
    from typing import Self

_Piece = TypeVar("_Piece", Validation, AblationCurves)

PUBLISHED_AGREEMENT = {"GPT-2 XL": (0.89, 0.71), "Pythia-6.9B": (0.86, 0.69), "Llama-3.1-8B": (0.78, 0.72)}
"""Mean agreement without and with context (arXiv:2412.11965)."""

PUBLISHED_DROPS: dict[str, tuple[float, float | None]] = {
    "Pythia-6.9B": (0.88, -0.01),
    "Pythia-12B": (0.72, None),
    "GPT-2 XL": (0.65, 0.07),
    "Llama-3.1-8B": (0.44, None),
}
"""Mean relative drop of accuracy without the relation's heads, and without random heads where it is known here
(arXiv:2412.11965); all models of the paper, not the best alone."""


@dataclass(frozen=True)
class ReproducedRelation:
    """Both experiments on one relation; None where there is no value.

    Attributes:
        relation: Its name.
        n_pairs: Pairs behind the agreement.
        pearson_without, pearson_with: Agreement of static and dynamic scores over heads x templates, as published,
            without and with context.
        heads_without, heads_with: The same over heads, within layers.
        status: Status of the ablation: ``tested``, ``not testable``, ``no heads`` or ``no template``.
        n_heads: Number of heads switched off.
        base_accuracy, final_accuracy: Accuracy on the relation before and after.
        random_accuracy: Accuracy with as many random heads switched off instead, mean over draws.
        drop, random_drop, control_drop: Share of the accuracy lost.
        controls: Names of the control relations.
        n_verdict: Number of heads that implement the relation, which the verdict is about.
        p_value: The verdict: their rank among other sets of as many heads of the same layers.
    """

    relation: str
    n_pairs: int
    pearson_without: float | None = None
    pearson_with: float | None = None
    status: str = "no template"
    n_heads: int = 0
    base_accuracy: float | None = None
    final_accuracy: float | None = None
    random_accuracy: float | None = None
    drop: float | None = None
    random_drop: float | None = None
    control_drop: float | None = None
    controls: tuple[str, ...] = ()
    heads_without: float | None = None
    heads_with: float | None = None
    n_verdict: int = 0
    p_value: float | None = None


@frozen_result
class Reproduction(Result):
    """Tables of a reproduction; the results behind them are files of their own.

    Attributes:
        rows: Both experiments on each relation: agreement with activations, and ablation.

    Example:
        >>> from tl_headmaps import Relation, Reproduction, load_default_model, reproduce
        >>> pairs = [("France", "Paris"), ("Germany", "Berlin"), ("Japan", "Tokyo")]
        >>> capitals = Relation.from_pairs("capitals", pairs, eliciting_templates=("The capital of <X> is",))
        >>> options = {"relations": capitals, "n_random": 1, "data_dir": "."}  # "." has no controls
        >>> tables = reproduce(load_default_model(), "maps", **options, progress=False)
        >>> round(tables.mean("base_accuracy"), 2)
        1.0
        >>> Reproduction.load("maps/reproduction.json") == tables
        True
    """

    kind: ClassVar[str] = "reproduction"
    methods: ClassVar[tuple[str, ...]] = ("elhelo2024maps",)
    experiment: ClassVar[str] = "maps"
    paper_columns: ClassVar[tuple[str, ...]] = (
        "relation",
        "pearson_without",
        "pearson_with",
        "n_heads",
        "base_accuracy",
        "final_accuracy",
        "drop",
        "random_drop",
        "p_value",
    )
    rows: tuple[ReproducedRelation, ...]
    provenance: Provenance

    @property
    def axes(self) -> dict[str, list[Any]]:
        """Names of the relations."""
        return {"relation": [row.relation for row in self.rows]}

    def mean(self, column: str) -> float:
        """Mean of a column over the relations that have a value there."""
        values = [getattr(row, column) for row in self.rows]
        known = [value for value in values if value is not None]
        return sum(known) / len(known) if known else math.nan

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, the published figures with them."""
        return {
            "kind": self.kind,
            "experiment": self.experiment,
            "axes": self.axes,
            "rows": plain(self.rows),
            "mean": plain({name: self.mean(name) for name in _MEANS}, nullable=True),
            "published": plain({"agreement": PUBLISHED_AGREEMENT, "drop": PUBLISHED_DROPS}),
            "provenance": self.provenance.to_dict(),
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Self":
        """Inverse of :meth:`to_dict`."""
        return cls(typed(values["rows"], annotations_of(cls)["rows"]), Provenance.from_dict(values["provenance"]))

    def to_rows(self) -> Iterable[dict[str, Any]]:
        """One record per relation."""
        return (asdict(row) | {"controls": " ".join(row.controls)} for row in self.rows)

    def figure(self) -> Figure:
        """Agreement, then what is lost without the heads; one row per relation, the published values below ours."""
        title = f"Published experiments ({self.experiment}) on {self.provenance.model}"
        return table_figure(self.agreement_table(), self.drops_table(), title=title, text=str(self))

    def __str__(self) -> str:
        return (
            f"Static scores and the running model: {self.experiment}, {self.provenance.model}\n\n"
            f"{self.agreement_table().text()}\n\n"
            f"Heads switched off\n\n{self.drops_table().text()}"
        )

    def agreement_table(self) -> Table:
        """Agreement of static and dynamic scores by relation, the mean and the published means below."""
        rows: list[list[object]] = [
            [row.relation, row.n_pairs, number(row.pearson_without), number(row.pearson_with)] for row in self.rows
        ]
        means = (self.mean("pearson_without"), self.mean("pearson_with"))
        rows.append([f"mean, {self.provenance.model}", "", *map(number, means)])
        rows += [[f"published mean, {name}", "", *map(number, values)] for name, values in PUBLISHED_AGREEMENT.items()]
        columns = [("relation", "left"), ("pairs", "right"), ("without context", "right"), ("with context", "right")]
        return Table(columns, rows, "Pearson correlation of static and dynamic scores over heads x templates")

    def drops_table(self) -> Table:
        """Accuracy before and after switching off heads by relation, the mean and the published means below."""
        rows: list[list[object]] = []
        for row in self.rows:
            if row.status != "tested":
                rows.append([row.relation, "", number(row.base_accuracy), row.status, *[""] * 6])
                continue
            values = (row.base_accuracy, row.final_accuracy, row.random_accuracy)
            drops = (percent(share) for share in (row.drop, row.random_drop, row.control_drop))
            rows.append(
                [row.relation, row.n_heads, *map(number, values), *drops, row.n_verdict, number(row.p_value, 3)]
            )
        drops = (percent(self.mean(name)) for name in ("drop", "random_drop", "control_drop"))
        rows.append([f"mean, {self.provenance.model}", "", "", "", "", *drops, "", ""])
        rows += [
            [f"published mean, {name}", "", "", "", "", *map(percent, values), "-", "", ""]
            for name, values in PUBLISHED_DROPS.items()
        ]
        titles = ["relation", "heads off", "before", "after", "random", "drop", "drop, random", "drop, controls"]
        titles += ["implement", "p"]
        columns = [(title, "left" if title == "relation" else "right") for title in titles]
        note = "next-token accuracy; drop: share of the accuracy lost; p: rank of the heads that implement the relation"
        return Table(columns, rows, f"{note} among sets of as many heads of the same layers")


_MEANS = ("pearson_without", "pearson_with", "drop", "random_drop", "control_drop")
"""Fields whose mean over relations is told."""


@public
def reproduce(
    model: Model,
    out: str | Path,
    *,
    relations: RelationLike | Sequence[RelationLike] | None = None,
    n_random: Annotated[int, Between(0, MOST_DRAWS)] = 99,
    prepend_bos: bool = False,
    data_dir: str | Path | None = None,
    progress: bool = True,
) -> Reproduction:
    """Run the published experiments on a model: agreement with activations, and ablation.

    They are those of Elhelo and Geva, *Inferring Functionality of Attention Heads from their Parameters*. Written to
    ``out``: a result for each relation and experiment (``relations/``), tables as CSV, Markdown and LaTeX
    (``tables/``), figures (``figures/``), ``reproduction.json`` and ``manifest.json``. Finished relations are saved, so
    an interrupted run resumes.

    Args:
        model: A TransformerBridge or HookedTransformer with raw weights.
        out: Folder to write to.
        relations: Bundled names, files, or :class:`Relation` objects; by default all bundled ones that the tokenizer
            can write.
        n_random: Number of sets of heads that the verdict on each ablation compares with.
        prepend_bos: Begin each prompt with BOS; published figures are without.

    Example:
        >>> from tl_headmaps import Relation, load_default_model, reproduce
        >>> pairs = [("France", "Paris"), ("Germany", "Berlin"), ("Japan", "Tokyo")]
        >>> capitals = Relation.from_pairs("capitals", pairs, eliciting_templates=("The capital of <X> is",))
        >>> options = {"relations": capitals, "n_random": 1, "data_dir": "."}  # "." has no controls
        >>> tables = reproduce(load_default_model(), "maps", **options, progress=False)
        >>> tables.rows[0].relation, tables.rows[0].status
        ('capitals', 'tested')
    """
    study = Study(model, prepend_bos=prepend_bos, fills_prompts=True, preset="maps", progress=progress)
    weights = study.weights
    weights.require("maps", needs_mlp=max(weights.layers_with_heads) > 0)
    if relations is None:
        bundled = chosen = load_relations(model=weights, data_dir=data_dir)
    else:
        # A folder without any has no controls.
        bundled = writable(relations_in(data_dir), weights)
        chosen = resolve_relations(relations, data_dir)
    names = [relation.name for relation in chosen]
    # Controls may be any bundled relation, even when only a few are reproduced.
    candidates = [*chosen, *(relation for relation in bundled if relation.name not in names)]
    provenance = weights.provenance(
        runs_model=True,
        options={"n_random": n_random, "prepend_bos": prepend_bos},
        data={relation.name: relation.digest for relation in chosen},
        seed=0,
    )
    details = {**_details(provenance, candidates), "settings": weights.settings_digest}
    identity = identity_of(Reproduction.kind, provenance, details)
    folder = home_expanded(out)
    with open_run(folder, identity, provenance) as run:
        # Only a complete folder has a manifest.
        (folder / _MANIFEST).unlink(missing_ok=True)
        checks: dict[str, Validation] = {}
        for relation in chosen:
            make = partial(validate, model, relation, preset="maps", prepend_bos=prepend_bos, progress=progress)
            checks[relation.name] = _finished_or_made(run, _file_stem(relation, "validation"), Validation, make)
        ablation, curves = Ablation(study), dict[str, AblationCurves]()
        # Of control relations, the validations have the static scores already.
        static = {name: check.static_promote[0] for name, check in checks.items()}
        for relation in chosen:
            if not relation.eliciting_templates:
                continue
            ablated = partial(_ablated, ablation, relation, candidates, n_random, static)
            curves[relation.name] = _finished_or_made(run, _file_stem(relation, "ablation"), AblationCurves, ablated)
        rows = tuple(_row(name, checks[name], curves.get(name)) for name in names)
        result = Reproduction(rows, replace(provenance, created=run.created))
        results: dict[str, Result] = {_file_stem(one, "validation"): checks[one.name] for one in chosen}
        results |= {_file_stem(one, "ablation"): curves[one.name] for one in chosen if one.name in curves}
        _write(folder, identity, result, results)
    return result


_MANIFEST = "manifest.json"


def _details(provenance: Provenance, candidates: Sequence[Relation]) -> dict[str, Any]:
    """What the numbers depend on beyond the options and data in the provenance."""
    return {
        "model": provenance.model,
        "hosts": {name: provenance.versions[name] for name in ("transformer-lens", "transformers")},
        "relations": {
            relation.name: {
                "digest": relation.digest,
                "neutral": list(relation.neutral_templates),
                "eliciting": list(relation.eliciting_templates),
            }
            for relation in candidates
        },
    }


def _ablated(
    ablation: Ablation,
    relation: Relation,
    candidates: Sequence[Relation],
    n_random: int,
    static: Mapping[str, Tensor],
) -> AblationCurves:
    """The ablation of a relation, asked with the template that the model answers best."""
    return ablation.curves(
        ablation.questions(relation, relation.eliciting_templates),
        chosen_on=relation,
        candidates=[other for other in candidates if other.name != relation.name],
        n_random=n_random,
        static=static,
    )


def _finished_or_made(run: Store, stem: str, kind: type[_Piece], make: Callable[[], _Piece]) -> _Piece:
    """A result of this run: from its piece, or made now and kept as one."""
    piece = f"pieces/{stem}"
    # Pieces hold tensors; a result is the bytes of its JSON.
    tensors = run.finished(piece)
    if tensors is not None:
        return kind.from_dict(json.loads(tensors["json"].numpy().tobytes()))
    made = make()
    # All results carry the time the run was started: their bytes do not tell when it was interrupted.
    result = replace(made, provenance=replace(made.provenance, created=run.created))
    tensors = {"json": torch.frombuffer(bytearray(result.to_json().encode()), dtype=torch.uint8)}
    run.write(piece, tensors)
    return result


def _row(name: str, check: Validation, curves: AblationCurves | None) -> ReproducedRelation:
    measures = ("pearson_without", "pearson_with", "heads_without", "heads_with")
    row: dict[str, Any] = {measure: _known(check.agreement[measure][0]) for measure in measures}
    if curves is not None:
        ends = [float(curve.accuracy[-1]) for curve in curves.random_curves]
        row |= {
            "status": curves.status,
            "n_heads": len(curves.heads),
            "base_accuracy": curves.base_accuracy,
            "random_accuracy": sum(ends) / len(ends) if ends else None,
            "controls": tuple(control.relation for control in curves.controls),
            "n_verdict": curves.n_verdict,
            "p_value": None if curves.verdict is None else _known(curves.verdict.p_value),
        }
    if curves is not None and curves.status == "tested":
        row |= {
            "final_accuracy": float(curves.curve.accuracy[-1]),
            "drop": _known(curves.curve.drop),
            "random_drop": _known(curves.random_drop),
            "control_drop": _known(curves.control_drop),
        }
    return ReproducedRelation(name, check.n_dynamic[0], **row)


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value


def _write(folder: Path, identity: Mapping[str, Any], result: Reproduction, results: Mapping[str, Result]) -> None:
    """Results, figures and tables, and last a manifest with the SHA-256 of each of them."""
    paths = [result.save(folder / "reproduction.json")]
    for stem, one in results.items():
        paths.append(one.save(folder / "relations" / f"{stem}.json"))
        paths += [one.save(folder / "figures" / f"{stem}{suffix}") for suffix in (".html", ".svg")]
    for name, table in (("agreement", result.agreement_table()), ("ablation", result.drops_table())):
        for suffix, text in ((".csv", table.csv()), (".md", table.markdown()), (".tex", table.latex())):
            paths.append(_write_text(folder / "tables" / f"{name}{suffix}", text))
    files = {path.relative_to(folder).as_posix(): sha256_of(path) for path in sorted(paths)}
    manifest = {"settings": identity, "complete": True, "files": files}
    _write_text(folder / _MANIFEST, json.dumps(manifest, ensure_ascii=False, indent=1) + "\n")


def _write_text(path: Path, text: str) -> Path:
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
    return path


def _file_stem(relation: Relation, experiment: str) -> str:
    """``country_to_capital.ablation``; names of users' relations may hold anything, names of files may not."""
    slug = re.sub(r"[^A-Za-z0-9_-]", "_", relation.name)
    return f"{slug if slug == relation.name else f'{slug}-{relation.digest[:8]}'}.{experiment}"
