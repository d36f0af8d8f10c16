"""The scheduler as a service: messages in, messages out. The process around it is `launch/worker.py`."""
