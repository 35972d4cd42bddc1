"""What this package sees in a model, before any analysis."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from ..capture.bundled import NAME, ORIGINAL
from ..capture.parts import LayerWeights, Norm
from ..capture.tensors import in_float64
from ..capture.weights import HeadWeights
from ..core.errors import UsageError
from ..core.options import public
from ..core.provenance import Provenance
from ..core.types import Circuit, HeadIndex, Model, check_choice
from ..renderers.figure import Figure
from ..renderers.listing import table_figure
from ..renderers.tables import Table
from ..results import Result, largest_heads
from ..results.table import frozen_result
from ..scorers.spectra import entropy_rank, product_singular_values, random_matrix


@frozen_result
class ModelDescription(Result):
    """Facts about a model.

    Attributes:
        facts: What was found, by name and in reading order.
        parameters: Entries of the matrices of one head and of its circuits, by name. Heads of one key/value head share
            ``W_K`` and ``W_V``, which are counted in each of them.
        qk_rank, ov_rank: Effective rank of every head's circuits ``W_Q W_K^T`` and ``W_V W_O``, what the layer's norm
            multiplies by included; at most ``d_head``, NaN in layers without heads.

    Example:
        >>> from tl_headmaps import describe_model, load_default_model
        >>> description = describe_model(load_default_model())
        >>> description.facts["norm before attention"], description.facts["first MLP"]
        ('RMSNorm, eps 1e-05', 'gated silu, width 1536')
    """

    kind: ClassVar[str] = "model_description"
    methods: ClassVar[tuple[str, ...]] = ("elhage2021framework", "roy2007effective")
    nullable: ClassVar[tuple[str, ...]] = ("qk_rank", "ov_rank")
    facts: Mapping[str, str]
    provenance: Provenance
    parameters: Mapping[str, int] | None = None
    qk_rank: Float[Tensor, "layer head"] | None = None
    ov_rank: Float[Tensor, "layer head"] | None = None

    def head_map(self, circuit: Circuit = "ov") -> Float[Tensor, "layer head"]:
        """Effective ranks of a circuit."""
        check_choice(circuit, Circuit, "circuit")
        ranks = self.ov_rank if circuit == "ov" else self.qk_rank
        if ranks is None:
            raise UsageError("This description has no ranks: an older version made it. Call describe_model() again.")
        return ranks

    def top(self, n: int = 5, circuit: Circuit = "ov") -> list[tuple[HeadIndex, float]]:
        """The ``n`` heads with the largest effective rank."""
        return largest_heads(self.head_map(circuit), n)

    def to_rows(self) -> Iterable[dict[str, Any]]:
        """One record per fact."""
        return ({"fact": name, "value": value} for name, value in self.facts.items())

    def head_rows(self, head: HeadIndex) -> Table:
        """The size of one head."""
        counts = self.parameters or {}
        sizes = {"parameters": "head", "parameters of QK": "QK", "parameters of OV": "OV"}
        rows = [[title, f"{counts[name]:,}"] for title, name in sizes.items() if name in counts]
        for name, ranks in (("QK", self.qk_rank), ("OV", self.ov_rank)):
            if ranks is not None and not math.isnan(ranks[head.layer, head.head]):
                rows.append([f"effective rank of {name}", f"{float(ranks[head.layer, head.head]):.1f}"])
        note = f"{counts['W_Q']:,} parameters in each of W_Q, W_K, W_V and W_O." if counts else ""
        return Table([("of the head", "left"), ("number", "right")], rows, note)

    def figure(self) -> Figure:
        """The facts as a table."""
        facts = Table([("", "left"), ("", "left")], list(self.facts.items()))
        return table_figure(facts, title=f"Model {self.provenance.model}", text=str(self), unbroken=False)

    def __str__(self) -> str:
        width = max(len(name) for name in self.facts)
        return "\n".join(f"{name:<{width}}  {value}" for name, value in self.facts.items())


@public
def describe_model(model: Model | HeadWeights) -> ModelDescription:
    """Architecture, size, weight basis, norms and supported analyses of a model; parameters and rank of its circuits.

    Args:
        model: A TransformerBridge, a HookedTransformer, or HeadWeights.

    Example:
        >>> from tl_headmaps import describe_model, load_default_model
        >>> facts = describe_model(load_default_model()).facts
        >>> facts["heads"], facts["weight basis"]
        ('9 per layer, 270 in all', 'raw')
        >>> facts["QK circuit"]
        'W_Q and W_K, 73,728 parameters in each head, 69,632 of them free'
    """
    weights = HeadWeights.of(model)
    layer = weights.layer(weights.layers_with_heads[0])
    shapes = [weights.shape(number) for number in weights.layers_with_heads]
    per_group = [shape.n_heads // shape.n_kv_heads for shape in shapes]
    grouping = f"{_range(shape.n_kv_heads for shape in shapes)} per layer" + (
        f", each read by {_range(per_group)} heads" if max(per_group) > 1 else " (not grouped)"
    )
    with_attention = " that has any" if weights.mixers else ""
    qk_rank, ov_rank = _effective_ranks(weights)
    facts = {
        "model": weights.shown_name,
        "architecture": weights.architecture,
        "layers": _layers(weights),
        "heads": f"{_range(shape.n_heads for shape in shapes)} per layer{with_attention}, {weights.n_all_heads} in all",
        "key/value heads": grouping,
        "d_model": str(weights.d_model),
        "d_head": _range(shape.d_head for shape in shapes),
        **_circuits(weights, qk_rank, ov_rank),
        "vocabulary": f"{weights.n_vocab:,} tokens",
        "weight basis": weights.basis,
        "stored type": str(weights.W_E.dtype).removeprefix("torch."),
        "quantisation": _quantisation(weights),
        "device": str(weights.device),
        "norm before attention": _norm(layer.ln1),
        "norm after attention": _norm(layer.ln1_post),
        "norm of queries, keys": _norm(layer.q_norm),
        "final norm": _norm(weights.ln_final),
        "embedding factor": f"{weights.embed_scale:g}",
        **_outside_modules(weights, layer),
        "first MLP": _mlp(weights),
        "presets": _presets(weights),
        "analyses": _analyses(weights),
        **_seams(weights),
        "fingerprint": weights.fingerprint,
    }
    if weights.notes:
        facts["note"] = " ".join(weights.notes)
    return ModelDescription(facts, weights.provenance(), _parameters(weights), qk_rank, ov_rank)


def _range(numbers: Iterable[int]) -> str:
    """A number, or the least and the most of several."""
    found = sorted(set(numbers))
    return str(found[0]) if len(found) == 1 else f"{found[0]} to {found[-1]}"


def _quantisation(weights: HeadWeights) -> str:
    if weights.quantisation is None:
        return "none found in its configuration or values"
    original = f"; the original weights: load_model({ORIGINAL!r})" if weights.model_name == NAME else ""
    return weights.quantisation + original


def _parameters(weights: HeadWeights) -> dict[str, int]:
    """Entries of the matrices of one head, biases apart."""
    each = weights.d_model * weights.d_head
    return {**dict.fromkeys(("W_Q", "W_K", "W_V", "W_O"), each), "QK": 2 * each, "OV": 2 * each, "head": 4 * each}


def _effective_ranks(weights: HeadWeights) -> tuple[Tensor, Tensor]:
    """Effective rank of every head's QK and OV circuit, the same for raw and for processed weights."""
    ranks: dict[str, list[Tensor]] = {"qk": [], "ov": []}
    for number in weights.layers_with_heads:
        layer = weights.layer(number)
        W_Q, W_K, W_V = (_read_through(layer.ln1, matrix) for matrix in (layer.W_Q, layer.W_K, layer.W_V))
        W_O = in_float64(layer.W_O).mT
        if weights.ln_final is not None and weights.ln_final.centres:
            # The mean of what is written is taken off before anything reads it.
            W_O = W_O - W_O.mean(-2, keepdim=True)
        groups = [layer.shape.group_of(head) for head in range(len(W_Q))]
        ranks["qk"].append(entropy_rank(product_singular_values(W_Q, W_K[groups])))
        ranks["ov"].append(entropy_rank(product_singular_values(W_V[groups], W_O)))
    padded = torch.nn.utils.rnn.pad_sequence
    qk, ov = (
        weights.over_all_layers(padded(each, batch_first=True, padding_value=torch.nan).float())
        for each in ranks.values()
    )
    return qk, ov


