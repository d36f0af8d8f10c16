"""The processes of a server with several models: a front, and the engines of each loaded model."""
