"""The errors for a model that the user gave and weft cannot serve.

ModelError              the message is the reason, in one sentence
├── UnsupportedModel    the model is valid, but weft does not implement it
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
    """`config.json` has a number that no model can have: other code could not run it either."""


class ModelNotFound(ModelError):
    """The model does not exist, or one of its files is missing or unreadable."""


class BadCheckpoint(ModelError):
    """The weights do not fit the architecture."""
