"""Commands, and the processes that they start.
Nothing heavy is imported before a command needs it.
"""
