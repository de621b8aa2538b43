"""Compression of torch's gradients: states, their hooks for DDP, and Adam's held moment."""
