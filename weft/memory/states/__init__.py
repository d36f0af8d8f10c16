"""States of layers that keep a state of fixed size for each sequence, instead of K and V: a slot
for each row, and copies that the prefix cache keeps where sequences end and diverge."""
