"""What every question does first: read the model, choose heads and documents, and remember all of it for provenance."""

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ..capture.running.activations import encode_prompt, prepends_bos
from ..capture.running.text import check_runs
from ..capture.weights import HeadWeights
from ..core.errors import UsageError
from ..core.progress import Progress
from ..core.provenance import Provenance
from ..core.types import HeadLike, LayerLike, Preset
from ..data.relations import Encoded, MultiToken, Relation, encode
from ..data.texts import Sample, describe_source, split_texts


class Study:
    """A model, the heads asked about, and what provenance has to say of the call.

    Attributes:
        model: The model.
        weights: What was read of it.
        heads: The chosen heads, in order.
        prepend_bos: Whether prompts begin with BOS; None for weights, which run nothing.
        preset: Of the static scores that prompts filled with words are compared with.
    """

    def __init__(
        self,
        model: Any,
        *,
        heads: HeadLike | Iterable[HeadLike] | None = None,
        layers: LayerLike | Iterable[LayerLike] | None = None,
        prepend_bos: bool | None = None,
        by_heads: bool = True,
        runs: bool = True,
        fills_prompts: bool = False,
        preset: Preset | None = None,
        progress: bool = True,
    ) -> None:
        if runs:
            check_runs(model)
        if fills_prompts and getattr(model, "tokenizer", None) is None and hasattr(model, "cfg"):
            raise UsageError(
                "The model has no tokenizer, which prompts need. Load the model with its tokenizer, or set "
                "model.tokenizer."
            )
        self.model, self.progress = model, progress
        self.weights = HeadWeights.of(model)
        self.preset = self.weights.preset(preset)
        self.heads = self.weights.chosen_heads(heads, layers)
        self.options: dict[str, Any] = {}
        self.data: dict[str, str] = {}
        self.prepend_bos = False
        if runs:
            self.prepend_bos = self.options["prepend_bos"] = prepends_bos(model, prepend_bos, self.preset)
        if by_heads:
            self.options["heads"] = None if heads is None and layers is None else list(map(str, self.heads))

    def documents(
        self, texts: Any, *, max_tokens: int | None, max_texts: int | None = None, least: int = 3, least_fit: int = 1
    ) -> tuple[list[list[int]], list[list[int]]]:
        """Token ids of the documents to fit on and of those held out (a third); too few or too short ones are refused.

        Args:
            texts: As a user gives them; the bundled texts by default.
            max_tokens: Documents are cut to this many tokens, or to what the model holds.
            max_texts: At most this many held-out documents, and twice as many to fit on, evenly spaced.
            least: Shorter documents are left out.
            least_fit: Documents needed to fit on.
        """
        if max_texts is not None and max_texts < 2:
            raise UsageError(f"max_texts={max_texts} is too few: an interval needs at least two texts.")
        if max_tokens is not None and max_tokens < least:
            raise UsageError(f"max_tokens={max_tokens} is too short. A text needs at least {least} tokens.")
        longest = min(int(self.model.cfg.n_ctx), max_tokens or int(self.model.cfg.n_ctx))
        source = Sample.WHOLE if texts is None else texts
        fit, held_out = (
            [ids for text in part if len(ids := encode_prompt(self.model, text, self.prepend_bos)[:longest]) >= least]
            for part in split_texts(source)
        )
        if len(fit) < least_fit or len(held_out) < 2:
            where = "on either side" if least_fit > 1 else "there"
            raise UsageError(
                f"{len(fit) + len(held_out)} texts are too few: a third of them is held out, and at least two are "
                f"needed {where}. Give more texts, or longer ones separated by blank lines."
            )
        if max_texts is not None:
            fit, held_out = spaced(fit, 2 * max_texts), spaced(held_out, max_texts)
        digest = hashlib.sha256(repr((fit, held_out)).encode()).hexdigest()
        self.data |= {"texts": digest, "source": describe_source(source)}
        return fit, held_out

    def encoded(
        self, relation: Relation, k: int | None = None, multi_token: MultiToken = "skip"
    ) -> tuple[Encoded, int]:
        """The pairs of a relation that can be scored, and its k; raises where there are none."""
        n_targets = self.weights.W_U.shape[0]
        encoded = encode(
            relation,
            self.weights.tokenizer,
            n_sources=self.weights.n_vocab,
            n_targets=n_targets,
            multi_token=multi_token,
        )
        return encoded, encoded.top_k(k, n_targets)

    def bar(self, what: str, unit: str, total: int | None) -> Progress:
        """A progress bar, shown if the caller wants one."""
        return Progress(total=total, desc=what, unit=unit, show=self.progress)

    def as_map(self, values: Float[Tensor, " chosen"]) -> Float[Tensor, "layer head"]:
        """Values of the chosen heads as a map; NaN for the others."""
        spread = torch.full((self.weights.n_layers, self.weights.n_heads), torch.nan)
        spread[[head.layer for head in self.heads], [head.head for head in self.heads]] = values.float()
        return spread

    def provenance(self, *, runs_model: bool = False, seed: int | None = None, **options: Any) -> Provenance:
        """How the result was made: the study's own options and data are added to those given."""
        return self.weights.provenance(
            runs_model=runs_model, options={**options, **self.options}, data=self.data, seed=seed
        )


def spaced(texts: Sequence[list[int]], n: int) -> list[list[int]]:
    """At most ``n`` of the texts, from the first on at even distances: the bundled registers take turns."""
    return list(texts) if len(texts) <= n else [texts[place * len(texts) // n] for place in range(n)]
