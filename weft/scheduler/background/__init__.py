"""Background requests: work that gets what online requests leave.

They wait in a line of their own after all others (`waiting/queue.py`), and are retracted first,
for each online request that needs their memory. While online requests decode, only so many
background rows take part in a step as its time allows (`turns.py`); their prompts are cut in the
same way (`pace/pace.py`). Without them nothing here is called."""
