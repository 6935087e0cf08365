"""Long-term, tiered memory for LlamaIndex agents."""
