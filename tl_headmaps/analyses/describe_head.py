"""What one head does, answered in one place from what the other analyses say.

A card holds the results it was made from, and says nothing that none of them says.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import field
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

from ..capture.running.text import check_runs
from ..capture.weights import HeadWeights
from ..core.errors import UnsupportedModelError, UsageError, WeightBasisError
from ..core.options import public
from ..core.provenance import Provenance
from ..core.types import HeadIndex, HeadLike, Model, Preset
from ..data.relations import RelationLike, load_relations
from ..data.texts import Sample, neutral_prompts
from ..naming.namer import UNCLEAR
from ..renderers.figure import Figure
from ..renderers.listing import stacked, table_figure
from ..renderers.tables import Table
from ..renderers.text import sentence, visible, wrapped
from ..results import HeadMaps, Result
from ..results.table import HeadTable, frozen_result
from .attention_groups import AttentionGroups, attention_groups
from .describe_model import ModelDescription, describe_model
from .grouping_profile import GroupingProfile, grouping_profile
from .head_trust import HeadTrust, head_trust
from .head_worth import HeadWorth, head_worth
from .relation_scores import RelationScores, relation_scores
from .salient_operations import SalientOperations, salient_operations

SENTENCE = "When Mary and John went to the store, John gave a drink to Mary."
"""The sentence on which a head's attention is shown, unless another is given."""

_N_PROMPTS = 2
"""Neutral prompts behind which the sources of relations are read: reading thousands of them behind eight takes longer
than all the rest."""

_TOKENS = 64
"""Tokens of each text that profile and trust read."""

_WORTH_TEXTS, _WORTH_TOKENS = 24, 40
"""Held-out texts and their tokens on which the loss is measured, once for each head of the layer."""

_CLASSES: dict[str, type[Result]] = {
    "description": ModelDescription,
    "relations": RelationScores,
    "operations": SalientOperations,
    "trust": HeadTrust,
    "profile": GroupingProfile,
    "attention": AttentionGroups,
    "worth": HeadWorth,
}

_TITLES = {
    "relations": "Relations it implements",
    "operations": "What it does with single tokens",
    "trust": "How far its tokens tell what it writes",
    "profile": "Where it looks",
    "attention": "Its attention in a sentence",
    "worth": "What it is worth, beside the other heads of its layer",
}
"""The fields that hold results about the head, in the order of the card, and what it calls them."""

_Part: TypeAlias = HeadTable | SalientOperations | AttentionGroups

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

_ALPHA = 0.05
_CLEARLY = 0.05
"""Share of attention above its null from which on a kind of token is worth a word."""


@frozen_result
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
    def _parts(self) -> dict[str, _Part]:
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

    def _table(self, part: _Part, full: bool = False) -> Table:
        """What a result says about the head, with what was measured and which heads were tested together."""
        table = part.head_rows(self.head, full=full, n=_LISTED)
        tested, notes = isinstance(part, SalientOperations), [table.note]
        if isinstance(part, HeadTable):
            count = f"relations tried: {len(part.labels)}; " if isinstance(part, RelationScores) else ""
            notes = [part.caption, f"{count}{table.note}"]
            tested = "q" in part.families()[part.ranked()]
        notes += [f"tested together: {self._family(part)}"] * tested
        return Table(table.columns, table.rows, " ".join(map(sentence, filter(None, notes))))

    def _family(self, result: Result) -> str:
        """Which heads were tested together, in words."""
        heads = result.provenance.options.get("heads")
        if heads is None:
            return "all heads of the model"
        layers = {HeadIndex.parse(name).layer for name in heads}
        of = f" of layer {next(iter(layers))}" if len(layers) == 1 else ""
        return f"{len(heads)} head{'s' if len(heads) > 1 else ''}{of}"

    def sections(self, *, full: bool = False) -> list[tuple[str, Table]]:
        """What the card shows, section by section; ``full`` with all columns of its results."""
        shown = [(_TITLES[name], self._table(part, full)) for name, part in self._parts.items()]
        shown += [(_TITLES[name], Table((), (), f"Not here: {why}")) for name, why in self.missing.items()]
        return [*shown, ("Its size", self.description.head_rows(self.head))]

    def to_rows(self) -> Iterable[dict[str, Any]]:
        """One record per cell of the tables."""
        for title, table in self.sections(full=True):
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
        figures = [table_figure(Table((), (), self.sentence), title=name)]
        for title, table in self.sections():
            figures.append(table_figure(table, title=title))
            if title == _TITLES["attention"] and self.attention is not None:
                figures.append(self.attention.figure(head=self.head))
        return stacked(figures, title=f"What {name} does", text=str(self))


