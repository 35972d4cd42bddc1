"""The tokenizer of a checkpoint, loaded without the code of its model."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...core.errors import ModelLoadError

_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model")
_OWN_CONFIG = "tokenizer_config.json"


def open_tokenizer(name: str, folder: Path, config: Mapping[str, Any]) -> Any:
    """The tokenizer of a folder, the same as that of the loaded model; None if there is none.

    Args:
        name: What the checkpoint is called in messages.
        folder: Its folder.
        config: The content of its config.json.
    """
    if not any((folder / file).is_file() for file in _FILES):
        return None
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False, **_hints(folder, config))
    except Exception as error:
        # A damaged tokenizer can make its library raise anything.
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ModelLoadError(
            f"The tokenizer of {name!r} cannot be opened: {reason} Fetch it again, or remove its files and use token "
            "ids."
        ) from error


def _hints(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of the model's configuration that the choice of the tokenizer's class needs, if it names its class.

    By default the library loads the configuration class of the model and with it torch's compiler: 80 MB and seconds,
    for two fields.
    """
    from transformers import PreTrainedConfig

    path = folder / _OWN_CONFIG
    own = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    if not own.get("tokenizer_class") or "auto_map" in own:
        return {}
    fields = ("model_type", "tokenizer_class")
    return {"config": PreTrainedConfig.from_dict({field: config[field] for field in fields if config.get(field)})}
