"""The verb `ctl`: sends a control request to a running server and prints its answer as lines.

    weft ctl flush-cache --timeout 10
    weft ctl state set max_running_requests=8 schedule_policy=lpm
    weft ctl requests --json

Every administration route is a command. `table.py` lists the commands with their words, and alone
knows single routes; the arguments of a command come from the message that is the body of its route,
and from the query parameters of the route (`command.py`). A route that is not in the list is a
command under its own name. `run.py` reads the command line and sends the request.
"""
