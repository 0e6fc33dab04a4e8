"""Layer 3: models, each a list of layers."""

from __future__ import annotations

from mfun.models.gpt import gpt

__all__ = ["gpt"]
