"""Compatibility layers: other packages' APIs on top of weft's operations. Each is inactive until you install it."""

__all__ = ["transformer_engine"]
