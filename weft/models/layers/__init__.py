"""The parts that models are made of. Each names its own tensors in a checkpoint and where they
go."""
