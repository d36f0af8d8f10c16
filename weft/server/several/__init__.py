"""Several models behind one address: which model a request is for, and what concerns all."""
