"""The error tree: each error says what was given, what is allowed, and the way out.

MemoryTiersError
├── ConfigurationError (ValueError)      an argument is out of range, missing, or excludes another
│   ├── MissingExtraError                an optional package is needed
│   └── ForeignTableError                the database holds a table that is not ours
├── InvalidMessageError (ValueError)     a message that cannot be stored or counted
├── BudgetError (ValueError)             what must be shown does not fit the token limit
├── EmbeddingError                       an embedding has the wrong size or is no vector
│   └── EmbeddingMismatchError           the stored embeddings are those of another model
├── ExtractionError                      a model's answer could not be read
├── ModelCallsUnavailableError           the cap of model calls is reached for today
└── StorageError
    ├── SchemaVersionError               the database was written by a newer version
    ├── StorageClosedError               used after `aclose`
    └── StorageUnavailableError          the database did not answer after all retries
"""

from __future__ import annotations


class MemoryTiersError(Exception):
    """Base of all errors of this package.

    Args:
        given: What was given, with its name and value.
        allowed: What would have been right.
        remedy: What to do now.
    """

    def __init__(self, given: str, *, allowed: str, remedy: str) -> None:
        super().__init__(f"{given} {allowed} {remedy}")
        self.given = given
        self.allowed = allowed
        self.remedy = remedy


class ConfigurationError(MemoryTiersError, ValueError):
    """An argument is out of range, missing, or excludes another one."""


class MissingExtraError(ConfigurationError):
    """An optional package is needed for what was asked."""


class ForeignTableError(ConfigurationError):
    """The database holds a table of the wanted name that this package did not make."""


class InvalidMessageError(MemoryTiersError, ValueError):
    """A message cannot be stored or counted."""


class BudgetError(MemoryTiersError, ValueError):
    """What must be shown does not fit the token limit."""


class EmbeddingError(MemoryTiersError):
    """An embedding has the wrong size or is no vector."""


class EmbeddingMismatchError(EmbeddingError):
    """A question was embedded with another model than the records were; see `embedding_mismatch`."""

    stored_dimensions: int = 0
    asked_dimensions: int = 0
    stored_model: str = ""
    asked_model: str = ""


def embedding_mismatch(
    *, stored_dimensions: int, asked_dimensions: int, stored_model: str = "", asked_model: str = ""
) -> EmbeddingMismatchError:
    """Make the error that names both models.

    Args:
        stored_dimensions: Size of the stored embeddings.
        asked_dimensions: Size of the question's.
        stored_model: Name of the model of the stored embeddings, where it is known.
        asked_model: Name of the question's model, where it is known.

    Returns:
        The error, with these as attributes.
    """
    error = EmbeddingMismatchError(
        f"A question's embedding{_named(asked_model)} has {asked_dimensions} dimensions, "
        f"the stored ones{_named(stored_model)} have {stored_dimensions}.",
        allowed="Question and records need the same embedding model; until then words alone find the records.",
        remedy="Embed the records again with `await memory.areindex()` or `await storage.reindex(embed_model)`, "
        "or use the model that they were stored with.",
    )
    error.stored_dimensions, error.asked_dimensions = stored_dimensions, asked_dimensions
    error.stored_model, error.asked_model = stored_model, asked_model
    return error


def _named(model: str) -> str:
    return f" (model {model!r})" if model else ""


class ExtractionError(MemoryTiersError):
    """A model's answer could not be read."""


class ModelCallsUnavailableError(MemoryTiersError):
    """The cap of model calls is reached; what waits is absorbed when it allows calls again."""


class StorageError(MemoryTiersError):
    """The database cannot be used."""


class SchemaVersionError(StorageError):
    """The database was written by a newer version of this package."""


class StorageClosedError(StorageError):
    """The storage was used after it had been closed."""


class StorageUnavailableError(StorageError):
    """The database did not answer after all retries."""
