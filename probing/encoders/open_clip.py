"""Image towers of open_clip (github.com/mlfoundations/open_clip), and of checkpoints in its layout.

python probe.py encoder=clip_b32 weights=/ckpt/epoch_10.pt allow_pickle=true name=tuned
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
    architecture: str | Mapping[str, Any],
    taps: tuple[Tap, ...],
    image: Mapping[str, Any],
    weights: str = "hub",
    source: Mapping[str, Any] | None = None,
    weights_prefix: str | None = None,
    allow_pickle: bool = False,
    seed: int = 0,
) -> Encoder:
    """Build the image tower of `architecture` (a name that open_clip knows, or a config as in its model_configs), fill it
    strictly and return it in eval mode. The text tower's tensors in a checkpoint are passed over.

    The activation is what the architecture says: OpenAI's weights need one with QuickGELU, which open_clip does not
    choose by itself since 2.29. Raises ValueError for weights that do not fit, FileNotFoundError for weights that are
    not there.
    """
    import open_clip
    import torch

    config = open_clip.get_model_config(architecture) if isinstance(architecture, str) else dict(architecture)
    if config is None:
        raise ValueError(f"architecture: {architecture}: open_clip knows no such model")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = open_clip.model.CLIP(**config).visual
    if weights != "random":
        pinned = source if weights == "hub" and source else {}
        state = read(find(weights, source), pinned.get("sha256"), allow_pickle, weights_prefix)
        state = {k.removeprefix("module."): v for k, v in state.items()}  # of distributed training
        tower = {k.removeprefix("visual."): v for k, v in state.items() if k.startswith("visual.")}
        fill(module, tower or state)
    module.eval().requires_grad_(False)
    policy = json.dumps(dict(image), sort_keys=True)
    random = [seed, importlib.metadata.version("open_clip_torch")] if weights == "random" else None
    vision = {k: v for k, v in config.items() if k != "text_cfg"}
    return Encoder(name, module, preprocess(image), policy, taps, fingerprint(module, ["open_clip", vision], policy, random))
