"""Relations: named lists of (source, target) words, and their token ids for a model.

A relation file is JSON with the fields of :class:`Relation` (``relations_data/<category>/<name>.json``). Users may also
bring a plain JSON list of [source, target], two columns of a CSV or TSV file, or a ``datasets.Dataset``. Words have
no leading space; :mod:`tl_headmaps.core.vocabulary` says which token a word means. ``<X>`` is the placeholder of prompt
templates.
"""

import difflib
import hashlib
import json
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

from ..core.errors import HeadMapsWarning, RelationDataError, TokenError, UsageError, shown
from ..core.files import UnreadableError, check_text, parse_json, read_text
from ..core.vocabulary import TokenLike, single_id, word_ids
from .records import column_values, table_pairs

PLACEHOLDER = "<X>"
NEUTRAL_TEMPLATES = (
    "No <X> means no",
    "The story of <X> contains",
    "This is a document about <X>",
    "When I think about <X> I think about",
)
"""Prompts of the published activation experiment; they hint at no relation."""

MultiToken: TypeAlias = Literal["skip", "first"]

_NAME = re.compile(r"[a-z0-9]+(_[a-z0-9]+)*")
_FILE_SUFFIXES = (".json", ".csv", ".tsv")
_LARGEST_INT = 2**63 - 1
_LARGE_VOCABULARY = 100_000
_LARGE_K = {10: 25, 1: 3}
"""Published default k for vocabularies above 100,000 tokens."""


class _NoRelationError(RelationDataError):
    """A file that does not even look like a relation."""


