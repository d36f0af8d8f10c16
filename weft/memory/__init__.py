"""Accounting of the KV cache: rows, pages, the prefix tree. It knows keys and slot numbers, never
a request or a tensor.

A *slot* is the place of one token's K and V in every layer. A *page* is `page_size` consecutive
slots, the unit of allocation and caching: slot = page * page_size + offset. A *row* lists the slots
of a request's tokens.
"""
