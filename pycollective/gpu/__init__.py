"""GPUs: the way on which calls on their arrays go, arrays for tests, and where NVRTC is."""
