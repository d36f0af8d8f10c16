"""Work in the background: files of requests, and batches that answer them.

    file ──▶ Batch ──▶ lines, some hundred open at once ──▶ the routes of this server, as `flex`
                                                               │
    output file, error file ◀── one line for each answer ◀─────┘

A batch is what its files say: each answered line is one line that was appended, and after a stop of
any kind the lines that are not there are answered. `line_file.py` appends and recovers, also for
`weft batch run`; `forms/` has the APIs, one file each; `runner.py` answers lines; `files.py` has
the files of all keys, and `service.py` their batches. Nothing here knows HTTP servers, engines or
models.
"""
