"""Which language model is meant, and what it is called."""

from __future__ import annotations

from llama_index.core.llms import LLM
from llama_index.core.settings import Settings

from llama_index_memory_tiers.errors import ConfigurationError


def llm_of_settings() -> LLM | None:
    """The model of `Settings`, if the user has set one; `Settings.llm` would look for OpenAI's."""
    return Settings._llm  # noqa: SLF001  # the public property resolves a default


def needed_llm(block: str, *, without: str, remedy: str) -> LLM:
    """The model of `Settings`.

    Args:
        block: Class of the block that needs it.
        without: What it was made without.
        remedy: The way out.

    Returns:
        The model.

    Raises:
        ConfigurationError: The user has set none.
    """
    llm = llm_of_settings()
    if llm is None:
        raise ConfigurationError(
            f"{block} was made without {without}, and Settings.llm is not set.",
            allowed="It needs a language model of your choice.",
            remedy=remedy,
        )
    return llm


def llm_name(llm: LLM | None) -> str:
    """Name of a language model, whatever its integration knows; '' for none."""
    if llm is None:
        return ""
    name = getattr(llm, "model", None)
    if isinstance(name, str) and name:
        return name
    try:
        return llm.metadata.model_name
    except ValueError:  # some integrations refuse models whose context window they do not know
        return llm.class_name()
