"""Fetching those files of a checkpoint that are needed, through ``huggingface_hub``.

They go to the library's own cache and follow its settings (``HF_HUB_OFFLINE``, ``HF_ENDPOINT``, ``HF_HOME``, tokens).
The configuration and the index of shards come first; they say which shards contain tensors that are read.
"""

from collections.abc import Callable
from pathlib import Path

from ...core.errors import ModelLoadError
from .shards import INDEX, SINGLE

_TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "generation_config.json",
)
_OPTIONAL = (*_TOKENIZER, INDEX)


def fetched(repo: str, revision: str | None, needed: Callable[[Path], list[str]]) -> Path:
    """Folder of a repository's snapshot in the local cache, with all files that are needed.

    Args:
        repo: Name on the hub.
        revision: Branch, tag or commit.
        needed: Lists the weight files that are needed, given the folder with configuration and index.
    """
    config = _download(repo, "config.json", revision)
    if config is None:
        raise ModelLoadError(
            f"{repo!r} on the hub has no config.json: it is not a Hugging Face checkpoint. Check the name."
        )
    folder = config.parent
    # The snapshot's folder is named after its commit: all other files are taken from the same one.
    commit = folder.name
    if _download(repo, INDEX, commit) is None and _download(repo, SINGLE, commit) is None:
        raise ModelLoadError(
            f"{repo!r} on the hub has neither {SINGLE} nor {INDEX}. Only .safetensors are read; pickled weights (.bin) "
            "run code when they are opened. Look for a converted copy of the model."
        )
    for name in needed(folder):
        if _download(repo, name, commit) is None:
            raise ModelLoadError(
                f"{repo!r} on the hub has no {name}, which its index of shards lists. Use another revision or a "
                "complete copy."
            )
    for name in _TOKENIZER:
        _download(repo, name, commit)
    return folder


def _download(repo: str, name: str, revision: str | None) -> Path | None:
    """Path of one file in the cache; None if the repository has no such file."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(repo, name, revision=revision))
    except LocalEntryNotFoundError as error:
        # Offline, a file that was never fetched cannot be told from one that does not exist.
        if name in _OPTIONAL:
            return None
        raise ModelLoadError(
            f"{name} of {repo!r} is not in the local cache and the hub cannot be reached (or HF_HUB_OFFLINE is set). "
            "Fetch it on a machine with network access, or give a folder."
        ) from error
    except EntryNotFoundError:
        return None
    except HFValidationError as error:
        raise ModelLoadError(f"{repo!r} is neither a folder nor a name on the hub: {error}") from error
    except (HfHubHTTPError, OSError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ModelLoadError(
            f"{name} of {repo!r} could not be fetched from the hub: {reason} Check name, network and access."
        ) from error
