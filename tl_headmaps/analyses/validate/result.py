"""Whether the running model agrees with scores read from its weights."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from ...core.errors import UsageError
from ...core.provenance import Provenance
from ...core.types import HeadIndex, check_choice
from ...renderers.charts import scatter
from ...renderers.figure import Figure
from ...renderers.text import in_words, interval, number, table_text, visible
from ...results import HeadMaps, cells
from ...scorers.statistics import LEAST_UNITS

if TYPE_CHECKING:
    from typing import Self

Context: TypeAlias = Literal["without", "with"]

_CONTEXTS: tuple[Context, ...] = ("without", "with")
_STATIC = ("static_promote", "static_suppress")
_DYNAMIC = ("promote_without", "promote_with", "suppress_without", "suppress_with")


@dataclass(frozen=True, eq=False, repr=False)
class Validation(HeadMaps):
    """Static and dynamic scores of relations, and how well they agree.

    Attributes:
        relations: Names of the relations.
        templates: The prompts, with ``<X>`` in place of the source.
        k: Top-k of each relation.
        n_static: Pairs behind the static scores of each relation.
        n_dynamic: Pairs behind the dynamic scores of each relation, each in every template.
        dropped: (source, target, reason) of the pairs left out of the dynamic scores, by relation.
        static_promote, static_suppress: Scores from the weights alone.
        promote_without, suppress_without: Scores when the last position attends to the source alone.
        promote_with, suppress_with: Scores of what the head really writes at the last position.
        agreement: Columns with a value per relation, for attention wholly on the source (``_without``) and as it is
            (``_with``), with ``suppress_`` in front for suppression. ``heads``: correlation of static with dynamic
            scores over heads, templates averaged and layer means taken off; ``p``: share of permutations of heads
            within layers that correlate as highly; ``n_active``: heads with a score above 0; ``n_static``: heads with a
            static score of .15 or more; ``n_confirmed`` and ``confirmed``: those that have it in prompts too, and their
            share; ``pearson`` and ``spearman``: correlation over heads x templates, as published. ``_low`` and
            ``_high`` are ends of 95% intervals over clusters of pairs, of which ``n_clusters`` are behind the static
            scores and behind the dynamic ones (the fewer of both, where they differ); ``spearman`` has none, since most
            heads tie at 0 and no resampling of pairs tells how far it would move. NaN where a side does not vary over
            heads, where no head counts, and for intervals of fewer than four clusters or where a side does not vary
            without one of them.

    Example:
        >>> from tl_headmaps import Relation, load_default_model, validate
        >>> capitals = Relation.from_pairs("capitals", [("France", "Paris"), ("Egypt", "Cairo"), ("Japan", "Tokyo")])
        >>> validation = validate(load_default_model(), capitals, "The story of <X> contains", progress=False)
        >>> validation.n_static, validation.n_dynamic, validation.templates
        ((3,), (3,), ('The story of <X> contains',))
        >>> static, dynamic = validation.static_promote[0, 23, 4], validation.promote_without[0, 0, 23, 4]
        >>> round(float(static), 2), round(float(dynamic), 2)
        (1.0, 0.33)
    """

    kind: ClassVar[str] = "validation"
    methods: ClassVar[tuple[str, ...]] = ("elhelo2024maps",)
    json_axes: ClassVar[dict[str, str | None]] = {
        "relation": "relations",
        "template": "templates",
        "layer": None,
        "head": None,
    }
    nullable: ClassVar[tuple[str, ...]] = ("agreement", *_STATIC, *_DYNAMIC)
    labelled: ClassVar[str] = "relations"
    aligned: ClassVar[tuple[str, ...]] = ("k", "n_static", "n_dynamic", "dropped", "agreement")
    relations: tuple[str, ...]
    templates: tuple[str, ...]
    k: tuple[int, ...]
    n_static: tuple[int, ...]
    n_dynamic: tuple[int, ...]
    dropped: tuple[tuple[tuple[str, str, str], ...], ...]
    agreement: dict[str, tuple[float, ...]]
    static_promote: Float[Tensor, "relation layer head"]
    static_suppress: Float[Tensor, "relation layer head"]
    promote_without: Float[Tensor, "relation template layer head"]
    promote_with: Float[Tensor, "relation template layer head"]
    suppress_without: Float[Tensor, "relation template layer head"]
    suppress_with: Float[Tensor, "relation template layer head"]
    provenance: Provenance

    @property
    def values(self) -> Float[Tensor, "relation template layer head"]:
        """The dynamic promotion scores without context."""
        return self.promote_without

    def head_map(self, relation: str | None = None) -> Float[Tensor, "layer head"]:
        """What heads write on a relation in prompts, attention on the source alone: mean over templates."""
        return self.promote_without[self.index_of(relation)].mean(0)

    def mean(self, column: str) -> float:
        """Mean of a column of the agreement table over the relations that have a value there."""
        if column not in self.agreement:
            raise UsageError(f"There is no column {column!r}; the columns are {', '.join(self.agreement)}.")
        known = [value for value in self.agreement[column] if not math.isnan(value)]
        return sum(known) / len(known) if known else math.nan

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; the agreement table names its rows."""
        values = super().to_dict()
        values["agreement"] = {"relation": list(self.relations), **values["agreement"]}
        return values

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Self":
        """Inverse of :meth:`to_dict`."""
        columns = {name: column for name, column in values["agreement"].items() if name != "relation"}
        return super().from_dict({**values, "agreement": columns})

    def to_rows(self) -> Iterable[dict[str, Any]]:
        """One record per relation, template and head."""
        for (place, template, layer, head), labels in cells(self.axes, self.promote_without):
            static = {name: float(getattr(self, name)[place, layer, head]) for name in _STATIC}
            dynamic = {name: float(getattr(self, name)[place, template, layer, head]) for name in _DYNAMIC}
            named = {"relation": labels["relation"], "template": labels["template"]}
            yield {**named, "head": str(HeadIndex(layer, head)), "k": self.k[place], **static, **dynamic}

    def figure(self, *, relation: str | None = None, context: Context | None = None) -> Figure:
        """What heads write in prompts against what their weights say, averaged over templates: a point per head.

        Args:
            relation: One relation; all of them by default.
            context: Attention as it is (``"with"``) or wholly on the source (``"without"``); by default both for one
                relation, and without context for several.
        """
        if context is not None:
            check_choice(context, Context, "context")
        names = list(self.relations) if relation is None else [self.relations[self.index_of(relation)]]
        contexts = [context] if context is not None else ["without", "with"] if len(names) == 1 else ["without"]
        n_layers, n_heads = self.static_promote.shape[1:]
        heads = [str(HeadIndex(layer, head)) for layer in range(n_layers) for head in range(n_heads)]
        x, y, points, groups = [], [], [], []
        for name in names:
            place = self.index_of(name)
            for label in contexts:
                dynamic = self.promote_with if label == "with" else self.promote_without
                x.append(self.static_promote[place].flatten())
                y.append(dynamic[place].mean(0).flatten())
                points += heads if len(names) == 1 else [f"{head} {name}" for head in heads]
                groups += [f"{label} context" if len(names) == 1 else name] * len(heads)
        shown = in_words(", ".join(names))
        agreement = "; ".join(
            f"{in_words(name)} {self._in_prose(self.index_of(name), 'without')} without context, "
            f"{self._in_prose(self.index_of(name), 'with')} with"
            for name in names
        )
        return scatter(
            torch.cat(x),
            torch.cat(y),
            names=points,
            groups=groups,
            title=f"Static and dynamic scores, preset {self.provenance.options['preset']}: {shown}",
            x_name=f"static score (preset {self.provenance.options['preset']})",
            y_name="dynamic score (prompts)",
            diagonal=True,
            note=self._noted(f"Correlation over heads within layers: {agreement}. A head counts from .15 on.", " "),
        )

    def _in_prose(self, place: int, context: Context) -> str:
        """One agreement in a few words."""
        table = {name: column[place] for name, column in self.agreement.items()}
        if math.isnan(table[f"heads_{context}"]):
            return "undefined"
        return (
            f"{number(table[f'heads_{context}'])} (p = {number(table[f'p_{context}'], 3)}, "
            f"{table[f'n_confirmed_{context}']:.0f} of {table[f'n_static_{context}']:.0f} heads confirmed)"
        )

    def __str__(self) -> str:
        """The agreement of each relation without and with context, the means over relations below."""
        rows = [self._text_row(place, context) for place in range(len(self.relations)) for context in _CONTEXTS]
        if len(self.relations) > 1:
            for context in _CONTEXTS:
                means = [number(self.mean(f"{name}_{context}")) for name in ("heads", "pearson", "spearman")]
                rows.append(["mean", "", "", context, means[0], *[""] * 5, means[1], "", means[2]])
        titles = ["relation", "pairs", "k", "context", "heads", "95%", "p", "active", "confirmed", "95%"]
        titles += ["published", "95%", "Spearman"]
        columns = [(title, "left" if title in ("relation", "context") else "right") for title in titles]
        preset = self.provenance.options["preset"]
        n_templates = f"{len(self.templates)} template{'s' if len(self.templates) > 1 else ''}"
        title = f"Static against dynamic scores, preset {preset}, {n_templates}"
        note = (
            "heads: correlation of static and dynamic scores over heads, layer means taken off; p: heads permuted "
            "within layers;\nactive: heads with a score above 0; confirmed: heads with a static score of .15 or more "
            "that have it in prompts too,\nand the interval of their share; published: Pearson over heads x templates. "
            "Intervals are over clusters of pairs that\nshare a target or the beginning of their sources.\n"
            "without context: the last position attends to the source alone; with: what the head really writes there"
        )
        note += "".join(f"\nno interval for {', '.join(names)}: {reason}" for reason, names in self._missing().items())
        templates = "\n".join(f"  {visible(template)}" for template in self.templates)
        return self._noted(f"{title}\n\n{table_text(columns, rows)}\n\n{note}\ntemplates:\n{templates}")

    def _missing(self) -> dict[str, list[str]]:
        """Relations with a correlation that has no interval, by the reason."""
        reasons: dict[str, list[str]] = {}
        for place, (name, n) in enumerate(zip(self.relations, self.agreement["n_clusters"], strict=True)):
            columns = [f"{measure}_{context}" for measure in ("heads", "pearson") for context in _CONTEXTS]
            known = [column for column in columns if not math.isnan(self.agreement[column][place])]
            if n < LEAST_UNITS:
                side = (
                    " behind the static or the dynamic scores" if self.n_static[place] != self.n_dynamic[place] else ""
                )
                reasons.setdefault(f"fewer than {LEAST_UNITS} clusters of pairs{side}", []).append(name)
            elif any(math.isnan(self.agreement[f"{column}_low"][place]) for column in known):
                reason = "in the rows without one, scores do not vary over heads when a certain cluster is left out"
                reasons.setdefault(reason, []).append(name)
        return reasons

    def _text_row(self, place: int, context: Context) -> list[object]:
        table = {name: column[place] for name, column in self.agreement.items()}

        def ends(name: str) -> str:
            return interval(table[f"{name}_{context}_low"], table[f"{name}_{context}_high"])

        return [
            *(self.relations[place], self.n_dynamic[place], self.k[place], context),
            *(number(table[f"heads_{context}"]), ends("heads"), number(table[f"p_{context}"], 3)),
            f"{table[f'n_active_{context}']:.0f}",
            f"{table[f'n_confirmed_{context}']:.0f} of {table[f'n_static_{context}']:.0f}",
            *(ends("confirmed"), number(table[f"pearson_{context}"]), ends("pearson")),
            number(table[f"spearman_{context}"]),
        ]
