"""Tell paths from names on the Hugging Face hub, and check that the hub has a model."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from huggingface_hub import HfApi, hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import EntryNotFoundError, HFValidationError, RepositoryNotFoundError
from huggingface_hub.utils import validate_repo_id

from kvshift_lab.core.errors import LabError

_SECONDS = 10.0  # timeout of a request to the hub
_FILES = ("config.json", "tokenizer_config.json", "tokenizer.json")


def is_hub_name(name: str) -> bool:
    """Return True if `name` can only be a name on the hub, such as "gpt2" or "owner/name".

    A name is a path if it exists, begins with ".", "~" or "/", is not allowed on the hub ("runs/a/b"), or would be in
    an existing folder ("runs/mine" if there is a folder "runs").
    """
    path = Path(name)
    if path.exists() or path.is_absolute() or name.startswith((".", "~")):
        return False
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return len(path.parts) == 1 or not Path(path.parts[0]).is_dir()


def require_on_hub(name: str, option: str) -> None:
    """Raise a LabError that names `option` unless a model of this name is in the hub's cache or on the hub.

    This takes a single request, whereas loading a model with transformers requests each of its files and retries each
    for seconds.
    """
    if any(isinstance(try_to_load_from_cache(name, file), str) for file in _FILES):
        return
    try:
        HfApi().model_info(name, timeout=_SECONDS)
    except RepositoryNotFoundError as error:
        raise LabError(
            f"{option}: there is no folder {name} here, and the hub has no such model, or you have no access to it"
        ) from error
    except Exception as error:  # HTTP, the network, offline mode
        raise LabError(
            f"{option}: there is no folder {name} here, it is not in the hub's cache, and the hub cannot be reached: "
            f"{_reason(error)}"
        ) from error


@cache
def model_commit(name: str) -> str:
    """Return the commit of a model or tokenizer on the hub that is loaded now; without a network, that in the cache."""
    problem: Exception | None = None
    for file in _FILES:
        try:
            return Path(hf_hub_download(name, file)).parent.name  # .../snapshots/COMMIT/config.json
        except EntryNotFoundError as error:  # also if it is not in the cache and there is no network
            problem = error
        except Exception as error:  # HTTP, access
            problem = error
            break
    raise LabError(f"the commit of {name} on the hub cannot be found: {_reason(problem)}") from problem


def _reason(error: Exception | None) -> str:
    return str(error).strip().split("\n")[0] or type(error).__name__
