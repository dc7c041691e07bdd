"""Clients of the monitor: callbacks for the Trainers of other libraries, and trackers of our own.

Each file needs its library, so none is imported here.
"""
