"""`python -m llama_index_memory_tiers.cli`."""

from llama_index_memory_tiers.cli import main

if __name__ == "__main__":
    main()
