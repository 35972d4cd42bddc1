"""Small models whose answers are known: random ones of every architecture, and ones with planted heads.

A planted head ``h`` sends source ``s`` to target ``t``: in row ``s`` of its OV map the entry of ``t`` is 1 and every
other entry 0 (in ``folded``, where the mean over the vocabulary is taken off: ``1 - 1/n`` and ``-1/n``). With fewer
tokens than half of ``d_model``, W_V and W_O that do this for both presets at once are an exact least-squares
solution, computed here in float64 from the modules of the transformers model. Nothing here uses tl_headmaps.

Weights come from one seeded generator alone, so two models built with the same arguments are equal.
"""

import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

TL_MAJOR = int(version("transformer-lens").split(".")[0])

needs_hooked = pytest.mark.skipif(
    TL_MAJOR >= 4, reason="HookedTransformer left TransformerLens in 4.0; run make test-tl3"
)

DECODERS = ("gpt2", "neox", "llama", "gemma2", "gemma3", "qwen2", "qwen3", "phi")
"""Causal language models with an attention layer and a plain MLP in every block."""

GROUPED = ("llama", "mistral", "gemma2", "gemma3", "qwen2", "qwen3", "mixtral")
"""Architectures that can share a key/value head among query heads; the others ignore ``n_kv_heads``."""

N_SPECIAL = 3
"""Ids below this are not words: unknown, a hyphen, beginning of text."""


def word(token_id: int) -> str:
    """The word of a token id (without the space its token starts with)."""
    assert token_id >= N_SPECIAL
    return f"word{token_id}"


def word_tokenizer(n_vocab: int) -> Any:
    """``" word7"`` is token 7; ``"word7-"`` is two tokens; ``"word7"`` at the start of a text is unknown."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<unk>": 0, "-": 1, "<bos>": 2}
    vocabulary |= {f"Ġword{i}": i for i in range(N_SPECIAL, n_vocab)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Replace(" ", "Ġ")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("Ġ?[a-z0-9]+|-"), "isolated")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("Ġ", " "), decoders.Fuse()])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<bos>", eos_token="<bos>", pad_token="<bos>"
    )


@contextmanager
def quiet() -> Iterator[None]:
    """No progress bars while writing and reading a hundred kilobytes."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def config_of(
    kind: str,
    *,
    n_layers: int,
    n_heads: int,
    n_kv_heads: int,
    n_vocab: int,
    d_model: int,
    d_head: int,
    **changes: Any,
) -> Any:
    """Configuration of a small model; ``changes`` go to the transformers class as they are."""
    import transformers

    special: dict[str, Any] = {"bos_token_id": 2, "eos_token_id": 2, "pad_token_id": 2}
    if kind == "gpt2":
        sizes = special | {"vocab_size": n_vocab, "n_embd": d_model, "n_layer": n_layers}
        sizes |= {"n_head": n_heads, "n_positions": 32}
        return transformers.GPT2Config(**sizes | changes)
    sizes = special | {
        "vocab_size": n_vocab,
        "hidden_size": d_model,
        "num_hidden_layers": n_layers,
        "num_attention_heads": n_heads,
        "intermediate_size": 2 * d_model,
        "max_position_embeddings": 32,
    }
    if kind in GROUPED:
        sizes |= {"num_key_value_heads": n_kv_heads, "head_dim": d_head}
    if kind in ("gemma2", "gemma3"):
        # Unlike head_dim, so that a reader who takes 1 / sqrt(d_head) is wrong.
        sizes |= {"query_pre_attn_scalar": 24}
    if kind == "mamba":
        sizes = special | {"vocab_size": n_vocab, "hidden_size": d_model, "num_hidden_layers": n_layers}
        sizes |= {"state_size": 8}
    names = {
        "neox": "GPTNeoXConfig",
        "llama": "LlamaConfig",
        "mistral": "MistralConfig",
        "gemma2": "Gemma2Config",
        "gemma3": "Gemma3TextConfig",
        "qwen2": "Qwen2Config",
        "qwen3": "Qwen3Config",
        "phi": "PhiConfig",
        "mixtral": "MixtralConfig",
        "bert": "BertConfig",
        "mamba": "MambaConfig",
    }
    if kind not in names:
        # Any other family, by its model_type.
        if hasattr(transformers.AutoConfig.for_model(kind), "num_key_value_heads"):
            sizes["num_key_value_heads"] = n_kv_heads
        return transformers.AutoConfig.for_model(kind, **sizes | changes)
    return getattr(transformers, names[kind])(**sizes | changes)


