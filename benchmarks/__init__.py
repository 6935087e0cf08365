"""Speed and recall next to LlamaIndex's own memory, in one run: python -m benchmarks."""
