"""Vision encoders of timm (github.com/huggingface/pytorch-image-models): `timm.create_model` with strict keys.

python probe.py encoder=efficientnet_lite0 task=orientation
"""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Mapping
from typing import Any

from probing.picture import preprocess
from probing.types import Encoder, Tap
from probing.weights import fill, find, fingerprint, read


def load(
    *,
    name: str,
    architecture: str,
    taps: tuple[Tap, ...],
    image: Mapping[str, Any],
    weights: str = "hub",
    source: Mapping[str, Any] | None = None,
    options: Mapping[str, Any] | None = None,
    weights_prefix: str | None = None,
    allow_pickle: bool = False,
    seed: int = 0,
) -> Encoder:
    """Build `architecture`, fill it from `weights` (hub, random or a path) and return it in eval mode.

    source: where weights=hub are, with `sha256`, and `keys: order` if the file names its tensors differently.
    options: further arguments of timm.create_model. seed: of weights=random.
    Raises ValueError for weights that do not fit, FileNotFoundError for weights that are not there.
    """
    import timm
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = timm.create_model(architecture, pretrained=False, **(options or {}))
    if weights != "random":
        pinned = source if weights == "hub" and source else {}
        state = read(find(weights, source), pinned.get("sha256"), allow_pickle, weights_prefix)
        fill(module, state, by_order=pinned.get("keys") == "order")
    module.eval().requires_grad_(False)
    _check(module, architecture, taps)
    policy = json.dumps(dict(image), sort_keys=True)
    random = [seed, importlib.metadata.version("timm")] if weights == "random" else None
    mark = fingerprint(module, ["timm", architecture, dict(options or {})], policy, random)
    return Encoder(name, module, preprocess(image), policy, taps, mark)


def _check(module: Any, architecture: str, taps: tuple[Tap, ...]) -> None:
    """What the YAML says of a tap's layout is held against what the built module says of itself."""
    form, prefix = str(getattr(module, "output_fmt", "NCHW")), getattr(module, "num_prefix_tokens", None)
    for tap in taps:
        if tap.layout == "grid" and "NCHW" not in form:
            raise ValueError(f"tap {tap.name}: the grids of {architecture} are {form}, and layout: grid reads NCHW")
        if tap.layout == "tokens" and prefix is not None and len(tap.prefix) not in (0, prefix):
            raise ValueError(f"tap {tap.name}: its prefix names {len(tap.prefix)} tokens, and {architecture} has {prefix}")
