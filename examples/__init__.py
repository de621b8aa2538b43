"""Programs to copy from: see README.md."""
