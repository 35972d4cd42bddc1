"""What the tour shows: what was found first, then how, then around it; the model itself comes last.

A section is one entry of :data:`SECTIONS`, a step one function: adding one touches nothing else. What a step says is
made from its own result, so that no number can be older than the run.
"""

from ...core.types import HeadIndex
from ...data.relations import kept_pairs, resolve
from ...data.tasks import FUNCTIONS, load_tasks
from ...naming.namer import UNCLEAR
from ...renderers.text import interval, number, quoted, significant
from ..ablate.call import ablate
from ..association_heads import AssociationHeads, association_heads
from ..attention_groups.call import attention_groups
from ..component_map.call import component_map
from ..describe_model import describe_model
from ..name_heads import name_heads
from ..relation_scores import RelationScores, relation_scores
from ..salient_operations.call import salient_operations
from ..task_maps.call import task_maps
from ..task_maps.result import TaskMaps
from ..token_grid import token_grid
from ..validate.call import validate
from ..value_mixing.call import value_mixing
from .tour import Finding, Section, Tour

RELATIONS = ("country_to_capital", "country_to_language", "name_copying", "past_tense", "comparative", "antonym")
LEAD = RELATIONS[0]
"""The relation the tour follows from what is read of heads to what the model answers."""

TASK_OF_LEAD = "knowledge_recall"
"""The cognitive function that questions about it are an example of."""

SOURCES = ("France", "Germany", "Egypt")
TARGETS = ("Cairo", "Paris", "Berlin")
TEMPLATE = "The capital of <X> is"
SENTENCE = "The capital of France is Paris, and the capital of Germany is Berlin."
QUERY, KEY = "is#2", "Germany"
QUERY_IN_WORDS = "the second 'is'"
"""Where the second capital is about to be said, and what has to be known there."""

_BASES = {"raw": "raw, as they were trained"}
# What three minutes allow.
N_ABLATED = 8
MAX_TOKENS = 2048
N_ITEMS = 36


def the_model(tour: Tour) -> Finding:
    """Size and basis."""
    weights = tour.weights
    total = weights.n_all_heads
    some = f", {len(weights.layers_with_heads)} of them" if weights.mixers else ""
    return Finding(
        "model",
        describe_model(weights),
        ("model",),
        f"{weights.shown_name} has {weights.n_layers} layers{some} of {weights.n_heads} heads, {total:,} in all, and a "
        f"vocabulary of {weights.n_vocab:,} tokens. Its weights are {_BASES.get(weights.basis, weights.basis)}.",
        f"{total:,} heads in {weights.n_layers} layers",
    )


def relations(tour: Tour) -> Finding:
    """Scores of all heads on the main relations."""
    tokenizer = tour.weights.tokenizer
    named = [name for name in RELATIONS if tokenizer is None or kept_pairs(resolve(name), tokenizer)]
    scores = relation_scores(tour.weights, named or RELATIONS)
    implementing = scores.implements()
    first, *others = scores.relations
    head, score = scores.top(1, first)[0]
    at = (0, head.layer, head.head)
    ends = interval(float(scores.interval_low[at]), float(scores.interval_high[at]))
    opening = (
        f"{head} scores highest on {first}: for {score:.0%} of {scores.n_kept[0]} pairs the target is among the "
        f"{scores.k[0]} tokens it promotes most (95% {ends}); with shuffled targets it would be for "
        f"{float(scores.null_mean[at]):.0%}."
    )
    rest = "; ".join(_score(scores, name) for name in others)
    rest = f" The best heads of the others: {rest}." if others else ""
    heads = {head for those in implementing.values() for head in those}
    left_out = [name for name in RELATIONS if name not in scores.relations]
    missing = f" Left out, because no pair is single tokens of this model: {', '.join(left_out)}." if left_out else ""
    return Finding(
        "relation_scores",
        scores,
        ("relations", *scores.relations, "--side-by-side"),
        f"{opening}{rest} {len(heads)} of {scores.n_measured} heads implement at least one.{missing}",
        f"{head} scores {score:.2f} on {first}",
        str(scores),
        {"side_by_side": True},
    )


def _score(scores: RelationScores, name: str) -> str:
    head, score = scores.top(1, name)[0]
    null = float(scores.null_mean[scores.index_of(name), head.layer, head.head])
    doubt = "" if head in scores.implements()[name] else ", not enough to count"
    return f"{name} {head} {number(score)} (null {number(null)}{doubt})"


def _head(tour: Tour) -> HeadIndex:
    """The head that scores highest on the relation the tour follows."""
    scores: RelationScores = tour.needed(relations)
    return scores.top(1, LEAD)[0][0]


