"""Triton kernels, one file per codec family. Each writes the wire format of docs/wire."""
