"""The only room that calls a language model: prompts, one call each, answers that are checked."""
