"""Multimodal checkpoints (text with images or audio) are opened as the language model inside them.

Head maps read the language model only. TransformerLens boots such a checkpoint whole and may install packages for its
processor (:mod:`.installs`), so ``config.json`` is looked at first. Where transformers has a text-only class for the
text half, it gets the decoder and the unembedding of the checkpoint, and its logits are compared with those of the
whole model; otherwise the checkpoint is refused.
"""

from itertools import count, islice
from typing import Any

import torch

from ..core.errors import UnsupportedModelError
from .checkpoint.sound import require_counted

_OTHER_HALVES = ("vision_config", "audio_config", "vq_config", "speech_config", "image_config", "video_config")
_SAME_LOGITS = 1e-4
"""Largest accepted difference between the logits of the two, relative to the largest: the modules are the same ones."""


def language_model_of(where: str, name: str) -> Any | None:
    """The text-only transformers model of a multimodal checkpoint; None for any other checkpoint.

    Args:
        where: Folder or name on the hub.
        name: What the user called it, for errors.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, PreTrainedConfig

    try:
        settings, _ = PreTrainedConfig.get_config_dict(where)
    except OSError:
        # TransformerLens knows other names of some models, and says itself what it cannot find.
        return None
    named = settings.get("architectures")
    architecture = str(named[0]) if isinstance(named, list) and named else str(settings.get("model_type"))
    halves = [half for half in _OTHER_HALVES if settings.get(half)]
    if not halves and architecture not in _known_multimodal():
        return None
    found = f"{name!r} is a multimodal checkpoint ({architecture}, with {' and '.join(halves) or 'more than text'})"
    text_config = AutoConfig.from_pretrained(where, trust_remote_code=False).get_text_config(decoder=True)
    text_class = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(text_config), None)
    if text_class is None or text_class.__name__ not in _booted_architectures():
        raise _refusal(found, f"there is no text-only class for its text half ({text_config.model_type})")
    if text_class.__name__ == architecture:
        return None
    return _text_half(where, name, found, architecture, text_class, text_config)


def _text_half(where: str, name: str, found: str, architecture: str, text_class: Any, text_config: Any) -> Any:
    import transformers

    whole_class = getattr(transformers, architecture, None)
    if whole_class is None:
        raise _refusal(found, f"transformers has no class {architecture}")
    whole, loading = whole_class.from_pretrained(
        where, dtype=torch.float32, attn_implementation="eager", output_loading_info=True, use_safetensors=True
    )
    whole.eval()
    with torch.device("meta"):
        text = text_class(text_config).eval()
    decoder, unembedding = whole.get_decoder(), whole.get_output_embeddings()
    if type(decoder) is not type(text.get_decoder()) or unembedding is None:
        raise _refusal(found, f"its decoder ({type(decoder).__name__}) is not that of {text_class.__name__}")
    require_counted(name, whole, loading["unexpected_keys"], decoder)
    setattr(text, text.base_model_prefix, decoder)
    text.set_output_embeddings(unembedding)
    parts = {id(tensor) for tensor in [*text.parameters(), *text.buffers()]}
    unread = [key for key, tensor in whole.named_parameters() if key in loading["missing_keys"] and id(tensor) in parts]
    empty = [key for key, tensor in text.named_parameters() if tensor.is_meta]
    if unread or empty:
        raise _refusal(found, f"its files have no weights for {(unread or empty)[0]}")
    difference = _difference(whole, text)
    if not difference <= _SAME_LOGITS:
        raise _refusal(found, f"{text_class.__name__} computes other logits from its weights (by {difference:.2g})")
    text.config.architectures = [text_class.__name__]
    text.config.tie_word_embeddings = unembedding.weight is text.get_input_embeddings().weight
    return text


def _difference(whole: Any, text: Any) -> float:
    """Between the logits of both for a few tokens that do not stand for an image, relative to the largest."""
    special = {value for value in whole.config.to_dict().values() if isinstance(value, int)}
    tokens = torch.tensor([list(islice((token for token in count(1) if token not in special), 3))])
    with torch.no_grad():
        theirs, ours = (model(input_ids=tokens).logits for model in (whole, text))
    return float((ours - theirs).abs().max() / theirs.abs().max().clamp_min(1e-12))


def _known_multimodal() -> set[str]:
    from transformer_lens.utilities import architectures

    known = (getattr(architectures, name, ()) for name in ("MULTIMODAL_ARCHITECTURES", "AUDIO_TEXT_ARCHITECTURES"))
    return {name for names in known for name in names}


def _booted_architectures() -> set[str]:
    from transformer_lens.factories.architecture_adapter_factory import SUPPORTED_ARCHITECTURES

    return set(SUPPORTED_ARCHITECTURES)


def _refusal(found: str, reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{found}, and {reason}, so it cannot be opened as a language model alone. Booting it whole could make "
        "TransformerLens install packages here. Use a text-only checkpoint, or boot it yourself in an environment made "
        "for it and pass the model to the analysis."
    )
