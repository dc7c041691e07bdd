"""The monitor: its cost, its alarms on runs that fail late, and its answers to random faults."""