def source_model(
    kind: str,
    *,
    n_layers: int = 3,
    n_heads: int = 4,
    n_kv_heads: int = 2,
    n_vocab: int = 61,
    d_model: int = 32,
    d_head: int | None = None,
    seed: int = 0,
    **changes: Any,
) -> Any:
    """A transformers model in float32 whose every parameter comes from one seeded generator.

    A bridge takes its modules apart, so comparisons use a second model built with the same arguments.
    """
    from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

    config = config_of(
        kind,
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        n_vocab=n_vocab,
        d_model=d_model,
        d_head=d_model // n_heads if d_head is None else d_head,
        **changes,
    )
    with torch.random.fork_rng(devices=[]):
        auto = AutoModelForMaskedLM if kind == "bert" else AutoModelForCausalLM
        model = auto.from_config(config).float().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            is_norm = parameter.ndim == 1 and ("norm" in name or ".ln_" in name)
            # Norms keep their constant (1, or 0 for Gemma's 1 + w and for biases); all else is replaced.
            parameter.copy_(parameter + 0.2 * noise if is_norm else 0.3 * noise)
    return model


def random_model(
    kind: str,
    *,
    host: str = "bridge",
    processed: bool = False,
    tokenizer: bool = True,
    dtype: torch.dtype = torch.float32,
    **sizes: Any,
) -> Any:
    """A fresh TransformerLens model with random weights.

    Args:
        kind: One of ``DECODERS``, or ``"mixtral"``, ``"bert"``, ``"mamba"``.
        host: ``"bridge"`` or (TransformerLens 3) ``"hooked"``.
        processed: Fold norms and centre: compatibility mode, or what ``from_pretrained`` does.
        tokenizer: False for a model without one.
        dtype: Stored type.
        **sizes: Arguments of :func:`source_model`.
    """
    source = source_model(kind, **sizes).to(dtype)
    return hosted(source, kind, host=host, processed=processed, tokenizer=tokenizer)


@cache
def shared_model(kind: str, **options: Any) -> Any:
    """The same, built once per run: for tests that only read."""
    return random_model(kind, **options)


def hosted(
    source: Any,
    kind: str,
    *,
    host: str = "bridge",
    processed: bool = False,
    tokenizer: bool = True,
    words: Any = None,
) -> Any:
    """Put a transformers model into TransformerLens; ``words`` is a tokenizer for a bridge, if not the usual one."""
    if host == "hooked":
        return _hooked(source, kind, processed=processed, tokenizer=tokenizer)
    from transformer_lens.model_bridge import TransformerBridge

    with quiet(), tempfile.TemporaryDirectory() as folder:
        source.save_pretrained(folder)
        words = _reopened(words or word_tokenizer(source.config.vocab_size), folder)
        model = TransformerBridge.boot_transformers(
            folder, hf_model=source, tokenizer=words, device="cpu", dtype=source.dtype
        )
        if processed:
            model.enable_compatibility_mode(disable_warnings=True)
    if not tokenizer:
        model.tokenizer = None
    model.cfg.model_name = f"tiny-{kind}"
    return model


def save_checkpoint(source: Any, folder: Path, *, tokenizer: bool = True, shard_size: str = "1GB") -> Path:
    """Write a transformers model as a Hugging Face folder."""
    with quiet():
        source.save_pretrained(folder, max_shard_size=shard_size)
        if tokenizer:
            word_tokenizer(source.config.get_text_config().vocab_size).save_pretrained(folder)
    return folder


def _reopened(tokenizer: Any, folder: str) -> Any:
    """TransformerLens opens a tokenizer a second time (with ``<bos>``), so it has to come from a folder."""
    tokenizer.save_pretrained(folder)
    return type(tokenizer).from_pretrained(folder)


