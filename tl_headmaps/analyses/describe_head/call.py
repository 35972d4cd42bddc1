"""What one head does, answered in one place from what the other analyses say."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ...capture.running.text import check_runs
from ...capture.weights import HeadWeights
from ...core.ambient import steady
from ...core.errors import UnsupportedModelError, UsageError, WeightBasisError
from ...core.types import HeadIndex, HeadLike, Model, Preset, check_choice
from ...data.prompts import neutral_prompts
from ...data.relations import RelationLike, load_relations
from ...data.texts import Sample
from ...results import HeadMaps, Result
from ..attention_groups.call import attention_groups
from ..attention_groups.result import AttentionGroups
from ..describe_model import ModelDescription, describe_model
from ..grouping_profile import GroupingProfile, grouping_profile
from ..head_trust import HeadTrust, head_trust
from ..head_worth import HeadWorth, head_worth
from ..relation_scores import RelationScores, relation_scores
from ..salient_operations.call import salient_operations
from ..salient_operations.result import SalientOperations
from .result import HeadCard

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


@steady
def describe_head(
    model: Model,
    head: HeadLike,
    *,
    relations: RelationLike | Sequence[RelationLike] | None = None,
    preset: Preset | None = None,
    text: str = SENTENCE,
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
        model: A TransformerBridge or HookedTransformer with a tokenizer.
        head: The head.
        relations: Relations to try; by default all bundled ones that the model's tokenizer can write.
        preset: Of the relation scores; by default ``"context"``, behind two neutral prompts (give
            ``results=[relation_scores(...)]`` for the usual eight).
        text: A sentence to show its attention on.
        texts: Texts (a list, a file, a dataset) for profile, trust and worth; a third of them is held out where
            something is fitted. By default the bundled text.
        results: Results about this model, or their files: of ``relation_scores``, ``salient_operations``,
            ``head_trust``, ``grouping_profile``, ``attention_groups``, ``head_worth`` and ``describe_model``. They are
            cut down to the head; q-values stay those of all the heads they were made for.
        progress: Show progress bars on a terminal.

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
    preset = "context" if preset is None else preset
    check_choice(preset, Preset, "preset")
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
            raise UsageError(f"results= holds {result.kind!r}, which is no part of a card. Give some of: {kinds}.")
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
