"""States of layers that keep one of fixed size for each sequence, instead of K and V: a slot for
each row, and copies that the prefix cache keeps where sequences end and part."""
