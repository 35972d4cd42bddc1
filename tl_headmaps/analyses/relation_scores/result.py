"""Scores of relations by layer and head, with nulls, intervals and what they are compared with."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeAlias

from jaxtyping import Float, Int
from torch import Tensor

from ...core.provenance import Provenance
from ...core.types import Circuit, HeadIndex, check_choice
from ...renderers import heat
from ...renderers.figure import Figure
from ...renderers.grids import MapLayer
from ...renderers.text import interval, table_text
from ...renderers.text import number as decimal
from ...results import HeadMaps, cells, largest_heads

ScoreDirection: TypeAlias = Literal["promote", "suppress"]

IMPLEMENTS_SCORE = 0.15
IMPLEMENTS_Q = 0.05
SPECIFIC_P = 0.05
_MAPS = (
    "promote",
    "suppress",
    "null_mean",
    "p_value",
    "q_value",
    "interval_low",
    "interval_high",
    "suppress_null_mean",
    "suppress_p_value",
    "suppress_q_value",
    "neighbour",
    "neighbour_p_value",
)
"""Fields with one value per relation, layer and head."""

_CONTEXT_MAPS = ("prompt_low", "prompt_high", "multi_token", "together")
"""The same, of context vectors alone."""


@dataclass(frozen=True, eq=False, repr=False)
class RelationScores(HeadMaps):
    """Scores of relations (first axis) by layer and head; cells that were not asked for are NaN.

    Attributes:
        relations: Names of the relations.
        circuit: ``"ov"`` (what heads write) or ``"qk"`` (where they look).
        k: Top-k of each relation.
        n_pairs: Pairs given.
        n_kept: Pairs whose words are single tokens, the ones scored.
        dropped: (source, target, reason) of the others, by relation.
        promote: Share of pairs whose target is among the k strongest tokens the head writes.
        suppress: Share of pairs whose target is among the k it suppresses most.
        null_mean: Mean promotion score with targets shuffled among the relation's sources.
        p_value: Probability that shuffled targets score as well, by the ``test`` of the relation.
        q_value: The same after Benjamini-Hochberg over the promotion scores of all heads and relations of this result.
        interval_low, interval_high: 95% interval of ``promote``: Wilson's, with pairs that share a target or a stem
            counted together.
        suppress_null_mean, suppress_p_value, suppress_q_value: The same for ``suppress``, a family of its own.
        neighbour: Specificity: the promotion score with wrong targets, that of the most similar source (by embeddings)
            with another target for each source. NaN where ``promote`` is 0.
        neighbour_p_value: Exact paired sign test that ``promote`` is above ``neighbour``.
        test: How each relation's p-values come about: targets shuffled among single pairs or among clusters of pairs
            with one target and alike sources (forms of one word, or embeddings with a cosine above 0.2); below ten of
            them by all orders, exactly.
        n_units: Number of these pairs or clusters.
        n_clusters: Number of clusters of pairs that share a target or a stem, by which intervals are made.
        promote_ranks, suppress_ranks: Exact rank of every kept pair's target, by relation, if asked for (0 is best;
            ``ranks_count_from`` in JSON).
        stream: With ``"context"``: the promotion score of the stream itself before each layer (logit lens). A head
            whose score is not above it passes on what is known already.
        prompt_low, prompt_high: With ``"context"``: the smallest and largest promotion score of a single prompt, for
            heads that score 0.05 or more; NaN with a single prompt, where agreement cannot be judged.
        n_multi_token, multi_token: With ``"context"``: pairs with a source of several tokens, and their scores.
        together: Promotion scores over pairs with sources of one and of several tokens.
        token_share: With ``trust=``: share of what each head writes in running text that token identities explain.

    Example:
        >>> from tl_headmaps import load_default_model, relation_scores
        >>> scores = relation_scores(load_default_model(), "country_to_capital", heads="L23H4", progress=False)
        >>> scores.implements()
        {'country_to_capital': [HeadIndex(layer=23, head=4)]}
        >>> round(float(scores.interval_low[0, 23, 4]), 2), round(float(scores.null_mean[0, 23, 4]), 2)
        (0.55, 0.02)
        >>> scores.n_kept, scores.n_pairs  # pairs of single tokens, of all
        ((42,), (106,))
    """

    kind: ClassVar[str] = "relation_scores"
    paper_columns: ClassVar[tuple[str, ...]] = (
        "relation",
        "head",
        "promote",
        "interval_low",
        "interval_high",
        "null_mean",
        "q_value",
        "neighbour",
        "stream",
    )
    methods: ClassVar[tuple[str, ...]] = (
        "elhelo2024maps",
        "elhage2021framework",
        "benjamini1995controlling",
        "wilson1927probable",
    )
    json_axes: ClassVar[Mapping[str, str | None]] = {"relation": "relations", "layer": None, "head": None}
    json_extra: ClassVar[tuple[str, ...]] = ("ranks_count_from",)
    nullable: ClassVar[tuple[str, ...]] = (*_MAPS, *_CONTEXT_MAPS, "stream", "token_share")
    labelled: ClassVar[str] = "relations"
    aligned: ClassVar[tuple[str, ...]] = (
        *("k", "n_pairs", "n_kept", "dropped", "test", "n_units", "n_clusters", "n_multi_token"),
        *("promote_ranks", "suppress_ranks"),
    )
    ranks_count_from: ClassVar[int] = 0
    relations: tuple[str, ...]
    circuit: Circuit
    k: tuple[int, ...]
    n_pairs: tuple[int, ...]
    n_kept: tuple[int, ...]
    dropped: tuple[tuple[tuple[str, str, str], ...], ...]
    promote: Float[Tensor, "relation layer head"]
    suppress: Float[Tensor, "relation layer head"]
    null_mean: Float[Tensor, "relation layer head"]
    p_value: Float[Tensor, "relation layer head"]
    q_value: Float[Tensor, "relation layer head"]
    interval_low: Float[Tensor, "relation layer head"]
    interval_high: Float[Tensor, "relation layer head"]
    suppress_null_mean: Float[Tensor, "relation layer head"]
    suppress_p_value: Float[Tensor, "relation layer head"]
    suppress_q_value: Float[Tensor, "relation layer head"]
    neighbour: Float[Tensor, "relation layer head"]
    neighbour_p_value: Float[Tensor, "relation layer head"]
    test: tuple[str, ...]
    n_units: tuple[int, ...]
    n_clusters: tuple[int, ...]
    provenance: Provenance
    promote_ranks: tuple[Int[Tensor, "_ layer head"], ...] | None = None
    suppress_ranks: tuple[Int[Tensor, "_ layer head"], ...] | None = None
    stream: Float[Tensor, "relation layer"] | None = None
    prompt_low: Float[Tensor, "relation layer head"] | None = None
    prompt_high: Float[Tensor, "relation layer head"] | None = None
    n_multi_token: tuple[int, ...] | None = None
    multi_token: Float[Tensor, "relation layer head"] | None = None
    together: Float[Tensor, "relation layer head"] | None = None
    token_share: Float[Tensor, "layer head"] | None = None

    @property
    def values(self) -> Float[Tensor, "relation layer head"]:
        """The promotion scores."""
        return self.promote

    def head_map(
        self, relation: str | None = None, direction: ScoreDirection = "promote"
    ) -> Float[Tensor, "layer head"]:
        """The scores of one relation."""
        check_choice(direction, ScoreDirection, "direction")
        scores: Tensor = getattr(self, direction)
        return scores[self.index_of(relation)]

    def top(
        self, n: int = 5, relation: str | None = None, direction: ScoreDirection = "promote"
    ) -> list[tuple[HeadIndex, float]]:
        """The ``n`` heads that score highest on a relation (ties: lower layer, then lower head)."""
        return largest_heads(self.head_map(relation, direction), n)

    def implements(self, score: float = IMPLEMENTS_SCORE, q: float = IMPLEMENTS_Q) -> dict[str, list[HeadIndex]]:
        """Heads that implement each relation, best first: a score of at least 0.15 that beats its null (q < 0.05).

        It must also be above what the head scores on wrong targets, those of similar sources (p <= 0.05), and with
        ``preset="context"`` above that of the stream itself.
        """
        implementing = (self.promote >= score) & (self.q_value < q) & (self.neighbour_p_value <= SPECIFIC_P)
        if self.stream is not None:
            # With QK there is no stream to compare with.
            implementing &= self.stream.isnan()[:, :, None] | (self.promote > self.stream[:, :, None])
        heads_of = {}
        for number, name in enumerate(self.relations):
            heads = [HeadIndex(layer, head) for layer, head in implementing[number].nonzero().tolist()]
            heads_of[name] = sorted(heads, key=lambda head: (-self.promote[number, head.layer, head.head], head))
        return heads_of

    @property
    def _met_maps(self) -> tuple[str, ...]:
        return tuple(name for name in _CONTEXT_MAPS if getattr(self, name) is not None)

    def to_rows(self) -> Iterable[dict[str, Any]]:
        """One record per relation and head."""
        for at, labels in cells(self.axes, self.promote):
            record = labels | {"k": self.k[at[0]], "n_kept": self.n_kept[at[0]]}
            record |= {name: float(getattr(self, name)[at]) for name in (*_MAPS, *self._met_maps)}
            if self.stream is not None:
                record["stream"] = float(self.stream[at[:2]])
            if self.token_share is not None:
                record["token_share"] = float(self.token_share[at[1:]])
            yield record

    def figure(self, *, side_by_side: bool = False) -> Figure:
        """A head map of each relation's scores, promotion and suppression, with null, interval and q-value.

        The best head that implements the first relation is pinned.

        Args:
            side_by_side: Show the promotion maps of all relations side by side instead of one map at a time.
        """
        layers = [layer for number in range(len(self.relations)) for layer in self._map_layers(number)]
        title = f"{self.circuit.upper()} relation scores, preset {self.provenance.options.get('preset', '')}"
        unit, k = "share of pairs", sorted(set(self.k))
        strongest = f"{'k = ' if len(k) == 1 else ''}{' or '.join(map(str, k))} strongest tokens"
        note = (
            f"Share of pairs whose target is among the {strongest}{', by relation' if len(k) > 1 else ''}. "
            f"A head implements a relation at a score of {IMPLEMENTS_SCORE} or more with q < {IMPLEMENTS_Q} (q: "
            f"{self._family}) that is above its score on the targets of similar sources (p ≤ {SPECIFIC_P})."
        )
        note = self._noted(note, " ")
        best = next(iter(self.implements()[self.relations[0]]), None)
        if side_by_side:
            promoting = [layer for layer in layers if layer.group == "promotes"]
            return heat.panels(
                promoting,
                title=title,
                unit=unit,
                signed=False,
                pinned=best,
                empty=self.provenance.short_rows,
                note=note,
            )
        return heat.head_map(
            layers,
            title=title,
            unit=unit,
            signed=False,
            switches=("relation", "direction"),
            pinned=best,
            empty=self.provenance.short_rows,
            note=note,
        )

    def _map_layers(self, number: int) -> tuple[MapLayer, MapLayer]:
        """One relation's promotion and suppression as layers of a head map."""
        name = self.relations[number]
        details = {
            "q over all promotion scores": self.q_value[number],
            "targets of similar sources": self.neighbour[number],
            "p above those": self.neighbour_p_value[number],
        }
        if self.stream is not None and not bool(self.stream.isnan().all()):
            details["stream"] = self.stream[number][:, None].expand_as(self.promote[number])
        if self.token_share is not None:
            details["share of its writing that tokens explain"] = self.token_share
        promotes = MapLayer(
            name,
            self.promote[number],
            group="promotes",
            null=self.null_mean[number],
            interval=(self.interval_low[number], self.interval_high[number]),
            details=details,
        )
        suppresses = MapLayer(
            name,
            self.suppress[number],
            group="suppresses",
            null=self.suppress_null_mean[number],
            details={"q over all suppression scores": self.suppress_q_value[number]},
        )
        return promotes, suppresses

    def __str__(self) -> str:
        """The best heads of each relation with their nulls; a star marks heads that implement it."""
        implementing = self.implements()
        rows = [row for name in self.relations for row in self._text_rows(name, implementing[name])]
        head = f"best of {self.n_measured}"
        titles = ["relation", "pairs", "k", head, "score", "95%", "null", "q", "neighbour", "suppress"]
        note = (
            "score: share of pairs whose target is among the k strongest tokens; null: the same with shuffled "
            f"targets;\nq: {self._family};\n95%: pairs that share a target or stem count together; neighbour: score on "
            "the targets of the most similar\nother sources; ~ not shown to be above that;\n* implements the relation "
            "(score >= 0.15 and q < 0.05, above neighbour"
        )
        if self.stream is None:
            note += ")"
        else:
            titles += ["stream", "by prompt", "multi_token"]
            note += (
                " and the stream); = not above the stream\nstream: score of the stream itself before the layer; by "
                f"prompt: {self._agreement};\nmulti_token: score of the pairs whose source has several tokens"
            )
        if self.token_share is not None:
            titles.append("tokens")
            note += "\ntokens: share of what the head writes in running text that token identities explain"
        columns = [(title, "left" if title in ("relation", head) else "right") for title in titles]
        title = f"{self.circuit.upper()} relation scores, preset {self.provenance.options['preset']}"
        return self._noted(f"{title}\n\n{table_text(columns, rows)}\n\n{note}")

    def _text_rows(self, name: str, implementing: list[HeadIndex]) -> list[list[Any]]:
        number = self.index_of(name)
        relation = [name, f"{self.n_kept[number]}/{self.n_pairs[number]}", self.k[number]]
        best = [entry for entry in self.top(3, name) if entry[1] > 0]
        if not best:
            n_empty = 5 + 3 * (self.stream is not None) + (self.token_share is not None)
            return [[*relation, "none ", "0.00", *[""] * n_empty]]
        rows = []
        for place, (head, score) in enumerate(best):
            at = (number, head.layer, head.head)
            mark = "*" if head in implementing else self._mark(at)
            rows.append(
                [
                    *(relation if place == 0 else ["", "", ""]),
                    f"{head}{mark}",
                    decimal(score),
                    interval(float(self.interval_low[at]), float(self.interval_high[at])),
                    decimal(float(self.null_mean[at])),
                    f"{self.q_value[at]:.1g}" if self.q_value[at] > 1e-9 else "<1e-9",
                    decimal(float(self.neighbour[at])),
                    decimal(float(self.suppress[at])),
                    *self._context_cells(at),
                    *([] if self.token_share is None else [decimal(float(self.token_share[at[1:]]))]),
                ]
            )
        return rows

    def _mark(self, at: tuple[int, int, int]) -> str:
        """Whether a head's score is not above that of the stream, or not above that of wrong targets."""
        if self.stream is not None and bool(self.promote[at] <= self.stream[at[:2]]):
            return "="
        return " " if bool(self.neighbour_p_value[at] <= SPECIFIC_P) else "~"

    @property
    def _family(self) -> str:
        """What q is a false discovery rate over."""
        counts = {"head": self.n_measured, "relation": len(self.relations)}
        family = " x ".join(f"{n} {what}{'' if n == 1 else 's'}" for what, n in counts.items())
        return f"false discovery rate over the promotion scores of {family}"

    @property
    def _agreement(self) -> str:
        """What is shown of how far the prompts agree."""
        if len(self.provenance.options.get("prefixes", ())) == 1:
            return "there is one prompt only, so agreement cannot be judged"
        return "smallest and largest score behind one prompt alone"

    def _context_cells(self, at: tuple[int, int, int]) -> list[str]:
        if self.stream is None or self.prompt_low is None or self.prompt_high is None:
            return []
        assert self.multi_token is not None and self.n_multi_token is not None
        low, high, n = float(self.prompt_low[at]), float(self.prompt_high[at]), self.n_multi_token[at[0]]
        return [
            decimal(float(self.stream[at[:2]])),
            interval(low, high),
            f"{decimal(float(self.multi_token[at]))} ({n})" if n else "-",
        ]
