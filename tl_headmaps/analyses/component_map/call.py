"""What q, k, v, o, up, down and gate of every layer contribute, and the heads inside them."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, overload

import torch
from jaxtyping import Float
from torch import Tensor

from ...capture.components.gradients import component_gradients, component_outputs
from ...capture.components.matrices import (
    CheckpointComponents,
    ComponentSource,
    ModelComponents,
    component_source,
    heads_of,
    n_parts,
)
from ...capture.loading import load_model
from ...capture.running.activations import encode_prompt, prepends_bos
from ...capture.running.text import TextBatches, token_batches
from ...capture.weights import HeadWeights
from ...core.ambient import steady
from ...core.errors import UsageError, WeightBasisError
from ...core.progress import Progress
from ...core.provenance import Provenance
from ...core.types import ATTENTION_COMPONENTS, WRITING_COMPONENTS, Model, check_choice
from ...data.texts import describe_source, read_texts
from ...scorers.components import (
    Change,
    Estimate,
    Share,
    attention_share,
    find_metric,
    names_of,
    over_documents,
    random_baseline,
)
from ...scorers.spectra import WeightMatrix, side_by_side
from ..sweep import LayerStep, sweep_layers
from .result import ComponentMap, HeadComponentMap

_SEQUENCE = 256
_SUBSPACE = 16

Cells = Float[Tensor, "component layer part"]
Key = tuple[int, int, int]
"""Component, layer and part of a cell, counted from 0."""


@overload
def component_map(
    model: Model | HeadWeights,
    metric: str = ...,
    texts: Any = ...,
    against: Any = ...,
    *,
    by_head: Literal[False] = ...,
    normalise: Share | None = ...,
    relative: bool = ...,
    k: int | None = ...,
    column: str = ...,
    max_tokens: int = ...,
    prepend_bos: bool | None = ...,
    seed: int = ...,
    run_dir: str | Path | None = ...,
    progress: bool = ...,
) -> ComponentMap: ...
@overload
def component_map(
    model: Model | HeadWeights,
    metric: str = ...,
    texts: Any = ...,
    against: Any = ...,
    *,
    by_head: Literal[True],
    normalise: Share | None = ...,
    relative: bool = ...,
    k: int | None = ...,
    column: str = ...,
    max_tokens: int = ...,
    prepend_bos: bool | None = ...,
    seed: int = ...,
    run_dir: str | Path | None = ...,
    progress: bool = ...,
) -> HeadComponentMap: ...
@overload
def component_map(
    model: Model | HeadWeights,
    metric: str = ...,
    texts: Any = ...,
    against: Any = ...,
    *,
    by_head: bool,
    normalise: Share | None = ...,
    relative: bool = ...,
    k: int | None = ...,
    column: str = ...,
    max_tokens: int = ...,
    prepend_bos: bool | None = ...,
    seed: int = ...,
    run_dir: str | Path | None = ...,
    progress: bool = ...,
) -> ComponentMap | HeadComponentMap: ...
@steady
def component_map(
    model: Model | HeadWeights,
    metric: str = "sensitivity",
    texts: Any = None,
    against: Any = None,
    *,
    by_head: bool = False,
    normalise: Share | None = None,
    relative: bool = False,
    k: int | None = None,
    column: str = "text",
    max_tokens: int = 8192,
    prepend_bos: bool | None = None,
    seed: int = 0,
    run_dir: str | Path | None = None,
    progress: bool = True,
) -> ComponentMap | HeadComponentMap:
    """One value for every weight matrix of every layer: rows layers, columns attn.q to mlp.gate.

    From text: ``sensitivity`` (first-order effect on the loss of removing entries, as shares of the map),
    ``contribution`` (of scaling the matrix as a whole), ``gradient_ratio``, ``output_share``; with intervals over the
    documents of the text, if there are four. From the weights alone: ``frobenius``, ``spectral``, ``stable_rank``,
    ``effective_rank``, ``tail_exponent``. Between two models: ``relative_change``, ``changed_share``,
    ``subspace_overlap``.

    Args:
        model: A TransformerBridge or HookedTransformer, or HeadWeights for metrics that need no text: of a checkpoint
            all columns, of a model the four of attention (they keep no MLP but the first).
        metric: One of the names above.
        texts: For metrics from text: a string, a list of strings, a UTF-8 file with texts separated by blank lines, or
            a ``datasets.Dataset``; by default the bundled English sample.
        against: For metrics between two models: the other model, its weights, or its folder. Change is relative to it.
        by_head: Give a value to the q, k, v and o of every head instead (k and v: of every key/value head), as a
            HeadComponentMap. Shares are shares of that map, so heads compare with heads.
        normalise: What ``sensitivity`` and ``contribution`` are shares of: the ``"map"`` (default), or of their
            ``"layer"``, so that every row sums to 1.
        relative: Divide by the baseline: what random matrices of the same shape give (independent normal entries of
            variance 1 / inputs, mean of three), or random subspaces.
        k: Dimensions of the subspaces of ``subspace_overlap``; by default 16, or half of the smallest matrix.
        column: Column of a dataset that holds the text.
        max_tokens: Read at most this many tokens.
        prepend_bos: Begin each sequence with BOS; by default as the model does.
        seed: Seed of the random matrices.
        run_dir: For metrics without text: finished layers are saved in this folder, so an interrupted run resumes.
        progress: Show a progress bar on a terminal.

    Example:
        >>> from tl_headmaps import component_map, load_default_model
        >>> norms = component_map(load_default_model(), "frobenius", progress=False)
        >>> [(layer, component, round(value)) for (layer, component), value in norms.top(2)]
        [(28, 'mlp.up', 206), (29, 'mlp.up', 203)]
        >>> heads = component_map(load_default_model(), "frobenius", by_head=True, progress=False)
        >>> [(component, str(head), round(value)) for (component, head), value in heads.top(2)]
        [('attn.k', 'L0H1', 90), ('attn.q', 'L0H3', 74)]
    """
    options = _Options(texts, against, normalise, relative, k, column, max_tokens, prepend_bos, seed, run_dir, progress)
    measurement = _Measurement(model, metric, options, by_head=by_head)
    fields = measurement.fields()
    if by_head:
        return HeadComponentMap(**fields)
    for name in ("values", "interval_low", "interval_high", "baseline"):
        fields[name] = None if fields[name] is None else fields[name][:, :, 0].T.contiguous()
    return ComponentMap(**fields, attention_without=measurement.attention_without)


@dataclass(frozen=True)
class _Options:
    texts: Any
    against: Any
    normalise: Share | None
    relative: bool
    k: int | None
    column: str
    max_tokens: int
    prepend_bos: bool | None
    seed: int
    run_dir: str | Path | None
    progress: bool


@dataclass(frozen=True)
class _MeasureLayers:
    """Values of all matrices of a layer, with their shapes."""

    weights: HeadWeights
    keys: list[Key]
    measure: Callable[[Key], tuple[float, int, int]]

    def prepare(self) -> LayerStep:
        def step(layer: int) -> dict[str, Tensor]:
            rows = side_by_side(self.measure, [key for key in self.keys if key[1] == layer])
            return {"measured": torch.tensor(list(rows), dtype=torch.float64)}

        return step


class _Measurement:
    """One call: its options, checked, and the fields of its result."""

    def __init__(self, model: Any, metric: str, options: _Options, *, by_head: bool) -> None:
        self.metric, self.options, self.by_head = find_metric(metric), options, by_head
        self._check_options()
        self.source = component_source(model, attention_only=by_head)
        self.recorded: dict[str, Any] = {"metric": metric, "relative": options.relative}
        if self._share is not None:
            self.recorded["normalise"] = self._share
        self.data: dict[str, str] = {}
        self.created: str | None = None
        self.n_batches = self.n_documents = self.n_tokens = 0
        self.attention_without: Float[Tensor, "document layer"] | None = None

    def _check_options(self) -> None:
        metric, options = self.metric, self.options
        if metric.kind == "change" and options.against is None:
            raise UsageError(
                f"{metric.name} compares two models, and only one was given. Pass the other one, its weights or its "
                "folder as against=."
            )
        if metric.kind != "change" and options.against is not None:
            raise UsageError(
                f"{metric.name} looks at one model, but against= was given. Leave it out, or choose one of "
                f"{names_of('change')}."
            )
        if not metric.needs_text and options.texts is not None:
            raise UsageError(
                f"{metric.name} reads the weights alone, but texts were given. Leave them out, or choose one of "
                f"{names_of('gradients', 'outputs')}."
            )
        if options.normalise is not None:
            check_choice(options.normalise, Share, "normalise")
            if not metric.normalised:
                raise UsageError(
                    f"{metric.name} is no share of anything, but normalise={options.normalise!r} was given. Leave it "
                    "out, or choose sensitivity or contribution."
                )
        if options.relative and not metric.has_baseline:
            raise UsageError(
                f"{metric.name} has no random baseline to be relative to. Leave relative out, or choose a metric of "
                "the weights alone or subspace_overlap."
            )
        if options.k is not None and metric.chance is None:
            raise UsageError(f"{metric.name} compares no subspaces, but k={options.k} was given. Leave it out.")
        if metric.needs_text and options.run_dir is not None:
            raise UsageError(
                f"{metric.name} runs texts through the whole model, so it has no finished layers to keep: leave "
                "run_dir out, or choose a metric of the weights alone."
            )
        if options.max_tokens < 2:
            raise UsageError(f"max_tokens={options.max_tokens} is too few; a loss needs at least two tokens.")

    def fields(self) -> dict[str, Any]:
        """Fields of the result; maps are [component, layer, part]."""
        estimate, baseline = self._measured()
        maps = {"values": estimate.values, "interval_low": estimate.low, "interval_high": estimate.high}
        if self.options.relative:
            assert baseline is not None
            maps = {name: None if cells is None else cells / baseline for name, cells in maps.items()}
        maps["baseline"] = baseline
        of = {None: "", "map": " over the map", "layer": " of its layer"}[self._share]
        unit = f"{self.metric.unit}{of}{', relative to random' if self.options.relative else ''}"
        provenance = self._provenance()
        return {
            "metric": self.metric.name,
            "unit": unit,
            "relative": self.options.relative,
            "n_batches": self.n_batches,
            "n_documents": self.n_documents,
            "n_tokens": self.n_tokens,
            "components": self.source.components,
            **{name: None if cells is None else _finite(cells) for name, cells in maps.items()},
            "provenance": provenance if self.created is None else replace(provenance, created=self.created),
        }

    def _provenance(self) -> Provenance:
        seed = self.options.seed if self.metric.kind == "weights" else None
        runs_model = self.metric.needs_text
        return self.source.provenance(runs_model=runs_model, options=self.recorded, data=self.data, seed=seed)

    def _measured(self) -> tuple[Estimate, Cells | None]:
        if self.metric.kind == "weights":
            return self._of_weights()
        if self.metric.kind == "change":
            return self._of_change()
        if not isinstance(self.source, ModelComponents):
            raise UsageError(
                f"{self.metric.name} runs a text through the model, but only weights were given. Pass the model "
                "itself, or choose a metric of the weights alone."
            )
        batches = self._batches(self.source)
        if self.metric.kind == "gradients":
            by_batch = component_gradients(
                self.source, batches, self.metric.measure, by_head=self.by_head, progress=self.options.progress
            )
            sizes = [float(batch.n_targets) for batch in batches.items]
        else:
            by_batch = self._outputs(self.source, batches)
            sizes = [float(batch.lengths.sum()) for batch in batches.items]
        weights = torch.tensor(sizes, dtype=torch.float64, device="cpu")
        documents = torch.tensor(batches.units, device="cpu")
        estimate = over_documents(self._joined(by_batch), weights, documents, self._share)
        if self._share is not None and estimate.without_each is not None:
            attention = torch.tensor([name in ATTENTION_COMPONENTS for name in self.source.components], device="cpu")
            self.attention_without = attention_share(estimate.without_each, attention).float()
        return estimate, None

    @property
    def _share(self) -> Share | None:
        """What values are shares of."""
        return (self.options.normalise or "map") if self.metric.normalised else None

    def _keys(self) -> list[Key]:
        return [
            (index, layer, part)
            for layer in range(self.source.n_layers)
            for index, component in enumerate(self.source.components)
            if self.source.has(layer, component)
            for part in range(n_parts(self.source, component, layer) if self.by_head else 1)
        ]

    def _matrix(self, source: ComponentSource, key: Key) -> WeightMatrix:
        index, layer, part = key
        component = source.components[index]
        weight = heads_of(source, layer, component)[part] if self.by_head else source.matrix(layer, component)
        return WeightMatrix(weight, writes=component in WRITING_COMPONENTS)

    def _cells(self, values: dict[Key, float]) -> Cells:
        cells = torch.full(self._shape, torch.nan, dtype=torch.float64)
        for key, value in values.items():
            cells[key] = value
        return cells

    @property
    def _shape(self) -> tuple[int, int, int]:
        source = self.source
        return len(source.components), source.n_layers, source.n_heads if self.by_head else 1

    def _filled(self, measured: Callable[[WeightMatrix, Key], float]) -> tuple[Cells, dict[Key, tuple[int, int]]]:
        """Value and shape of every matrix."""
        keys, options = self._keys(), self.options

        def measure(key: Key) -> tuple[float, int, int]:
            matrix = self._matrix(self.source, key)
            return measured(matrix, key), *matrix.weight.shape

        if options.run_dir is None:
            measured_rows = side_by_side(measure, keys)
            bar = Progress(total=len(keys), desc=self.metric.name, unit="matrix", show=options.progress)
            rows = list(bar.over(measured_rows))
        else:
            swept = sweep_layers(
                _MeasureLayers(self.source.weights, keys, measure),
                range(self.source.n_layers),
                kind=(HeadComponentMap if self.by_head else ComponentMap).kind,
                provenance=self._provenance(),
                run_dir=options.run_dir,
                description=self.metric.name,
                progress=options.progress,
            )
            self.created = swept.provenance.created
            rows = [row for layer in range(self.source.n_layers) for row in swept.layers[layer]["measured"].tolist()]
        by_key = dict(zip(keys, rows, strict=True))
        cells = self._cells({key: row[0] for key, row in by_key.items()})
        return cells, {key: (int(row[1]), int(row[2])) for key, row in by_key.items()}

    def _of_weights(self) -> tuple[Estimate, Cells]:
        values, shapes = self._filled(lambda matrix, key: float(self.metric.measure(matrix)))
        distinct = sorted(set(shapes.values()))
        seed = self.options.seed
        random = side_by_side(lambda shape: random_baseline(self.metric, *shape, seed), distinct)
        by_shape = dict(zip(distinct, random, strict=True))
        return Estimate(values), self._cells({key: by_shape[shape] for key, shape in shapes.items()})

    def _of_change(self) -> tuple[Estimate, Cells | None]:
        against = self.options.against
        if isinstance(against, str | Path):
            # Weights are compared with weights: nothing is built that was not before.
            on_disk = isinstance(self.source, CheckpointComponents)
            against = HeadWeights.from_checkpoint(against) if on_disk else load_model(str(against))
        other = component_source(against, attention_only=self.by_head)
        smallest = self._require_same_shapes(other)
        k = self._subspace(smallest)
        theirs = other.provenance()
        self._require_same_basis(theirs.basis)
        self.recorded |= {"against": theirs.model, "k": k}
        self.data["against"] = theirs.fingerprint
        self.data |= {f"against_{name}": digest for name, digest in theirs.data.items()}

        def change(new: WeightMatrix, key: Key) -> Change:
            old = self._matrix(other, key)
            return Change(new, WeightMatrix(old.weight.to(new.weight.device), old.writes), k)

        values, _ = self._filled(lambda new, key: float(self.metric.measure(change(new, key))))
        chance = self.metric.chance
        if chance is None:
            return Estimate(values), None
        by_chance = {key: chance(change(self._matrix(self.source, key), key)) for key in self._keys()}
        return Estimate(values), self._cells(by_chance)

    def _require_same_shapes(self, other: ComponentSource) -> int:
        """The smallest side of any matrix, if all are alike."""
        source = self.source
        for name in ("n_layers", "components", "n_heads", "n_kv_heads"):
            ours, theirs = getattr(source, name), getattr(other, name)
            if ours != theirs:
                raise UsageError(
                    f"The two models cannot be compared matrix by matrix: {name} is {ours} here and {theirs} in the "
                    "one compared with. Compare checkpoints of one architecture."
                )
        smallest: list[int] = []
        for layer in range(source.n_layers):
            for component in (name for name in source.components if source.has(layer, name)):
                ours, theirs = (tuple(one.matrix(layer, component).shape) for one in (source, other))
                if ours != theirs:
                    raise UsageError(
                        f"The two models cannot be compared: {component} of layer {layer} is {list(ours)} here and "
                        f"{list(theirs)} in the one compared with. Compare checkpoints of one architecture."
                    )
                smallest += heads_of(source, layer, component).shape[1:] if self.by_head else ours
        return min(smallest)

    def _require_same_basis(self, theirs: str) -> None:
        ours = self.source.provenance().basis
        if ours != theirs:
            raise WeightBasisError(
                f"The weights are {ours} here and {theirs} in the model compared with, so every matrix would differ by "
                "the processing alone. Load both the same way (both raw, or both processed)."
            )

    def _subspace(self, smallest: int) -> int:
        k = self.options.k
        if k is None:
            return max(1, min(_SUBSPACE, smallest // 2))
        if not 1 <= k <= smallest:
            raise UsageError(
                f"k={k} is impossible: the smallest matrix has {smallest} directions. Choose 1 to {smallest}."
            )
        return k

    def _batches(self, source: ModelComponents) -> TextBatches:
        options, model = self.options, source.model
        length = min(_SEQUENCE, int(model.cfg.n_ctx))
        prepend_bos = prepends_bos(model, options.prepend_bos)
        batches = token_batches(
            (
                text if isinstance(text, str) else tuple(encode_prompt(model, text))
                for text in read_texts(options.texts, options.column)
            ),
            source.weights.tokenizer,
            length=length,
            max_tokens=options.max_tokens,
            prepend_bos=prepend_bos,
            device=model.embed.W_E.device,
        )
        self.n_batches, self.n_documents, self.n_tokens = len(batches.items), batches.n_documents, batches.n_tokens
        self.recorded |= {
            "texts": describe_source(options.texts),
            "max_tokens": options.max_tokens,
            "sequence": length,
            "prepend_bos": prepend_bos,
        }
        self.data["tokens"] = batches.digest
        return batches

    def _outputs(self, source: ModelComponents, batches: TextBatches) -> dict[str, Tensor]:
        shares = {
            component: torch.full(
                (len(batches.items), source.n_layers, n_parts(source, component) if self.by_head else 1),
                torch.nan,
                dtype=torch.float64,
            )
            for component in source.components
        }
        bar = Progress(total=len(batches.items), desc=self.metric.name, unit="batch", show=self.options.progress)
        for number, batch in enumerate(bar.over(batches.items)):

            def receive(layer: int, component: str, written: Tensor, stream: Tensor, number: int = number) -> None:
                measured = self.metric.measure(written, stream).cpu()
                shares[component][number, layer, : len(measured)] = measured

            component_outputs(source, batch, receive, by_head=self.by_head)
        return shares

    def _joined(self, by_batch: dict[str, Tensor]) -> Float[Tensor, "batch component layer part"]:
        cells = torch.full((self.n_batches, *self._shape), torch.nan, dtype=torch.float64)
        for index, component in enumerate(self.source.components):
            values = by_batch[component]
            cells[:, index, :, : values.shape[-1]] = values
        return cells


def _finite(cells: Cells) -> Cells:
    """As stored: float32, NaN where a value is not defined."""
    return cells.where(cells.isfinite(), torch.nan).float()
