"""Kernels in Triton. To import the package needs no Triton: `formats` serves without it."""
