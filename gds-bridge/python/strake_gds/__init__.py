"""Ranges of StrakeFS files into GPU memory and back, with a report of how every byte went: see docs/gds.md."""

from ._native import Bridge, Call, Tensor

__all__ = ["Bridge", "Call", "Tensor"]
