"""Compression of tensors on devices, whose host never waits within a step."""
