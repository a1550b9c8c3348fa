"""The floor that sees only a thumbnail: the picture at 24 x 24, flattened. What it reads is easy from pixels."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from torch import nn

from probing.picture import preprocess
from probing.types import Encoder, Tap
from probing.weights import fingerprint


def load(*, name: str, taps: tuple[Tap, ...], image: Mapping[str, Any]) -> Encoder:
    """An encoder whose embedding is its preprocessed picture, [B, C*H*W]."""
    module = nn.Sequential()
    module.add_module("flatten", nn.Flatten())
    policy = json.dumps(dict(image), sort_keys=True)
    return Encoder(name, module.eval(), preprocess(image), policy, taps, fingerprint(module, "pixels", policy))
