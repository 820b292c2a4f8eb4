"""Faces of other packages on top of weft's operations. Nothing here is active until it is installed by name."""
