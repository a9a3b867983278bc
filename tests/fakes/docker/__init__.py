"""A Docker engine in this process that speaks the real API over a socket."""