def _read_through(
    norm: Norm | None, matrix: Float[Tensor, "head d_model d_head"]
) -> Float[Tensor, "head d_model d_head"]:
    """What a matrix reads of the stream, the linear part of the norm before it included."""
    wide = in_float64(matrix)
    if norm is None:
        return wide
    scaled = wide * norm.weight.double()[:, None]
    return scaled - scaled.mean(-2, keepdim=True) if norm.centres else scaled


def _circuits(weights: HeadWeights, qk_rank: Tensor, ov_rank: Tensor) -> dict[str, str]:
    """How large the space is that a head has for what it attends to, and for what it then writes."""
    counts, d, rank = _parameters(weights), weights.d_model, weights.d_head
    # Turning queries and keys together, or values and what W_O reads, changes nothing: rank x rank entries are idle.
    free = rank * (2 * d - rank) if rank <= d else d * d
    first = weights.shape(weights.layers_with_heads[0])
    per_group = first.n_heads // first.n_kv_heads
    shared = f"; W_K and W_V are shared by {per_group} heads" if per_group > 1 else ""
    chance = float(
        entropy_rank(product_singular_values(random_matrix(d, rank, seed=0), random_matrix(d, rank, seed=1)))
    )
    where = f" (in layer {weights.layers_with_heads[0]}; layers differ)" if weights.shapes else ""
    each = f"{counts['head']:,}, {counts['W_Q']:,} in each of W_Q, W_K, W_V, W_O{shared}{where}"
    facts = {"parameters of a head": each}
    for name, pair, ranks in (("QK", "W_Q and W_K", qk_rank), ("OV", "W_V and W_O", ov_rank)):
        known = ranks[~ranks.isnan()]
        facts[f"{name} circuit"] = f"{pair}, {counts[name]:,} parameters in each head, {free:,} of them free"
        facts[f"effective rank of {name}"] = (
            f"{float(known.min()):.1f} to {float(known.max()):.1f}, median {float(known.median()):.1f}, of at most "
            f"{min(rank, d)}; random matrices {chance:.1f}"
        )
    return facts


