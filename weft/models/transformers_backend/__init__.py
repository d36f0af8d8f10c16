"""Models by the code of the package transformers, on weft's pages: for architectures for which weft
has no code. These modules import that package only when such a model is loaded."""