@dataclass(frozen=True)
class Relation:
    """A relation between words, such as country to capital.

    Attributes:
        name: Short name, the file's name for bundled relations.
        pairs: (source, target) words, or token ids.
        title, category, description: For people; ``category`` is the folder of bundled relations.
        k: A target counts as implemented when fewer than ``k`` tokens rank above it.
        neutral_templates: Prompts that mention the source and do not hint at the relation.
        eliciting_templates: Prompts whose natural next word is the target.
        source, licence: Where the pairs come from, and how they may be used.

    Example:
        >>> from tl_headmaps import Relation
        >>> capitals = Relation.from_pairs("capitals", [("France", "Paris"), ("Egypt", "Cairo")], k=5)
        >>> capitals.pairs[1], capitals.k
        (('Egypt', 'Cairo'), 5)
        >>> capitals.neutral_templates[1]
        'The story of <X> contains'
    """

    name: str
    pairs: tuple[tuple[TokenLike, TokenLike], ...]
    title: str = ""
    category: str = "custom"
    description: str = ""
    k: int = 10
    neutral_templates: tuple[str, ...] = NEUTRAL_TEMPLATES
    eliciting_templates: tuple[str, ...] = ()
    source: str = ""
    licence: str = ""

    def __post_init__(self) -> None:
        _require_fields(vars(self))

    @property
    def digest(self) -> str:
        """SHA-256 of name, pairs and k: everything a score depends on."""
        content = json.dumps([self.name, self.k, self.pairs], ensure_ascii=False)
        return hashlib.sha256(content.encode()).hexdigest()

    def default_k(self, n_vocab: int) -> int:
        """The relation's own k, enlarged for vocabularies above 100,000 tokens (10 to 25, 1 to 3)."""
        return _LARGE_K.get(self.k, self.k) if n_vocab > _LARGE_VOCABULARY else self.k

    @classmethod
    def from_pairs(cls, name: str, pairs: Iterable[Sequence[TokenLike]], **details: Any) -> "Relation":
        """A relation from (source, target) pairs.

        Example:
            >>> Relation.from_pairs("capital", [("France", "Paris")]).pairs
            (('France', 'Paris'),)
        """
        return cls._from_fields({"name": name, "pairs": list(pairs), **details})

    @classmethod
    def _from_fields(cls, fields: dict[str, Any]) -> "Relation":
        # What a file holds is checked before it meets a signature that promises types.
        _require_fields(fields)
        return cls(**{**fields, "pairs": tuple((source, target) for source, target in fields["pairs"])})

    @classmethod
    def from_file(
        cls,
        path: str | Path,
        *,
        templates: str | Sequence[str] | Mapping[str, Sequence[str]] | None = None,
        header: bool | None = None,
    ) -> "Relation":
        r"""Read our JSON, a JSON list of pairs, or the two columns of a CSV or TSV file.

        Args:
            path: The file.
            templates: Prompts whose next word is the target (``"The capital of <X> is"``), one or several; or
                ``{"neutral": [...], "eliciting": [...]}``. Those of the file by default.
            header: Whether the first row of a table names its columns. By default that is recognised, and a warning
                says what was assumed, unless the columns are named source and target.

        Example:
            >>> _ = Path("capitals.csv").write_text("source,target\nFrance,Paris\nEgypt,Cairo\n")
            >>> capitals = Relation.from_file("capitals.csv", templates="The capital of <X> is")
            >>> capitals.pairs, capitals.eliciting_templates
            ((('France', 'Paris'), ('Egypt', 'Cairo')), ('The capital of <X> is',))
        """
        relation = cls._read(Path(path), header)
        if templates is None:
            return relation
        if not isinstance(templates, Mapping):
            templates = {"eliciting": [templates] if isinstance(templates, str) else list(templates)}
        checked = _checked_templates(Path(path), {name: list(listed) for name, listed in templates.items()})
        if unknown := sorted(set(checked) - {"neutral", "eliciting"}):
            raise RelationDataError(f"templates= has {unknown[0]!r}; it may have 'neutral' and 'eliciting'.")
        changes: dict[str, Any] = {f"{name}_templates": tuple(listed) for name, listed in checked.items()}
        return replace(relation, **changes)

    @classmethod
    def _read(cls, path: Path, header: bool | None) -> "Relation":
        try:
            text = read_text(path)
            if path.suffix.lower() in (".csv", ".tsv"):
                return cls.from_pairs(path.stem, table_pairs(path, text, header))
            content = parse_json(text)
        except UnreadableError as error:
            raise _NoRelationError(
                f"Cannot read the relation file {path}: {error}. Give JSON, CSV or TSV in UTF-8."
            ) from error
        if isinstance(content, list):
            return cls._from_fields({"name": path.stem, "pairs": content})
        if not isinstance(content, dict) or not isinstance(content.get("pairs"), list):
            raise _NoRelationError(
                f"{path}: a relation file is a list of [source, target], or an object with a field 'pairs'."
            )
        templates = _checked_templates(path, {} if content.get("templates") is None else content["templates"])
        fields = {name: content[name] for name in (*_TEXTS, "k", "pairs") if name in content}
        return cls._from_fields(
            {
                "name": path.stem,
                "neutral_templates": tuple(templates.get("neutral", NEUTRAL_TEMPLATES)),
                "eliciting_templates": tuple(templates.get("eliciting", ())),
                **fields,
            }
        )

    @classmethod
    def from_dataset(
        cls, dataset: Any, name: str, source: str = "source", target: str = "target", **details: Any
    ) -> "Relation":
        """A relation from two columns of a ``datasets.Dataset``."""
        if not hasattr(dataset, "column_names"):
            raise RelationDataError(
                f"A {type(dataset).__name__} is not a dataset. Give a datasets.Dataset, or a list of pairs to "
                "Relation.from_pairs."
            )
        return cls.from_pairs(name, column_values(dataset, (source, target), RelationDataError), **details)


RelationLike: TypeAlias = Relation | str | Path

_TEXTS = ("name", "title", "category", "description", "source", "licence")
"""Fields of a relation that are text."""