def grid(tour: Tour) -> Finding:
    """The best head at work."""
    head = _head(tour)
    table = token_grid(tour.weights, head, SOURCES, TARGETS, relation=LEAD)
    pairs = [
        f"{source} → {target} (rank {int(table.ranks[row, table.targets.index(target)]) + 1:,})"
        for row, (source, target) in enumerate(table.best())
    ]
    return Finding(
        "token_grid",
        table,
        (
            *("grid", "--head", str(head), "--sources", ",".join(SOURCES), "--targets", ",".join(TARGETS)),
            *("--relation", LEAD),
        ),
        f"{head} at work: rows are what it attends to, columns what it writes. "
        f"The largest entry of each row: {', '.join(pairs)}. Rank 1 is the token written most strongly, out of "
        f"{table.n_vocab:,}.",
        ", ".join(f"{source} → {target}" for source, target in table.best()),
        str(table),
    )


def names(tour: Tour) -> Finding:
    """A name for every head, where one is earned."""
    named_heads = name_heads(tour.weights, vocabulary="words")
    named = named_heads.named()
    count, total = sum(map(len, named.values())), sum(map(len, named_heads.names))
    common = ", ".join(f"{name} ({len(heads)})" for name, heads in list(named.items())[:4])
    thirds = ", ".join(f"{share:.0%} of the {part}" for part, share in named_heads.coverage().items() if part != "all")
    frequent = f"; the most frequent: {common}" if common else ""
    return Finding(
        "head_names",
        named_heads,
        ("name-heads", "--vocabulary", "words"),
        f"{count} of {total} heads earn a name{frequent}. By thirds of the layers: {thirds} heads. The others stay "
        "unclear: no predicate explains them better than chance.",
        f"{count} of {total} heads have a name",
    )


def operations(tour: Tour) -> Finding:
    """What the best head does when nobody says what to look for."""
    head = _head(tour)
    salient = salient_operations(tour.weights, head, vocabulary="words")
    entry = salient.name(head)
    n_tokens, n_targets = salient.token_ids.shape[1], salient.promoted_ids.shape[2]
    shown = "; ".join(
        f"{token.strip()} → {', '.join(dict.fromkeys(target.strip() for target in targets))}"
        for token, targets in salient.mappings(head)[:3]
    )
    explained = f"explains {entry.score:.0%} of these mappings (null {entry.null_mean:.0%})"
    if entry.name != UNCLEAR:
        named = f"Its name: {entry.name}, which {explained}."
    elif entry.best is not None:
        named = f"It has no name: the best predicate, {entry.best}, {explained}."
    else:
        named = "It has no name: no predicate explains any of these mappings."
    return Finding(
        "salient_operations",
        salient,
        (
            *("salient", "--heads", str(head), "--n-tokens", str(n_tokens), "--n-targets", str(n_targets)),
            *("--vocabulary", "words"),
        ),
        f"The tokens {head} does most about, and what it promotes: {shown}. {named}",
    )


def agreement(tour: Tour) -> Finding:
    """Do heads write in prompts what was read from them?"""
    validation = validate(tour.model, [LEAD])
    found = {name: column[0] for name, column in validation.agreement.items()}
    ends = {name: interval(found[f"heads_{name}_low"], found[f"heads_{name}_high"]) for name in ("without", "with")}
    context = {
        name: f"{number(found[f'heads_{name}'])} (95% {between}, p = {number(found[f'p_{name}'], 3)})"
        for name, between in ends.items()
    }
    confirmed = f"{found['n_confirmed_without']:.0f} of {found['n_static_without']:.0f}"
    return Finding(
        "validation",
        validation,
        ("validate", LEAD),
        f"In {len(validation.templates)} prompts with {validation.n_dynamic[0]} sources each, what heads write agrees "
        f"with what was read from them at a correlation over heads within layers of {context['without']} when they "
        f"attend to the source alone, and of {context['with']} with attention as it is. {confirmed} heads that score "
        ".15 or more there do so in prompts too.",
        f"prompts confirm {confirmed} heads",
    )


