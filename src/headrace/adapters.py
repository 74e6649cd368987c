"""For those who come from elsewhere: what runs their logits processors here. See docs/plugins/migrating.md."""

from .hooks.adapters import Make, PerRequest, Style, per_request

__all__ = ["Make", "PerRequest", "Style", "per_request"]