def _require_fields(fields: Mapping[str, Any]) -> None:
    """Refuse fields of a relation that are not what they should be; those that are missing have good defaults."""
    relation = f"Relation {shown(fields['name'])}"
    for part in _TEXTS:
        if not isinstance(value := fields.get(part, ""), str):
            raise RelationDataError(f"{relation}: {part} is {shown(value)}; it must be text.")
    check_text(fields, relation, RelationDataError)
    if not fields["pairs"]:
        raise RelationDataError(f"{relation} is empty; it needs at least one (source, target) pair.")
    for number, pair in enumerate(fields["pairs"]):
        if not isinstance(pair, list | tuple) or len(pair) != 2 or not all(map(_is_token, pair)):
            raise RelationDataError(
                f"{relation}, pair {number}: {shown(pair)} is not a pair of two words (or token ids). Write it as "
                "[source, target]."
            )
        if empty := [word for word in pair if isinstance(word, str) and not word.strip()]:
            raise RelationDataError(f"{relation}, pair {number}: {empty[0]!r} is an empty word.")
    k = fields.get("k", 1)
    if isinstance(k, bool) or not isinstance(k, int) or not 1 <= k <= _LARGEST_INT:
        raise RelationDataError(
            f"{relation}: k is {shown(k)}, but a whole number of at least 1 was expected. Write for example 10."
        )
    for template in (*fields.get("neutral_templates", ()), *fields.get("eliciting_templates", ())):
        if not isinstance(template, str) or template.count(PLACEHOLDER) != 1:
            raise RelationDataError(
                f"{relation}: the template {template!r} must contain {PLACEHOLDER} exactly once: the source word takes "
                "its place."
            )


def _is_token(word: object) -> bool:
    if isinstance(word, int):
        return not isinstance(word, bool) and abs(word) <= _LARGEST_INT
    return isinstance(word, str)


def _checked_templates(path: Path, templates: Any) -> dict[str, list[str]]:
    well_formed = isinstance(templates, dict) and all(
        isinstance(listed, list) and all(isinstance(template, str) for template in listed)
        for listed in templates.values()
    )
    if not well_formed:
        raise RelationDataError(
            f"{path}: templates are {shown(templates)}; an object with lists of strings was expected. Write "
            '{"neutral": [...], "eliciting": ["The capital of <X> is"]}.'
        )
    return dict(templates)


def data_folder(data_dir: str | Path | None = None) -> Path:
    """Folder of the bundled relations: the given one, else the wheel's copy, else the checkout's."""
    here = Path(__file__).parent.parent
    candidates = [Path(data_dir)] if data_dir is not None else [here / "relations_data", here.parent / "relations_data"]
    for folder in candidates:
        if folder.is_dir():
            return folder
    raise RelationDataError(
        f"There is no folder of relations at {candidates[0]}; reinstall tl-headmaps, or pass data_dir=."
    )


def _bundled(data_dir: str | Path | None) -> list[Path]:
    """Files of relations: ours in folders by category, those of users also beside each other."""
    folder = data_folder(data_dir)
    if data_dir is None:
        return [path for path in sorted(folder.glob("*/*.json")) if path.parent.name != "tasks"]
    files = [path for path in (*folder.glob("*"), *folder.glob("*/*")) if path.suffix.lower() in _FILE_SUFFIXES]
    # Of two forms of one relation the JSON file, which says more, comes last and stays.
    files.sort(key=lambda path: (path.parent, path.stem, path.suffix.lower() == ".json", path.suffix))
    return list({path.with_suffix(""): path for path in files}.values())


def _require_one(name: str, files: Sequence[Path]) -> None:
    """Refuse a name that several files have: one of them would be left out, or stand for the other."""
    if len(files) > 1:
        raise RelationDataError(
            f"{files[0]} and {files[1]} are both called {name!r}, and a relation is found by its name. Rename one of "
            "them, or remove it."
        )


