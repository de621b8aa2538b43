"""The project's own benchmarks: one file a question, results under results/."""
