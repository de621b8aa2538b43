"""Which schedule the engine runs for a call, among which ranks."""
