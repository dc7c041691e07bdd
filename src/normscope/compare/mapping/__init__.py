"""Put A's weights into B: by a given map, by use and place, by name, by value and shape."""

from normscope.compare.mapping.loading import loading_notes
from normscope.compare.mapping.weights import CannotMapError, map_weights

__all__ = ["CannotMapError", "loading_notes", "map_weights"]
