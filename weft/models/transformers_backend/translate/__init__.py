"""The forward pass of a model of transformers, written down as operations of torch and then said in
the few words of `Ops`, as far as these go. Knows no weights' content."""