def ablation(tour: Tour) -> Finding:
    """Does the model lose the relation without its heads?"""
    curves = ablate(tour.model, LEAD, max_heads=N_ABLATED, template=TEMPLATE, controls=None)
    asked = f"The model answers {curves.base_accuracy:.0%} of {curves.n_pairs} prompts {quoted(curves.template)} right"
    if curves.status != "tested":
        says = f"{asked}. Nothing was switched off: {curves.status}."
        headline = f"{LEAD} is {curves.status}"
    else:
        accuracy = curves.curve.accuracy.tolist()
        half = next((step for step, value in enumerate(accuracy) if value <= accuracy[0] / 2), None)
        falls = "" if half is None else f"; {half} {'is' if half == 1 else 'are'} enough to lose half"
        says = (
            f"{asked}. With the {len(curves.heads)} best heads switched off, one after the other, {accuracy[-1]:.0%} "
            f"are left{falls}. "
            f"Share of the accuracy lost: {curves.curve.drop:.0%}, with as many random heads "
            f"{_percent(curves.random_drop)}."
        )
        verdict = curves.verdict
        if verdict is not None and verdict.sets:
            says += (
                f" The {verdict.n_heads} that implement it leave {verdict.accuracy:.0%}; the "
                f"{verdict.compared_with} leave {float(verdict.set_accuracy.mean()):.0%} (p = {verdict.p_value:.3f})."
            )
        # The same heads as in the sentence that opens the page.
        n = curves.n_verdict or len(curves.heads)
        headline = f"accuracy {accuracy[0]:.0%} → {accuracy[n]:.0%} without {_count(n, 'head')}"
    return Finding(
        "ablation",
        curves,
        ("ablate", LEAD, "--template", TEMPLATE, "--max-heads", str(N_ABLATED), "--controls", "none"),
        says,
        headline,
    )


def groups(tour: Tour) -> Finding:
    """Which tokens of the sentence do heads bind together, beyond what distance explains?"""
    found = attention_groups(tour.model, SENTENCE)
    ranked = found.formers(q=1.0)
    n, total = len(found.formers()), len(found.heads)
    said = (
        f"{n or 'None'} of {total} heads {'form' if n > 1 else 'forms'} groups in {quoted(SENTENCE)} beyond what "
        "distance explains (false discovery rate 5%)."
    )
    if ranked:
        head, q = ranked[0]
        bound = " ".join(
            f"{{{' '.join(found.tokens[token].strip() for token in group)}}}"
            for group in found.groups_of(head)
            if len(group) > 1
        )
        said += f" {'The clearest' if n else 'The closest'}, {head} (q = {significant(q, 2)}), binds {bound}."
    return Finding(
        "attention_groups",
        found,
        ("groups", "--text", SENTENCE),
        said,
        f"{n or 'none'} of {total} heads bind{'s' if n < 2 else ''} tokens beyond distance",
    )


def _percent(share: float) -> str:
    """Whole percent, never below zero by a rounding error."""
    return f"{round(100 * share) + 0}%"


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def association(tour: Tour) -> Finding:
    """Which heads bring two tokens together?"""
    pair = association_heads(tour.model, SENTENCE, QUERY, KEY)
    head, gain = pair.top(1)[0]
    attention, before, after, others = (
        float(values[head.layer, head.head])
        for values in (pair.attention, pair.before_cosine, pair.after_cosine, pair.others_cosine)
    )
    query, key = QUERY_IN_WORDS, quoted(KEY)
    return Finding(
        "association_heads",
        pair,
        ("association", "--text", SENTENCE, "--query", QUERY, "--key", KEY),
        f"{head} brings {query} closest to {key}: there {query} gives {key} {attention:.0%} of its attention, and the "
        f"cosine of their values goes from {before:.2f} to {after:.2f} (gain {gain:.2f}; mean gain with the other "
        f"tokens {number(others)}).",
        f"{head} brings {key} to {query}",
    )


def mixing(tour: Tour) -> Finding:
    """The same head's arithmetic, step by step."""
    heads: AssociationHeads = tour.needed(association)
    head = heads.top(1)[0][0]
    mixed = value_mixing(tour.model, SENTENCE, head, QUERY, KEY)
    example = mixed.explain(QUERY, KEY)
    most = int(example.split.argmax())
    return Finding(
        "value_mixing",
        mixed,
        ("mixing", "--text", SENTENCE, "--head", str(head), "--query", QUERY, "--key", KEY),
        f"In {head} the dot product of the two values goes from {example.before:.3g} to {example.after:.3g}. The "
        f"largest part, {float(example.split[most]):.3g}, is brought by {quoted(example.tokens[most].strip())}.",
    )


def components(tour: Tour) -> Finding:
    """Which matrices matter?"""
    shares = component_map(tour.model, max_tokens=MAX_TOKENS)
    top = shares.top(3)
    (layer, name), _ = top[0]
    cells = ", ".join(f"{name} of layer {layer} ({value:.1%})" for (layer, name), value in top)
    return Finding(
        "component_map",
        shares,
        ("components", "--max-tokens", str(MAX_TOKENS)),
        f"On {shares.n_tokens:,} tokens of text, the largest shares of the map: {cells}. Even shares would be "
        f"{1 / int((~shares.values.isnan()).sum()):.1%}.",
        f"{name} of layer {layer} comes first",
    )


