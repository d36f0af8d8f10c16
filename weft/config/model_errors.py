"""Why the model that the user gave cannot be served.

ModelError              one sentence says why
├── UnsupportedModel    we know what it is, and do not have it
│   └── BadConfig       config.json has a number that no model can have
├── ModelNotFound       no such folder or hub id, or a file is missing or unreadable
└── BadCheckpoint       the weights do not fit the architecture
"""

from __future__ import annotations


class ModelError(ValueError):
    """The model that the user gave cannot be served."""


class UnsupportedModel(ModelError):
    """The model is valid, but of a kind that is not implemented."""


class BadConfig(UnsupportedModel):
    """`config.json` has a number that no model can have: other code would not run it either."""


class ModelNotFound(ModelError):
    """There is no such model, or a file of it is missing or unreadable."""


class BadCheckpoint(ModelError):
    """The weights do not fit the architecture."""
