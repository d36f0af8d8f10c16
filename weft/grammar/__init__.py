"""What an output may be: grammars are compiled once, and followed token by token.

Knows no request and no model.
"""
