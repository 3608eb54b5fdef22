"""How fast a model would generate, from its config: bytes, floors, and shares that were measured on
other models. No weights are loaded and nothing of the model runs."""

from __future__ import annotations

__all__: list[str] = []
