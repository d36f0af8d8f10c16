"""The front before several servers (`weft route`): it chooses, passes requests on and answers
through. It has no model, no tokenizer and no keys of its own."""
