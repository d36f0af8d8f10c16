"""What differs where a model's layers are on several devices that work at once."""
