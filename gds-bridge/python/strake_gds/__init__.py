"""Ranges of StrakeFS files into GPU memory and back, with a report of the road that every byte took: see docs/gds.md."""

from ._native import Bridge, Call, Tensor

__all__ = ["Bridge", "Call", "Tensor"]
