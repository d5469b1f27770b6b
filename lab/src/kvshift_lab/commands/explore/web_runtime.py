"""The WebAssembly build of ONNX Runtime, downloaded once from the npm registry and kept in the user's cache.

The package onnxruntime-web contains several builds. The page needs three files: the script with the API, and the loader
and the binary of the build for CPUs, which has all operators and no GPU backend.
"""

from __future__ import annotations

import hashlib
import tarfile
import urllib.request
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from filelock import FileLock

from kvshift_lab.core.atomic import write_bytes
from kvshift_lab.core.errors import LabError
from kvshift_lab.core.user_cache import user_cache

VERSION = "1.30.0"
URL = f"https://registry.npmjs.org/onnxruntime-web/-/onnxruntime-web-{VERSION}.tgz"
FILES = {
    "ort.wasm.min.mjs": "219e6a1fc8a9938268d18efca3c91d310bd2f4a59bbd13744df5b2b7fc6cee3b",
    "ort-wasm-simd-threaded.mjs": "e13f7f94fc51b4ca72b12faeb1ee95f4ace6dfbc8939bc718aabdc0a27c4299b",
    "ort-wasm-simd-threaded.wasm": "3398c10d07d229bd91b364548e130e0e51a8e5704b88c7c083ebbeb78842dee2",
}
"""SHA-256 of each file, by name."""

_SECONDS = 60  # timeout of a network operation


def runtime_folder(log: Callable[[str], Any], url: str = URL) -> Path:
    """Return the folder that contains `FILES`, after downloading them if they are not in the cache.

    Raises:
        LabError: The files are not in the cache and cannot be downloaded, or a downloaded file has another SHA-256.
    """
    folder = user_cache(f"onnxruntime-web-{VERSION}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / ".lock"):
            if not all((folder / name).is_file() for name in FILES):
                log(f"downloading onnxruntime-web {VERSION} from {url}, once, into {folder}")
                _download(url, folder)
    except (OSError, tarfile.TarError, EOFError, zlib.error) as error:  # urllib's are OSErrors
        raise LabError(
            f"onnxruntime-web {VERSION}, which runs models in a browser, is not in {folder} and could not be "
            f"downloaded from {url}: {error}. To install it by hand, run `npm pack onnxruntime-web@{VERSION}` on a "
            f"machine with a connection, and copy {', '.join(FILES)} from the folder dist of the archive to {folder}"
        ) from error
    return folder


def copy_runtime(folder: Path, to: Path) -> None:
    """Copy the files into a new folder, after comparing each with its SHA-256."""
    to.mkdir()
    for name, sha256 in FILES.items():
        content = (folder / name).read_bytes()
        _require(name, content, sha256, f"{folder}; remove the folder to download it again")
        (to / name).write_bytes(content)


def _download(url: str, folder: Path) -> None:
    missing = dict(FILES)
    with urllib.request.urlopen(url, timeout=_SECONDS) as answer, tarfile.open(fileobj=answer, mode="r|gz") as archive:
        for member in archive:
            name = member.name.removeprefix("package/dist/")
            if name in missing and (file := archive.extractfile(member)) is not None:
                content = file.read()
                _require(name, content, missing.pop(name), url)
                write_bytes(folder / name, content)
            if not missing:
                return
    raise LabError(f"{url} has no {', '.join(missing)}")


def _require(name: str, content: bytes, sha256: str, where: str) -> None:
    found = hashlib.sha256(content).hexdigest()
    if found != sha256:
        raise LabError(f"the SHA-256 of {name} must be {sha256}, got {found}, in {where}")