@public
def describe_head(
    model: Model,
    head: HeadLike,
    *,
    relations: RelationLike | Sequence[RelationLike] | None = None,
    preset: Preset | None = None,
    text: Any = SENTENCE,
    texts: Any = None,
    results: Sequence[Result | str | Path] = (),
    progress: bool = True,
) -> HeadCard:
    """What one head does: relations, salient tokens, a name, where it looks, what it is worth, and its size.

    Each part is a result of its own analysis, made for the heads of one layer, so that q-values are over these. Parts
    that are given are not made again. A part that the model cannot have is left out, and the card says why.

    Takes less than a minute for the bundled model on two cores; most of it is reading the sources of relations, which
    is kept on disk for the next head, and passes through held-out text with each head of the layer replaced by its
    mean.

    Args:
        relations: Relations to try; by default all bundled ones that the model's tokenizer can write.
        preset: Of the relation scores; by default ``"context"``, behind two neutral prompts instead of the
            usual eight. For these give ``results=[relation_scores(...)]``.
        text: A sentence to show its attention on.
        texts: Texts (a list, a file, a dataset) for profile, trust and worth; a third of them is held out where
            something is fitted. By default the bundled text.
        results: Results about this model, or their files: of ``relation_scores``, ``salient_operations``,
            ``head_trust``, ``grouping_profile``, ``attention_groups``, ``head_worth`` and ``describe_model``. They are
            cut down to the head; q-values stay those of all the heads they were made for.

    Example:
        >>> from tl_headmaps import Relation, describe_head, load_default_model
        >>> capitals = Relation.from_pairs("capitals", [("France", "Paris"), ("Egypt", "Cairo"), ("Italy", "Rome")])
        >>> texts = [f"There were {n} cups on table {n + 1}." for n in range(12)]
        >>> card = describe_head(load_default_model(), "L23H4", relations=capitals, preset="folded", texts=texts,
        ...                      progress=False)
        >>> card.operations.name("L23H4").name, round(float(card.relations.promote[0, 23, 4]), 2)
        ('copy', 0.67)
    """
    check_runs(model)
    preset = preset or "context"
    weights = HeadWeights.from_model(model)
    chosen = weights.head(head)
    given = _given(results, weights, chosen)
    layer = weights.chosen_heads(layers=chosen.layer)
    made: dict[str, Result] = dict(given)
    missing: dict[str, str] = {}

    def make(name: str, call: Callable[[], Result]) -> None:
        if name in made:
            return
        try:
            made[name] = call()
        except (UnsupportedModelError, WeightBasisError) as error:
            missing[name] = str(error)

    prose = Sample.PROSE if texts is None else texts
    shared: dict[str, Any] = {"heads": layer, "max_tokens": _TOKENS, "progress": progress}
    make("description", lambda: describe_model(weights))
    make("trust", lambda: head_trust(model, prose, **shared))
    prompts = neutral_prompts()[:_N_PROMPTS] if preset == "context" else None
    make(
        "relations",
        lambda: relation_scores(
            weights,
            load_relations(model=weights) if relations is None else relations,
            preset=preset,
            heads=layer,
            prompts=prompts,
            trust=made.get("trust"),  # type: ignore[arg-type]
            progress=progress,
        ),
    )
    make("operations", lambda: salient_operations(weights, layer, progress=progress))
    make("profile", lambda: grouping_profile(model, prose, **shared))
    make("attention", lambda: attention_groups(model, text, heads=chosen))
    size: dict[str, Any] = {"max_texts": _WORTH_TEXTS, "max_tokens": _WORTH_TOKENS}
    make("worth", lambda: head_worth(model, layer, texts, **size, progress=progress))
    if "description" not in made:
        raise UnsupportedModelError(missing["description"])
    parts = {name: _cut(name, result, chosen) for name, result in made.items()}
    sources = {name: result.provenance.data for name, result in made.items()}
    digests = {f"{name}: {key}": value for name, data in sources.items() for key, value in data.items()}
    options = {"head": str(chosen), "preset": preset, "text": text, "given": sorted(given)}
    return HeadCard(
        head=chosen,
        missing=missing,
        provenance=weights.provenance(options=options, data=digests),
        **parts,  # type: ignore[arg-type]
    )


def _given(results: Sequence[Result | str | Path], weights: HeadWeights, head: HeadIndex) -> dict[str, Result]:
    """The results of the caller by the part they are; refuses those of another model, kind or head."""
    if isinstance(results, Result | str | Path):
        results = [results]
    found: dict[str, Result] = {}
    for entry in results:
        result = entry if isinstance(entry, Result) else Result.load(entry)
        name = next((name for name, one in _CLASSES.items() if type(result) is one), None)
        if name is None:
            kinds = ", ".join(one.kind for one in _CLASSES.values())
            raise UsageError(f"results= holds {result.kind!r}, which is not a part of a card. Give some of: {kinds}.")
        if name in found:
            raise UsageError(f"results= holds two of kind {result.kind!r}. Give the one to show.")
        if result.provenance.fingerprint != weights.fingerprint:
            raise UsageError(
                f"The {result.kind} of results= belongs to another model than {weights.model_name!r}: the fingerprints "
                "of their weights differ. Make it with this model."
            )
        if not _holds(result, head):
            raise UsageError(f"The {result.kind} of results= says nothing about {head}. Make it for this head, too.")
        found[name] = result
    return found


def _holds(result: Result, head: HeadIndex) -> bool:
    if isinstance(result, SalientOperations | AttentionGroups):
        return head in result.heads
    values = getattr(result, "values", None)
    return values is None or not bool(values[..., head.layer, head.head].isnan().all())


def _cut(name: str, result: Result, head: HeadIndex) -> Result:
    """A result without what it says about other heads; of what heads are worth, the layer stays."""
    if isinstance(result, SalientOperations):
        return result.select(head)
    if isinstance(result, HeadMaps):
        return result.select(layers=head.layer) if name == "worth" else result.select(heads=head)
    return result
