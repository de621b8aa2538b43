"""GPUs: the path of calls on their arrays, arrays for tests, and where NVRTC is."""
