"""Opening a model by name: the default model, a folder in Hugging Face format, or a name on the hub."""

from pathlib import Path

import torch

from ..core.errors import HeadMapsError, ModelLoadError
from ..core.options import public
from ..core.types import Model
from .adapters import own_adapters
from .bundled import load_default_model, quiet_transformers
from .checkpoint.reader import local_folder
from .checkpoint.sound import require_weights, sound_folder
from .installs import nothing_installed
from .multimodal import language_model_of
from .tensors import check_device


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
    folder = sound_folder(name)
    from transformer_lens.model_bridge import TransformerBridge
    from transformer_lens.utilities import get_device

    where = str(folder)
    try:
        with quiet_transformers(), nothing_installed(name), own_adapters():
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
