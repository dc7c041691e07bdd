"""Granularities: the parts of a tensor that share a scale when it is rounded."""

GRANULARITIES = ("tensor", "channel")
"""One scale for the whole tensor, or one for each channel.

A channel is an output feature of a weight, or an index of the last axis of an activation.
"""