def load_relations(
    category: str | None = None, *, model: Any = None, data_dir: str | Path | None = None
) -> list[Relation]:
    """All bundled relations, or those of one category (algorithmic, knowledge, linguistic, translation).

    Args:
        category: Only relations of this category.
        model: Leave out relations without a pair of single tokens for this model's tokenizer (such as ``next_year``,
            where a tokenizer splits numbers).
        data_dir: Folder of relations to use instead of the bundled one: JSON, CSV or TSV, in it or in folders by
            category. Files that are not relations are left out with a warning.

    Example:
        >>> from tl_headmaps import load_relations
        >>> [relation.name for relation in load_relations("translation")]
        ['english_to_french', 'english_to_german', 'english_to_italian', 'english_to_spanish']
    """
    relations = relations_in(data_dir, category)
    if not relations:
        raise RelationDataError(
            f"There is no relation in {data_folder(data_dir)}. Give a folder of .json, .csv or .tsv."
        )
    return writable(relations, model)


def relations_in(data_dir: str | Path | None, category: str | None = None) -> list[Relation]:
    """All relations of a folder, or none if it has none."""
    paths = _bundled(data_dir)
    categories = sorted({path.parent.name for path in paths})
    if category is not None and category not in categories:
        raise RelationDataError(f"There is no category {category!r}; the categories are {', '.join(categories)}.")
    relations = []
    named: dict[str, list[Path]] = {}
    for path in paths:
        try:
            if category in (None, path.parent.name):
                relations.append(Relation.from_file(path))
                named.setdefault(relations[-1].name, []).append(path)
        except _NoRelationError as error:
            if data_dir is None:
                raise
            warnings.warn(f"{path} was left out: it is not a relation ({error})", HeadMapsWarning, stacklevel=3)
    for name, files in named.items():
        _require_one(name, files)
    return relations


def writable(relations: Iterable[Relation], model: Any) -> list[Relation]:
    """Relations with a pair of single tokens for a model's tokenizer; all of them without one."""
    tokenizer = getattr(model, "tokenizer", None)
    return [relation for relation in relations if tokenizer is None or kept_pairs(relation, tokenizer)]


def kept_pairs(relation: Relation, tokenizer: Any) -> int:
    """Number of pairs that are single tokens on both sides."""
    size = len(tokenizer)
    return len(encode(relation, tokenizer, n_sources=size, n_targets=size).kept)


def resolve(relation: RelationLike, data_dir: str | Path | None = None) -> Relation:
    """The relation itself, the one in a file (a name with a suffix), or the bundled one with this name."""
    if isinstance(relation, Relation):
        return relation
    if isinstance(relation, Path) or str(relation).lower().endswith(_FILE_SUFFIXES):
        return Relation.from_file(relation)
    bundled: dict[str, list[Path]] = {}
    for path in _bundled(data_dir):
        bundled.setdefault(path.stem, []).append(path)
    if relation in bundled:
        _require_one(relation, bundled[relation])
        return Relation.from_file(bundled[relation][0])
    if not _NAME.fullmatch(relation):
        raise RelationDataError(
            f"{relation!r} is not the name of a relation (lower-case words joined by '_'). "
            f"For a file of your own, give its path with the suffix: {', '.join(_FILE_SUFFIXES)}."
        )
    near = difflib.get_close_matches(relation, bundled, n=3, cutoff=0.5)
    hint = f"Did you mean {' or '.join(map(repr, near))}?" if near else "See 'tl-headmaps relations --list'."
    raise RelationDataError(f"There is no relation {relation!r}. {hint}")


def resolve_relations(
    relations: RelationLike | Iterable[RelationLike], data_dir: str | Path | None = None
) -> list[Relation]:
    """One or several relations, each under a name of its own."""
    listed = [relations] if isinstance(relations, str | Path | Relation) else list(relations)
    if not listed:
        raise UsageError("No relation was given. Name at least one, for example 'country_to_capital'.")
    resolved = [resolve(relation, data_dir) for relation in listed]
    names = [relation.name for relation in resolved]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise UsageError(f"The relation {repeated[0]!r} was given twice; give each relation its own name.")
    return resolved


