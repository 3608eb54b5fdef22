"""Whether calls are logged."""

from __future__ import annotations

_API_LOG_LEVEL = 0
