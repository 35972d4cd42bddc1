"""Opening a model by name: the default model, a folder in Hugging Face format, or a name on the hub.

Multimodal checkpoints (text with images or audio) are opened as the language model inside them, which is all that head
maps read. TransformerLens boots such a checkpoint whole and, when the processor does not open, runs ``pip install
torchvision`` (3.9 and 4.3), which has replaced torch by another build. So ``config.json`` is looked at first. Where
transformers has a text-only class for the text half, it gets the decoder and the unembedding of the checkpoint, and its
logits are compared with those of the whole model; otherwise the checkpoint is refused. For a path that was not
foreseen, no installer is let run while a host loads a model.
"""

import os
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from itertools import count, islice
from pathlib import Path, PurePath
from typing import Any

import torch

from ..core.errors import HeadMapsError, ModelLoadError, UnsupportedModelError
from ..core.options import public
from ..core.types import Model
from .adapters import own_adapters
from .bundled import NAME, default_model_folder, quiet_transformers
from .checkpoint.config import require_counted, require_weights, validate_checkpoint
from .checkpoint.shards import local_folder
from .tensors import check_device

_OTHER_HALVES = ("vision_config", "audio_config", "vq_config", "speech_config", "image_config", "video_config")
_SAME_LOGITS = 1e-4
"""Largest accepted difference between the logits of the two, relative to the largest: the modules are the same ones."""
_INSTALLERS = {"pip", "pip3", "uv", "conda", "mamba", "micromamba", "poetry", "pdm", "pixi", "easy_install"}
_ONE_AT_A_TIME = threading.RLock()
"""The guard replaces functions of the standard library: two loads in two threads take turns."""


@public
def load_model(name: str | Path | None = None, device: str | torch.device | None = None) -> Model:
    """A raw TransformerBridge for ``name``; the default model if no name is given.

    A multimodal checkpoint is opened as the language model inside it, or refused if that cannot stand alone. The
    weights must be complete safetensors inside the folder. Nothing is installed, no code of a checkpoint runs, and
    nothing but the checkpoint is downloaded.

    Args:
        name: A folder with config, safetensors and tokenizer, or a name on the hub such as ``"gpt2"``.

    Example:
        >>> from tl_headmaps import load_model
        >>> model = load_model()  # or load_model("gpt2"), load_model("folder/of/a/checkpoint")
        >>> model.cfg.model_name
        'SmolLM2-135M-Instruct'
    """
    if name is None:
        return load_default_model(device)
    check_device(device)
    name = str(name)
    folder = validate_checkpoint(name)
    from transformer_lens.model_bridge import TransformerBridge
    from transformer_lens.utilities import get_device

    where = str(folder)
    try:
        with quiet_transformers(), forbid_installs(name), own_adapters():
            text = language_model_of(where, name)
            if text is None:
                require_weights(name, folder)
            else:
                text = text.to(device or get_device())
            model: Model = TransformerBridge.boot_transformers(where, hf_model=text, device=device)
    except (HeadMapsError, MemoryError):
        raise
    except Exception as error:  # a host may raise anything; its users get a sentence, and the cause behind it
        # Its first line alone may only say that there was an error.
        reason = " ".join(str(error).split())[:300].rstrip(".:") or type(error).__name__
        raise ModelLoadError(
            f"TransformerLens could not load {name!r}: {reason}. Check the name, the network, or give a folder."
        ) from error
    if local_folder(name) is None:
        model.cfg.model_name = name
    return model


