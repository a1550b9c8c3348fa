"""Representation probes for medical vision encoders.

From a notebook: `probing.embeddings(encoder)`, `probing.results(folder)`, `probing.load(encoder)`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from probing.notebook import embeddings, load, results

__all__ = ["embeddings", "load", "results"]


def __getattr__(name: str) -> Any:  # PEP 562: nothing heavy is imported before it is asked for
    if name in __all__:
        from probing import notebook

        return getattr(notebook, name)
    raise AttributeError(f"module 'probing' has no attribute {name!r}")