def _layers(weights: HeadWeights) -> str:
    """Their number, and in hybrid models how many of them have heads and what the others have."""
    if not weights.mixers:
        return str(weights.n_layers)
    counts = Counter(weights.mixers.values())
    parts = [
        f"{len(weights.layers_with_heads)} with heads",
        *(f"{count} with {what}" for what, count in counts.items()),
    ]
    return f"{weights.n_layers} ({', '.join(parts)}; heads in {', '.join(map(str, weights.layers_with_heads))})"


def _outside_modules(weights: HeadWeights, layer: LayerWeights) -> dict[str, str]:
    """What few models have."""
    facts = {
        "norm of the embedding": None if weights.embed_norm is None else _norm(weights.embed_norm),
        "norm of values": None if layer.v_norm is None else _norm(layer.v_norm),
        "norm before W_O": None if layer.z_norm is None else _norm(layer.z_norm),
        "queries, keys, values": None if layer.clip is None else f"clipped at {layer.clip:g}",
        "beside the heads": None if weights.beside is None else f"{weights.beside.name}, in every layer",
        "factor of what heads add": None if weights.residual_scale == 1 else f"{weights.residual_scale:g}",
        "factor of what MLPs add": None if weights.mlp_scale == 1 else f"{weights.mlp_scale:g}",
        "factor of the logits": None if weights.logit_scale == 1 else f"{weights.logit_scale:g}",
    }
    return {name: value for name, value in facts.items() if value is not None}


def _seams(weights: HeadWeights) -> dict[str, str]:
    """What the model computes, compared with what was read of it."""
    if weights.check is None:
        return {"self-check": "none: a checkpoint is read without building the model"}
    return {f"self-check, {seam.name}": str(seam) for seam in weights.check.seams}


def _norm(norm: Norm | None) -> str:
    if norm is None:
        return "none"
    name = "LayerNorm" if norm.centres else "RMSNorm"
    return f"{name}, eps {norm.eps:g}" + (", folded into the weights" if norm.is_unit else "")


def _mlp(weights: HeadWeights) -> str:
    if weights.mlp is None:
        return weights.mlp_refusal or "none"
    gate = "gated " if weights.mlp.W_gate is not None else ""
    return f"{gate}{weights.mlp.activation}, width {weights.mlp.W_in.shape[1]}"


def _presets(weights: HeadWeights) -> str:
    context_free = "folded, maps" if weights.basis == "raw" else "folded (maps needs raw weights)"
    return context_free if weights.model is None else f"context (default), {context_free}"


def _analyses(weights: HeadWeights) -> str:
    where = "all layers" + (" that have heads" if weights.mixers else "")
    if weights.mlp_refusal is not None:
        where = "no layer" if 0 in weights.mixers else "layer 0 only"
    words = "" if weights.tokenizer is not None else " (by token id: there is no tokenizer)"
    analyses = "token_grid, relation_scores, salient_operations, name_heads"
    return f"from the weights alone: {analyses} on the OV and QK circuits of {where}{words}"
