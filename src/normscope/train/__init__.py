"""See the room's files."""
