"""A card about one head. It holds the results it was made from, and says nothing that none of them says."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from ...core.provenance import Provenance
from ...core.types import HeadIndex
from ...naming.namer import UNCLEAR
from ...renderers.figure import Figure
from ...renderers.listing import noted_table, together
from ...renderers.tables import Table
from ...renderers.text import interval, number, significant, visible, word, wrapped
from ...results import Result
from ..attention_groups.result import AttentionGroups
from ..describe_model import ModelDescription
from ..grouping_profile import GroupingProfile
from ..head_trust import HeadTrust
from ..head_worth import HeadWorth
from ..relation_scores import RelationScores
from ..salient_operations.result import SalientOperations

_TITLES = {
    "relations": "Relations it implements",
    "operations": "What it does with single tokens",
    "trust": "How far its tokens tell what it writes",
    "profile": "Where it looks",
    "attention": "Its attention in a sentence",
    "worth": "What it is worth, beside the other heads of its layer",
}
"""The fields that hold results about the head, in the order of the card, and what it calls them."""

_LOOKS = {
    "previous_token": "it looks at the previous token",
    "duplicate_token": "it looks at the same token earlier in the text",
    "first_token": "it parks attention on the first token",
    "induction": "it looks at what followed the same token before (induction)",
    "syntactic_neighbour": "it looks at neighbours in the clause",
    "sentence_block": "it looks inside the same sentence",
}

_LISTED = 8
"""Relations and tokens that a table lists, at most."""

_PAIRS = 5
"""Pairs of tokens of the sample sentence that are listed."""

_ALPHA = 0.05
_CLEARLY = 0.05
"""Share of attention above its null from which on a kind of token is worth a word."""


@dataclass(frozen=True, eq=False, repr=False)
class HeadCard(Result):
    """What one head does: what it writes, where it looks, what it is worth, and how far its weights tell.

    Every number is one of the results held here, which are cut down to the head. Scores and names were tested together
    with those of the layer's other heads, unless results were given that cover more: q-values are over these.

    Attributes:
        head: The head.
        description: Facts about its model: parameters of a head, and the effective rank of its circuits.
        missing: Why a part is not there, by its name: what the model lacks for it.
        relations: How well it maps the sources of relations to their targets.
        operations: The tokens it acts on most, what it promotes and suppresses for them, and a name for that.
        trust: How much of what it writes in running text is told by which tokens it attends to.
        profile: Which kinds of tokens it attends to.
        attention: Its attention on a sample sentence.
        worth: How much the loss rises without it; with the other heads of its layer.

    Example:
        >>> from tl_headmaps import HeadCard, HeadIndex, describe_model, load_default_model
        >>> description = describe_model(load_default_model())
        >>> card = HeadCard(HeadIndex(23, 4), description, description.provenance)  # describe_head() adds the parts
        >>> print(card.sections()[-1][1].text())
        of the head             number
        ──────────────────────────────
        parameters             147,456
        parameters of QK        73,728
        parameters of OV        73,728
        effective rank of QK      44.4
        effective rank of OV      53.4
        <BLANKLINE>
        36,864 parameters in each of W_Q, W_K, W_V and W_O.
        >>> HeadCard.load(card.save("card.json")) == card
        True
    """

    kind: ClassVar[str] = "head_card"
    head: HeadIndex
    description: ModelDescription
    provenance: Provenance
    missing: dict[str, str] = field(default_factory=dict)
    relations: RelationScores | None = None
    operations: SalientOperations | None = None
    trust: HeadTrust | None = None
    profile: GroupingProfile | None = None
    attention: AttentionGroups | None = None
    worth: HeadWorth | None = None

    @property
    def references(self) -> tuple[str, ...]:
        """Publications behind all its parts."""
        held = (self.description, *(part for part in self._parts.values()))
        return tuple(dict.fromkeys(key for part in held for key in part.references))

    @property
    def _parts(self) -> dict[str, Result]:
        return {name: part for name in _TITLES if (part := getattr(self, name)) is not None}

    @property
    def implemented(self) -> list[tuple[str, float]]:
        """The relations it implements with their scores, best first; none where relations were not scored."""
        if self.relations is None:
            return []
        scores = self.relations
        own = [name for name, heads in scores.implements().items() if self.head in heads]
        found = [(name, float(scores.promote[(scores.index_of(name), *self._at)])) for name in own]
        return sorted(found, key=lambda entry: (-entry[1], entry[0]))

    @property
    def _at(self) -> tuple[int, int]:
        return self.head.layer, self.head.head

    @property
    def sentence(self) -> str:
        """The whole card in one sentence."""
        clauses = (self._writes(), self._named(), self._looks(), self._trusted(), self._missed())
        said = "; ".join(filter(None, clauses))
        return f"{self.head} {said}." if said else f"Nothing can be said about {self.head} of this model."

    def _writes(self) -> str:
        if self.relations is None:
            return ""
        found, n = self.implemented, len(self.relations.relations)
        if not found:
            return f"implements none of the {n} relations tried" if n > 1 else "does not implement the relation tried"
        best = ", ".join(f"{name} ({score:.2f})" for name, score in found[:3])
        more = f" and {len(found) - 3} more" if len(found) > 3 else ""
        return f"implements {best}{more} of {n} relation{'s' if n > 1 else ''} tried"

    def _named(self) -> str:
        if self.operations is None:
            return ""
        name = self.operations.name(self.head)
        if name.name == UNCLEAR:
            return "what it does with its most salient tokens has no name"
        return f"what it does with its most salient tokens is called {name.name!r} ({name.score:.0%} of them)"

    def _looks(self) -> str:
        profile = self.profile
        if profile is None:
            return ""
        above = {
            name: float(profile.values[at] - profile.null[at])
            for name, at in ((name, (row, *self._at)) for row, name in enumerate(profile.scores))
            if float(profile.q_value[at]) < _ALPHA
        }
        if not above:
            return "it looks at no kind of token more than its distance profile explains"
        # Most heads park attention on the first token: that is said of a head that does little else.
        kind = max(above, key=lambda name: (name != "first_token" and above[name] >= _CLEARLY, above[name]))
        at = (profile.index_of(kind), *self._at)
        share, null = float(profile.values[at]), float(profile.null[at])
        return f"{_LOOKS.get(kind, kind)} ({share:.0%} of its attention, null {null:.0%})"

    def _trusted(self) -> str:
        if self.trust is None:
            return ""
        return f"the tokens it attends to explain {float(self.trust.values[self._at]):.0%} of what it writes in text"

    def _missed(self) -> str:
        if self.worth is None:
            return ""
        rise, known = self.worth.cell_texts({"layer": self.head.layer, "head": self.head.head})
        row = self.worth.worth[self.head.layer]
        rank, n = 1 + int((row > row[self.head.head]).sum()), int((~row.isnan()).sum())
        place = f", rank {rank} of the {n} heads of its layer" if n > 1 else ""
        return f"replaced by its mean it changes the loss on held-out text by {rise} nats a token (95% {known}){place}"

    def _relation_table(self, scores: RelationScores) -> Table:
        titles = ["relation", "pairs", "score", "95%", "null", "q", "neighbour", "suppress"]
        titles += [] if scores.stream is None else ["stream"]
        titles += [] if scores.token_share is None else ["tokens"]
        own = dict(self.implemented)
        best = scores.promote[:, self.head.layer, self.head.head]
        rows = []
        for index in best.argsort(descending=True, stable=True).tolist()[:_LISTED]:
            name, at = scores.relations[index], (index, *self._at)
            if not float(best[index]) > 0:
                break
            row = [f"{name}{' *' if name in own else ''}", f"{scores.n_kept[index]}/{scores.n_pairs[index]}"]
            ends = float(scores.interval_low[at]), float(scores.interval_high[at])
            row += [number(float(best[index])), interval(*ends)]
            row += [number(float(scores.null_mean[at])), _small(float(scores.q_value[at]))]
            row += [number(float(scores.neighbour[at])), number(float(scores.suppress[at]))]
            row += [] if scores.stream is None else [number(float(scores.stream[at[:2]]))]
            row += [] if scores.token_share is None else [number(float(scores.token_share[at[1:]]))]
            rows.append(row)
        note = "" if rows else "None scores above 0. "
        note += (
            f"Relations tried: {len(scores.relations)}; * implements it; q: over {self._family(scores)} x all "
            "relations; wrong: score on the targets of similar sources"
        )
        note += "" if scores.stream is None else "; stream: score of the stream before the layer"
        note += "" if scores.token_share is None else "; tokens: share of its writing that tokens explain"
        return _table(titles, rows, f"{note}.")

    def _operation_table(self, operations: SalientOperations) -> Table:
        index, name = operations.index_of(self.head), operations.name(self.head)
        rows = [row for row in operations._token_rows(index)[:_LISTED]]
        best = "no predicate fits" if name.best is None else f"best: {name.best}"
        named = name.name if name.best == name.name else f"{name.name} ({best})"
        note = (
            f"{named}: {name.score:.2f} of its salient mappings, null {name.null_mean:.2f}, q "
            f"{_small(name.q_value)} over {self._family(operations)} and all predicates."
        )
        return _table(["token", "salience", *operations._verbs], rows, note, left=(0, 2, 3))

    def _profile_table(self, profile: GroupingProfile) -> Table:
        rows = []
        for index, score in enumerate(profile.scores):
            at = (index, *self._at)
            row = [score.replace("_", " "), number(float(profile.values[at]))]
            row += [interval(float(profile.interval_low[at]), float(profile.interval_high[at]))]
            row += [number(float(profile.null[at])), _small(float(profile.q_value[at]))]
            rows.append([*row, number(float(profile.where_possible[at]))])
        note = (
            f"Share of its attention over {profile.n_texts} texts; null: if it depended on distance alone (previous "
            f"and first token: if it were even); q: over {self._family(profile)} and all kinds; where possible: from "
            "the queries that have such a token."
        )
        return _table(["attention to", "share", "95%", "null", "q", "where possible"], rows, note)

    def _attention_table(self, groups: AttentionGroups) -> Table:
        place = groups.heads.index(self.head)
        rows = []
        if groups.patterns is not None:
            pairs = [
                (float(groups.patterns[place, query, key]), query, key)
                for query in groups.kept
                for key in groups.kept
                if query != key
            ]
            for share, query, key in sorted(pairs, key=lambda pair: (-pair[0], pair[1:]))[:_PAIRS]:
                rows.append([word(groups.tokens[query]), word(groups.tokens[key]), number(share)])
        text = visible("".join(groups.tokens)).strip()
        note = (
            f"In '{text}': to the first token {groups.sink_share[place]:.0%}, to the token itself "
            f"{groups.self_share[place]:.0%}; above, most between others."
        )
        return _table(["from", "to", "attention"], rows, note, left=(0, 1))

    def _worth_table(self, worth: HeadWorth) -> Table:
        heads = [head for head, _ in worth.top(worth.worth.numel()) if head.layer == self.head.layer]
        rows = [
            [
                f"> {head}" if head == self.head else f"  {head}",
                *worth.cell_texts({"layer": head.layer, "head": head.head}),
            ]
            for head in heads
        ]
        return _table(["head", "rise of the loss", "95% over texts"], rows, worth.caption)

    def _trust_table(self, trust: HeadTrust) -> Table:
        rows = []
        for name, shares in trust.token_share.items():
            low, high = (float(ends[name][self._at]) for ends in (trust.interval_low, trust.interval_high))
            null = float(trust.null[name][self._at])
            rows.append([name, number(float(shares[self._at])), interval(low, high), number(null)])
        note = (
            f"Share of what it writes on {trust.n_documents} held-out documents that its tokens' own vectors explain; "
            "context: as the layer reads a token, folded: without context; null: vectors of other tokens."
        )
        return _table(["vectors", "share explained", "95%", "null"], rows, note)

    def _size_table(self) -> Table:
        description, counts = self.description, self.description.parameters or {}
        sizes = {"parameters": "head", "parameters of QK": "QK", "parameters of OV": "OV"}
        rows = [[title, f"{counts[name]:,}"] for title, name in sizes.items() if name in counts]
        for name, ranks in (("QK", description.qk_rank), ("OV", description.ov_rank)):
            if ranks is not None and not math.isnan(ranks[self._at]):
                rows.append([f"effective rank of {name}", number(float(ranks[self._at]), 1)])
        each = counts.get("W_Q", 0)
        note = f"{each:,} parameters in each of W_Q, W_K, W_V and W_O." if each else ""
        return _table(["of the head", "number"], rows, note)

    def _family(self, result: Result) -> str:
        """Which heads were tested together, in words."""
        heads = result.provenance.options.get("heads")
        if heads is None:
            return "all heads of the model"
        layers = {HeadIndex.parse(name).layer for name in heads}
        of = f" of layer {next(iter(layers))}" if len(layers) == 1 else ""
        return f"{len(heads)} head{'s' if len(heads) > 1 else ''}{of}"

    def sections(self) -> list[tuple[str, Table]]:
        """What the card shows, section by section."""
        tables: dict[str, Callable[[Any], Table]] = {
            "relations": self._relation_table,
            "operations": self._operation_table,
            "trust": self._trust_table,
            "profile": self._profile_table,
            "attention": self._attention_table,
            "worth": self._worth_table,
        }
        shown = [(_TITLES[name], tables[name](part)) for name, part in self._parts.items()]
        shown += [(_TITLES[name], Table((), (), f"Not here: {why}")) for name, why in self.missing.items()]
        return [*shown, ("Its size", self._size_table())]

    def to_rows(self) -> Iterable[dict[str, Any]]:
        """One record per cell of the tables."""
        for title, table in self.sections():
            for row in table.rows:
                for (column, _), cell in zip(table.columns[1:], row[1:], strict=True):
                    yield {"section": title, "row": str(row[0]).strip(), "column": column, "value": cell}

    def __str__(self) -> str:
        parts = [f"{self.head} of {visible(self.provenance.model)}", wrapped(self.sentence, 118)]
        for title, table in self.sections():
            body = f"{Table(table.columns, table.rows).text()}\n" if table.rows else ""
            parts.append(f"{title.upper()}\n{body}{wrapped(table.note, 118)}")
        return self._noted("\n\n".join(parts))

    def figure(self) -> Figure:
        """All of it on one page: the sentence, what it writes, where it looks, what it is worth."""
        name = f"{self.head} of {visible(self.provenance.model)}"
        figures = [noted_table(Table((), (), self.sentence), title=name)]
        for title, table in self.sections():
            figures.append(noted_table(table, title=title))
            if title == _TITLES["attention"] and self.attention is not None:
                figures.append(self.attention.figure(head=self.head))
        return together(figures, title=f"What {name} does", text=str(self))


def _table(titles: list[str], rows: list[list[Any]], note: str, left: tuple[int, ...] = (0,)) -> Table:
    return Table([(title, "left" if place in left else "right") for place, title in enumerate(titles)], rows, note)


def _small(value: float) -> str:
    """A q-value."""
    return "<1e-9" if value < 1e-9 else significant(value, 2)
