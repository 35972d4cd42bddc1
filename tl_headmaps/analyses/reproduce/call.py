"""Both published experiments end to end, into a folder that can be finished after a kill.

Every relation is a file of its own, written whole or not at all and computed alone: what is there is not computed
again, and what is computed later does not depend on when. The manifest says what the folder holds (model, data,
options, versions); a folder of anything else is refused.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from ...capture.weights import HeadWeights
from ...core.errors import OutputError, UsageError
from ...core.files import replacing, sha256_of
from ...core.provenance import package_versions
from ...core.types import Experiment, check_choice
from ...data.relations import Relation, RelationLike, load_relations, resolve
from ...renderers.tables import Table
from ...results import Result
from ...scorers.ablation import default_m
from ..ablate.call import AblationSettings, Lab
from ..ablate.result import AblationCurves
from ..relation_scores.call import require_distinct
from ..validate.call import ValidationSettings, common_templates, validated, weights_of
from ..validate.result import Validation
from ..validate.text import agreement_table, drops_table
from .result import ReproducedRelation, Reproduction

_Kept = TypeVar("_Kept", bound=Result)


def reproduce(
    model: Any,
    out: str | Path,
    *,
    experiment: Experiment = "maps",
    relations: RelationLike | Sequence[RelationLike] | None = None,
    seeds: int = 5,
    prepend_bos: bool = False,
    data_dir: str | Path | None = None,
    progress: bool = True,
) -> Reproduction:
    """Run the published experiments on a model: agreement with activations, and ablation.

    Writes into ``out``: a result file for each relation and experiment (``relations/``), tables as CSV, Markdown and
    LaTeX (``tables/``), pictures (``figures/``), ``reproduction.json`` and ``manifest.json``. Started again on the same
    folder it goes on where it was stopped.

    Args:
        model: A TransformerBridge or HookedTransformer with raw weights.
        out: Folder to write to.
        experiment: ``"maps"``: Elhelo and Geva, *Inferring Functionality of Attention Heads from their Parameters*.
        relations: Bundled names, files, or :class:`Relation` objects; by default all bundled ones that the tokenizer
            can write.
        seeds: Draws of random heads to compare with.
        prepend_bos: Put the BOS token in front of each prompt; published figures are without.
        data_dir: Folder of relations instead of the bundled one.
        progress: Show progress bars on a terminal.

    Example:
        >>> from tl_headmaps import Relation, load_default_model, reproduce
        >>> pairs = [("France", "Paris"), ("Germany", "Berlin"), ("Japan", "Tokyo")]
        >>> capitals = Relation.from_pairs("capitals", pairs, eliciting_templates=("The capital of <X> is",))
        >>> options = {"relations": capitals, "seeds": 1, "data_dir": "."}  # in "." are no relations to control with
        >>> tables = reproduce(load_default_model(), "maps", **options, progress=False)
        >>> tables.rows[0].relation, tables.rows[0].status
        ('capitals', 'tested')
    """
    check_choice(experiment, Experiment, "experiment")
    weights = weights_of(model)
    weights.require("maps", needs_mlp=weights.n_layers > 1)
    bundled = load_relations(model=weights, data_dir=data_dir)
    chosen = bundled if relations is None else _resolved(relations, data_dir)
    require_distinct(chosen)
    folder = _Folder(Path(out))
    folder.claim(_settings(weights, experiment, chosen, seeds, prepend_bos))
    names = [relation.name for relation in chosen]
    # Controls may be any bundled relation, also when only a few are reproduced.
    candidates = [*chosen, *(relation for relation in bundled if relation.name not in names)]

    settings = ValidationSettings("maps", None, "single", "skip", prepend_bos, seed=0)
    checks: dict[str, Validation] = {}
    for relation in chosen:
        path = folder.file(relation, "validation")
        known = folder.kept(path, Validation)
        if known is None:
            known = validated(model, weights, [relation], common_templates([relation]), settings, progress)
            known.save(path)
        checks[relation.name] = known

    static = {name: check.static_promote[0] for name, check in checks.items()}
    lab = Lab(model, weights, AblationSettings("zero", "maps", None, "skip", prepend_bos, progress))
    curves: dict[str, AblationCurves] = {}
    for relation in chosen:
        if not relation.eliciting_templates:
            continue
        path = folder.file(relation, "ablation")
        found = folder.kept(path, AblationCurves)
        if found is None:
            found = lab.curves(
                lab.asked(relation, relation.eliciting_templates),
                ranked=None,
                m=default_m(weights.n_layers * weights.n_heads),
                candidates=[other for other in candidates if other.name != relation.name],
                all_candidates=False,
                seeds=seeds,
                static=static,
            )
            found.save(path)
        curves[relation.name] = found

    rows = tuple(_row(name, checks[name], curves.get(name)) for name in names)
    options = {"experiment": experiment, "seeds": seeds, "prepend_bos": prepend_bos}
    data = {relation.name: relation.digest for relation in chosen}
    result = Reproduction(experiment, rows, weights.provenance(runs_model=True, options=options, data=data, seed=0))
    _tables(folder.path / "tables", {"agreement": agreement_table(result), "ablation": drops_table(result)})
    for relation in chosen:
        drawn: dict[str, Result] = {"validation": checks[relation.name]}
        if relation.name in curves:
            drawn["ablation"] = curves[relation.name]
        for part, one in drawn.items():
            for suffix in _figure_suffixes():
                one.save(folder.figure(relation, part, suffix))
    result.save(folder.path / "reproduction.json")
    folder.finish()
    return result


def _resolved(relations: Any, data_dir: str | Path | None) -> list[Relation]:
    listed = [relations] if isinstance(relations, str | Path | Relation) else list(relations)
    if not listed:
        raise UsageError("No relation was given. Name at least one, or leave relations= out for all.")
    return [resolve(relation, data_dir) for relation in listed]


def _settings(
    weights: HeadWeights, experiment: str, relations: Sequence[Relation], seeds: int, prepend_bos: bool
) -> dict[str, Any]:
    """Everything the numbers of a folder depend on."""
    return {
        "experiment": experiment,
        "model": weights.model_name,
        "fingerprint": weights.fingerprint,
        "basis": weights.basis,
        "seeds": seeds,
        "prepend_bos": prepend_bos,
        "relations": {
            relation.name: {
                "digest": relation.digest,
                "neutral": list(relation.neutral_templates),
                "eliciting": list(relation.eliciting_templates),
            }
            for relation in relations
        },
        "versions": package_versions(),
    }


class _Folder:
    """The folder of one reproduction."""

    def __init__(self, path: Path) -> None:
        self.path, self.manifest = path, path / "manifest.json"
        self._settings: dict[str, Any] = {}

    def claim(self, settings: dict[str, Any]) -> None:
        """Take a new folder, or one that was begun with the same settings; refuse any other."""
        if self.path.exists() and not self.path.is_dir():
            raise OutputError(f"{self.path} is a file. Choose a folder.")
        if not self.manifest.exists() and self.path.is_dir() and any(self.path.iterdir()):
            raise OutputError(f"{self.path} holds other files and no manifest.json. Choose an empty or a new folder.")
        self._settings = settings
        if not self.manifest.exists():
            self._write({"settings": settings, "complete": False})
            return
        try:
            begun = json.loads(self.manifest.read_text(encoding="utf-8"))["settings"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise OutputError(f"{self.manifest} cannot be read ({error}). Choose another folder.") from error
        differing = [name for name in settings if not isinstance(begun, dict) or begun.get(name) != settings[name]]
        if differing:
            raise OutputError(
                f"{self.path} was begun with another {', '.join(differing)}; the numbers would not belong together. "
                "Choose another folder, or use the same settings."
            )

    def finish(self) -> None:
        """Write down every file with its SHA-256."""
        found = sorted(path for path in self.path.rglob("*") if path.is_file() and not path.name.startswith("."))
        files = {path.relative_to(self.path).as_posix(): sha256_of(path) for path in found if path != self.manifest}
        self._write({"settings": self._settings, "complete": True, "files": files})

    def _write(self, content: dict[str, Any]) -> None:
        with replacing(self.manifest) as temporary:
            temporary.write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")

    def file(self, relation: Relation, part: str) -> Path:
        """Where the result of a relation goes."""
        return self.path / "relations" / f"{_slug(relation)}.{part}.json"

    def figure(self, relation: Relation, part: str, suffix: str) -> Path:
        """Where a picture of it goes."""
        return self.path / "figures" / f"{_slug(relation)}.{part}{suffix}"

    @staticmethod
    def kept(path: Path, kind: type[_Kept]) -> _Kept | None:
        """A finished result; None if it is not there, or was damaged since and has to be made again."""
        if not path.exists():
            return None
        try:
            return kind.load(path)
        except OutputError:
            return None


def _row(name: str, check: Validation, curves: AblationCurves | None) -> ReproducedRelation:
    tested = curves is not None and curves.status == "tested"
    ends = [float(curve.accuracy[-1]) for curve in curves.random_curves] if curves is not None else []
    return ReproducedRelation(
        relation=name,
        n_pairs=check.n_dynamic[0],
        pearson_without=_known(check.agreement["pearson_without"][0]),
        pearson_with=_known(check.agreement["pearson_with"][0]),
        status="no template" if curves is None else curves.status,
        n_heads=len(curves.heads) if curves is not None else 0,
        base_accuracy=None if curves is None else curves.base_accuracy,
        final_accuracy=float(curves.curve.accuracy[-1]) if curves is not None and tested else None,
        random_accuracy=sum(ends) / len(ends) if ends else None,
        drop=_known(curves.curve.drop) if curves is not None and tested else None,
        random_drop=_known(curves.random_drop) if curves is not None and tested else None,
        control_drop=_known(curves.control_drop) if curves is not None and tested else None,
        controls=tuple(control.relation for control in curves.controls) if curves is not None else (),
    )


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value


def _tables(folder: Path, tables: Mapping[str, Table]) -> None:
    for name, table in tables.items():
        for suffix, text in ((".csv", table.csv()), (".md", table.markdown()), (".tex", table.latex())):
            with replacing(folder / f"{name}{suffix}") as temporary:
                temporary.write_text(text, encoding="utf-8")


def _slug(relation: Relation) -> str:
    """A name for files: those of users' relations may hold anything."""
    slug = re.sub(r"[^A-Za-z0-9_-]", "_", relation.name)
    return slug if slug == relation.name else f"{slug}-{relation.digest[:8]}"


def _figure_suffixes() -> tuple[str, ...]:
    """Pages, and figures for print where matplotlib is installed."""
    return (".html", ".svg") if find_spec("matplotlib") else (".html",)