@public
def load_default_model(device: str | torch.device | None = None) -> Model:
    """The default model, ready to use: a TransformerBridge (TransformerLens 4) or HookedTransformer (3).

    The weights are raw (unprocessed), float32, dequantised from a file of four bits (Q4_1). With network access
    ``load_model("HuggingFaceTB/SmolLM2-135M-Instruct")`` opens the original ones. The first call fetches about 93 MB;
    later ones need no network.

    Example:
        >>> from tl_headmaps import load_default_model
        >>> model = load_default_model()
        >>> model.cfg.n_layers, model.cfg.n_heads
        (30, 9)
        >>> model.to_string(model("The capital of France is")[0, -1].argmax())
        ' Paris'
    """
    check_device(device)
    folder = default_model_folder()
    with quiet_transformers(), forbid_installs(NAME):
        if int(version("transformer-lens").split(".")[0]) < 4:
            return _boot_hooked(folder, device)
        from transformer_lens.model_bridge import TransformerBridge

        model: Model = TransformerBridge.boot_transformers(str(folder), device=device)
    model.cfg.model_name = NAME
    return model


def _boot_hooked(folder: Path, device: str | torch.device | None) -> Model:
    from transformer_lens import HookedTransformer, HookedTransformerConfig
    from transformer_lens.pretrained.weight_conversions import convert_llama_weights
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config = source.config
    cfg = HookedTransformerConfig(
        model_name=NAME,
        n_layers=config.num_hidden_layers,
        d_model=config.hidden_size,
        n_ctx=2048,
        d_head=config.head_dim,
        n_heads=config.num_attention_heads,
        n_key_value_heads=config.num_key_value_heads,
        d_mlp=config.intermediate_size,
        d_vocab=config.vocab_size,
        act_fn="silu",
        gated_mlp=True,
        final_rms=True,
        normalization_type="RMS",
        eps=config.rms_norm_eps,
        positional_embedding_type="rotary",
        rotary_adjacent_pairs=False,
        rotary_dim=config.head_dim,
        rotary_base=int(config.rope_parameters["rope_theta"]),
        original_architecture="LlamaForCausalLM",
        device=device,
        dtype=torch.float32,
    )
    model: Model = HookedTransformer(cfg, tokenizer=AutoTokenizer.from_pretrained(folder))
    model.load_state_dict(convert_llama_weights(source, cfg), strict=False)
    model.eval()
    return model


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


@contextmanager
def forbid_installs(name: str) -> Iterator[None]:
    """Stop every attempt to run an installer in this block, and end the block with a sentence if there was one.

    The host catches the exception of a command that fails, so stopping alone would stay unnoticed.

    Args:
        name: The model that is loaded, for the sentence.
    """
    stopped: list[str] = []

    def refusal() -> ModelLoadError:
        return ModelLoadError(
            f"While loading {name!r} TransformerLens tried to run {stopped[0]!r} and was stopped: loading a model must "
            "not change what is installed here. Use a text-only checkpoint, or boot the model yourself in an "
            "environment that has what it asks for, and pass it to the analysis."
        )

    def refuse_installers(command: Any) -> None:
        words = _words(command)
        if any(PurePath(word).name.removesuffix(".exe") in _INSTALLERS for word in words):
            stopped.append(" ".join(words))
            raise PermissionError(f"{stopped[-1]!r} was stopped: nothing is installed while a model is loaded.")

    try:
        with _ONE_AT_A_TIME, _commands_seen(refuse_installers):
            yield
    except Exception as error:
        if stopped:
            raise refusal() from error
        raise
    if stopped:
        raise refusal()


@contextmanager
def _commands_seen(see: Callable[[Any], None]) -> Iterator[None]:
    """Show every command to a function before it starts."""
    start_process, run_in_shell = subprocess.Popen.__init__, os.system

    def seen_process(self: Any, args: Any, *rest: Any, **options: Any) -> None:
        see(args)
        start_process(self, args, *rest, **options)

    def seen_shell(command: Any) -> int:
        see(command)
        return run_in_shell(command)

    setattr(subprocess.Popen, "__init__", seen_process)  # noqa: B010
    os.system = seen_shell
    try:
        yield
    finally:
        setattr(subprocess.Popen, "__init__", start_process)  # noqa: B010
        os.system = run_in_shell


def _words(command: Any) -> list[str]:
    parts = command if isinstance(command, Sequence) and not isinstance(command, str | bytes) else [command]
    return [word for part in parts for word in os.fsdecode(part).replace('"', " ").replace("'", " ").split()]