@dataclass(frozen=True)
class Encoded:
    """Token ids of those pairs of a relation that a model can be scored on.

    Attributes:
        kept: Positions of these pairs in ``relation.pairs``.
        dropped: (source, target, reason) of the others.
        multi_token_sources: Ids of sources of several tokens and of their targets, if asked for.
    """

    relation: Relation
    source_ids: tuple[int, ...]
    target_ids: tuple[int, ...]
    kept: tuple[int, ...]
    dropped: tuple[tuple[str, str, str], ...] = field(repr=False)
    multi_token_sources: tuple[tuple[tuple[int, ...], int], ...] = ()

    def top_k(self, k: int | None, n_targets: int) -> int:
        """The k to count with; raises if no pair can be scored, or if there are fewer targets than that."""
        if not self.kept:
            source, target, reason = self.dropped[0]
            raise RelationDataError(
                f"No pair of {self.relation.name!r} can be scored: all {len(self.dropped)} were left out (for example "
                f"{source!r}, {target!r}: {reason}). Use single-token words of this model, "
                "multi_token='first', or load_relations(model=model), which leaves such relations out."
            )
        chosen = self.relation.default_k(n_targets) if k is None else k
        if not 1 <= chosen <= n_targets:
            raise UsageError(f"k={chosen} is impossible: it must be from 1 to {n_targets}, the size of the vocabulary.")
        return chosen


def encode(
    relation: Relation,
    tokenizer: Any,
    *,
    n_sources: int,
    n_targets: int,
    multi_token: MultiToken = "skip",
    multi_token_sources: bool = False,
) -> Encoded:
    """Ids of a relation's pairs; pairs with a word of several tokens are dropped with the reason.

    Args:
        relation: The relation.
        tokenizer: The model's tokenizer; None only for pairs of token ids.
        n_sources: Number of rows of the map: the tokens the model embeds.
        n_targets: Number of columns of the map.
        multi_token: ``"skip"`` drops targets of several tokens, ``"first"`` takes their first token.
        multi_token_sources: Give pairs whose source has several tokens too, apart from the others.
    """
    sources, targets, kept, dropped, longer = [], [], [], [], []
    known = _single_tokens(relation, tokenizer)
    for number, (source, target) in enumerate(relation.pairs):
        source_id = None
        try:
            source_id = single_id(tokenizer, known.get(source, source), n_sources)
        except TokenError:
            if not (multi_token_sources and isinstance(source, str) and tokenizer is not None):
                dropped.append((str(source), str(target), "source is not one token"))
                continue
        try:
            if multi_token == "first" and isinstance(target, str) and tokenizer is not None:
                target_id = single_id(None, word_ids(tokenizer, target)[0], n_targets)
            else:
                target_id = single_id(tokenizer, known.get(target, target), n_targets)
        except TokenError:
            dropped.append((str(source), str(target), "target is not one token"))
            continue
        if source_id is None:
            longer.append((tuple(word_ids(tokenizer, str(source))), target_id))
            continue
        sources.append(source_id)
        targets.append(target_id)
        kept.append(number)
    return Encoded(relation, tuple(sources), tuple(targets), tuple(kept), tuple(dropped), tuple(longer))


def _single_tokens(relation: Relation, tokenizer: Any) -> dict[TokenLike, int]:
    """Words that are plainly one token, encoded in one batch; the others are looked at one by one."""
    words = sorted(
        {word for pair in relation.pairs for word in pair if isinstance(word, str) and not word[:1].isspace()}
    )
    if tokenizer is None or not words:
        return {}
    encoded = tokenizer([f" {word}" for word in words], add_special_tokens=False)["input_ids"]
    unknown = getattr(tokenizer, "unk_token_id", None)
    return {word: ids[0] for word, ids in zip(words, encoded, strict=True) if len(ids) == 1 and ids[0] != unknown}