def _hooked(source: Any, kind: str, *, processed: bool, tokenizer: bool) -> Any:
    from transformer_lens import HookedTransformer, HookedTransformerConfig
    from transformer_lens.pretrained import weight_conversions

    c = source.config
    parts = Anatomy(source, kind)
    layer_norm = kind in ("gpt2", "neox", "phi")
    settings: dict[str, Any] = {
        "model_name": f"tiny-{kind}",
        "n_layers": c.num_hidden_layers,
        "d_model": c.hidden_size,
        "n_ctx": 32,
        "d_head": parts.d_head,
        "n_heads": parts.n_heads,
        "d_mlp": 4 * c.hidden_size if kind == "gpt2" else c.intermediate_size,
        "d_vocab": c.vocab_size,
        "act_fn": c.activation_function if kind == "gpt2" else _activation(c),
        "normalization_type": "LN" if layer_norm else "RMS",
        "eps": next(getattr(c, n) for n in _EPS_NAMES if hasattr(c, n)),
        "original_architecture": type(source).__name__,
        "device": "cpu",
        "dtype": source.dtype,
    }
    if kind == "gpt2":
        settings["scale_attn_by_inverse_layer_idx"] = c.scale_attn_by_inverse_layer_idx
    else:
        settings |= {"positional_embedding_type": "rotary", "rotary_dim": parts.d_head}
        settings |= {"rotary_adjacent_pairs": False}
    if kind in ("neox", "phi"):
        settings |= {"parallel_attn_mlp": True, "rotary_dim": parts.d_head // (4 if kind == "neox" else 2)}
    if kind in GROUPED:
        settings |= {"gated_mlp": True, "final_rms": True, "n_key_value_heads": parts.n_kv_heads}
    if kind in ("gemma2", "gemma3"):
        settings |= {"use_normalization_before_and_after": True, "attn_scale": c.query_pre_attn_scalar**0.5}
    if kind == "gemma2":
        settings |= {
            "attn_scores_soft_cap": c.attn_logit_softcapping,
            "output_logits_soft_cap": c.final_logit_softcapping,
        }
    if kind in ("gemma3", "qwen3"):
        settings["use_qk_norm"] = True
    cfg = HookedTransformerConfig(**settings)
    convert = "gemma" if kind.startswith("gemma") else kind
    state = getattr(weight_conversions, f"convert_{convert}_weights")(source, cfg)
    with tempfile.TemporaryDirectory() as folder:
        words = _reopened(word_tokenizer(c.vocab_size), folder) if tokenizer else None
        with warnings.catch_warnings():
            # TransformerLens 3.9 announces its own 4.0.
            warnings.filterwarnings("ignore", "HookedTransformer is deprecated", DeprecationWarning)
            model = HookedTransformer(cfg, tokenizer=words)
    options = dict.fromkeys(("fold_ln", "center_writing_weights", "center_unembed", "fold_value_biases"), processed)
    # Conversions hand out views of the source's tensors, and processing writes into them.
    state = {name: tensor.detach().clone() for name, tensor in state.items()}
    model.load_and_process_state_dict(state, **options)
    return model.eval()


_EPS_NAMES = ("layer_norm_epsilon", "layer_norm_eps", "rms_norm_eps")


def _activation(config: Any) -> str:
    return str(getattr(config, "hidden_activation", None) or config.hidden_act)


_LLAMA = {
    "body": "model",
    "embed": "embed_tokens",
    "layers": "layers",
    "ln_final": "norm",
    "ln1": "input_layernorm",
    "ln2": "post_attention_layernorm",
    "attn": "self_attn",
    "out": "o_proj",
}
_GEMMA = _LLAMA | {
    "ln2": "pre_feedforward_layernorm",
    "ln1_post": "post_attention_layernorm",
    "ln2_post": "post_feedforward_layernorm",
}
_NAMES = {
    "gpt2": {
        "body": "transformer",
        "embed": "wte",
        "layers": "h",
        "ln_final": "ln_f",
        "ln1": "ln_1",
        "ln2": "ln_2",
        "attn": "attn",
        "out": "c_proj",
    },
    "neox": _LLAMA
    | {
        "body": "gpt_neox",
        "embed": "embed_in",
        "ln_final": "final_layer_norm",
        "attn": "attention",
        "out": "dense",
    },
    "phi": _LLAMA | {"ln_final": "final_layernorm", "ln2": "input_layernorm", "out": "dense"},
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
    "mixtral": _LLAMA,
    "gemma2": _GEMMA,
    "gemma3": _GEMMA,
}


@dataclass(frozen=True)
class Heads:
    """Projections of one layer, cut into heads by hand."""

    W_Q: Tensor
    W_K: Tensor
    W_V: Tensor
    W_O: Tensor
    b_Q: Tensor | None
    b_K: Tensor | None


class Anatomy:
    """Where a transformers model keeps its parts, and how its norms act: the reference readers of the tests."""

    def __init__(self, source: Any, kind: str) -> None:
        self.kind, self.source, self.names = kind, source, _NAMES[kind]
        config = source.config
        self.body = getattr(source, self.names["body"])
        self.layers = getattr(self.body, self.names["layers"])
        self.n_heads = config.num_attention_heads
        self.n_kv_heads = config.num_key_value_heads if kind in GROUPED else self.n_heads
        self.d_head = getattr(config, "head_dim", None) or config.hidden_size // self.n_heads
        self.ln_final = getattr(self.body, self.names["ln_final"])

    @property
    def W_E(self) -> Tensor:
        return getattr(self.body, self.names["embed"]).weight

    @property
    def W_U(self) -> Tensor:
        """Unembedding, rows are tokens."""
        return self.source.get_output_embeddings().weight

    def embed(self) -> Tensor:
        """Embeddings of the whole vocabulary as the model computes them (Gemma: times sqrt(d_model))."""
        return getattr(self.body, self.names["embed"])(torch.arange(self.W_E.shape[0]))

    def part(self, layer: int, name: str) -> Any:
        """``ln1``, ``ln2``, ``ln1_post``, ``ln2_post`` (None where there is none), ``mlp`` or ``attn``."""
        if name == "mlp":
            return self.layers[layer].mlp
        return getattr(self.layers[layer], self.names[name]) if name in self.names else None

    def factor(self, norm: Any) -> Tensor:
        """What a norm multiplies by."""
        return 1 + norm.weight if self.kind.startswith("gemma") else norm.weight

    def centres(self) -> bool:
        return self.kind in ("gpt2", "neox", "phi")

    def score_scale(self, layer: int) -> float:
        config = self.source.config
        if self.kind.startswith("gemma"):
            return config.query_pre_attn_scalar**-0.5
        by_layer = getattr(config, "scale_attn_by_inverse_layer_idx", False)
        return self.d_head**-0.5 / (layer + 1 if by_layer else 1)

    def heads(self, layer: int) -> Heads:
        attn, d, r = self.part(layer, "attn"), self.W_E.shape[1], self.d_head
        if self.kind == "gpt2":
            # Conv1D: [in, out], columns are q, k, v, and heads within each.
            q, k, v = (part.view(d, -1, r).transpose(0, 1) for part in attn.c_attn.weight.split(d, dim=1))
            b_q, b_k, _ = (part.view(-1, r) for part in attn.c_attn.bias.split(d))
            return Heads(q, k, v, attn.c_proj.weight.view(-1, r, d), b_q, b_k)
        if self.kind == "neox":
            # Rows are heads, and q, k, v within each.
            q, k, v = attn.query_key_value.weight.view(-1, 3, r, d).transpose(2, 3).unbind(1)
            b_q, b_k, _ = attn.query_key_value.bias.view(-1, 3, r).unbind(1)
            return Heads(q, k, v, attn.dense.weight.T.reshape(-1, r, d), b_q, b_k)
        q, k, v = (p.weight.view(-1, r, d).transpose(1, 2) for p in (attn.q_proj, attn.k_proj, attn.v_proj))
        b_q, b_k = (None if p.bias is None else p.bias.view(-1, r) for p in (attn.q_proj, attn.k_proj))
        out = getattr(attn, self.names["out"]).weight
        return Heads(q, k, v, out.T.reshape(-1, r, d), b_q, b_k)

    def write_value(self, layer: int, group: int, W_V: Tensor) -> None:
        attn, d, r = self.part(layer, "attn"), self.W_E.shape[1], self.d_head
        if self.kind == "gpt2":
            attn.c_attn.weight.data[:, 2 * d + group * r : 2 * d + (group + 1) * r] = W_V
        elif self.kind == "neox":
            attn.query_key_value.weight.data[(3 * group + 2) * r : (3 * group + 3) * r] = W_V.T
        else:
            attn.v_proj.weight.data[group * r : (group + 1) * r] = W_V.T

    def write_output(self, layer: int, head: int, W_O: Tensor) -> None:
        out = getattr(self.part(layer, "attn"), self.names["out"]).weight.data
        rows = slice(head * self.d_head, (head + 1) * self.d_head)
        if self.kind == "gpt2":
            out[rows] = W_O
        else:
            out[:, rows] = W_O.T

    def vectors(self, layer: int, preset: str) -> Tensor:
        """What the layer's value projections read for every token of the vocabulary, after ln1 in ``folded``."""
        plain = self.W_E if preset == "maps" else self.embed()
        x = plain
        if layer > 0:
            x = self.part(0, "mlp")(self.part(0, "ln2")(plain)[None])[0]
            if preset == "folded":
                post = self.part(0, "ln2_post")
                x = plain + (x if post is None else post(x))
        return x if preset == "maps" else self.part(layer, "ln1")(x)

    def readout(self, layer: int, preset: str) -> Tensor:
        """[token, d_model] matrix that turns what a head writes into entries of its map."""
        if preset == "maps":
            return self.W_U
        by = self.W_U - self.W_U.mean(0)
        by = by * self.factor(self.ln_final)
        if self.centres():
            by = by - by.mean(-1, keepdim=True)
        post = self.part(layer, "ln1_post")
        return by if post is None else by * self.factor(post)


def planted_model(
    relations: Mapping[tuple[int, int], Mapping[int, int]],
    *,
    kind: str = "llama",
    n_layers: int = 3,
    n_heads: int = 4,
    n_kv_heads: int = 2,
    n_vocab: int = 24,
    host: str = "bridge",
    processed: bool = False,
    seed: int = 0,
) -> Any:
    """A model in which chosen heads implement chosen relations, in both presets, and all other heads are random.

    Args:
        relations: For each ``(layer, head)`` the target id of each source id. Sources of the heads of one
            key/value group share a value matrix of rank d_head = 16: at most 16 different ones.
        kind: One of ``DECODERS``.
        n_layers: Number of layers.
        n_heads: Number of query heads; d_model is 16 times this, and must be twice ``n_vocab`` or more.
        n_kv_heads: Number of key/value heads (ignored by gpt2, neox and phi).
        n_vocab: Number of tokens.
        host: ``"bridge"`` or ``"hooked"``.
        processed: As in :func:`random_model`.
        seed: Of all other weights.
    """
    sizes = {"n_layers": n_layers, "n_heads": n_heads, "n_kv_heads": n_kv_heads, "n_vocab": n_vocab}
    source = source_model(kind, d_model=16 * n_heads, seed=seed, **sizes)
    with torch.no_grad():
        plant(Anatomy(source, kind), relations)
    return hosted(source, kind, host=host, processed=processed)


def knowing_model(relations: Mapping[int, Mapping[int, int]], *, n_layers: int = 3) -> Any:
    """:func:`knowing_source` in TransformerLens."""
    return hosted(knowing_source(relations, n_layers=n_layers), "llama")


def knowing_source(
    relations: Mapping[int, Mapping[int, int]],
    *,
    n_layers: int = 3,
    n_heads: int = 4,
    n_vocab: int = 24,
    **changes: Any,
) -> Any:
    """A llama whose next token after a source is its target, because heads of layer 0 say so louder than all else.

    Args:
        relations: For each head of layer 0 (with four heads, 0 and 1, 2 and 3 share a value matrix) targets by source.
        n_layers: Number of layers; all above the first are random and not heard.
        n_heads: Number of query heads; d_model is 16 times this, and must be twice ``n_vocab`` or more.
        n_vocab: Number of tokens.
        **changes: Go to the configuration.
    """
    sizes = {"n_layers": n_layers, "n_heads": n_heads, "n_kv_heads": 2, "n_vocab": n_vocab}
    source = source_model("llama", d_model=16 * n_heads, **sizes, **changes)
    parts = Anatomy(source, "llama")
    with torch.no_grad():
        plant(parts, {(0, head): relation for head, relation in relations.items()})
        for head in relations:
            parts.write_output(0, head, 1e4 * parts.heads(0).W_O[head])
        # Queries of zero attend to every token alike.
        parts.part(0, "attn").q_proj.weight.zero_()
    return source


def plant(parts: Anatomy, relations: Mapping[tuple[int, int], Mapping[int, int]]) -> None:
    """Write the relations into the weights of a transformers model."""
    n_vocab, d_model = parts.W_E.shape
    if 2 * n_vocab > d_model:
        raise ValueError(f"{n_vocab} tokens need d_model >= {2 * n_vocab}, not {d_model}, to be told apart.")
    share = parts.n_heads // parts.n_kv_heads
    for layer, group in sorted({(layer, head // share) for layer, head in relations}):
        mine = {h: r for (at, h), r in relations.items() if at == layer and h // share == group}
        sources = sorted({source for relation in mine.values() for source in relation})
        if len(sources) > parts.d_head:
            raise ValueError(f"Layer {layer}, group {group}: {len(sources)} sources, rank {parts.d_head}.")
        place = torch.zeros(n_vocab, parts.d_head, dtype=torch.float64)
        place[sources, range(len(sources))] = 1.0
        folded = parts.vectors(layer, "folded")
        bias = getattr(parts.part(layer, "ln1"), "bias", None)
        read = torch.cat([parts.vectors(layer, "maps"), folded if bias is None else folded - bias])
        parts.write_value(layer, group, _solve(read, torch.cat([place, place])))
        for head, relation in mine.items():
            wanted = torch.zeros(parts.d_head, n_vocab, dtype=torch.float64)
            for row, source in enumerate(sources):
                if source in relation:
                    wanted[row, relation[source]] = 1.0
            centred = wanted - wanted.mean(1, keepdim=True)
            written = torch.cat([parts.readout(layer, "maps"), parts.readout(layer, "folded")])
            parts.write_output(layer, head, _solve(written, torch.cat([wanted, centred], dim=1).T).T)


def _solve(matrix: Tensor, right: Tensor) -> Tensor:
    """Exact X of least norm with ``matrix @ X = right``, as float32."""
    solution = torch.linalg.pinv(matrix.double(), rtol=1e-8) @ right
    assert (matrix.double() @ solution - right).abs().max() < 1e-6, "the tokens cannot be told apart"
    return solution.float()


SLOT = 3
"""Position the planted heads of :func:`slot_model` attend to."""


def slot_model(markers: tuple[int, ...], answers: tuple[int, ...] = (), host: str = "bridge") -> Any:
    """One layer of eight heads: head ``i`` sees whether ``markers[i]`` stands at ``SLOT``, the others see a bag.

    Which marker stands there is a matter of order, not of words: heads beyond the planted ones attend to all
    positions alike. If ``answers`` are given, head ``i`` then writes ``answers[i]``.
    """
    n_vocab, d_model, n_heads = 40, 64, 8
    d_head = d_model // n_heads
    source = source_model("gpt2", n_layers=1, n_heads=n_heads, n_vocab=n_vocab, d_model=d_model)
    block = source.transformer.h[0]
    with torch.no_grad():
        # Tokens and positions each have a direction of their own; norms only scale.
        source.transformer.wte.weight.copy_(torch.eye(n_vocab, d_model))
        source.transformer.wpe.weight.zero_()
        source.transformer.wpe.weight[: d_model - n_vocab, n_vocab:] = torch.eye(d_model - n_vocab)
        for norm in (block.ln_1, block.ln_2, source.transformer.ln_f):
            norm.weight.fill_(1)
            norm.bias.zero_()
        block.mlp.c_proj.weight.zero_()
        block.mlp.c_proj.bias.zero_()
        block.attn.c_proj.bias.zero_()
        block.attn.c_proj.weight.zero_()
        W_Q, W_K, W_V = block.attn.c_attn.weight.split(d_model, dim=1)
        W_Q.zero_()
        W_K.zero_()
        block.attn.c_attn.bias.zero_()
        for head, marker in enumerate(markers):
            first = head * d_head
            block.attn.c_attn.bias[first] = 10.0
            W_K[n_vocab + SLOT, first] = 10.0
            W_V[:, first : first + d_head] = 0
            W_V[marker, first] = 1.0
            if answers:
                # Without its marker a head writes a little of its answer too, so that ablation takes the answer last.
                block.attn.c_attn.bias[2 * d_model + first] = 0.4
                block.attn.c_proj.weight[first, answers[head]] = 1.0
    model = hosted(source, "gpt2", host=host)
    model.cfg.default_prepend_bos = False  # slots are counted from the first word
    return model
