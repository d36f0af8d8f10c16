"""Models by the code of the package transformers, on weft's pages: for architectures that weft has
no code of its own for. What is here imports that package only when such a model is loaded."""