def tasks(tour: Tour) -> Finding:
    """Which heads serve which function?"""
    maps = task_maps(tour.model, load_tasks().sample(N_ITEMS))
    overall = maps.overall_accuracy
    chosen = sum(map(len, maps.standing_out))
    named = [
        f"{FUNCTIONS.get(name, name)} {heads[0]}"
        for name, heads in zip(maps.functions, maps.standing_out, strict=True)
        if heads
    ]
    best = f" The most important of them: {'; '.join(named)}." if named else ""
    stable = "" if maps.stable else " With other contents some maps change: take single heads with care."
    return Finding(
        "task_maps",
        maps,
        ("tasks", "--sample", str(N_ITEMS)),
        f"From the heads, a probe recognises the function of {overall['probe']:.0%} of {sum(maps.n_items)} held-out "
        f"items; from their words alone {overall['words']:.0%}, from the words of the sentence that is asked about "
        f"{overall['decisive']:.0%}, by guessing {overall['majority']:.1%}. Heads that stand out from shuffled labels, "
        f"over all functions: {chosen or 'none'}.{best}{stable}{disagreement(tour, maps)}",
        f"probe {overall['probe']:.0%}, words {overall['words']:.0%}",
    )


def disagreement(tour: Tour, maps: TaskMaps) -> str:
    """Why the name of the best head, its scores and its place in the task maps may say different things of it."""
    scores, named = tour.found(relations), tour.found(names)
    function = TASK_OF_LEAD
    if scores is None or named is None or function not in maps.functions:
        return ""
    head, score = scores.top(1, scores.relations[0])[0]
    entry = named.name(head)
    row = maps.importance[maps.functions.index(function)]
    place = 1 + int((row > row[head.layer, head.head]).sum())
    total = int((~row.isnan()).sum())
    if head in maps.standing_out[maps.functions.index(function)]:
        return ""
    called = "has no name" if entry.name == UNCLEAR else f"is named {entry.name} ({entry.score:.0%})"
    return (
        f" Of {head} three sections say three things: it scores {score:.2f} on {scores.relations[0]}, it {called}, and "
        f"here it is number {place} of {total} for {FUNCTIONS.get(function, function)}. They ask different things. The "
        "score is about one relation's few words; the name about whichever tokens of the vocabulary the head does "
        "most about; these maps about what tells one function from the others in a head's output. A head that helps "
        "with many questions alike does not stand out here, though the model may need it."
    )


SECTIONS = (
    Section(
        "Which heads know the capitals, and does the model need them?",
        "Prompts ask for the capital of a country, and heads are switched off one after the other, best score first, "
        "and as many random other heads beside them. Then the head that scores highest, and nine entries of its map.",
        (ablation, grid),
        columns=True,
    ),
    Section(
        "Which heads know what?",
        "A head's OV circuit maps every token it may attend to, to what it then writes. Its score on a relation is the "
        "share of pairs whose target is among the k tokens written most strongly. The null is the same score with "
        "targets shuffled among the sources. Hover a head, click to pin it.",
        (relations,),
    ),
    Section(
        "What do heads do when nobody says what to look for?",
        "The tokens a head does most about are those with the largest ratio of what it writes to what it reads. "
        "Predicates (copy, case variant, first letter, ...) try to explain the targets of these tokens; a head gets a "
        "name only if one beats its null.",
        (names, operations),
    ),
    Section(
        "Do heads write in prompts what was read from them?",
        "Prompts that say nothing about the relation, with its sources in them: what each head writes there, beside "
        "what it was expected to write.",
        (agreement,),
    ),
    Section(
        "One sentence",
        "Attention read as a graph of tokens: which tokens do heads bind together, beyond what distance does? "
        f"Then the place where an answer is due: which heads bring {QUERY_IN_WORDS} together with {quoted(KEY)}, and "
        "how the best of them does it, number by number.",
        (groups, association, mixing),
    ),
    Section(
        "Which matrices matter?",
        "The first-order effect on the loss of removing the entries of each weight matrix one by one, as shares of the "
        "map.",
        (components,),
    ),
    Section(
        "Which heads serve which cognitive function?",
        "Short questions of eight functions, a few of each here; items come in sets of the same words, so that words "
        "alone cannot tell the functions apart. A cross-validated probe reads all heads; the maps show what it reads "
        "from each, beyond the words.",
        (tasks,),
    ),
    Section("The model", "What was loaded, and what can be asked of it.", (the_model,)),
)
