"""Commands, and the processes that they start.
Heavy modules are imported only when a command needs them.
"""
