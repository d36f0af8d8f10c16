"""The front of several servers (`weft route`): it chooses a server for each request, and forwards
requests and answers. It has no model, no tokenizer and no keys of its own."""
