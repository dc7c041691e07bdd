"""Hand-written inline SVG: the tower, the profiles beside it, and the charts of the HTML page."""
