"""The demo: an agent that remembers, next to agents that do not, with every promise checked."""
